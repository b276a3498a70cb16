"""How context-parallel ranks split a row: the work of each, counted by hand, and against torch's own balancers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer

from forge_rl.engines.architecture import Architecture, read_architecture
from forge_rl.engines.protocol import LoadBalancer
from forge_rl.engines.titan.balance import attention_work, split_row
from forge_rl.packing.rows import Row
from tests.dense_masks import dense_mask
from tests.fakes import empty_row, make_model, packed, random_batch

BALANCERS: tuple[LoadBalancer, ...] = ("none", "headtail", "ptrr")


@pytest.fixture
def architecture(tmp_path: Path) -> Architecture:
    """A model of two layers."""
    make_model(tmp_path, num_hidden_layers=2)
    return read_architecture(tmp_path)


def row_of(*lengths: int, padding: int = 0) -> Row:
    """A row of episodes without shared prefixes."""
    parts = [*lengths, *([padding] if padding else [])]
    ends = torch.tensor(parts).cumsum(0)
    trees = torch.arange(len(parts), dtype=torch.int32)
    if padding:
        trees[-1] = -1
    counts = torch.tensor(parts)
    return replace(
        empty_row(),
        token_ids=torch.zeros(sum(parts), dtype=torch.int64),
        trees=trees.repeat_interleave(counts),
        until=ends.int().repeat_interleave(counts),
    )


def test_a_tokens_work_is_the_keys_that_it_sees_in_all_layers(architecture: Architecture):
    (row,) = packed(random_batch(0, vocab=43, groups=3), seq_len=200, pad_multiple=100).rows
    visibility = dense_mask(row)
    assert torch.equal(attention_work(row, architecture), 2 * visibility.sum(1))
    near = row.positions[:, None] - row.positions < 5
    windowed = replace(architecture, window=5, window_layers=(1,))
    assert torch.equal(attention_work(row, windowed), visibility.sum(1) + (visibility & near).sum(1))


def test_ranks_have_equal_parts_of_a_row_and_the_work_that_is_told(architecture: Architecture):
    for length in (8, 12, 72, 1003 * 4):  # also not a multiple of the ranks' blocks
        row = row_of(length // 2, length // 4, padding=length - length // 2 - length // 4)
        work = attention_work(row, architecture)
        for balancer in BALANCERS:
            split = split_row(row, 4, balancer, architecture)
            assert split.tokens.shape == (4, length // 4)
            assert sorted(split.tokens.flatten().tolist()) == list(range(length))
            assert split.heaviest == max(int(work[tokens].sum()) for tokens in split.tokens)
            assert split.mean == float(work.sum()) / 4
            assert split.plain == max(int(part.sum()) for part in work.chunk(4))


def test_parts_from_both_ends_even_out_one_long_episode_as_in_torch(architecture: Architecture):
    row = row_of(64)
    split = split_row(row, 4, "auto", architecture)
    expected = _HeadTailLoadBalancer(64, 4, "cpu")._generate_indices()
    assert torch.equal(split.tokens.flatten(), expected[0].long())
    assert split.order is not None
    assert split.heaviest == split.mean == 2 * 64 * 65 / 2 / 4
    assert split.plain == 2 * sum(range(49, 65))


def test_blocks_are_dealt_where_neither_other_way_is_even(architecture: Architecture):
    lengths = (512, 32, 32, 512)  # the work of two long episodes lies in the second and the last quarter
    splits = {balancer: split_row(row_of(*lengths), 4, balancer, architecture) for balancer in (*BALANCERS, "auto")}
    ratios = {name: round(split.heaviest / split.mean, 2) for name, split in splits.items()}
    assert ratios["ptrr"] < min(ratios["none"], ratios["headtail"])
    assert torch.equal(splits["auto"].tokens, splits["ptrr"].tokens)


def test_a_row_that_is_even_stays_in_order(architecture: Architecture):
    split = split_row(row_of(*[16] * 32), 4, "auto", architecture)
    assert split.order is None
    assert split.heaviest == split.plain == split.mean
