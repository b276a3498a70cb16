"""Adapters in PEFT's format: written, read, and merged with their base model into a full folder."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.errors import ModelError
from forge_rl.models import expert_stacks
from forge_rl.models.adapter_products import fits, merged_weights
from forge_rl.models.base_formats import BaseQuantization
from forge_rl.models.hf_folder import (
    HEAD,
    TEMPLATES,
    TOKENIZERS,
    complete_folder,
    corrected_tokenizer_config,
    open_weights,
    read_object,
    save_weights,
    tensor_files,
    tokenizer_files,
)

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model.json"
"""Files of an adapter: settings and factors, as PEFT writes them, and forge_rl's own file with digests of the base
model."""
_QUANTIZED = "quantization"
"""Key in `BASE` for the base model's weights that training held quantised."""
_PREFIX = "base_model.model."
_HEAD_COPY = f"{_PREFIX}lm_head.base_layer.weight"
"""Copy of the base's head, which PEFT writes alongside an adapter of it."""
_AGAIN = "write the adapter again"
_UNSUPPORTED = {
    "use_dora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "bias": "none",
    "modules_to_save": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "trainable_token_indices": None,
    "use_qalora": False,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "velora_config": None,
}
"""Settings of PEFT that make an adapter more than a product of two matrices, with the values at which they are off."""
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""PEFT's initialisations that leave the base model unchanged; others, such as PiSSA, subtract a part from it."""
_MAX_RANK = 1 << 20


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 < value < _MAX_RANK


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter in PEFT's format."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").exists()


def write_adapter(
    folder: Path,
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    *,
    base: Path,
    alpha: float,
    rslora: bool,
    dropout: float,
    quantization: BaseQuantization | None = None,
) -> None:
    """Write an adapter into an existing folder, along with the tokenizer of its base model.

    Args:
        factors: A, [rank, inputs], and B, [outputs, rank], by the name of the adapted weight; of experts, stacks of
            both by transformers' name of the stack of weights.
        base: Hugging Face folder of the model that was adapted.
        quantization: weights of that model that training held quantised; None if it held all in full.
    """
    from forge_rl.models.digests import model_digests

    write_factors(folder, factors, base=base, alpha=alpha, rslora=rslora, dropout=dropout)
    record = {"folder": str(base), "files": model_digests(base)}
    if quantization is not None:
        record[_QUANTIZED] = asdict(quantization)
    (folder / BASE).write_text(json.dumps(record, indent=2) + "\n")
    for path in (*base.iterdir(), *base.glob(TEMPLATES)):
        # Without config.json, which would make the folder look like a whole model: see `is_adapter`.
        is_config = path.name in ("config.json", CONFIG, BASE) or path.name.endswith(".index.json")
        if path.is_file() and not is_config and path.suffix in (".json", ".jinja", ".model", ".txt", ".tiktoken"):
            _copy(path, folder / path.relative_to(base))


def write_factors(
    folder: Path,
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    *,
    base: Path,
    alpha: float,
    rslora: bool = False,
    dropout: float = 0.0,
) -> None:
    """Write the two files of PEFT's format into an existing folder; see `write_adapter`."""
    # Factors with three dims are stacks of experts, [experts, ...].
    stacks = [name for name, (a, _) in factors.items() if a.ndim == 3]
    targets = sorted({expert_stacks.target(name) for name in stacks})
    tensors = {}
    for name, pair in factors.items():
        stem = expert_stacks.stem(name, targets) if name in stacks else name.removesuffix(".weight")
        for kind, factor in zip(("lora_A", "lora_B"), pair, strict=True):
            values = expert_stacks.flattened(factor, kind) if name in stacks else factor
            tensors[f"{_PREFIX}{stem}.{kind}.weight"] = values.contiguous()
    save_weights(tensors, folder / WEIGHTS)
    ranks = {name: pair[0].shape[-2] for name, pair in factors.items()}
    modules = {name.removesuffix(".weight").rpartition(".")[2] for name in factors if name not in stacks}
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": next((rank for name, rank in ranks.items() if name not in stacks), next(iter(ranks.values()))),
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "lora_dropout": dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "inference_mode": True,
    }
    # PEFT has one rank for all modules and exceptions from it by pattern: experts may have a smaller one.
    if stacks:
        config |= {"target_parameters": targets, "rank_pattern": dict.fromkeys(targets, ranks[stacks[0]])}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def name_base(folder: Path, base: Path) -> None:
    """Record this host's folder of the base model in an adapter that a trainer on another host may have written.

    Raises:
        ModelError: the folder holds no adapter.
        OSError: it cannot be written.
    """
    for name, key in ((CONFIG, "base_model_name_or_path"), (BASE, "folder")):
        values = read_object(folder / name, hint=_AGAIN)
        if values.get(key) != str(base):
            (folder / name).write_text(json.dumps(values | {key: str(base)}, indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter in PEFT's format.

    Adapter.read(folder).merge(base, target)
    """

    folder: Path
    base: str
    """Folder or name of the model that it adapts."""
    digests: Mapping[str, str]
    """Digests of that model's files; empty if another program wrote the adapter."""
    scale: float
    """Factor on B A in linear layers."""
    rank: int
    """Rank of the adapters of linear layers."""
    expert_scale: float = 0.0
    """Factor on B A in experts."""
    expert_rank: int = 0
    """Rank of each expert's adapter; 0 without adapters of experts."""
    expert_targets: tuple[str, ...] = ()
    """Adapted stacks of experts, as PEFT names them in target_parameters."""
    quantization: BaseQuantization | None = None
    """Weights of that model that training held quantised: the adapter was trained on their rounded values."""
    revision: str = ""
    """Revision of that model on the hub; empty for the newest."""

    @staticmethod
    def read(folder: Path) -> Adapter:
        """Read an adapter's settings.

        Raises:
            ModelError: a file is missing or malformed, or the adapter is more than products of two matrices.
        """
        config = read_object(folder / CONFIG, hint=_AGAIN)
        if config.get("peft_type") != "LORA":
            raise ModelError(f"{folder} holds a {config.get('peft_type')!r:.40} adapter", hint="give a LoRA adapter")
        for name, plain in _UNSUPPORTED.items():
            # null, false and an empty list mean that a feature is off.
            if config.get(name, plain) not in (plain, None, False, []):
                raise ModelError(
                    f"{folder / CONFIG} sets {name} to {config[name]!r:.80}, which is more than plain LoRA",
                    hint="merge it with merge_and_unload() of peft, and save that",
                )
        for name, value in config.items():
            # A feature of a later version of PEFT, which may change what the adapter computes.
            if name.startswith("use_") and name not in _UNSUPPORTED and name != "use_rslora" and value:
                raise ModelError(
                    f"{folder / CONFIG} sets {name:.40} to {value!r:.80}, which is not known here",
                    hint="merge it with merge_and_unload() of peft, and save that",
                )
        if config.get("init_lora_weights") not in _KEEPS_BASE:
            raise ModelError(
                f"{folder / CONFIG} sets init_lora_weights to {config['init_lora_weights']!r:.80}, which changes the "
                "base model before it is adapted",
                hint="save it with path_initial_model_for_weight_conversion of peft, which makes it a plain LoRA",
            )
        # PEFT's patterns give modules other ranks; only one for all stacks of experts is known here.
        targets, ranks = config.get("target_parameters") or [], config.get("rank_pattern") or {}
        if config.get("alpha_pattern") or not expert_stacks.are_known(targets, ranks):
            raise ModelError(
                f"{folder / CONFIG} has another rank or alpha for some modules",
                hint="merge it with merge_and_unload() of peft, and save that",
            )
        rank, alpha = config.get("r"), config.get("lora_alpha")
        expert_rank = next(iter(ranks.values()), rank) if targets else 0
        if (
            not _is_rank(rank)
            or (targets and not _is_rank(expert_rank))
            or isinstance(alpha, bool)
            or not isinstance(alpha, int | float)
            or not abs(alpha) < 1e9
        ):
            raise ModelError(f"{folder / CONFIG} has r {rank!r:.40} and lora_alpha {alpha!r:.40}", hint=_AGAIN)
        assert isinstance(rank, int)
        assert isinstance(expert_rank, int)

        def scale(adapter_rank: int) -> float:
            return float(alpha) / (math.sqrt(adapter_rank) if config.get("use_rslora") else adapter_rank)

        digests: dict[str, str] = {}
        quantization = None
        if (folder / BASE).is_file():
            record = read_object(folder / BASE, hint=_AGAIN)
            files = record.get("files")
            digests = {str(name): str(digest) for name, digest in files.items()} if isinstance(files, dict) else {}
            quantization = BaseQuantization.read(record.get(_QUANTIZED), folder / BASE)
        return Adapter(
            folder=folder,
            base=str(config.get("base_model_name_or_path") or ""),
            digests=digests,
            scale=scale(rank),
            rank=rank,
            expert_scale=scale(expert_rank) if targets else 0.0,
            expert_rank=expert_rank,
            expert_targets=tuple(targets),
            quantization=quantization,
            revision=str(config.get("revision") or ""),
        )

    def check_base(self, base: Path) -> None:
        """Check that a folder holds the adapted model, if the model's digests are known.

        Raises:
            ModelError: names the files that differ.
        """
        from forge_rl.models.digests import model_digests

        digests = model_digests(base)
        # Weights only: a tokenizer or chat template may be edited without harm to the adapter.
        weights = {name: digest for name, digest in self.digests.items() if name.endswith(".safetensors")}
        if changed_files := sorted(name for name, digest in weights.items() if digests.get(name) != digest):
            raise ModelError(
                f"{base} is not the model that {self.folder} adapts: {', '.join(changed_files[:3])} changed",
                hint="put that model back, or name it by: forge-rl merge ADAPTER OUT --base FOLDER",
            )

    def merge(self, base: Path, target: Path) -> None:
        """Write the base model with W + scale B A in place of each adapted weight W, in W's dtype; see
        `AdapterProduct`. Weights that training held quantised get the values that it computed with, rounded once more
        to W's dtype. The adapter's own tokenizer and chat templates, if its folder has any, replace the base's.

        Args:
            base: Hugging Face folder of the model that was adapted.
            target: folder to write, which exists and is empty.

        Raises:
            ModelError: the model lacks an adapted weight, or has it in another shape.
            OSError: the folder cannot be written.
        """
        if read_object(base / "config.json").get("quantization_config"):
            raise ModelError(
                f"{base} holds quantised weights, to which no product can be added as they are",
                hint="name the model's bfloat16 files by: forge-rl merge ADAPTER OUT --base FOLDER",
            )
        files = tensor_files(base)
        factors = self._by_file_name(base, files)
        quantized = frozenset(self.quantization.weights if self.quantization is not None else ())
        if unknown := sorted((factors.keys() | quantized) - files.keys()):
            raise ModelError(
                f"{self.folder} adapts {len(unknown)} weights that {base} lacks, such as {unknown[0]!r:.120}",
                hint="name the model that it was trained on by: forge-rl merge ADAPTER OUT --base FOLDER",
            )
        self._check_head(files)
        total_bytes = 0
        dtype = ""
        # File by file, so that one file of weights is in memory at a time.
        for path in sorted(set(files.values())):
            with open_weights(path) as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            total_bytes += sum(tensor.nbytes for tensor in tensors.values())
            dtype = dtype or next((str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()), "")
            if self.quantization is not None:
                # Rounded before the product is added: the adapter was trained on these values.
                for name in quantized & tensors.keys():
                    tensors[name] = self.quantization.round_weight(name, tensors[name])
            tensors |= self._merged(tensors, factors)
            save_weights(tensors, target / path.name)
        weight_map = {name: path.name for name, path in files.items()}
        complete_folder(base, target, dtype=dtype, weight_map=weight_map, total_bytes=total_bytes)
        self._write_tokenizer(target)

    def _write_tokenizer(self, target: Path) -> None:
        """Replace the tokenizer in a folder by the adapter's, with which it was trained, if the adapter has one."""
        paths = tokenizer_files(self.folder)
        # A whole tokenizer replaces a whole one, as a base's template or tokens may be in files of other names.
        if any(path.name in TOKENIZERS for path in paths):
            for path in tokenizer_files(target):
                path.unlink()
        for path in paths:
            _copy(path, target / path.relative_to(self.folder))
        if (tokenizer_config := corrected_tokenizer_config(target)) is not None:
            (target / "tokenizer_config.json").write_text(tokenizer_config)

    def factors(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Read A, [rank, inputs], and B, [outputs, rank], by the name of the adapted weight; for experts, stacks of
        both, by transformers' name of the stack of weights.

        Raises:
            ModelError: the file is missing or malformed.
        """
        stems: dict[str, dict[str, torch.Tensor]] = {}
        with open_weights(self.folder / WEIGHTS) as file:
            for key in file.keys():  # noqa: SIM118
                # Not a factor; `_check_head` compares it.
                if key == _HEAD_COPY:
                    continue
                module, _, kind = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
                if kind not in ("lora_A", "lora_B") or not key.startswith(_PREFIX):
                    raise ModelError(
                        f"{self.folder / WEIGHTS} holds {key!r:.120}, which is not a factor of a LoRA adapter",
                        hint="merge it with merge_and_unload() of peft, and save that",
                    )
                stems.setdefault(f"{module}.weight", {})[kind] = file.get_tensor(key)
        factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for stem, halves in stems.items():
            if len(halves) != 2:
                raise ModelError(f"{self.folder / WEIGHTS} has only one factor of {stem!r:.120}", hint=_AGAIN)
            name, pair = stem, (halves["lora_A"], halves["lora_B"])
            if self.expert_targets and expert_stacks.is_stem(stem):
                name = expert_stacks.name(stem, self.expert_targets)
                pair = expert_stacks.unflattened(pair, self.expert_rank, self.folder / WEIGHTS)
            if name in factors:
                raise ModelError(f"{self.folder / WEIGHTS} has two adapters of {name!r:.120}", hint=_AGAIN)
            factors[name] = pair
        return factors

    def _by_file_name(
        self, base: Path, files: Mapping[str, Path]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor, bool]]:
        """Return A and B of each adapted tensor in a model's files, and whether it belongs to experts. The files may
        hold each expert's matrices separately."""
        factors: dict[str, tuple[torch.Tensor, torch.Tensor, bool]] = {}
        for name, pair in self.factors().items():
            is_stack = pair[0].ndim == 3
            parts = expert_stacks.file_factors(name, pair, base, files) if is_stack else {name: pair}
            factors |= {part: (a, b, is_stack) for part, (a, b) in parts.items()}
        return factors

    def _check_head(self, files: Mapping[str, Path]) -> None:
        """Raise ModelError if the adapter's copy of the base's head is not the base's."""
        with open_weights(self.folder / WEIGHTS) as adapter:
            if _HEAD_COPY not in adapter.keys():  # noqa: SIM118
                return
            copy = adapter.get_tensor(_HEAD_COPY)
        if HEAD in files:
            with open_weights(files[HEAD]) as base:
                if copy.equal(base.get_tensor(HEAD)):
                    return
        raise ModelError(
            f"{self.folder / WEIGHTS} holds another {HEAD} than the base",
            hint="name the model that the adapter was trained on by: forge-rl merge ADAPTER OUT --base FOLDER",
        )

    def _merged(
        self, tensors: Mapping[str, torch.Tensor], factors: Mapping[str, tuple[torch.Tensor, torch.Tensor, bool]]
    ) -> dict[str, torch.Tensor]:
        """Return a model's adapted tensors, with the adapters added."""
        scaled_factors: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
        # The factors may be of another model with the same names, so shapes are compared first.
        for name in filter(factors.__contains__, tensors):
            a, b, of_experts = factors[name]
            rank, scale = (self.expert_rank, self.expert_scale) if of_experts else (self.rank, self.scale)
            if not fits(tensors[name].shape, a.shape, b.shape) or a.shape[-2] != rank:
                raise ModelError(
                    f"{name!r:.120} has shape {tuple(tensors[name].shape)}, and its factors {tuple(b.shape)} and "
                    f"{tuple(a.shape)}",
                    hint="name the model that the adapter was trained on by: forge-rl merge ADAPTER OUT --base FOLDER",
                )
            scaled_factors[name] = a, b, scale
        merged = merged_weights(tensors, scaled_factors)
        for name, tensor in merged.items():
            # A diverged training would otherwise become a model that only fails when it is used.
            if not bool(tensor.isfinite().all()):
                raise ModelError(
                    f"{name!r:.120} is not finite with the factors in {self.folder / WEIGHTS}",
                    hint="take an earlier checkpoint of that training",
                )
        return merged


def merged_copy(folder: Path, base: Path, cache: Path) -> Path:
    """Return a cached folder with an adapter merged into its base model; the first call writes it.

    Raises:
        ModelError: the adapter does not fit the base, or the cache is not writable.
    """
    from forge_rl.models.cache import build_once
    from forge_rl.models.digests import file_digest, model_digests
    from forge_rl.system.folders import check_own

    adapter = Adapter.read(folder)
    adapter.check_base(base)
    # Named after its contents, so that a changed base or adapter is merged again.
    paths = [folder / CONFIG, folder / WEIGHTS, *tokenizer_files(folder)]
    parts: list[object] = [model_digests(base), *((path.name, file_digest(path)) for path in paths)]
    if adapter.quantization is not None:
        parts.append(asdict(adapter.quantization))
    target = cache / f"merged-{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]}"

    def write(work: Path) -> None:
        work.mkdir()
        adapter.merge(base, work)

    try:
        build_once(target, write, ModelError)
        check_own(target, ModelError)
    except OSError as error:
        raise ModelError(
            f"cannot merge {folder} into {target}: {error.strerror or error}",
            hint="free space there, or choose another folder with --cache",
        ) from error
    return target


def _copy(path: Path, copy: Path) -> None:
    """Copy a file without its mode, as the original may be read-only."""
    copy.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, copy)
