"""Rollouts over services without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from forge_rl.data.mixture import Mixture
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.envs.protocol import Observation, Step, sees_thoughts
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ReplicaError
from forge_rl.rewards.protocol import Form
from forge_rl.rollout.dispatcher import Dispatcher, PolicyClient
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.rollout.evaluation import Evaluation
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.rollout.reward_outage import EpisodeScoring
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.services.completion import ResumableCompletion
from forge_rl.services.environment import LocalSession
from forge_rl.system.listeners import Listeners
from forge_rl.token_arrays import Chunk
from forge_rl.tokens.thoughts import without_thoughts
from forge_rl.types import Episode, Message, Sampling, Score, Task


class CountingSource:
    """Tasks 1, 2, 3, …"""

    def __init__(self, name: str = "counting") -> None:
        self.name = name
        self.drawn = 0

    def draw(self) -> Task:
        self.drawn += 1
        return Task(id=str(self.drawn), source=self.name, messages=({"role": "user", "content": str(self.drawn)},))

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        return ()

    def state(self) -> dict[str, object]:
        return {"drawn": self.drawn}

    def restore(self, state: dict[str, object]) -> None:
        self.drawn = int(str(state["drawn"]))


class Letters:
    """A tokenizer of one token a letter, whose model writes <think> before a thought."""

    @property
    def thoughts(self) -> LetterThoughts:
        return LetterThoughts()

    def render(self, messages: Sequence[Message], **_: object) -> tuple[int, ...]:
        return tuple(ord(letter) for message in messages for letter in message["content"])

    def extend(self, ids: Sequence[int], messages: Sequence[Message], **_: object) -> tuple[int, ...]:
        return (*map(int, ids), *self.render(messages))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def tagged_text(self, ids: Sequence[int], text: str) -> str:
        return text

    def text_stream(self, prompt_ids: Sequence[int]) -> LetterStream:
        return LetterStream()


class LetterThoughts:
    is_harmony = False

    def answer(self, prompt_ids: Sequence[int], token_ids: Sequence[int], text: str) -> str | None:
        return without_thoughts(text) if "<think>" in text else None


class LetterStream:
    def add(self, token: int) -> str:
        return chr(token)


class StagedGenerator:
    """Decodes its seed, so that every episode differs."""

    sampling = Sampling(max_tokens=4)

    version = 0
    max_model_len = 1024

    def __init__(self, *, truncated: bool = False, says: str = "") -> None:
        self.says = says
        """What it decodes instead of its seed."""
        self.seen: list[tuple[tuple[int, ...], Sampling]] = []
        self.truncated = truncated
        self.listeners = Listeners[[]]()
        self.told: list[str] = []

    def engines(self) -> dict[int, int]:
        return {0: 8, 1: 8}

    async def pause(self) -> None:
        self.told.append("pause")

    async def resume(self) -> None:
        self.told.append("resume")

    async def sleep(self) -> None:
        self.told.append("sleep")

    async def wake(self) -> None:
        self.told.append("wake")

    async def decode(self, completion: ResumableCompletion, *, engine: int) -> None:
        self.seen.append((tuple(completion.shown.tolist()), completion.rest))
        text = self.says or str(completion.rest.seed)
        ids = tuple(ord(letter) for letter in text)
        completion.add(
            Chunk(
                token_ids=ids,
                logprobs=(-1.0,) * len(ids),
                versions=(0,) * len(ids),
                text=text,
                finish="length" if self.truncated else "stop",
            )
        )


class TwoTurns:
    """An environment of two turns that scores the episode itself."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.turns = 0

    async def reset(self) -> Observation:
        return Observation(messages=self.task.messages)

    async def step(self, answer: str, *, truncated: bool = False) -> Step:
        self.turns += 1
        if self.turns == 1:
            return Step(messages=({"role": "user", "content": "again"},), done=False)
        return Step(done=True, reward=0.75)


class StagedEnvironment:
    def __init__(self, factory: type) -> None:
        self.factory = factory
        self.thoughts = sees_thoughts(factory)
        self.closed = 0

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Episodes wait for nothing that could be fetched."""

    async def open(self, task: Task) -> tuple[object, Observation]:
        async def make() -> Any:
            return self.factory(task)

        env = await make()
        return StagedSession(env, make, owner=self), await env.reset()


@dataclass(frozen=True)
class StagedSession(LocalSession):
    """Session that tells its environment when it is closed."""

    owner: StagedEnvironment = field(kw_only=True)

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self.owner.closed += 1


class StagedReward:
    def __init__(self, score: Callable[[Task, Any], Any], form: Form = "text") -> None:
        self.score_of = score
        self.form = form

    async def score(self, episodes: Sequence[Episode]) -> list[Score]:
        task = episodes[0].task
        scores = (
            self.score_of(task, episodes)
            if self.form == "group"
            else [self._one(task, episode) for episode in episodes]
        )
        return [score if isinstance(score, Score) else Score(total=score) for score in scores]

    def _one(self, task: Task, episode: Episode) -> Any:
        return self.score_of(task, episode.text if self.form == "text" else episode)


def rollouts(**changes: Any) -> RolloutExecutor:
    parts: dict[str, Any] = {
        "mixture": Mixture({"counting": CountingSource()}),
        "groups": 3,
        "leaves": 1,
        "episodes": 4,
        "schedule": ScheduleConfig(max_lag=0),
        "tokenizer": Letters(),
        "generator": StagedGenerator(),
        "environment": StagedEnvironment(SingleTurn),
        "reward": StagedReward(lambda task, text: float(len(text) % 2 + int(text) % 7)),
        "seed": 0,
        "reward_wait_s": 1800.0,
        "hold": None,
        "warn": lambda text: None,
        "on_episode": lambda episode: None,
    }
    parts |= changes
    tokenizer, generator, reward = parts["tokenizer"], parts["generator"], parts["reward"]
    scheduler = Scheduler(
        parts["schedule"],
        groups=parts["groups"],
        episodes=parts["episodes"],
        tasks=ResumableTaskStream(parts["mixture"]),
        leaves=parts["leaves"],
    )
    return RolloutExecutor(
        Dispatcher(scheduler, generator, tokenizer, hold=parts["hold"]),
        EpisodeRunner(tokenizer, parts["environment"], reward),
        devices=DeviceHandover(generator),
        version=lambda: generator.version,
        seed=parts["seed"],
        scoring=EpisodeScoring(reward=reward, wait_s=parts["reward_wait_s"]),
        listener=SimpleNamespace(warn=parts["warn"], episode=parts["on_episode"]),
    )


async def play(executor: RolloutExecutor, *, max_tokens: int) -> Episode:
    """Run one episode of a task, as an evaluation."""
    sampling = Sampling(max_tokens=max_tokens, temperature=0)
    evaluation = Evaluation({"one": [CountingSource().draw()]}, episodes=1, sampling=sampling, version=0)
    executor.start_evaluation(evaluation)
    await executor.finish_evaluation()
    ((episode,),) = evaluation.results("one")
    return episode


class MortalGenerator(StagedGenerator):
    """Engines that decode letter by letter, and wait after three until a gate opens or breaks.

    Each draw, of another seed or from another place on, repeats the next digit.
    """

    sampling = Sampling(max_tokens=12)

    def __init__(self) -> None:
        super().__init__()
        self.serving = {0: 8, 1: 8}
        self.draws: dict[tuple[int | None, int], int] = {}
        self.gates = {engine: asyncio.get_running_loop().create_future() for engine in range(4)}
        """Gate of each engine: its requests wait after three letters until it is done, and fail with its error."""

    def engines(self) -> dict[int, int]:
        return dict(self.serving)

    def kill(self, engine: int) -> None:
        del self.serving[engine]
        self.gates[engine].set_exception(ReplicaError("gone", service="generator", replica=engine))
        self.tell()

    def tell(self) -> None:
        self.listeners.tell()

    async def decode(self, completion: ResumableCompletion, *, engine: int) -> None:
        sampling = completion.rest
        self.seen.append((tuple(completion.shown.tolist()), sampling))
        letter = str(self.draws.setdefault((sampling.seed, len(completion.shown)), len(self.draws)) % 10)
        for count in range(sampling.max_tokens):
            if count == 3:
                await asyncio.shield(self.gates[engine])
            finish = "length" if count == sampling.max_tokens - 1 else ""
            if completion.add(
                Chunk(token_ids=(ord(letter),), logprobs=(-1.0,), versions=(engine,), text=letter, finish=finish)
            ):
                return


def fail_once(executor: RolloutExecutor, predicate: Callable[[Task], bool]) -> None:
    """Let the first episode of such a task raise RuntimeError("a bug")."""
    run_episode, failed = executor._run_episode, list[Task]()

    async def failing(task: Task, client: PolicyClient) -> Episode:
        if predicate(task) and not failed:
            failed.append(task)
            raise RuntimeError("a bug")
        return await run_episode(task, client)

    executor._run_episode = failing


async def run_until_idle() -> None:
    """Let all other tasks run until they wait."""
    for _ in range(1000):
        await asyncio.sleep(0)
