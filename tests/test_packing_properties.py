"""Packing of random batches, and a model that scores packed episodes as it scores each alone."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, PackedBatch
from forge_rl.packing.unpacking import unpack
from forge_rl.types import Batch, Episode
from tests.dense_masks import dense_mask
from tests.test_packing import EOS, batch_of, centered, packed, turn


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Groups whose episodes have one to three turns that extend or rewrite a history, over a vocabulary of 6."""
    tokens = st.lists(st.integers(0, 5), min_size=1, max_size=5)
    size = draw(st.integers(1, 4))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(tokens)
        group = []
        for _ in range(size):
            turns, history = [], prompt
            for _ in range(draw(st.integers(1, 3))):
                drawn_turn = turn(
                    history, draw(tokens), version=draw(st.integers(0, 3)), logprob=draw(st.floats(-9, -1))
                )
                turns.append(drawn_turn)
                reply_ids = draw(tokens)
                extended = [*drawn_turn.prompt_ids, *drawn_turn.token_ids, *reply_ids]
                history = draw(st.sampled_from([extended, prompt + reply_ids, reply_ids]))
            group.append((draw(st.sampled_from([0.0, 0.5, 1.0])), turns))
        groups.append(group)
    return batch_of(*groups)


_BLANK = {"behaviour": 0, "advantages": 0, "versions": -1, "episodes": -1, "segments": -1, "turns": -1, "lengths": 1}

layouts = st.builds(
    Layout,
    shares=st.integers(1, 4),
    seq_len=st.sampled_from([48, 64, 256]),
    context_parallel_degree=st.integers(1, 3),
    pad_multiple=st.sampled_from([1, 4, 16]),
    share_prefixes=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(batch=batches(), layout=layouts, drop_uniform=st.booleans())
def test_each_trained_token_is_a_target_once_and_sees_only_its_past(batch, layout, drop_uniform):
    advantages = centered(batch)
    result = pack(batch, advantages, layout, drop_uniform=drop_uniform)
    spared = [row for part in result.minibatches for row in part.rows[len(part.rows) - part.uniform_rows :]]
    assert len(spared) % layout.shares == 0
    assert not any(row.advantages.any() for row in spared)
    result = result.without_uniform
    size = advantages.shape[1]
    expected: Counter[tuple[object, ...]] = Counter()
    for e, episode in enumerate(batch.episodes):
        if drop_uniform and not advantages[e // size].any():
            continue
        for s, segment in enumerate(episode.segments):
            for t, trained in enumerate(segment.trained.tolist()):
                if trained:
                    about = (segment.logprobs[t].item(), segment.versions[t].item())
                    advantage = advantages[e // size, e % size].item()
                    expected[(e, s, tuple(segment.token_ids[: t + 1].tolist()), *about, advantage)] += 1

    contexts: Counter[tuple[object, ...]] = Counter()
    for row in result.rows:
        visible = dense_mask(row)
        for t in row.mask.nonzero().flatten().tolist():
            visible_positions = visible[t].nonzero().flatten()
            assert row.positions[visible_positions].tolist() == list(range(len(visible_positions)))
            context = (*row.token_ids[visible_positions].tolist(), row.targets[t].item())
            about = (row.behaviour[t].item(), row.versions[t].item(), row.advantages[t].item())
            contexts[(row.episodes[t].item(), row.segments[t].item(), context, *about)] += 1
    assert contexts == expected
    assert result.trained_tokens == contexts.total()
    assert len(result.rows) % layout.shares == 0


@settings(max_examples=150, deadline=None)
@given(batch=batches(), layout=layouts)
def test_rows_keep_to_their_layout_and_padding_is_inert(batch, layout):
    result = pack(batch, centered(batch), layout, drop_uniform=False)
    lengths = [len(row) for row in result.rows]
    assert max(lengths) <= layout.seq_len * layout.context_parallel_degree
    assert all(length % (layout.pad_multiple * layout.context_parallel_degree) == 0 for length in lengths)
    for row in result.rows:
        visible, padding = dense_mask(row), row.trees == -1
        assert visible.diagonal().all()
        assert not visible[~padding][:, padding].any()
        assert not visible[padding][:, ~padding].any()
        assert not row.mask[padding].any()
        for name, blank in _BLANK.items():
            about = ~row.mask & ~row.observed if name == "episodes" else ~row.mask
            assert (getattr(row, name)[about] == blank).all()


@settings(max_examples=75, deadline=None)
@given(batch=batches())
def test_sharing_never_takes_more_tokens(batch):
    shared, alone = (packed(batch, Layout(share_prefixes=share)).packed_tokens for share in (True, False))
    assert shared <= alone


class TinyModel(torch.nn.Module):
    """Two layers of attention over learned absolute positions, in plain torch."""

    def __init__(self, vocabulary: int = 64, width: int = 32, longest: int = 64) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.places = torch.nn.Embedding(longest, width)
        self.attention = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width) for _ in range(2))
        self.mlp = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """[L] ids and positions and an [L, L] mask to [L, V] logprobs."""
        x = self.tokens(token_ids) + self.places(positions)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            q, k, v = (part[None, None] for part in attention(x).chunk(3, dim=-1))
            x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)[0, 0]
            x = x + torch.tanh(mlp(x))
        return self.head(x).log_softmax(dim=-1)


def two_turn_batch() -> Batch:
    generator = torch.Generator().manual_seed(4)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 64, (count,), generator=generator).tolist()

    groups = []
    for p in range(3):
        prompt = ids(6 + p)
        group = []
        for g in range(4):
            first = turn(prompt, [*ids(3 + g), EOS])
            extended = [*first.prompt_ids, *first.token_ids, *ids(2)]
            second = turn(extended if g % 2 else prompt[:-2] + ids(3), [*ids(2), EOS])
            group.append((float(g), [first, second]))
        groups.append(group)
    return batch_of(*groups)


def packed_logprobs(model: TinyModel, result: PackedBatch, masks: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    values = []
    for row, visible in zip(result.rows, masks, strict=True):
        scored = model(row.token_ids, row.positions, visible)
        values.append(scored.gather(1, row.targets[:, None]).squeeze(1))
    return unpack(result, values)


def lone_logprobs(model: TinyModel, episode: Episode) -> torch.Tensor:
    """Each segment by itself under a causal mask, without any packing."""
    parts = []
    for segment in episode.segments:
        ids = torch.tensor(segment.token_ids, dtype=torch.int64)
        causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        scored = model(ids, torch.arange(len(ids)), causal)
        parts += [scored[t - 1, ids[t]] for t, trained in enumerate(segment.trained) if trained]
    return torch.stack(parts)


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_a_model_scores_packed_episodes_as_it_scores_each_alone(share_prefixes):
    torch.manual_seed(5)
    model, batch = TinyModel().double(), two_turn_batch()
    layout = Layout(shares=2, seq_len=64, pad_multiple=8, share_prefixes=share_prefixes)
    result = packed(batch, layout)
    logprobs = packed_logprobs(model, result, [dense_mask(row) for row in result.rows])
    alone = [lone_logprobs(model, episode) for episode in batch.episodes]
    assert sorted(logprobs) == list(range(len(alone)))
    for e, expected in enumerate(alone):
        torch.testing.assert_close(logprobs[e], expected, atol=1e-12, rtol=0)

    packed_gradient = torch.autograd.grad(sum(values.sum() for values in logprobs.values()), list(model.parameters()))
    lone_gradient = torch.autograd.grad(sum(values.sum() for values in alone), list(model.parameters()))
    for a, b in zip(packed_gradient, lone_gradient, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_a_model_that_sees_across_branches_scores_differently():
    torch.manual_seed(5)
    model, batch = TinyModel(), two_turn_batch()
    result = packed(batch, Layout(seq_len=64))
    same_tree = [
        torch.ones(len(row), len(row), dtype=torch.bool).tril() & (row.trees[:, None] == row.trees[None, :])
        for row in result.rows
    ]
    logprobs = packed_logprobs(model, result, same_tree)
    gaps = [
        (logprobs[e] - lone_logprobs(model, episode)).abs().max().item() for e, episode in enumerate(batch.episodes)
    ]
    assert max(gaps) > 1e-2


def test_columns_follow_their_tokens_through_branches_and_segments():
    turns = [turn([10, 11], [20, 21]), turn([10, 11, 20, 21, 90], [22]), turn([10, 12], [23])]
    batch = batch_of([(0.0, turns), (1.0, [turn([10, 11], [30, 31])])])
    values = [[np.array([1.0, 2.0, 3.0, 4.0], np.float32), np.array([5.0, 6.0], np.float32)]]
    pairs = [[np.stack([number, -number], axis=1).astype(np.int32) for number in values[0]]]
    laid = pack(batch, centered(batch), Layout(), drop_uniform=False, columns={"values": values, "pairs": pairs})
    (row,) = laid.rows
    by_token = {20: 1.0, 21: 2.0, 22: 3.0, 23: 4.0, 30: 5.0, 31: 6.0}
    expected = [by_token[t] if m else 0 for t, m in zip(row.targets.tolist(), row.mask.tolist(), strict=True)]
    assert row.columns["values"].tolist() == expected
    assert row.columns["pairs"].tolist() == [[number, -number] for number in expected]
    (minibatch,) = laid.minibatches
    assert (minibatch.observations, minibatch.group_size, minibatch.sources) == (1, 2, ("toy",))
    assert minibatch.scattered == frozenset()
    split = pack(batch, centered(batch), Layout(shares=2, seq_len=8), drop_uniform=False, columns={"values": values})
    assert split.minibatches[0].scattered == {"episode", "group"}
    assert all(row.columns["values"].shape == row.targets.shape for row in split.rows), "also in padding rows"
