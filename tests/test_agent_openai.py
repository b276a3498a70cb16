"""Episodes of agents that know only the openai package: what they do is recorded, scored and trained."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from forge_rl.errors import ContextError, ForgeError, PoisonError, ReplicaError, ServiceError
from forge_rl.gateway import GatewayConfig, Session
from forge_rl.gateway import agents as agents_module
from forge_rl.gateway.agents import Agent, AgentEpisodeRunner, serving_agents
from forge_rl.services.completion import Observer
from forge_rl.types import Episode, Outcome, Sampling, Score, Task
from recipes.agent_openai import solve
from tests.commands import Command, metrics
from tests.fake_backend import FakeBackend, ids_of, letters_of, tokenizer, until
from tests.overcome import overcome_an_error

TASK = Task(id="7", source="s", messages=({"role": "user", "content": "What is 2 + 3?"},))


class PolicyClient:
    """An episode's way to a fake backend."""

    def __init__(self, backend: FakeBackend, sampling: Sampling | None = None) -> None:
        self.backend = backend
        self.sampling = sampling or Sampling(max_tokens=40, temperature=0.7)
        self.seed = 3
        self.own_s = 0.0
        self._lock = asyncio.Lock()

    def used_s(self) -> float:
        return self.own_s

    async def __call__(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, observe: Observer, gather_s: float
    ) -> None:
        async with self._lock:
            await self.backend.decode(prompt_ids, sampling, observe, session=None, gather_s=gather_s)


class Scorer:
    """Gives the length of the text."""

    form = "episode"
    error: Exception | None = None

    async def score(self, episodes: Sequence[Episode]) -> list[Score]:
        if self.error is not None:
            raise self.error
        return [Score(total=float(len(episode.text))) for episode in episodes]


@asynccontextmanager
async def attempts_of(
    agent: Agent | str, judge: Scorer | None = None, config: GatewayConfig | None = None, **outside: Any
) -> AsyncIterator[AgentEpisodeRunner]:
    engines = FakeBackend(**outside)
    async with serving_agents(agent, config or GatewayConfig(), engines, tokenizer(), judge or Scorer()) as attempts:
        yield attempts


def client_of(session: Session) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)


async def ask(session: Session, text: str = "Hi") -> str:
    async with client_of(session) as client:
        answer = await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content or ""


async def test_the_recipes_agent_asks_again_and_its_turns_are_one_segment():
    async def agent(task: Task, session: Session) -> str:
        async with client_of(session) as client:
            return await solve(client, task.messages[0]["content"], model="fake")

    async def check() -> None:
        client = PolicyClient(FakeBackend([letters_of("Let me see."), "It is 5."]))
        async with attempts_of(agent) as attempts:
            episode = await attempts(TASK, client)
        assert (episode.outcome, episode.reward) == (Outcome.COMPLETED, float(len("It is 5.")))
        assert episode.task is TASK
        first, second = episode.turns
        assert tuple(first.prompt_ids) == tokenizer().render(TASK.messages)
        assert tuple(first.token_ids) == letters_of("Let me see.")
        assert tuple(second.prompt_ids[: len(tuple(first.context))]) == tuple(first.context)
        (segment,) = episode.segments
        assert sum(segment.trained) == len(letters_of("Let me see.")) + len(ids_of("It is 5."))
        assert {request.sampling.temperature for request in client.backend.asked} == {0.7}

    await check()


@pytest.mark.parametrize(("returned", "scored"), [("5", 1.0), ("5\ud800", 2.0), (None, float(len("Hello there.")))])
async def test_what_the_agent_returns_is_scored_or_else_the_last_answer(returned: str | None, scored: float):
    async def agent(task: Task, session: Session) -> str | None:
        await ask(session)
        return returned

    async with attempts_of(agent) as attempts:
        episode = await attempts(TASK, PolicyClient(FakeBackend()))
    assert episode.reward == scored
    episode.text.encode()


async def test_an_answer_that_is_cut_off_last_makes_the_episode_truncated():
    async def agent(task: Task, session: Session) -> str:
        return await ask(session)

    async with attempts_of(agent) as attempts:
        episode = await attempts(TASK, PolicyClient(FakeBackend(), Sampling(max_tokens=2)))
    assert episode.outcome is Outcome.TRUNCATED
    assert episode.reward == len(episode.turns[0].text)


def failing(error: Exception) -> FakeBackend:
    return FakeBackend(fail=error)


@pytest.mark.parametrize(
    ("backend", "question", "outcome", "problem"),
    [
        (FakeBackend(), "", Outcome.ENVIRONMENT_ERROR, "the agent raised KeyError: 'lost' (" + __file__),
        (failing(ReplicaError("it died", service="g", replica=0)), "Hi", Outcome.INFRASTRUCTURE_ERROR, "it died"),
        (failing(ServiceError("none left", service="g")), "Hi", Outcome.INFRASTRUCTURE_ERROR, "none left"),
        (FakeBackend(), "word " * 5000, Outcome.TRUNCATED, ""),
    ],
)
async def test_why_an_agent_raises_decides_the_outcome(
    backend: FakeBackend, question: str, outcome: Outcome, problem: str
):
    async def agent(task: Task, session: Session) -> str:
        if question != "Hi":
            await ask(session)
        if not question:
            raise KeyError("lost")
        return await ask(session, question)

    async with attempts_of(agent) as attempts:
        episode = await attempts(TASK, PolicyClient(backend))
    assert episode.outcome is outcome
    assert problem in episode.problem
    assert bool(episode.problem) == (not outcome.scored)
    assert episode.reward == (len("Hello there.") if outcome.scored else 0)


async def test_an_error_that_the_agent_overcame_is_no_reason_for_a_later_one():
    async def agent(task: Task, session: Session) -> str:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await ask(session, "word " * 5000)
        await ask(session)
        raise KeyError("lost")

    async with attempts_of(agent) as attempts:
        assert (await attempts(TASK, PolicyClient(FakeBackend()))).outcome is Outcome.ENVIRONMENT_ERROR


async def test_an_agent_that_asks_nothing_gives_nothing_to_train():
    async def agent(task: Task, session: Session) -> str:
        return "5"

    async with attempts_of(agent) as attempts:
        episode = await attempts(TASK, PolicyClient(FakeBackend()))
    assert episode.outcome is Outcome.ENVIRONMENT_ERROR
    assert "no completion" in episode.problem


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(ValueError("bad"), Outcome.JUDGE_ERROR), (ReplicaError("died", service="r"), Outcome.INFRASTRUCTURE_ERROR)],
)
async def test_a_judge_that_fails_is_told_from_one_that_dies(error: Exception, outcome: Outcome):
    async def agent(task: Task, session: Session) -> str:
        return await ask(session)

    judge = Scorer()
    judge.error = error
    async with attempts_of(agent, judge) as attempts:
        assert (await attempts(TASK, PolicyClient(FakeBackend()))).outcome is outcome


async def test_an_agent_that_catches_its_cancellation_is_left_behind_and_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agents_module, "_GRACE_S", 0.01)
    monkeypatch.setattr(agents_module, "_LEFT_S", 0.2)
    client, rounds, gives_up = PolicyClient(FakeBackend()), 0, asyncio.Event()

    async def agent(task: Task, session: Session) -> str:
        nonlocal rounds
        client.own_s = 1.0
        while not gives_up.is_set():
            rounds += 1
            with contextlib.suppress(BaseException):
                await asyncio.sleep(0.01)
        return "at last"

    async def check() -> None:
        warnings = list[str]()
        async with attempts_of(agent) as served:
            attempts = replace(served, deadline_s=0.1, warn=warnings.append)
            episode = await attempts(TASK, client)
            assert (episode.outcome, "took longer than" in episode.problem) == (Outcome.ENVIRONMENT_ERROR, True)
            assert attempts.metrics() == {"agents/left_behind": 1.0}
            running = asyncio.ensure_future(replace(attempts, deadline_s=600.0)(TASK, PolicyClient(FakeBackend())))
            await asyncio.sleep(0.05)
            running.cancel()
            async with asyncio.timeout(60):
                assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], asyncio.CancelledError)
            assert len(warnings) == 2
            assert all(
                f"agent ({__file__}:" in warning and "ignores its cancellation" in warning for warning in warnings
            )
            await until(lambda: not attempts._left)
            rounds_so_far = rounds
            await asyncio.sleep(0.1)
            assert rounds == rounds_so_far, "it goes on"
            assert attempts.metrics() == {"agents/left_behind": 1.0, "agents/ended": 2.0}
            assert attempts.metrics() == {}

    try:
        async with asyncio.timeout(60):
            await check()
    finally:
        gives_up.set()  # else a failure would wait for the agents


async def test_many_agents_that_ignore_cancellation_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(agents_module, "_GRACE_S", 0.01)
    monkeypatch.setattr(agents_module, "_MOST_LEFT", 2)
    end, clients, stubborn = asyncio.Event(), list[PolicyClient](), False

    async def works_on() -> None:
        while not end.is_set():
            with contextlib.suppress(BaseException):
                await end.wait()

    async def agent(task: Task, session: Session) -> str:
        clients[-1].own_s = 1.0
        while not end.is_set():
            with contextlib.suppress(BaseException):
                await (asyncio.ensure_future(works_on()) if stubborn else end.wait())
        return "at last"

    async def check() -> None:
        nonlocal stubborn
        async with attempts_of(agent) as served:
            attempts = replace(served, deadline_s=0.1)

            async def attempt() -> Episode:
                clients.append(PolicyClient(FakeBackend()))
                return await attempts(TASK, clients[-1])

            for _ in range(3):  # those that can be ended make room
                assert (await attempt()).outcome is Outcome.ENVIRONMENT_ERROR
            stubborn = True
            for _ in range(2):
                await attempt()
            with pytest.raises(ForgeError, match="2 agents ignore their cancellation") as caught:
                await attempt()
            assert "agent='FILE.py:FUNCTION'" in caught.value.hint
            end.set()
            await asyncio.wait(set(attempts._left))
            assert not attempts._left

    try:
        async with asyncio.timeout(60):
            await check()
    finally:
        end.set()  # else a failure would wait for the agents


async def test_episodes_decode_in_parallel_but_each_one_answer_at_a_time():
    async def agent(task: Task, session: Session) -> None:
        await asyncio.gather(ask(session, "one"), ask(session, "two"))

    gate = asyncio.Event()
    backends = [FakeBackend(gate=gate), FakeBackend(gate=gate)]
    async with attempts_of(agent) as attempts, asyncio.TaskGroup() as group:
        episodes = [group.create_task(attempts(TASK, PolicyClient(backend))) for backend in backends]
        await until(lambda: all(backend.open for backend in backends))
        gate.set()
    assert [len(episode.result().turns) for episode in episodes] == [2, 2]
    assert [backend.most_open for backend in backends] == [1, 1]


async def test_a_cancelled_or_slow_episode_leaves_no_request_on_an_engine():
    async def agent(task: Task, session: Session) -> str:
        return await ask(session)

    backend = FakeBackend(gate=asyncio.Event())
    async with attempts_of(agent) as attempts:
        episode = asyncio.ensure_future(attempts(TASK, PolicyClient(backend)))
        await until(lambda: backend.chunks > 0)
        episode.cancel()
        await asyncio.wait([episode])
        assert episode.cancelled()
        assert (backend.open, backend.aborted) == (0, 1)
        client = PolicyClient(backend)
        attempts = replace(attempts, deadline_s=0.1)
        slow = asyncio.ensure_future(attempts(TASK, client))
        await until(lambda: backend.chunks > 1)
        await asyncio.sleep(0.2)
        assert not slow.done(), "it was paused, or waited for an engine"
        client.own_s = 0.2
        assert (await slow).outcome is Outcome.ENVIRONMENT_ERROR
        assert "longer than 0.1 s" in slow.result().problem
        assert backend.open == 0


async def test_an_agent_that_overcame_an_error_of_its_tools_still_has_its_limit():
    client = PolicyClient(FakeBackend())

    async def agent(task: Task, session: Session) -> str:
        await overcome_an_error()
        client.own_s = 1.0
        await asyncio.Event().wait()
        return "never"

    async with attempts_of(agent) as attempts:
        episode = await replace(attempts, deadline_s=0.5)(TASK, client)
    assert (episode.outcome, "longer than 0.5 s" in episode.problem) == (Outcome.ENVIRONMENT_ERROR, True)


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_endless_agent_is_cut_and_scored_and_a_hung_one_is_not(hangs: bool):
    client = PolicyClient(FakeBackend())
    is_asked = asyncio.Event()

    async def agent(task: Task, session: Session) -> str:
        while True:
            await ask(session)
            if hangs:
                is_asked.set()
                await asyncio.Event().wait()
            client.own_s += 0.4

    async with attempts_of(agent) as attempts:
        running = asyncio.ensure_future(replace(attempts, deadline_s=1.0)(TASK, client))
        if hangs:
            await is_asked.wait()
            await asyncio.sleep(0.1)  # it has looked meanwhile
            client.own_s = 2.0
        episode = await running
    if hangs:
        assert episode.outcome is Outcome.ENVIRONMENT_ERROR
        assert "did not call the policy for half of that time" in episode.problem
    else:
        assert (episode.outcome, episode.reward) == (Outcome.TRUNCATED, len("Hello there."))
        assert len(episode.turns) >= 2


async def test_an_agent_that_loops_is_told_what_a_session_may_have_and_is_cut():
    async def loop(task: Task, session: Session) -> str:
        while True:
            await ask(session)

    async def ask_for_many(task: Task, session: Session) -> str:
        async with client_of(session) as client:
            await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "Hi"}], n=6)
        return ""

    async with attempts_of(loop, config=GatewayConfig(session_turns=5)) as attempts:
        episode = await attempts(TASK, PolicyClient(FakeBackend()))
        assert (episode.outcome, len(episode.turns)) == (Outcome.TRUNCATED, 5)
        many = await replace(attempts, agent=ask_for_many)(TASK, PolicyClient(FakeBackend()))
        assert (many.outcome, many.turns) == (Outcome.ENVIRONMENT_ERROR, ())
        assert "6 turns, more than 5 (--gateway.session-turns)" in many.problem
        context_tokens = len(episode.turns[0].context)
    async with attempts_of(loop, config=GatewayConfig(session_tokens=2 * context_tokens)) as attempts:
        episode = await attempts(TASK, PolicyClient(FakeBackend()))
        assert (episode.outcome, len(episode.turns)) == (Outcome.TRUNCATED, 2)


async def test_a_first_prompt_that_is_too_long_is_no_failure_of_the_agent():
    async def agent(task: Task, session: Session) -> str:
        return await ask(session, "word " * 5000)

    async with attempts_of(agent) as attempts:
        with pytest.raises(ContextError, match="maximum context length") as caught:
            await attempts(TASK, PolicyClient(FakeBackend()))
        assert "--generator.max-model-len" in caught.value.hint


async def test_a_request_that_kills_engines_costs_only_its_agents_episode():
    async def agent(task: Task, session: Session) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(session)
        assert caught.value.code == "ends_engines"
        raise caught.value

    poison = PoisonError("a completion of 9 prompt tokens ended 5 engines", service="generator")
    async with attempts_of(agent) as attempts:
        with pytest.raises(PoisonError, match="this request cannot be answered: a completion of 9 prompt tokens"):
            await attempts(TASK, PolicyClient(FakeBackend(fail=poison)))
        other = await replace(attempts, agent=lambda _, session: ask(session))(TASK, PolicyClient(FakeBackend()))
    assert other.outcome is Outcome.COMPLETED


@pytest.mark.nightly  # in this process, line by line: test_interactive.py
def test_the_recipe_trains_an_agent_that_knows_only_the_openai_package(
    commands: list[Command], tiny_model: Path, tmp_path: Path, nothing_left: None
):
    command = Command(
        "tests.tiny_agent",
        *("--model", str(tiny_model), "--tasks", "chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"),
        *("--steps", "1", "--groups-per-batch", "2", "--group-size", "4", "--evaluation.tasks", "0"),
        *("--checkpoint-every", "0", "--display", "plain", "--out", str(tmp_path)),
        *("--generator.max-model-len", "256", "--generator.kv-cache-gib", "0.25"),
    )
    commands.append(command)
    assert command.end(500) == 0, command.output
    (row,) = metrics(tmp_path)
    assert row["outcomes/completed"] + row["outcomes/truncated"] >= 8
    assert row["grad_norm"] > 0
    assert row["logprob_gap"] < 1e-3
