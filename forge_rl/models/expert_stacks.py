"""Adapters of stacked experts: their layout in PEFT's files, and the tensors of a model's files that they are added to.

transformers stacks a layer's experts, and PEFT adapts the stacks (`target_parameters`). PEFT's A is [experts * rank,
inputs]. Its B is [outputs, rank * experts], where every experts-th column belongs to one expert. The adapter of a
module's first stack is written under the module's `base_layer`, the second stack's under the module itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.errors import ModelError
from forge_rl.models.hf_folder import read_object

if TYPE_CHECKING:
    import torch

_DOWN = "down_proj"
_FILE_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    _DOWN: ((_DOWN,), ("w2",)),
}
"""Names, in files, of the equal parts of each stack's outputs, by transformers' name of the stack; several
alternatives."""
_FILE_STACKS = {"gate_up_proj": "input_linear.weight", _DOWN: "output_linear.weight"}
"""Other names of whole stacks in files, Granite's, by transformers' name of the stack."""
_TRANSPOSED = frozenset({"gpt_oss"})
"""Model types whose stacks are [experts, inputs, outputs]."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def target(name: str) -> str:
    """Return PEFT's target for a stack, such as experts.down_proj."""
    return ".".join(name.split(".")[-2:])


def are_known(targets: object, ranks: object) -> bool:
    """Return whether PEFT's `target_parameters` are stacks of experts, all of one rank by its `rank_pattern`."""
    if not isinstance(targets, list) or not isinstance(ranks, dict) or not all(isinstance(t, str) for t in targets):
        return False
    leaves = {full.rpartition(".")[2] for full in targets}
    ranked_leaves = {str(full).rpartition(".")[2] for full in ranks}
    is_one_rank = not ranks or (ranked_leaves == leaves and len(set(map(repr, ranks.values()))) == 1)
    return leaves <= _FILE_PARTS.keys() and len(leaves) <= 2 and is_one_rank


def stem(name: str, targets: Collection[str]) -> str:
    """Return the name under which PEFT writes a stack's adapter, without its prefix."""
    module = name.rpartition(".")[0]
    # PEFT wraps a module once for each adapted parameter: the first one's wrapper ends up inside.
    is_inner = len(targets) > 1 and not name.endswith(_DOWN)
    return f"{module}.base_layer" if is_inner else module


def is_stem(name: str) -> bool:
    """Return whether a name in an adapter's file, with `.weight` in place of the factor's suffix, is a stack's."""
    return name.endswith((".experts.weight", ".experts.base_layer.weight"))


def name(file_name: str, targets: Collection[str]) -> str:
    """Return the name of the stack that a name in an adapter's file stands for; see `is_stem`."""
    # down_proj last, as PEFT wraps it last.
    leaves = sorted({full.rpartition(".")[2] for full in targets}, key=lambda leaf: leaf == _DOWN)
    module = file_name.removesuffix(".weight")
    leaf = leaves[0] if module.endswith(".base_layer") else leaves[-1]
    return f"{module.removesuffix('.base_layer')}.{leaf}"


def flattened(factor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a stack of A, [experts, rank, inputs], or of B, [experts, outputs, rank], in PEFT's layout."""
    return factor.flatten(0, 1) if kind == "lora_A" else factor.permute(1, 2, 0).flatten(1)


def unflattened(pair: tuple[torch.Tensor, torch.Tensor], rank: int, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stacks of A and B from factors in PEFT's layout; undoes `flattened`.

    Args:
        path: the adapter's file, for the error.

    Raises:
        ModelError: the rank does not divide the factors.
    """
    a, b = pair
    if a.ndim != 2 or b.ndim != 2 or not len(a) or len(a) % rank or b.shape[1] != len(a):
        raise ModelError(
            f"{path} holds factors of experts of shapes {tuple(a.shape)} and {tuple(b.shape)}, not of rank {rank}",
            hint="write the adapter again",
        )
    return a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)


def file_factors(
    name: str, pair: tuple[torch.Tensor, torch.Tensor], base: Path, files: Collection[str]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the factors of each tensor in a model's files that is part of an adapted stack.

    Args:
        name: transformers' name of the stack.
        pair: stacks of A and B.
        base: folder of the model.
        files: names of the tensors in its files.

    Raises:
        ModelError: the files hold no such experts.
    """
    (a, b), leaf = pair, name.rpartition(".")[2]
    layer = _LAYER.search(name)
    stack_ends = (f".experts.{leaf}", f".block_sparse_moe.{_FILE_STACKS.get(leaf, leaf)}")
    names = [
        file_name
        for file_name in files
        if (".experts." in file_name or file_name.endswith(stack_ends))
        and (match := _LAYER.search(file_name)) is not None
        and layer is not None
        and match[1] == layer[1]
    ]
    stacks = [file_name for file_name in names if file_name.endswith(stack_ends)]
    if len(stacks) == 1:
        # (s B A)^T = s A^T B^T: in a transposed stack, the factors swap places.
        is_transposed = read_object(base / "config.json").get("model_type") in _TRANSPOSED
        return {stacks[0]: (b.mT, a.mT) if is_transposed else (a, b)}
    for parts in _FILE_PARTS[leaf]:
        by_part = [
            {int(match[1]): file_name for file_name in names if (match := re.search(pattern, file_name))}
            for pattern in (rf"\.experts\.(\d+)\.{part}\.weight$" for part in parts)
        ]
        # Every expert must be there: a part of them is another model's.
        if all(set(part) == set(range(len(a))) for part in by_part):
            # gate and up share A, as their stack has one input; B's rows are theirs in turn.
            chunks = b.chunk(len(parts), dim=1)
            return {
                part[index]: (a[index], chunk[index])
                for part, chunk in zip(by_part, chunks, strict=True)
                for index in range(len(a))
            }
    raise ModelError(
        f"the adapter is of {len(a)} experts {name!r:.120}, which {base} lacks",
        hint="name the model that it was trained on by: forge-rl merge ADAPTER OUT --base FOLDER",
    )
