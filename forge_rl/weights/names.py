"""Maps torchtitan's weight names to Hugging Face's.

Models keep separate q, k and v projections in Hugging Face's row order (engines/titan builds them so), and torchtitan
stacks a layer's experts, which most families store separately. So every published tensor is a view of a block of one
torchtitan weight, at most with its last two dims swapped, and shards need no copy or permutation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from forge_rl.errors import ModelError
from forge_rl.weights.slices import TensorSlice

VALUE_HEAD = "score.weight"
"""Name of a value head, as in transformers' models for sequence classification."""
ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")
"""Suffixes of transformers' names of biases that choose experts: they stay float32, as in DeepSeek-V3."""
_TOP = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of one published tensor that a block of a torchtitan weight holds."""

    name: str
    """Name in Hugging Face."""
    shape: tuple[int, ...]
    """Shape of the whole published tensor."""
    tensor_slice: TensorSlice
    """Place of the part in the published tensor."""
    index: int | None = None
    """Index of the expert within the block; None if the part is the whole block."""
    rows: slice | None = None
    """Rows of the expert, if the model keeps several published tensors in one; None for all."""
    transposed: bool = False
    """True if the published tensor has its last two dims swapped."""
    float32: bool = False
    """True if it stays float32 regardless of the model's dtype."""

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """Return a view of this part of the block."""
        part = block if self.index is None else block[self.index]
        part = part if self.rows is None else part[self.rows]
        return part.transpose(-2, -1) if self.transposed else part


@dataclass(frozen=True, kw_only=True)
class SameNames:
    """Names of a model on transformers' own modelling code: the files' names, except those that transformers renames or
    stacks when it loads the folder."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names in the files, where they differ, by the model's name."""
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names in the files of the weights that the model stacks, by the model's name. "{}" is an expert's index along the
    first dim; several names are equal parts of the second dim, in order."""
    head: str = "lm_head.weight"
    """Hugging Face's name of the head: VALUE_HEAD in a value model."""

    def parts(self, name: str, shape: Sequence[int], tensor_slice: TensorSlice | None = None) -> Iterator[Part]:
        """List the published tensors that a block of a weight holds; see `Names.parts`."""
        tensor_slice = tensor_slice or TensorSlice.whole(shape)
        if name not in self.stacks:
            hf_name = self.to_hf(name)
            float32 = name.endswith(ROUTER_BIASES)
            yield Part(name=hf_name, shape=tuple(shape), tensor_slice=tensor_slice, float32=float32)
            return
        # Whole experts only: a published tensor is then in one block, and its rows need no offset.
        assert tensor_slice.size[1:] == tuple(shape[1:]), "FSDP splits stacks between experts"
        templates = self.stacks[name]
        # Rows of one published tensor in the stack's second dim, such as gate and up.
        count = shape[1] // len(templates)
        source_slice = TensorSlice.whole((count, *shape[2:]))
        for number, template in enumerate(templates):  # its experts follow one another, to be read at once
            for index in range(tensor_slice.size[0]):
                yield Part(
                    name=template.format(tensor_slice.start[0] + index),
                    shape=source_slice.size,
                    tensor_slice=source_slice,
                    index=index,
                    rows=slice(number * count, (number + 1) * count),
                )

    def to_hf(self, name: str) -> str:
        """Return a weight's name in the files; the weight is not a stack."""
        return self.head if name == "lm_head.weight" else self.renamed.get(name, name)


@dataclass(frozen=True, kw_only=True)
class Names:
    """Weight names of one model family.

    Names(layer={"attention.wo.weight": "self_attn.o_proj.weight"}).to_hf("layers.3.attention.wo.weight")
    """

    layer: Mapping[str, str]
    """Hugging Face names of a layer's weights by torchtitan name, both without the layer prefix. "{}" is the expert's
    index: torchtitan stacks experts in the first dim."""
    transposed: frozenset[str] = frozenset()
    """torchtitan names of the weights whose last two dims are swapped in Hugging Face."""
    float32: frozenset[str] = frozenset()
    """torchtitan names of the weights that stay float32 regardless of the model's dtype."""
    head: str = "lm_head.weight"
    """Hugging Face's name of the head: VALUE_HEAD in a value model."""

    def parts(self, name: str, shape: Sequence[int], tensor_slice: TensorSlice | None = None) -> Iterator[Part]:
        """List the published tensors that a block of a torchtitan weight holds, and the slice of each.

        Args:
            name: torchtitan's name of the weight.
            shape: shape of the whole weight.
            tensor_slice: the block; by default the whole weight.

        Raises:
            ModelError: the name is not one of the family.
        """
        tensor_slice = tensor_slice or TensorSlice.whole(shape)
        match = _LAYER.fullmatch(name)
        transposed = match is not None and match[2] in self.transposed
        stacked = match is not None and "{}" in self.layer.get(match[2], "")
        full_shape, start, size = tuple(shape), tensor_slice.start, tensor_slice.size
        if transposed:
            # Shape and slice in Hugging Face's order; `Part.of` swaps the values' dims as a view.
            full_shape, start, size = ((*dims[:-2], dims[-1], dims[-2]) for dims in (full_shape, start, size))
        if not stacked:
            inner = TensorSlice(start=start, size=size)
            float32 = match is not None and match[2] in self.float32
            hf_name = self.to_hf(name)
            yield Part(name=hf_name, shape=full_shape, tensor_slice=inner, transposed=transposed, float32=float32)
            return
        # The first dim is the expert's, which is in the name instead.
        inner = TensorSlice(start=start[1:], size=size[1:])
        # A block of a stack holds whole experts, one published tensor each.
        for index in range(size[0]):
            hf_name = self.to_hf(name, start[0] + index)
            yield Part(name=hf_name, shape=full_shape[1:], tensor_slice=inner, index=index, transposed=transposed)

    def to_hf(self, name: str, expert: int | None = None) -> str:
        """Hugging Face's name of a torchtitan weight.

        Args:
            name: torchtitan's.
            expert: which one of a stack; None for any other weight.

        Raises:
            ModelError: the name is not one of the family.
        """
        if expert is None and name == "lm_head.weight":
            return self.head
        if expert is None and name in _TOP:
            return _TOP[name]
        match = _LAYER.fullmatch(name)
        template = self.layer.get(match[2]) if match else None
        if match is None or template is None or ("{}" in template) == (expert is None):
            raise ModelError(
                f"the torchtitan weight {name!r} has no Hugging Face name",
                hint="add it to the names of its family, in engines/families",
            )
        return f"model.layers.{match[1]}.{template.format(expert)}"
