"""Trees of episodes: worlds that fork, advantages by hand, and gradients equal to those of separate episodes."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from inspect import getsource
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from forge_rl.algorithms.tree import most_surprising, tree_advantages
from forge_rl.envs.protocol import Observation, Step
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout
from forge_rl.packing.trees import decoded_tokens
from forge_rl.packing.unpacking import trained_tokens, unpack, values_of_episodes
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.services.completion import ResumableCompletion
from forge_rl.token_arrays import Chunk
from forge_rl.types import Batch, Episode, Group, Outcome, Score, Task, Turn
from recipes import tree_search
from tests.dense_masks import dense_mask
from tests.fakes import TASK
from tests.staged_rollouts import StagedEnvironment, StagedGenerator, play, rollouts
from tests.test_packing_properties import TinyModel


class Forking:
    """Forks in `branches` after each of two turns, and ends after the third; the reward is the last digit written."""

    leaves = 4
    branches = 2

    def __init__(self, task: Task) -> None:
        self.task = task
        self.said: list[str] = []

    async def reset(self) -> Observation:
        return Observation(messages=self.task.messages)

    async def step(self, completion: str) -> Step:
        self.said.append(completion)
        if len(self.said) == 3:
            return Step(done=True, reward=float(completion[-1]), output="/".join(self.said))
        return Step(done=False, messages=({"role": "user", "content": "?"},), branches=self.branches)


class Straight(Forking):
    branches = 1


class Wide(Forking):
    branches = 10**9


class Fragile(Forking):
    """Cannot be copied for its second branch; the first attempt at each slot only."""

    forked = 0

    def fork(self) -> Fragile:
        type(self).forked += 1
        if type(self).forked == 1:
            raise OSError("no room for a copy")
        copy = type(self)(self.task)
        copy.said = [*self.said]
        return copy


def trees(kind: type, leaves: int = 4, **changes: object) -> tuple[RolloutExecutor, StagedEnvironment]:
    environment = StagedEnvironment(kind)
    executor = rollouts(environment=environment, leaves=leaves, episodes=6, **changes)
    return executor, environment


def paths(group: Group) -> list[tuple[int, ...]]:
    return sorted(episode.turns[-1].branch for episode in group.episodes)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Forking, [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (4, 0), (4, 1)]),
        (Straight, [(0,), (1,), (2,), (3,), (4,), (5,)]),
        (Wide, [(0, 0), (0, 1), (0, 2), (0, 3), (4, 0), (4, 1)]),
    ],
)
async def test_the_leaves_of_trees_fill_each_group_exactly(kind: type, expected: list[tuple[int, ...]]) -> None:
    generator = StagedGenerator()
    executor, _ = trees(kind, generator=generator)
    batch = await asyncio.wait_for(executor.next_batch(), 60)
    assert [group.task.id for group in batch.groups] == ["1", "2", "3"]
    for group in batch.groups:
        assert paths(group) == expected
        for episode in group.episodes:
            assert episode.output == "/".join(turn.text for turn in episode.turns), "each branch has a world of its own"
            assert len(episode.segments) == 1
            assert (episode.outcome, len(episode.turns)) == (Outcome.COMPLETED, 3)
    nodes = {
        (group.task.id, turn.branch, i)
        for group in batch.groups
        for e in group.episodes
        for i, turn in enumerate(e.turns)
    }
    assert len(generator.seen) == len(nodes), "a turn that episodes have in common is decoded once"
    assert executor.metrics()["rollouts/in_flight"] == 0


async def test_a_branch_that_fails_costs_that_branch_only() -> None:
    Fragile.forked = 0
    episodes = list[Episode]()
    executor, environment = trees(Fragile, groups=1, on_episode=episodes.append)
    async with asyncio.timeout(60):
        (group,) = (await executor.next_batch()).groups
        while environment.closed < Fragile.forked - 1:  # noqa: ASYNC110  the last are closed after the batch
            await asyncio.sleep(0)
    assert [episode.problem for episode in episodes if not episode.outcome.scored] == ["no room for a copy"]
    assert len(group.episodes) == 6
    assert executor._scheduler.outcomes[Outcome.COMPLETED] == 6
    assert environment.closed == Fragile.forked - 1, "a branch without a world of its own closes none"
    begun = {path[0] for path in paths(group)}
    assert begun == {0, 4, 1 + 6}, "the place of the failed branch is taken by an episode from the start"


def test_worlds_that_may_not_fork_say_so_and_evaluations_play_one_branch() -> None:
    errors = list[str]()
    executor, _ = trees(Forking, leaves=1, groups=1, on_episode=lambda each: errors.append(each.problem))
    executor.config = replace(executor.config, retries=0)

    async def main() -> None:
        with pytest.raises(Exception, match="unusable groups"):
            await executor.next_batch()

    asyncio.run(main())
    assert "its factory sets no `leaves`" in errors[0]
    episode = asyncio.run(play(trees(Forking)[0], max_tokens=4))
    assert [turn.branch for turn in episode.turns] == [(), (), ()]


class Continuing(Forking):
    """Goes on with a message that was cut."""

    async def step(self, completion: str, *, truncated: bool) -> Step:  # type: ignore[override]
        self.said.append(completion)
        if len(self.said) == 3:
            return Step(done=True, reward=1.0)
        return Step(done=False, continues=True)


def test_a_cut_message_continues_its_tokens_with_new_random_numbers() -> None:
    generator = StagedGenerator(truncated=True)
    (group,) = asyncio.run(trees(Continuing, groups=1, generator=generator)[0].next_batch()).groups
    first, second, third = group.episodes[0].turns
    assert second.prompt_ids.tolist() == first.context.tolist()
    assert third.prompt_ids.tolist() == second.context.tolist()
    assert len({first.text, second.text, third.text}) == 3, "the generator decodes its seed"
    ended = trees(Continuing, groups=1, on_episode=lambda each: problems.append(each.problem))[0]
    ended.config = replace(ended.config, retries=0)
    problems = list[str]()
    with pytest.raises(Exception, match="unusable groups"):
        asyncio.run(ended.next_batch())
    assert "which the model has ended" in problems[0]


class Rivals(Continuing):
    """Continues a message that was cut in several branches, of which the first or the others come late."""

    first_is_late = is_first = True

    def fork(self) -> Rivals:
        copy = type(self)(self.task)
        copy.said, copy.is_first = [*self.said], False
        return copy

    async def step(self, completion: str, *, truncated: bool) -> Step:  # type: ignore[override]
        if self.is_first == self.first_is_late:
            await asyncio.sleep(0.05)
        step = await super().step(completion, truncated=truncated)
        return replace(step, branches=1 if step.done else 2)


def test_rival_branches_draw_by_seeds_of_their_own_in_any_order() -> None:
    answers = []
    for first_is_late in (False, True):
        Rivals.first_is_late, generator = first_is_late, StagedGenerator(truncated=True)
        (group,) = asyncio.run(trees(Rivals, groups=1, generator=generator)[0].next_batch()).groups
        assert len({(prompt, sampling.seed) for prompt, sampling in generator.seen}) == len(generator.seen)
        assert {sampling.max_tokens for _, sampling in generator.seen} == {4}
        answers.append({episode.turns[-1].branch: [turn.text for turn in episode.turns] for episode in group.episodes})
    assert answers[0] == answers[1]


class Whole(Forking):
    """Asks for forks within its only answer."""

    leaves = 3

    async def step(self, completion: str) -> Step:
        self.said.append(completion)
        return Step(done=True, reward=float(len(self.said)), forks=2)


class Undecided(StagedGenerator):
    """Writes "abcd", as unlikely as given, and X in place of what is left of an answer."""

    async def decode(self, completion: ResumableCompletion, *, engine: int) -> None:
        self.seen.append((tuple(completion.shown.tolist()), completion.rest))
        text, logprobs = "X" * completion.rest.max_tokens, [-1.0] * completion.rest.max_tokens
        if len(text) == 4:
            text, logprobs = "abcd", [-3.0, -0.5, -1.5, -2.0]
        ids = [ord(letter) for letter in text]
        completion.add(Chunk(token_ids=ids, logprobs=logprobs, versions=[0] * len(ids), text=text, finish="length"))


async def test_an_answer_forks_at_its_most_surprising_tokens() -> None:
    generator = Undecided()
    executor = rollouts(environment=StagedEnvironment(Whole), leaves=3, episodes=6, groups=1, generator=generator)
    (group,) = (await asyncio.wait_for(executor.next_batch(), 60)).groups
    branches = sorted(
        (episode.turns[-1].branch, [turn.text for turn in episode.turns], episode.output) for episode in group.episodes
    )
    assert branches == [
        branch
        for tree in (0, 3)
        for branch in (
            ((tree, 0, 0), ["ab", "c", "d"], "abcd"),
            ((tree, 0, 1), ["ab", "c", "X"], "abcX"),
            ((tree, 1), ["ab", "XX"], "abXX"),
        )
    ]
    for episode in group.episodes:
        assert len(episode.segments) == 1
        assert episode.reward == 1.0, "no world has seen another answer than its own"
        pieces = [turn.branch for turn in episode.turns]
        assert pieces == [episode.turns[-1].branch[: depth + 1] for depth in range(len(pieces))]
        for before, after in pairwise(episode.turns):
            assert after.prompt_ids.tolist() == before.context.tolist()
    logprobs = next(episode for episode in group.episodes if episode.turns[-1].branch == (0, 0, 0)).turns
    assert [turn.logprobs.tolist() for turn in logprobs] == [[-3.0, -0.5], [-1.5], [-2.0]]
    assert len(generator.seen) == 6, "what episodes have in common is decoded once"
    assert len({sampling.seed for _, sampling in generator.seen}) == 6
    assert executor.metrics()["rollouts/in_flight"] == 0


class Second(Whole):
    """Asks for a fork within its second answer."""

    async def step(self, completion: str) -> Step:
        self.said.append(completion)
        if len(self.said) == 1:
            return Step(done=False, messages=({"role": "user", "content": "?"},))
        return Step(done=True, reward=1.0, forks=1)


async def test_a_fork_within_a_later_answer_has_the_rest_of_that_answer_to_write() -> None:
    generator = Undecided()
    executor = rollouts(environment=StagedEnvironment(Second), leaves=2, episodes=2, groups=1, generator=generator)
    (group,) = (await asyncio.wait_for(executor.next_batch(), 60)).groups
    texts = {episode.turns[-1].branch: [turn.text for turn in episode.turns] for episode in group.episodes}
    assert texts == {(0, 0): ["abcd", "abc", "d"], (0, 1): ["abcd", "abc", "X"]}


def test_forks_are_at_the_least_likely_tokens_but_the_first() -> None:
    logprobs = np.array([-9.0, -0.5, -2.0, 0.0, -1.0, math.nan, -2.0], np.float32)
    assert most_surprising(logprobs, 0) == []
    assert most_surprising(logprobs, 2) == [2, 6]
    assert most_surprising(logprobs, 3) == [2, 4, 6]
    assert most_surprising(logprobs, 99) == [1, 2, 4, 6], "certain tokens and those without a logprob are left out"
    assert most_surprising(logprobs[:1], 1) == []


def turn(prompt: list[int], answer: list[int], branch: tuple[int, ...]) -> Turn:
    return Turn(
        prompt_ids=prompt, token_ids=answer, logprobs=[-1.0] * len(answer), versions=[0] * len(answer), text="",
        branch=branch,
    )  # fmt: skip


def tree() -> Batch:
    """A root turn that forks in two, of which the first forks again; and an episode that did not fork.

    Rewards: (0, 0, 0) 1, (0, 0, 1) 0, (0, 1) 1, (1,) 0.
    """
    root = turn([10, 11], [20, 21, 22], (0,))
    middle = turn([*root.context, 50], [30, 31], (0, 0))
    leaves = [
        (1.0, [root, middle, turn([*middle.context, 51], [40, 41], (0, 0, 0))]),
        (0.0, [root, middle, turn([*middle.context, 51], [42], (0, 0, 1))]),
        (1.0, [root, turn([*root.context, 50], [32, 33], (0, 1))]),
        (0.0, [turn([10, 11], [23, 24], (1,))]),
    ]
    episodes = tuple(Episode(task=TASK, turns=tuple(turns), score=Score(total=reward)) for reward, turns in leaves)
    return Batch(groups=(Group(task=TASK, episodes=episodes),), version=0)


def test_advantages_of_a_hand_worked_tree() -> None:
    # V(root) = 1/2, V(0) = 2/3 of three leaves, V(0, 0) = 1/2 of two.
    root = (2 / 3 - 1 / 2 + 2 / 3 - 1 / 2) / math.sqrt(3)
    middle = (1 / 2 - 1 / 2 + 1 / 2 - 2 / 3) / math.sqrt(2)
    expected = [
        [root] * 3 + [middle] * 2 + [1 - 1 / 2 + 1 - 1 / 2] * 2,
        [root] * 3 + [middle] * 2 + [0 - 1 / 2 + 0 - 1 / 2],
        [root] * 3 + [1 - 1 / 2 + 1 - 2 / 3] * 2,
        [0 - 1 / 2 + 0 - 1 / 2] * 2,
    ]
    (advantages,) = tree_advantages(tree())
    for values, expected_values in zip(advantages, expected, strict=True):
        np.testing.assert_allclose(values, expected_values, rtol=1e-6)


def test_equal_rewards_give_zero_and_unscored_episodes_do_not_count() -> None:
    (group,) = tree().groups
    equal = tuple(replace(episode, score=Score(total=0.1)) for episode in group.episodes)
    assert not any(
        values.any() for values in tree_advantages(Batch(groups=(replace(group, episodes=equal),), version=0))[0]
    )
    failed = (*group.episodes, replace(group.episodes[2], score=None))
    more = tree_advantages(Batch(groups=(replace(group, episodes=failed),), version=0))[0]
    for values, expected_values in zip(more, tree_advantages(tree())[0], strict=False):
        assert values.tolist() == expected_values.tolist()
    assert not more[4].any()


@pytest.mark.parametrize(("by", "unscored"), [("nodes", 0), ("episodes", 0), ("nodes", 1), ("episodes", 1)])
def test_a_tree_is_computed_once_with_the_gradient_of_its_episodes(by: str, unscored: int) -> None:
    torch.manual_seed(0)
    batch, model = tree(), TinyModel().double()
    (group,) = batch.groups
    if unscored:  # a token of the root, which three episodes share
        holed = [replace(e.turns[0], logprobs=[-1.0, math.nan, -1.0]) for e in group.episodes[:3]]
        episodes = (replace(e, turns=(turn, *e.turns[1:])) for e, turn in zip(group.episodes, holed, strict=False))
        group = replace(group, episodes=(*episodes, group.episodes[3]))
        batch = Batch(groups=(group,), version=0)
    apart = tuple(
        replace(episode, turns=tuple(replace(turn, branch=()) for turn in episode.turns)) for episode in group.episodes
    )
    separate = Batch(groups=(replace(group, episodes=apart),), version=0)
    advantages = tree_advantages(batch) if by == "nodes" else torch.tensor([[0.5, -0.25, 0.75, -1.0]])
    gradients = []
    for laid_batch, layout in ((batch, Layout(seq_len=64)), (separate, Layout(seq_len=64, share_prefixes=False))):
        laid = pack(laid_batch, advantages, layout)
        loss = torch.zeros((), dtype=torch.float64)
        for row in laid.rows:
            scored = model(row.token_ids, row.positions, dense_mask(row)).gather(1, row.targets[:, None]).squeeze(1)
            loss = loss - (scored * row.advantages)[row.mask].sum()
        (minibatch,) = laid.minibatches
        gradients.append(torch.autograd.grad(loss / minibatch.tokens, list(model.parameters())))
        if laid_batch is batch:
            assert (laid.trained_tokens, laid.unscored_tokens) == (12 - unscored, unscored)
            assert laid.packed_tokens == 15
            assert decoded_tokens(group.episodes for group in batch.groups) == 12
    for gradient, other in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-9, rtol=1e-6)


def test_what_is_known_of_tokens_in_common_is_found_again() -> None:
    batch = tree()
    laid = pack(batch, tree_advantages(batch), Layout(seq_len=64), drop_uniform=False)
    targets = [row.targets.double() for row in laid.rows]
    logprobs = unpack(laid, targets)
    for place, (episode, mask) in enumerate(zip(batch.episodes, trained_tokens(batch), strict=True)):
        token_ids = np.concatenate([turn.token_ids for turn in episode.turns])
        assert logprobs[place].tolist() == token_ids[mask].tolist()
    valued = values_of_episodes(batch, laid, targets)
    for episode, values in zip(batch.episodes, valued, strict=True):
        assert values.tolist() == np.concatenate([turn.token_ids for turn in episode.turns]).tolist()


def test_the_world_in_the_documentation_is_the_recipes() -> None:
    page = Path(__file__).parent.parent / "docs" / "doors" / "world.md"
    assert f"```python\nimport forge_rl as rl\n\n\n{getsource(tree_search.Forking)}```" in page.read_text()
