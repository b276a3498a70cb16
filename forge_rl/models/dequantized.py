"""Dequantises models to bfloat16, once, into a cache folder.

An engine started from MXFP4 weights packs them for special kernels and cannot load the bfloat16 weights that a trainer
publishes, so both start from a bfloat16 copy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_rl.errors import ModelError
from forge_rl.models.cache import Progress, build_once
from forge_rl.models.hf_folder import complete_folder
from forge_rl.system.folders import check_own

if TYPE_CHECKING:
    import torch

_BLOCKS = "_blocks"


def dequantized(folder: Path, cache: Path, progress: Progress | None = None) -> Path:
    """Return the bfloat16 copy of a folder with MXFP4 weights; the first call writes it.

    The copy is four times as large. Safe to call from several processes: one writes, the others wait.

    Args:
        folder: Hugging Face folder whose `_blocks` and `_scales` are MXFP4, as transformers reads it.
        cache: folder for the copy.
        progress: called per file.

    Raises:
        ModelError: the cache is not writable, other users can write to it, or a file cannot be read.
    """
    files = [path for path in sorted(folder.resolve().iterdir()) if path.is_file()]
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]
    target = cache / f"dequantized-{key}"
    report = progress or (lambda what, fraction: None)
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
    """Write a dequantised copy of each safetensors file, and the config and tokenizer files."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    target.mkdir()
    stored = [path for path in files if path.suffix == ".safetensors"]
    names: dict[str, Path] = {}
    placed: dict[str, str] = {}
    total = 0
    with ExitStack() as stack:
        try:
            opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in stored}
            for path, file in opened.items():
                names |= dict.fromkeys(file.keys(), path)
            for done, (path, file) in enumerate(opened.items()):
                report("dequantising", done / len(opened))
                tensors = dict(_tensors(file.keys(), names, opened))
                save_file(tensors, target / path.name, metadata={"format": "pt"})
                placed |= dict.fromkeys(tensors, path.name)
                total += sum(values.nbytes for values in tensors.values())
        except SafetensorError as error:
            raise ModelError(f"{path} cannot be read: {error}", hint="download the model again") from error
    complete_folder(files[0].parent, target, dtype="bfloat16", placed=placed, total_bytes=total)


def _tensors(
    names: list[str], places: Mapping[str, Path], files: Mapping[Path, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and bfloat16 values of each weight of a file; a quantised weight belongs to its blocks' file."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for name in names:
        weight = name.removesuffix(_BLOCKS)
        if name.endswith("_scales") and name.removesuffix("_scales") + _BLOCKS in places:
            continue
        if weight == name:
            yield name, files[places[name]].get_tensor(name).to(torch.bfloat16)
            continue
        blocks, scales = (files[places[each]].get_tensor(each) for each in (name, f"{weight}_scales"))
        if blocks.shape != (*scales.shape, 16) or scales.ndim != 3:
            raise ModelError(f"the scales of {weight!r} do not match its blocks", hint="download the model again")
        yield weight, convert_moe_packed_tensors(blocks, scales).contiguous()
