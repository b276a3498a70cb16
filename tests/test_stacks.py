"""Which published tensors lie in a bucket as a stack."""

from __future__ import annotations

import pytest
import torch

from forge_rl.weights.manifest import TensorSpec, draft
from forge_rl.weights.names import SameNames
from forge_rl.weights.stacks import stacks_of

EXPERT = "model.layers.{}.mlp.experts.{}.{}.weight"
NORM = "model.layers.{}.norm.weight"


def stacked_names(names: list[str], shape: tuple[int, ...] = (3, 5), bucket_bytes: int = 1 << 20) -> list[list[str]]:
    """Names of each stack of a version with these tensors, whose values are checked."""
    manifest = draft(
        [TensorSpec(name=name, shape=shape) for name in names],
        version=1,
        dtype=torch.bfloat16,
        bucket_bytes=bucket_bytes,
    )
    stacks = []
    for bucket in manifest.buckets:
        memory, entries = torch.randint(0, 256, (bucket.bytes,), dtype=torch.uint8), manifest.entries[bucket.key]
        tensors = {entry.name: entry.of(memory) for entry in entries}
        for stack in stacks_of(entries, tensors):
            stacks.append([entry.name for entry in stack.entries])
            assert tuple(stack.values.shape) == stack.shape == (len(stack.entries), *shape)
            for entry, values in zip(stack.entries, stack.values, strict=True):
                assert values.data_ptr() == tensors[entry.name].data_ptr()
                assert values.stride() == tensors[entry.name].stride()
    assert [name for stack in stacks for name in stack] == names
    return stacks


def experts(layer: int, projection: str, numbers: range) -> list[str]:
    return [EXPERT.format(layer, number, projection) for number in numbers]


def test_a_weight_of_consecutive_experts_is_one_stack() -> None:
    gate, up = experts(0, "gate", range(4)), experts(0, "up", range(4))
    next_layer = experts(1, "up", range(4, 6))
    norms = [NORM.format(layer) for layer in range(2)]
    names = [*gate, *up, *next_layer, *norms]
    assert stacked_names(names) == [gate, up, next_layer, [norms[0]], [norms[1]]]
    assert stacked_names(gate, shape=()) == [gate], "numbers"


def test_a_stack_ends_with_its_bucket() -> None:
    names = experts(0, "gate", range(7))
    assert stacked_names(names, bucket_bytes=3 * 64) == [names[:3], names[3:6], names[6:]]


@pytest.mark.parametrize("numbers", [[0, 2, 4], [3, 2, 1], [0, 0, 0]])
def test_experts_that_do_not_follow_one_another_are_no_stack(numbers: list[int]) -> None:
    names = [EXPERT.format(layer, number, "gate") for layer, number in enumerate(numbers)]
    assert stacked_names(names) == [[name] for name in names]
    if len(set(numbers)) == 3:
        names = [EXPERT.format(0, number, "gate") for number in numbers]
        assert stacked_names(names) == [[name] for name in names]


def test_tensors_in_memory_of_their_own_are_no_stack() -> None:
    entries = draft(
        [TensorSpec(name=name, shape=(3, 5)) for name in experts(0, "gate", range(2))], version=1, dtype=torch.float32
    ).tensors
    tensors = {entry.name: torch.zeros(3, 5) for entry in entries}
    assert [stack.entries for stack in stacks_of(entries, tensors)] == [(entry,) for entry in entries]


def test_names_of_transformers_code_publish_stacks_one_after_the_other() -> None:
    gate, up = "layers.0.experts.{}.gate", "layers.0.experts.{}.up"
    names = SameNames(stacks={"gate_up": (gate, up)})
    parts = list(names.parts("gate_up", (3, 4, 2)))
    assert [part.name for part in parts] == [template.format(n) for template in (gate, up) for n in range(3)]
    values = torch.randn(3, 4, 2)
    assert all(torch.equal(part.of(values), values[n % 3, 2 * (n // 3) :][:2]) for n, part in enumerate(parts))
