"""Masks in blocks, and how few compiled graphs of FlexAttention serve rows of all lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention import flex_attention
from torchtitan.models.common import attention
from torchtitan.models.common.attention import FlexAttention

from forge_rl.engines.titan.masks import block_mask, compile_attention, compile_once
from forge_rl.packing.rows import Layout
from tests.dense_masks import dense_mask
from tests.fakes import packed, random_batch


@pytest.fixture
def compiling() -> Iterator[None]:
    """Settings of torch.compile as they were before, and nothing compiled."""
    sources = torch.compiler.config.dynamic_sources
    with config.patch(recompile_limit=config.recompile_limit, fail_on_recompile_limit_hit=False):
        yield
    torch.compiler.config.dynamic_sources = sources
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts graphs of masks and of attention, which run uncompiled here; attention on a CPU has a gradient then."""
    counts: Counter[str] = Counter()

    def compiled(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            counts[name] += 1
            return graph.forward

        return torch.compile(function, backend=backend)

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "_compiled_create_block_mask", compiled(flex_attention.create_block_mask, "mask"))
    compiled_attention = compiled(flex_attention.flex_attention, "attention")
    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", staticmethod(compiled_attention))
    return counts


def test_attention_is_compiled_without_a_search(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", None)
    options_seen: list[dict[str, bool]] = []
    monkeypatch.setattr(torch, "compile", lambda function, options: options_seen.append(options))
    compile_attention()
    searched = FlexAttention.inductor_configs
    assert options_seen == [searched | {"max_autotune": False, "coordinate_descent_tuning": False}]
    assert searched.keys() == options_seen[0].keys(), "torchtitan's options have other names now"


@pytest.mark.long
@pytest.mark.usefixtures("compiling")
def test_rows_of_all_lengths_share_graphs_and_match_dense_masks(graphs: Counter[str]):
    compile_once()
    for seed, length in enumerate((512, 768, 1280)):
        (row,) = packed(random_batch(seed, vocab=43), seq_len=length, pad_multiple=length).rows
        chunk = torch.arange(length).unflatten(0, (4, -1))[[3, 1]].flatten()  # of one of two ranks that split the row
        sizes = (4, length // 2), (2, length), (2, length)
        for window in (None, 4):
            mask = block_mask(row, chunk, window)
            for trains in (False, True)[: 1 if window else 2]:
                q, k, v = (torch.randn(1, tokens, heads, 16, requires_grad=trains) for heads, tokens in sizes)
                with torch.set_grad_enabled(trains):
                    FlexAttention(FlexAttention.Config())(q, k, v, attention_masks=mask, enable_gqa=True)
            near = row.positions[chunk, None] - row.positions < (window or length)
            rank_mask = flex_attention.create_mask(mask.mask_mod, 1, None, length // 2, length, device="cpu")
            assert torch.equal(rank_mask[0, 0], dense_mask(row)[chunk] & near)
    assert graphs == {"mask": 2, "attention": 3}


def test_rows_on_gpus_have_two_blocks_which_no_graph_is_made_for_alone():
    short = packed(random_batch(0, vocab=43), seq_len=512, pad_multiple=128, least_tokens=256)
    assert {len(row) for row in short.rows} == {256}
    split = packed(
        random_batch(0, vocab=43), seq_len=512, pad_multiple=128, least_tokens=256, context_parallel_degree=2
    )
    assert {len(row) for row in split.rows} == {512}, "each device has two"
    assert Layout().least_tokens == 1


@pytest.mark.usefixtures("compiling")
def test_too_many_graphs_are_an_error_and_not_a_silent_eager_run():
    @torch.compile(backend="eager")
    def shifted(values: torch.Tensor, by: str) -> torch.Tensor:
        return values + len(by)

    compile_once(2)
    shifted(torch.zeros(2), "a")
    shifted(torch.zeros(2), "bc")
    with pytest.raises(FailOnRecompileLimitHit):
        shifted(torch.zeros(2), "def")
