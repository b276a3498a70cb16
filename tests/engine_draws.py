"""A check of decode engines: whole rollouts draw each random number once, and a resumed run draws the same ones."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from forge_rl.data.mixture import Mixture
from forge_rl.envs.protocol import Observation, Step
from forge_rl.errors import ReplicaError
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.services.completion import ResumableCompletion
from forge_rl.types import Batch, Sampling, Task
from tests.staged_rollouts import CountingSource, StagedEnvironment, StagedGenerator, StagedReward, rollouts

if TYPE_CHECKING:
    from tests.engine_conformance import Decoder

ASK = {"role": "user", "content": "Name a random animal. Answer with one word."}


class SameTask(CountingSource):
    """The same task in each epoch."""

    def draw(self) -> Task:
        super().draw()
        return Task(id="animal", source=self.name, messages=(ASK,))


class Asking:
    """Continues the first answer, which is cut, in two branches, and asks again; the first attempt of all fails."""

    leaves = 4
    failed = False

    def __init__(self, task: Task) -> None:
        self.turns = 0

    async def reset(self) -> Observation:
        return Observation(messages=(ASK,))

    async def step(self, completion: str, *, truncated: bool) -> Step:
        self.turns += 1
        if self.turns == 1:
            return Step(done=False, continues=True, branches=2)
        if self.turns == 2:
            return Step(done=False, messages=(ASK,))
        if not Asking.failed:
            Asking.failed = True
            raise OSError("the first attempt")
        return Step(done=True, reward=float(len(completion)))


class OnEngine(StagedGenerator):
    """Decodes on an engine under check, which seems to die in one request, after two tokens."""

    sampling = Sampling(max_tokens=4)
    max_model_len = 512

    def __init__(self, decoder: Decoder, *, dies_in: int | None = None) -> None:
        super().__init__()
        self._dies_in = dies_in
        self._engine = decoder.engine
        self.draws: list[tuple[int, ...]] = []
        """The first two tokens of each request."""

    async def decode(self, completion: ResumableCompletion, *, engine: int) -> None:
        number, before = len(self.draws), completion.tokens
        self.draws.append(())
        async with contextlib.aclosing(self._engine.stream(completion.shown, completion.rest)) as chunks:
            async for chunk in chunks:
                completion.add(chunk)
                drawn = [token for part in completion._chunks for token in part.token_ids.tolist()]
                self.draws[number] = tuple(drawn[before : before + 2])
                if number == self._dies_in and completion.tokens - before == 2:
                    raise ReplicaError("gone", service="generator", replica=engine)


async def whole_rollouts_draw_each_random_number_once(decoder: Decoder) -> None:
    """Draws of all turns, branches, siblings, retries, epochs, and of what was resumed differ, and not between runs.

    The model is nearly uniform over tens of thousands of tokens, so that two tokens are those of another draw only if
    the random numbers are.
    """
    await decoder.load_next()
    Asking.failed, generator = False, OnEngine(decoder, dies_in=2)
    run = rollouts_on(generator, decoder)
    first = await run.next_batch()
    state = run.state()
    second = await run.next_batch()
    assert run.metrics()["outcomes/environment_error"] == 1
    assert len(first.episodes) == len(second.episodes) == 8
    assert {len(draw) for draw in generator.draws} == {2}
    assert len(set(generator.draws)) == len(generator.draws) > 30

    resumed = rollouts_on(OnEngine(decoder), decoder)
    await resumed.restore(state)
    assert tokens_of(await resumed.next_batch()) == tokens_of(second)


def tokens_of(batch: Batch) -> dict[tuple[int, ...], list[list[int]]]:
    """Tokens of each turn, by the group's place in the batch and the episode's node."""
    return {
        (place, *episode.turns[-1].branch): [turn.token_ids.tolist() for turn in episode.turns]
        for place, group in enumerate(batch.groups)
        for episode in group.episodes
    }


def rollouts_on(generator: OnEngine, decoder: Decoder) -> RolloutExecutor:
    return rollouts(
        generator=generator,
        tokenizer=decoder.tokenizer,
        environment=StagedEnvironment(Asking),
        mixture=Mixture({"counting": SameTask()}),
        leaves=4,
        groups=2,
        reward=StagedReward(lambda task, episode: 1.0, form="episode"),
    )
