"""What an update costs a GPU, counted without one: no change may add operations, bytes or waits unnoticed."""

from __future__ import annotations

import pytest

from benchmarks.counted_operations import EXPERT_GRADIENTS, FUSED_PRODUCTS
from benchmarks.update_cost import MODELS, Counts, count

pytestmark = pytest.mark.usefixtures("process_group")
TOKENS = 512


def counts_of(name: str, layers: int) -> Counts:
    return count(MODELS[name] | {"num_hidden_layers": layers}, tokens=TOKENS, rows=2)


def launches(counts: Counts) -> float:
    return sum(counts.row.launches.values()) / counts.rows


@pytest.mark.parametrize(("name", "max_operations"), [("Qwen3-1.7B", 24), ("Qwen3-30B-A3B", 60), ("gpt-oss-20b", 106)])
def test_a_layer_of_a_row_takes_few_operations_and_no_waits(name: str, max_operations: int):
    few, more = (counts_of(name, layers) for layers in (2, 4))
    copied = [counts.row.launches["_foreach_copy_"] + counts.row.launches["copy_"] for counts in (few, more)]
    assert (launches(more) - launches(few) - (copied[1] - copied[0]) / 2) / 2 <= max_operations
    assert not few.row.waits
    # Metrics and the gradient's norm, and the experts' loads.
    assert sum(few.step.waits.values()) == (1 if name == "Qwen3-1.7B" else 2)


def test_the_loss_metrics_and_head_of_a_row_take_few_operations():
    counts = counts_of("Qwen3-1.7B", 2)
    copied = counts.row.launches["_foreach_copy_"] + counts.row.launches["copy_"]
    assert launches(counts) - 2 * 24 - copied / 2 <= 150
    assert sum(counts.head.launches.values()) <= 26


def test_gradients_are_added_up_by_the_products_that_compute_them():
    counts = counts_of("Qwen3-1.7B", 2)
    assert not counts.row.launches["add_"], "no sum of a gradient is an operation of its own"
    products = ("mm", "addmm", "addmm_", *FUSED_PRODUCTS)
    # The head's logits have gradients in one part.
    assert sum(counts.row.launches[name] for name in products) == counts.rows * (2 * 12 + 4)
    assert set(counts.row.flops) == {"mm", "addmm", *FUSED_PRODUCTS, "FlashAttention"} - {*EXPERT_GRADIENTS}


def test_gradients_of_experts_are_added_up_by_the_products_that_compute_them():
    counts = counts_of("Qwen3-30B-A3B", 2)
    # The first row's start the sums of two layers with three matrices, to which the second adds.
    assert [counts.row.launches[name] for name in EXPERT_GRADIENTS] == [2 * 3, 2 * 3]
    assert counts.row.launches["_grouped_mm"] == counts.rows * 2 * 4
    experts = 2 * 3 * 128 * 768 * 2048
    assert counts.row.sizes["add_"] < experts, "no sum of experts' gradients is an operation of its own"
    assert counts.row.sizes["expert_gradient_"] - counts.row.sizes["expert_gradient"] == 4 * experts
