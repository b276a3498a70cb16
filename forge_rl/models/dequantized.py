"""Dequantises models to bfloat16, once, into a cache folder.

An engine started from quantised weights packs them for special kernels and cannot load a trainer's bfloat16 weights, so
both start from a bfloat16 copy.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_rl.errors import ModelError
from forge_rl.models.cache import Progress, build_once
from forge_rl.models.hf_folder import OTHER_FORMATS, complete_folder, save_weights
from forge_rl.models.quantized import formats
from forge_rl.system.folders import check_own

if TYPE_CHECKING:
    import torch

_FLOAT32 = "e_score_correction_bias"
"""Suffix of the names of tensors that stay float32."""
_CODES = ("float8_e4m3fn", "float8_e5m2", "uint8", "int8", "int32")
"""Dtypes in which quantised values are stored, which mean nothing without scales."""


def dequantized(folder: Path, cache: Path, progress: Progress | None = None) -> Path:
    """Return the bfloat16 copy of a folder with quantised weights; the first call writes it.

    A copy of 4-bit weights takes four times their size. Safe to call from several processes: one writes, the others
    wait.

    Args:
        folder: Hugging Face folder in a format that `quantized.refusal` accepts.
        cache: folder for the copy.
        progress: called per file.

    Raises:
        ModelError: the cache is not writable or too small, other users can write to it, or a file cannot be read.
    """
    files = [path for path in sorted(folder.resolve().iterdir()) if path.is_file() and not path.match(OTHER_FORMATS)]
    # By size and time instead of contents, which are gigabytes.
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]
    target = cache / f"dequantized-{key}"
    report = progress or (lambda label, fraction: None)
    try:
        build_once(target, lambda work: _write(files, work, report), ModelError)
        check_own(target, ModelError)
    except OSError as error:
        raise ModelError(
            f"cannot write {folder} in bfloat16 to {target}: {error.strerror or error}",
            hint="free space there, or choose another folder with --cache",
        ) from error
    return target


def _write(files: list[Path], target: Path, report: Progress) -> None:
    """Write a dequantised copy of each safetensors file, along with config and tokenizer."""
    from safetensors import SafetensorError, safe_open

    target.mkdir()
    config = json.loads((files[0].parent / "config.json").read_text())["quantization_config"]
    weight_files = [path for path in files if path.suffix == ".safetensors"]
    weight_map: dict[str, str] = {}
    total = 0
    with ExitStack() as stack:
        try:
            open_files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in weight_files}
            # All files are open at once, since a weight's scales may be in another file than its codes.
            files_by_tensor: dict[str, Any] = {}
            for file in open_files.values():
                files_by_tensor |= dict.fromkeys(file.keys(), file)
            reader = _WeightReader(config, files_by_tensor)
            reader.check_space(target)
            for num_done, (path, file) in enumerate(open_files.items()):
                report("dequantising", num_done / len(open_files))
                # One output file for each input file, which bounds the memory.
                tensors = dict(reader.tensors(file.keys()))
                if tensors:
                    save_weights(tensors, target / path.name)
                weight_map |= dict.fromkeys(tensors, path.name)
                total += sum(values.nbytes for values in tensors.values())
        except SafetensorError as error:
            raise ModelError(f"{path} cannot be read: {error}", hint="download the model again") from error
    complete_folder(files[0].parent, target, dtype="bfloat16", weight_map=weight_map, total_bytes=total)


class _WeightReader:
    """Reads the weights of quantised files.

    Args:
        config: the model's quantization_config.
        files: open safetensors file that holds each tensor, by the tensor's name.
    """

    def __init__(self, config: Mapping[str, Any], files: Mapping[str, Any]) -> None:
        self._config, self._files = config, files
        self._whole = {  # format and stem of each quantised weight, by the name of its main tensor
            name: (weight_format, stem)
            for name in files
            for weight_format in formats(config)
            if (stem := weight_format.stem(name, files)) is not None
        }
        self._parts = {
            stem + suffix for weight_format, stem in self._whole.values() for suffix in weight_format.other_suffixes
        }

    def check_space(self, folder: Path) -> None:
        """Raise ModelError unless the weights in bfloat16 fit on the folder's disk."""
        needed_bytes = 0
        for name, file in self._files.items():
            if name not in self._parts:
                values = file.get_tensor(name)  # maps, reads nothing
                needed_bytes += 2 * (
                    values.nbytes * self._whole[name][0].packed if name in self._whole else values.numel()
                )
        if (free := shutil.disk_usage(folder).free) < needed_bytes:
            raise ModelError(
                f"the model takes {needed_bytes / 1e9:.1f} GB in bfloat16, "
                f"and {folder.parent} has {free / 1e9:.1f} GB free",
                hint="free space there, or choose another folder with --cache",
            )

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and bfloat16 values of each weight; a quantised weight belongs to its main tensor's file."""
        import torch

        for name in names:
            # Scales, zeros and maps are read with the weight's main tensor.
            if name in self._parts:
                continue
            if name not in self._whole:
                values = self._files[name].get_tensor(name)
                if str(values.dtype).removeprefix("torch.") in _CODES:
                    raise ModelError(
                        f"{name!r:.120} is {values.dtype} without the scales of {self._config['quant_method']!r:.40}",
                        hint="give the model's bfloat16 files",
                    )
                yield name, values if name.endswith(_FLOAT32) else values.to(torch.bfloat16)
                continue
            weight_format, stem = self._whole[name]
            suffixes = (
                weight_format.main,
                *(suffix for suffix in weight_format.other_suffixes if stem + suffix in self._files),
            )
            try:
                parts = {suffix: self._files[stem + suffix].get_tensor(stem + suffix) for suffix in suffixes}
                values = weight_format.read(parts, self._config)
            except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                raise ModelError(
                    f"{stem + weight_format.weight!r} cannot be dequantised: {error}", hint="download the model again"
                ) from error
            yield stem + weight_format.weight, values.to(torch.bfloat16).contiguous()
