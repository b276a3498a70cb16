"""Limits of adapters that engines serve: rank, modules, and finite values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.errors import ConfigError
from forge_rl.models.hf_folder import open_weights, tensor_files

if TYPE_CHECKING:
    from forge_rl.models.adapters import Adapter

SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM reserves memory; adapters of other ranks are padded to the next one."""
_ABSORBED = "kv_b_proj"
"""Up-projection of latent attention. vLLM multiplies it into its neighbours before it decodes, so an adapter of it
would have no effect."""


def served_rank(rank: int) -> int:
    """Return the rank for which vLLM reserves memory, to serve adapters of at most `rank`.

    Raises:
        ConfigError: vLLM serves none so large.
    """
    for limit in SERVED_RANKS:
        if rank <= limit:
            return limit
    raise ConfigError(
        f"adapters of rank {rank} cannot be served: vLLM's largest rank is {SERVED_RANKS[-1]}",
        hint="lower --lora.rank",
    )


def has_experts(model: Path) -> bool:
    """Return whether a model's files hold experts.

    Raises:
        ModelError: the folder cannot be read.
    """
    return any(".experts." in name for name in tensor_files(model))


def served_modules(model: Path) -> dict[str, tuple[int, int]]:
    """Map each weight of a model whose adapter vLLM can serve to its shape, (outputs, inputs).

    These are the linear layers of all blocks; in models with experts, only of their attention.

    Raises:
        ModelError: the folder cannot be read.
    """
    files, is_sparse = tensor_files(model), has_experts(model)
    names = [
        name
        for name in files
        if ".layers." in name
        and name.endswith(".weight")
        and not name.endswith(f"{_ABSORBED}.weight")
        and (not is_sparse or "attn." in name or "attention." in name)
    ]
    shapes: dict[str, tuple[int, int]] = {}
    # Shapes come from the files' headers; no weight is read.
    for path in {files[name] for name in names}:
        with open_weights(path) as file:
            present = set(file.keys())
            for name in names:
                if files[name] == path and name in present:
                    shape = tuple(file.get_slice(name).get_shape())
                    if len(shape) == 2:
                        shapes[name] = shape
    return shapes


def check_served(adapter: Adapter, model: Path, *, max_rank: int) -> None:
    """Check that an engine can serve an adapter.

    Args:
        adapter: adapter to serve.
        model: folder of the engine's model.
        max_rank: largest rank that the engine has memory for.

    Raises:
        ConfigError: its rank is too large, it adapts a module that vLLM cannot, or a value is not finite.
        ModelError: a file is missing or malformed.
    """
    if adapter.rank > max_rank:
        raise ConfigError(
            f"{adapter.folder} has rank {adapter.rank}, and the engine serves at most {max_rank}",
            hint="raise --generator.max-lora-rank",
        )
    shapes = served_modules(model)
    for name, (a, b) in adapter.factors().items():
        if name not in shapes:
            raise ConfigError(
                f"{adapter.folder} adapts {name!r:.120}, which cannot be served on {model}",
                hint="adapters of linear layers can be; merge this one by: forge_rl merge",
            )
        rows, columns = shapes[name]
        if tuple(b.shape) != (rows, adapter.rank) or tuple(a.shape) != (adapter.rank, columns):
            raise ConfigError(
                f"{adapter.folder} has factors of shapes {tuple(b.shape)} and {tuple(a.shape)} for {name!r:.120} of "
                f"shape {(rows, columns)}",
                hint="give an adapter that was trained on this model",
            )
        if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
            raise ConfigError(
                f"{adapter.folder} has values for {name!r:.120} that are not finite",
                hint="take an earlier checkpoint of that training",
            )
