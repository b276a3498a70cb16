"""Packing: hand-worked rows, shared prefixes, minibatches, and what is refused."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from forge_rl.errors import ConfigError
from forge_rl.packing.minibatches import deal
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, Minibatch, PackedBatch, Row, attends
from forge_rl.packing.unpacking import unpack
from forge_rl.types import Batch, Episode, Group, Score, Task, Turn
from tests.dense_masks import dense_mask

TASK = Task(id="1", source="toy", messages=({"role": "user", "content": "2+2"},))
EOS = 2


def turn(prompt: list[int], answer: list[int], *, version: int = 0, logprob: float = -0.5) -> Turn:
    """An answer whose tokens have logprobs logprob, logprob - 1, ..."""
    return Turn(
        prompt_ids=tuple(prompt),
        token_ids=tuple(answer),
        logprobs=tuple(logprob - i for i in range(len(answer))),
        versions=(version,) * len(answer),
        text="",
    )


def batch_of(*groups: list[tuple[float, list[Turn]]], version: int = 5) -> Batch:
    """Groups of (reward, turns)."""
    return Batch(
        groups=tuple(
            Group(task=TASK, episodes=tuple(Episode(task=TASK, turns=tuple(t), score=Score(total=r)) for r, t in group))
            for group in groups
        ),
        version=version,
    )


def centered(batch: Batch) -> torch.Tensor:
    return batch.rewards - batch.rewards.mean(dim=1, keepdim=True)


def packed(batch: Batch, layout: Layout | None = None, *, drop_uniform: bool = False) -> PackedBatch:
    return pack(batch, centered(batch), layout or Layout(), drop_uniform=drop_uniform)


def simple(answers: list[list[int]], prompt: list[int]) -> list[tuple[float, list[Turn]]]:
    """One group, with rewards 0, 1, 2, ..."""
    return [(float(i), [turn(prompt, answer)]) for i, answer in enumerate(answers)]


def test_every_field_of_a_hand_worked_row():
    prompt = [10, 11, 12]
    batch = batch_of(
        [
            (0.0, [turn(prompt, [20, 21, EOS], version=4, logprob=-0.25)]),
            (1.0, [turn(prompt, [30, EOS], version=5, logprob=-0.75)]),
        ]
    )
    result = packed(batch, Layout(pad_multiple=4))
    (row,) = result.rows
    # prefix 10 11 | branch 12 20 21 (EOS is only a target) | branch 12 30 | one token of padding
    assert row.token_ids.tolist() == [10, 11, 12, 20, 21, 12, 30, 0]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 2, 3, 0]
    assert row.trees.tolist() == [0, 0, 0, 0, 0, 0, 0, -1]
    assert row.until.tolist() == [7, 7, 5, 5, 5, 7, 7, 8]
    assert row.targets.tolist() == [11, 12, 20, 21, EOS, 30, EOS, 0]
    assert row.mask.tolist() == [False, False, True, True, True, True, True, False]
    assert row.behaviour.tolist() == [0, 0, -0.25, -1.25, -2.25, -0.75, -1.75, 0]
    assert row.advantages.tolist() == [0, 0, -0.5, -0.5, -0.5, 0.5, 0.5, 0]
    assert row.versions.tolist() == [-1, -1, 4, 4, 4, 5, 5, -1]
    assert row.episodes.tolist() == [-1, -1, 0, 0, 0, 1, 1, -1]
    assert row.segments.tolist() == [-1, -1, 0, 0, 0, 0, 0, -1]
    assert row.turns.tolist() == [-1, -1, 0, 0, 0, 0, 0, -1]
    assert row.lengths.tolist() == [1, 1, 3, 3, 3, 2, 2, 1]
    assert (result.trained_tokens, result.sequence_tokens, result.packed_tokens) == (5, 9, 8)
    assert (result.unscored_tokens, result.version) == (0, 5)


def test_the_dtypes_of_a_row():
    (row,) = packed(batch_of(simple([[20], [30]], [10, 11]))).rows
    for name in ("token_ids", "positions", "targets"):
        assert getattr(row, name).dtype == torch.int64
    for name in ("trees", "until", "episodes", "versions", "segments", "turns", "lengths"):
        assert getattr(row, name).dtype == torch.int32
    for name in ("behaviour", "advantages"):
        assert getattr(row, name).dtype == torch.float32
    assert row.mask.dtype == torch.bool


def test_the_dense_mask_of_a_hand_worked_row():
    (row,) = packed(batch_of(simple([[20, 21], [30, 31]], [10, 11])), Layout(pad_multiple=8)).rows
    assert row.token_ids.tolist() == [10, 11, 20, 11, 30, 0, 0, 0]
    assert dense_mask(row).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0, 0],
        [1, 0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1],
    ]


def test_attends_answers_for_single_positions():
    (row,) = packed(batch_of(simple([[20, 21], [30, 31]], [10, 11]))).rows
    assert attends(row.until, torch.tensor(4), torch.tensor(3))
    assert not attends(row.until, torch.tensor(4), torch.tensor(2))


def test_without_sharing_every_segment_is_a_tree():
    prompt = [10, 11, 12]
    batch = batch_of(simple([[20, 21, EOS], [30, EOS]], prompt))
    (row,) = packed(batch, Layout(share_prefixes=False)).rows
    assert row.token_ids.tolist() == [10, 11, 12, 20, 21, 10, 11, 12, 30]
    assert row.trees.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert row.until.tolist() == [5] * 5 + [9] * 4
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert row.targets.tolist() == [11, 12, 20, 21, EOS, 11, 12, 30, EOS]


def test_a_prompt_of_one_token_shares_nothing():
    (row,) = packed(batch_of(simple([[20], [30]], [10]))).rows
    assert row.token_ids.tolist() == [10, 10]
    assert row.trees.tolist() == [0, 1]
    assert row.targets.tolist() == [20, 30]


def test_groups_never_share_a_tree():
    group = simple([[20], [30]], [10, 11])
    (row,) = packed(batch_of(group, group)).rows
    assert row.trees.tolist() == [0, 0, 0, 1, 1, 1]
    assert row.episodes.tolist() == [-1, 0, 1, -1, 2, 3]


def test_tool_answers_are_context_and_not_targets():
    turns = [turn([10, 11], [20, 21], logprob=-1.0), turn([10, 11, 20, 21, 90, 91], [22], logprob=-7.0)]
    (row,) = packed(batch_of([(0.0, turns), (1.0, [turn([10, 11], [30])])])).rows
    assert row.token_ids.tolist() == [10, 11, 20, 21, 90, 91, 11]
    assert row.targets.tolist() == [11, 20, 21, 90, 91, 22, 30]
    assert row.mask.tolist() == [False, True, True, False, False, True, True]
    assert row.behaviour.tolist() == [0, -1, -2, 0, 0, -7, -0.5]
    assert row.advantages.tolist() == [0, -0.5, -0.5, 0, 0, -0.5, 0.5]
    assert row.episodes.tolist() == [-1, 0, 0, 0, 0, 0, 1]
    assert row.segments.tolist() == [-1, 0, 0, -1, -1, 0, 0]
    assert row.observed.tolist() == [False, False, False, True, True, False, False]


def test_a_rewritten_history_is_a_branch_of_the_same_episode():
    turns = [turn([10, 11, 12], [20, 21]), turn([10, 11, 13], [22])]
    (row,) = packed(batch_of([(0.0, turns), (1.0, [turn([10, 11, 12], [30])])])).rows
    assert row.token_ids.tolist() == [10, 11, 12, 20, 12, 13]
    assert row.until.tolist() == [6, 6, 4, 4, 5, 6]
    assert row.targets.tolist() == [11, 0, 20, 21, 30, 22]
    assert row.episodes.tolist() == [-1, -1, 0, 0, 1, 0]
    assert row.segments.tolist() == [-1, -1, 0, 0, 0, 1]
    assert row.advantages.tolist() == [0, 0, -0.5, -0.5, 0.5, -0.5]


def test_histories_that_go_on_differently_share_every_level():
    token_ids = [10, 11, 12, 20, 21, 30, 31]
    turns = [
        *(turn(token_ids[:3], [20, 21]), turn(token_ids, [22])),
        turn([*token_ids[:-1], 40, 41], [23]),  # another end of the history
        turn([*token_ids, 22, 50], [24]),
    ]
    (row,) = packed(batch_of([(0.0, turns), (1.0, [turn(token_ids[:3], [60])])])).rows
    # The second segment has 20 21 in its history. 30 and 12 are computed twice, as what follows them has two values.
    assert row.token_ids.tolist() == [10, 11, 12, 20, 21, 30, 31, 22, 50, 30, 40, 41, 12]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 2]
    assert row.until.tolist() == [13, 13, 12, 12, 12, 9, 9, 9, 9, 12, 12, 12, 13]
    assert row.targets.tolist() == [11, 12, 20, 21, 30, 31, 22, 50, 24, 40, 41, 23, 60]
    assert row.mask.int().tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 1]
    assert row.observed.int().tolist() == [0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0]
    assert row.turns.tolist() == [-1, -1, 0, 0, -1, -1, 1, -1, 3, -1, -1, 2, 0]
    assert row.episodes.tolist() == [-1, -1, 0, 0, 0, 0, 0, 0, 0, -1, -1, 0, 1]
    assert row.segments.tolist() == [-1, -1, 0, 0, -1, -1, 0, -1, 0, -1, -1, 1, 0]


def test_a_target_that_one_of_many_continuations_trains_is_kept():
    # Two segments that do not train their second token differ there; a third one trains it.
    group = [(0.0, [turn([7, 1], [3])]), (1.0, [turn([7, 2], [3])]), (2.0, [turn([7], [2, 3])])]
    (row,) = packed(batch_of(group)).rows
    trained = list(zip(row.episodes.tolist(), row.targets.tolist(), row.mask.tolist(), strict=True))
    assert sorted(target for episode, target, mask in trained if mask and episode == 2) == [2, 3]


def test_segments_of_little_in_common_shorten_no_other_prefix():
    long, other = [*range(10, 40)], [10, *range(50, 80)]
    batch = batch_of([(0.0, [turn(long, [1])]), (1.0, [turn(other, [1])]), (2.0, [turn(long, [3])])])
    (row,) = packed(batch).rows
    # all: 1 shared; long: 28 more, and two branches of 1; other: 30
    assert len(row) == 1 + 28 + 1 + 1 + 30
    assert row.until.tolist() == [61] + [31] * 28 + [30, 31] + [61] * 30


def test_uniform_groups_are_packed_into_rows_of_their_own():
    prompt = [10, 11]
    uniform = [(0.1, [turn(prompt, [20])]), (0.1, [turn(prompt, [21, 24])])]
    batch = batch_of(uniform, simple([[22], [23]], prompt))
    full = packed(batch, drop_uniform=True)
    spared = full.without_uniform
    assert (full.trained_tokens, spared.trained_tokens, full.uniform_share, spared.uniform_share) == (
        5,
        2,
        0.5,
        0.5,
    )
    assert (full.sequence_tokens, spared.sequence_tokens) == (2 + 3 + 2 + 2, 2 + 2)
    for minibatch in (*full.minibatches, *spared.minibatches):
        assert (minibatch.tokens, minibatch.sequences) == (5, 4), "the mean is over all"
    assert set(unpack(full, [row.targets for row in full.rows])) == {0, 1, 2, 3}
    assert set(unpack(spared, [row.targets for row in spared.rows])) == {2, 3}
    assert full.without_uniform is spared
    together = packed(batch)
    assert (len(together.rows), together.without_uniform.trained_tokens) == (1, 5)


def test_what_lies_in_several_rows_is_told_of_the_rows_that_are_left():
    long = [(1.0, [turn([10, 11], [20] * 5)]), (1.0, [turn([10, 11], [21] * 5)])]
    batch = batch_of(long, simple([[22], [23]], [10, 11]))
    full = packed(batch, Layout(seq_len=7), drop_uniform=True)
    assert full.minibatches[0].scattered == {"group"}
    assert full.without_uniform.minibatches[0].scattered == frozenset()


def test_a_group_is_uniform_by_its_advantages_not_by_its_rewards():
    constant = [(0.1, [turn([10, 11], [20])]), (0.1, [turn([10, 11], [21])])]  # as in distillation
    batch = batch_of(constant, simple([[22], [23]], [10, 11]))
    advantages = torch.tensor([[-0.5, 0.25], [0.0, 0.0]])
    result = pack(batch, advantages, Layout())
    (row,) = result.without_uniform.rows
    assert row.episodes[row.mask].tolist() == [0, 1]
    assert row.advantages[row.mask].tolist() == [-0.5, 0.25]
    assert result.uniform_share == 0.5


def test_minibatches_are_of_whole_groups_and_count_those_left_out():
    groups = [simple([[20 + p] * (p + 1), [30]], [10, 11, p]) for p in range(5)]
    groups[2] = [(1.0, turns) for _, turns in groups[2]]
    result = packed(batch_of(*groups), Layout(minibatches=3, shares=2), drop_uniform=True).without_uniform
    # 4 groups are trained: one of three gets two, and the uniform one, of 4 tokens, goes to one of the others
    assert sorted(minibatch.sequences for minibatch in result.minibatches) == [2, 4, 4]
    groups_of_minibatches = [trained_groups(part) for part in result.minibatches]
    assert sorted(map(len, groups_of_minibatches)) == [1, 1, 2]
    assert set.union(*groups_of_minibatches) == {0, 1, 3, 4}
    tokens = [sum(p + 2 for p in part) for part in groups_of_minibatches]
    assert sorted(part.tokens - token_count for part, token_count in zip(result.minibatches, tokens, strict=True)) == [
        0,
        0,
        4,
    ]
    assert result.trained_tokens == 2 + 5 + 3 + 6
    assert [len(minibatch.rows) for minibatch in result.minibatches] == [2, 2, 2]
    with pytest.raises(ConfigError, match="5 groups cannot be split into 6 minibatches"):
        packed(batch_of(*groups), Layout(minibatches=6))


def trained_groups(minibatch: Minibatch) -> set[int]:
    """Groups of two episodes that a minibatch trains."""
    return {episode // 2 for row in minibatch.rows for episode in row.episodes[row.mask].tolist()}


def test_without_advantages_no_group_is_spared():
    batch = batch_of(simple([[20], [21]], [10, 11]), simple([[22], [23]], [10, 12]))
    result = pack(batch, None, Layout(seq_len=64))
    assert not any(row.advantages.any() for row in result.rows)
    assert result.without_uniform.trained_tokens == result.trained_tokens == 4


def test_every_minibatch_has_its_share_of_every_source():
    for seed, (counts, minibatches) in enumerate([((4, 4), 2), ((12, 4), 4), ((4, 4, 4), 3), ((5, 2, 9, 1), 4)]):
        sources = [name for name, count in zip("abcd", counts, strict=False) for _ in range(count)]
        trained = [index % 3 != 1 for index in range(len(sources))]
        parts = deal(sources, trained, minibatches, seed=seed)
        assert sorted(index for part in parts for index in part) == list(range(len(sources)))
        for name in set(sources):
            shares = [sum(sources[index] == name for index in part) for part in parts]
            assert max(shares) - min(shares) <= 1, (name, parts)
        shares = [sum(trained[index] for index in part) for part in parts]
        assert max(shares) - min(shares) <= 1, parts


def test_minibatches_differ_by_epoch_and_repeat_by_seed_and_version():
    groups = [simple([[20 + p], [30]], [10, 11, p]) for p in range(8)]

    def cut(seed: int, version: int = 7) -> list[set[int]]:
        laid = packed(batch_of(*groups, version=version), Layout(minibatches=2, epochs=3, seed=seed))
        assert (laid.epochs, len(laid.minibatches), laid.trained_tokens) == (3, 6, 16)
        assert [int(row.mask.sum()) for row in laid.rows] == [8, 8], "each token is scored once"
        return [trained_groups(minibatch) for minibatch in laid.minibatches]

    first = cut(0)
    assert all(first[start] | first[start + 1] == set(range(8)) for start in (0, 2, 4))
    assert len({frozenset(map(frozenset, first[start : start + 2])) for start in (0, 2, 4)}) == 3
    assert first == cut(0)
    assert first != cut(1)
    assert first != cut(0, version=8)
    packed_batch = packed(batch_of(*groups), Layout(epochs=3))
    assert (packed_batch.epochs, len(packed_batch.minibatches)) == (1, 1), "one minibatch is the same each time"


def test_an_episodes_length_counts_all_segments():
    rewritten = [turn([10, 11], [20, 21]), turn([12, 13], [22]), turn([10, 11, 20, 21, 14], [23, 24, 25])]
    result = packed(batch_of([(0.0, rewritten), (1.0, [turn([10, 11], [30])])]))
    places = {
        (row.episodes[t].item(), row.segments[t].item(), row.turns[t].item(), row.lengths[t].item())
        for row in result.rows
        for t in row.mask.nonzero().flatten().tolist()
    }
    assert places == {(0, 0, 0, 6), (0, 0, 2, 6), (0, 1, 1, 6), (1, 0, 0, 1)}


def test_nothing_to_learn_gives_no_rows():
    uniform = [(1.0, [turn([10, 11], [20])])] * 2
    result = packed(batch_of(uniform, version=9), Layout(shares=4), drop_uniform=True).without_uniform
    assert (result.rows, result.trained_tokens, result.sequence_tokens, result.version) == ((), 0, 0, 9)
    assert unpack(result, []) == {}


def test_tokens_without_a_finite_logprob_are_context_only_and_counted():
    broken = Turn(
        prompt_ids=(10, 11),
        token_ids=(20, 21, 22, 23),
        logprobs=(float("nan"), -1.0, float("-inf"), float("nan")),
        versions=(0,) * 4,
        text="",
    )
    result = packed(batch_of([(0.0, [broken]), (1.0, [turn([10, 11], [30])])]))
    (row,) = result.rows
    # 20 is no target, so it may lead the branch; what follows 21 is not needed
    assert row.token_ids.tolist() == [10, 11, 20, 11]
    assert row.targets[row.mask].tolist() == [21, 30]
    assert torch.isfinite(row.behaviour).all()
    assert (result.trained_tokens, result.unscored_tokens) == (2, 3)


def test_packing_twice_gives_the_same_rows():
    batch = batch_of(*[simple([[20] * (1 + (p * g) % 5) for g in range(4)], [10, 11, p]) for p in range(5)])
    first, second = (packed(batch, Layout(shares=2, seq_len=32)) for _ in range(2))
    assert len(first.rows) == len(second.rows)
    for a, b in zip(first.rows, second.rows, strict=True):
        names = Row.__dataclass_fields__.keys() - {"routed", "columns"}
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def test_rows_travel_whole_as_arrays():
    [row] = packed(batch_of(simple([[20, 21], [30]], [10, 11]))).rows
    routed = torch.arange(len(row) * 2, dtype=torch.int16).reshape(-1, 1, 2)
    for original_row in (row, replace(row, routed=routed, columns={"values": routed[:, 0, 0].float()})):
        data = pickle.dumps(original_row)
        assert b"torch" not in data, "torch pickles a tensor by a class made for it, which is garbage in a circle"
        unpickled_row = pickle.loads(data)
        assert unpickled_row.tensors().keys() == original_row.tensors().keys()
        assert unpickled_row.columns.keys() == original_row.columns.keys()
        tensors = unpickled_row.tensors() | dict(unpickled_row.columns)
        for name, value in (original_row.tensors() | dict(original_row.columns)).items():
            assert torch.equal(tensors[name], value), name
            assert tensors[name].dtype == value.dtype
        unpickled_row.advantages[0] = 7.0  # what came may be written to


def test_unpack_returns_each_episode_in_token_order():
    prompt = [10, 11, 12]
    turns = [turn(prompt, [20, 21]), turn([10, 13, 13, 13, 13], [22, 23, 24])]
    batch = batch_of([(0.0, turns), (1.0, [turn(prompt, [30])])], simple([[40, 41], [50]], prompt))
    result = packed(batch, Layout(shares=3, seq_len=16))
    back = unpack(result, [row.targets for row in result.rows])
    assert {e: values.tolist() for e, values in back.items()} == {
        0: [20, 21, 22, 23, 24],
        1: [30],
        2: [40, 41],
        3: [50],
    }


def test_advantages_of_another_batch_are_refused():
    with pytest.raises(ConfigError, match=r"\[2, 3\]"):
        pack(batch_of(simple([[20], [30]], [10, 11])), torch.zeros(2, 3), Layout())


def test_advantages_may_be_arrays_or_lists_and_anything_else_is_named():
    batch = batch_of(simple([[20], [30, 31]], [10, 11]))
    expected = [row.advantages.tolist() for row in pack(batch, torch.tensor([[1.0, -1.0]]), Layout()).rows]
    for advantages in (np.array([[1.0, -1.0]]), [[1.0, -1.0]], [[np.float32(1), -1]], [[[1.0], [-1.0, -1.0]]]):
        assert [row.advantages.tolist() for row in pack(batch, advantages, Layout()).rows] == expected
    for advantages, message in (
        ([["much", "little"]], "a list, are not numbers of shape"),
        ([1.0, -1.0], "a list, are not numbers of shape"),
        (np.zeros((1, 2, 5)), r"an episode of 1 tokens has 5 advantages"),
        (torch.zeros(1, 2, 5), r"shape \[1, 2, 5\]"),
        ([[[1.0], 2.0]], r"an episode of 2 tokens has \[\] advantages"),
    ):
        with pytest.raises(ConfigError, match=message):
            pack(batch, advantages, Layout())


@pytest.mark.parametrize(
    ("field", "flag"), [("shares", "ranks"), *((n, n) for n in ("seq_len", "context_parallel_degree", "pad_multiple"))]
)
def test_a_layout_of_nothing_is_refused_with_its_flag(field: str, flag: str):
    with pytest.raises(ConfigError, match="--trainer." + flag.replace("_", "-")):
        Layout(**{field: 0})


def test_rows_that_padding_would_make_too_long_are_refused():
    with pytest.raises(ConfigError, match=r"--trainer\.seq-len to 1024"):
        Layout(seq_len=1000, pad_multiple=128)
