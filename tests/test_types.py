"""Turns become segments by exact token prefix; batches give their rewards."""

import gc
import math
import pickle
import tracemalloc
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from forge_rl.envs.protocol import Observation, Step
from forge_rl.errors import ConfigError
from forge_rl.token_arrays import Chunk
from forge_rl.types import Batch, Episode, Group, Outcome, Sampling, Score, Task, Turn

TASK = Task(id="1", source="toy", messages=({"role": "user", "content": "2+2"},))


def turn(prompt: Sequence[int], answer: Sequence[int], version: int = 0) -> Turn:
    return Turn(
        prompt_ids=prompt,
        token_ids=answer,
        logprobs=np.full(len(answer), -0.5),
        versions=np.full(len(answer), version),
        text="",
    )


def episode(*turns: Turn, reward: float = 0.0) -> Episode:
    return Episode(task=TASK, turns=turns, score=Score(total=reward))


def group(*rewards: float) -> Group:
    return Group(task=TASK, episodes=tuple(episode(turn([1], [2]), reward=reward) for reward in rewards))


def test_one_turn_is_one_segment_that_trains_only_the_completion():
    (segment,) = episode(turn([1, 2, 3], [4, 5], version=7)).segments
    assert segment.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert segment.trained.tolist() == [False, False, False, True, True]
    assert segment.logprobs.tolist() == [0.0, 0.0, 0.0, -0.5, -0.5]
    assert segment.versions.tolist() == [-1, -1, -1, 7, 7]


def test_a_turn_that_extends_the_history_joins_its_segment():
    first = turn([1, 2], [3, 4], version=0)
    second = turn([1, 2, 3, 4, 9, 9], [5], version=1)
    (segment,) = episode(first, second).segments
    assert segment.token_ids.tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert segment.trained.tolist() == [False, False, True, True, False, False, True]
    assert segment.versions.tolist() == [-1, -1, 0, 0, -1, -1, 1]


def test_a_rewritten_history_starts_a_new_segment():
    first = turn([1, 2], [3, 4])
    rewritten = turn([1, 2, 8], [5])
    extended = turn([1, 2, 8, 5, 9], [6])
    segments = episode(first, rewritten, extended).segments
    assert [segment.token_ids.tolist() for segment in segments] == [[1, 2, 3, 4], [1, 2, 8, 5, 9, 6]]
    assert segments[1].trained.tolist() == [False, False, False, True, False, True]
    assert segments[1].turns.tolist() == [-1, -1, -1, 1, -1, 2]


def test_a_turn_joins_the_segment_with_the_longest_prefix_of_its_prompt():
    root, other = turn([1, 2], [3]), turn([1, 2], [7])
    deeper, late = turn([1, 2, 3, 4], [5]), turn([1, 2, 7, 8], [9])
    segments = episode(root, other, deeper, late).segments
    assert [segment.token_ids.tolist() for segment in segments] == [[1, 2, 3, 4, 5], [1, 2, 7, 8, 9]]


def test_a_prompt_shorter_than_the_history_starts_a_new_segment():
    segments = episode(turn([1, 2], [3, 4]), turn([1, 2, 3], [4])).segments
    assert [segment.token_ids.tolist() for segment in segments] == [[1, 2, 3, 4], [1, 2, 3, 4]]
    assert segments[1].trained.tolist() == [False, False, False, True]


def routed(turn: Turn, mark: int) -> Turn:
    """A turn whose tokens were routed to experts that tell the turn and the position."""
    rows = np.array([[[mark, position]] for position in range(len(turn.context) - 1)], np.uint8)
    return replace(turn, routed=rows)


def test_a_segments_experts_are_of_the_first_turn_to_compute_them():
    first, second = turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 9], [5, 6])
    routed_episode = episode(routed(first, 1), routed(second, 2))
    (segment,) = routed_episode.segments
    # Token 4, the first turn's last, was drawn there and computed in the second turn; 6 was not computed at all.
    expected = [[1, 0], [1, 1], [1, 2], [2, 3], [2, 4], [2, 5], [2, 5]]
    assert segment.routed is not None
    assert segment.routed.tolist() == [[row] for row in expected]
    assert segment.routed.dtype == np.uint8
    assert pickle.loads(pickle.dumps(routed_episode)) == routed_episode
    assert routed_episode != episode(routed(first, 1), second)
    (segment,) = episode(first, routed(second, 2)).segments
    assert segment.routed is not None, "the second turn has computed the first one's tokens too"
    assert (segment.routed[:, 0, 0] == 2).all()
    assert episode(routed(first, 1), second).segments[0].routed is None


def test_arrays_are_made_of_any_sequence_and_nobody_writes_into_them():
    compact_turn = turn([1, 2], [3, 4], version=7)
    assert [compact_turn.prompt_ids.dtype, compact_turn.logprobs.dtype, compact_turn.versions.dtype] == [
        np.int32,
        np.float32,
        np.int32,
    ]
    with pytest.raises(ValueError, match="read-only"):
        compact_turn.token_ids[0] = 9
    prompt_ids = np.array([1, 2], np.int32)
    with pytest.raises(ValueError, match="read-only"):
        replace(compact_turn, prompt_ids=prompt_ids).prompt_ids[0] = 9
    assert prompt_ids.flags.writeable, "the caller's array stays its own"
    with pytest.raises(ValueError, match="read-only"):
        pickle.loads(pickle.dumps(compact_turn, pickle.HIGHEST_PROTOCOL)).token_ids[0] = 9
    assert compact_turn == turn([1, 2], [3, 4], version=7) == pickle.loads(pickle.dumps(compact_turn))
    assert compact_turn != turn([1, 2], [3, 5], version=7)
    assert compact_turn != turn([1, 2], [3, 4], version=8)
    with pytest.raises(TypeError, match="prompt_ids"):
        Turn(token_ids=(1,), logprobs=(-1.0,), versions=(0,), text="")  # type: ignore[call-arg]


MADE = turn([1, 2], [3, 4], version=7)
SHOWN: Any = ({"role": "tool", "content": "4"},)


@pytest.mark.parametrize(
    "compact",
    [
        MADE,
        Episode(task=TASK, turns=(MADE, turn([1, 2, 3, 4, 5], [6])), score=Score(total=1.0), outcome=Outcome.TRUNCATED),
        Score(total=1.0, parts={"right": 1.0}, turns=(0.5, 0.5)),
        Sampling(max_tokens=8, stop=("x",), extra={"top_p": 0.5}),
        Observation(messages=SHOWN),
        Step(messages=SHOWN, done=False, reward=0.5),
    ],
    ids=lambda made: type(made).__name__,
)
def test_compact_objects_are_one_object_each_frozen_and_travel_whole(compact: Any):
    names = [field.name for field in fields(compact)]
    assert not hasattr(compact, "__dict__")
    for name in names:
        with pytest.raises(FrozenInstanceError):
            setattr(compact, name, None)
    read = pickle.loads(pickle.dumps(compact))
    assert read == compact
    assert type(read) is type(compact.updated()) is type(compact)
    for name in names:
        changed = compact.updated(**{name: "other"})
        assert getattr(changed, name) == "other"
        assert all(
            getattr(changed, name_of_field) is getattr(compact, name_of_field)
            for name_of_field in names
            if name_of_field != name
        )
    with pytest.raises(AttributeError, match="typo"):
        compact.updated(typo=1)


def test_an_unchecked_turn_is_the_same_as_a_checked_one():
    turn_fields = {name: getattr(MADE, name) for name in ("prompt_ids", "token_ids", "logprobs", "versions", "text")}
    unchecked_turn = Turn.unchecked(**turn_fields)
    assert unchecked_turn == MADE
    assert (unchecked_turn.truncated, unchecked_turn.routed, unchecked_turn.seconds) == (False, None, 0.0)
    with pytest.raises(TypeError, match="positional arguments"):
        Turn.unchecked(**turn_fields, typo=1)


def test_a_chunk_travels_whole():
    chunk = Chunk(
        token_ids=(1, 2), logprobs=(-0.5, math.nan), versions=(3, 4), text="x", finish="stop", top=(((1, -0.5),),)
    )
    assert pickle.loads(pickle.dumps(chunk)) == chunk
    assert pickle.loads(pickle.dumps(chunk)).logprobs.dtype == np.float32


@pytest.mark.parametrize("turns", [1, 32])
def test_a_batch_takes_less_than_31_bytes_a_token(turns: int):
    drawn, tokens = np.random.default_rng(0), 1 << 16

    def long_episode() -> Episode:
        piece, parts = tokens // turns // 2, []
        context = np.empty(0, np.int32)
        for _ in range(turns):
            prompt = np.concatenate([context, drawn.integers(0, 50_000, piece, np.int32)])
            ids = drawn.integers(0, 50_000, piece, np.int32)
            parts.append(turn(prompt, ids))
            context = parts[-1].context
        return episode(*parts)

    tracemalloc.start()
    try:
        batch = Batch(groups=(Group(task=TASK, episodes=(long_episode(), long_episode())),), version=0)
        gc.collect()
        traced_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert sum(len(segment.token_ids) for episode in batch.episodes for segment in episode.segments) == 2 * tokens
    assert traced_bytes < 31 * 2 * tokens
    assert all(
        np.shares_memory(turn.prompt_ids, episode.turns[-1].prompt_ids)
        for episode in batch.episodes
        for turn in episode.turns
    )


def test_an_episode_leaves_its_callers_turns_as_they_are():
    first, second = turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 9], [5])
    before = first.prompt_ids, first.token_ids
    two_turns = episode(first, second)
    assert (first.prompt_ids is before[0], first.token_ids is before[1]) == (True, True)
    assert two_turns.turns == (first, second)
    assert np.shares_memory(two_turns.turns[0].token_ids, two_turns.turns[1].prompt_ids)
    unpickled_episode = pickle.loads(pickle.dumps(two_turns))
    assert unpickled_episode == two_turns
    assert np.shares_memory(unpickled_episode.turns[0].token_ids, unpickled_episode.turns[1].prompt_ids)


def test_an_episode_without_turns_has_no_segments_and_no_text():
    assert episode().segments == ()
    assert episode().text == ""
    assert episode().response_tokens == 0


def test_response_tokens_counts_the_completions_of_all_turns():
    assert episode(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 9], [5])).response_tokens == 3


def test_a_turn_refuses_misaligned_logprobs():
    with pytest.raises(AssertionError, match="differ in length"):
        Turn(prompt_ids=(1,), token_ids=(2, 3), logprobs=(-0.1,), versions=(0, 0), text="")


def test_batch_rewards_have_one_row_for_each_group():
    batch = Batch(groups=(group(0.0, 1.0), group(0.5, 0.25), group(1.0, 1.0)), version=3)
    assert batch.rewards.dtype == torch.float32
    assert batch.rewards.tolist() == [[0.0, 1.0], [0.5, 0.25], [1.0, 1.0]]


def test_batch_episodes_come_group_by_group():
    batch = Batch(groups=(group(0.0, 1.0), group(0.5, 0.25)), version=3)
    assert [episode.reward for episode in batch.episodes] == [0.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    "setting",
    [{"max_tokens": value} for value in (50.0, True, "5", None, float("nan"))]
    + [{"seed": 1.5}, {"top_logprobs": None}]
    + [{"temperature": value} for value in (True, "1", None, -0.5, float("nan"), float("inf"), 1j)],
)
def test_a_sampling_setting_of_another_type_is_refused(setting: dict[str, Any]):
    (name,) = setting
    with pytest.raises(ConfigError, match=f"{name} of a completion is "):
        Sampling(**{"max_tokens": 5} | setting)


def test_whole_numbers_of_numpy_are_whole_numbers():
    sampling = Sampling(max_tokens=np.int64(5), temperature=np.float32(0.5), seed=np.uint32(7))  # type: ignore[arg-type]
    assert (type(sampling.max_tokens), type(sampling.seed)) == (int, int)
