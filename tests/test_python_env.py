"""Episodes in which the model runs Python: state, what it is shown, and failures of its code and of the sandbox."""

import asyncio
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from forge_rl.envs.env_flag import build_environment
from forge_rl.envs.protocol import Step
from forge_rl.errors import ConfigError
from forge_rl.sandbox import run_code, shared_pool
from forge_rl.sandbox.durable import DivergedError
from forge_rl.types import Task, ToolCall
from forge_rl.worlds.code_world import CodeWorld
from forge_rl.worlds.python import PythonEnv
from tests.sandbox_pool import kill_servers, loop_with_pool

TASK = Task(id="1", source="s", messages=({"role": "user", "content": "?"},))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    yield from loop_with_pool()


def world(timeout_s: float = 30) -> PythonEnv:
    return PythonEnv(max_turns=6, timeout_s=timeout_s, max_output_chars=400)


def fenced(code: str) -> str:
    return f"I try this.\n```python\n{code}\n```"


async def play(env: CodeWorld, answers: Sequence[str | ToolCall]) -> list[Step]:
    """Steps of an episode whose model writes these texts, or makes these calls, until it is done."""
    await env.reset()
    steps = []
    for answer in answers:
        text, calls = (answer, ()) if isinstance(answer, str) else ("", (answer,))
        steps.append(await env.step(text, truncated=False, calls=calls))
        if steps[-1].done:
            break
    await env.close()
    return steps


def shown(loop: asyncio.Runner, *codes: str, timeout_s: float = 30) -> list[str]:
    """What the model is shown after each code."""
    steps = loop.run(play(world(timeout_s)(TASK), [fenced(code) for code in codes]))
    return [str(step.messages[0]["content"]).removeprefix("Output:\n") for step in steps]


def test_code_in_blocks_and_calls_share_a_state_until_the_answer(loop: asyncio.Runner):
    call = ToolCall(id="7", name="python", arguments=json.dumps({"code": "x + 1"}))
    first, second, third, last = loop.run(
        play(world()(TASK), [fenced("x = 6\nprint('set')"), call, fenced("x * 7"), "42"])
    )
    assert first.messages == ({"role": "user", "content": "Output:\nset"},)
    assert second.messages == ({"role": "tool", "tool_call_id": "7", "name": "python", "content": "7"},)
    assert third.messages == ({"role": "user", "content": "Output:\n42"},)
    assert [call.name for step in (first, second, third) for call in step.calls] == ["python"] * 3
    assert (last.done, last.output) == (True, "42")


def test_the_model_is_shown_errors_and_the_middle_of_long_output_is_cut(loop: asyncio.Runner):
    error, late, much, nothing = shown(loop, "1 / 0", "while True: pass", "print('x' * 9999)", "y = 1", timeout_s=2)
    assert error.endswith("ZeroDivisionError: division by zero")
    assert "exceeded its wall-clock limit" in late
    assert len(much) < 500
    assert "characters left out" in much
    assert nothing == "(no output)"


def test_code_that_ends_its_session_is_told_so_and_the_next_has_a_new_one(loop: asyncio.Runner):
    later = "import os, threading\nthreading.Timer(0.1, lambda: os._exit(3)).start()"
    first, _, second, third = shown(loop, "x = 1\nimport os; os._exit(3)", later, "import time; time.sleep(20)", "x")
    assert "Variables and files are gone" in first
    assert "Variables and files are gone" in second
    assert third.endswith("NameError: name 'x' is not defined")


def test_an_episode_takes_a_session_only_for_code_and_returns_it(loop: asyncio.Runner):
    async def taken() -> list[int]:
        pool, counts = await shared_pool(), []
        for answers in (["4"], [fenced("2 + 2"), "4"]):
            env = world()(TASK)
            await env.reset()
            for answer in answers:
                await env.step(answer, truncated=False, calls=())
            counts.append(pool.most - pool._places._value)
            await env.close()
            counts.append(pool.most - pool._places._value)
        return counts

    assert loop.run(taken()) == [0, 0, 1, 0]


def test_an_episode_that_only_runs_code_has_no_answer(loop: asyncio.Runner):
    [_, last] = loop.run(play(PythonEnv(max_turns=2)(TASK), [fenced("1"), fenced("2")]))
    assert (last.done, last.output) == (True, "")


def test_with_the_tools_schema_a_block_is_the_answer(loop: asyncio.Runner):
    call = ToolCall(id="1", name="python", arguments='{"code": "1 + 1"}')
    ran, last = loop.run(play(PythonEnv(tool=True)(TASK), [call, fenced("2")]))
    assert (ran.messages[0]["content"], last.output) == ("2", fenced("2"))


def test_a_dead_sandbox_costs_no_turn_if_its_code_is_deterministic(loop: asyncio.Runner):
    async def work(code: str) -> str:
        env = world()(TASK)
        await env.step(fenced(code), truncated=False, calls=())
        await kill_servers()
        try:
            step = await env.step(fenced("import time; time.sleep(0.5); x"), truncated=False, calls=())
        finally:
            await env.close()
        return str(step.messages[0]["content"])

    assert loop.run(work("x = 7")) == "Output:\n7"
    with pytest.raises(DivergedError, match="cell 1 of a session gave"):
        loop.run(work("import time; x = time.time_ns(); x"))
    assert loop.run(run_code("6 * 7")).value == "42"  # in a new server


def test_with_pure_the_same_code_after_the_same_code_is_run_once(loop: asyncio.Runner, tmp_path: Path):
    made = build_environment(f"python:pure=true,cache={tmp_path}")
    drawn = [fenced("import random; x = random.random()"), fenced("x"), "done"]
    plays = [loop.run(play(env(TASK), drawn)) for env in (made, made, pickle.loads(pickle.dumps(made)))]
    assert len({str(steps[1].messages[0]["content"]) for steps in plays}) == 1
    cached = [[call.cached for step in steps for call in step.calls] for steps in plays]
    assert cached == [[False, False], [True, True], [True, True]]
    other = loop.run(play(made(TASK), [drawn[0], fenced("x * 0"), ToolCall(id="1", name="python", arguments="{}")]))
    assert [call.cached for step in other for call in step.calls] == [True, False, None]
    assert other[1].messages[0]["content"] == "Output:\n0.0"


def test_the_flag_makes_it_and_only_with_tools_shows_a_schema(loop: asyncio.Runner):
    async def tools(env: PythonEnv) -> list[object]:
        return [dict(each)["function"]["name"] for each in (await env(TASK).reset()).tools]  # type: ignore[index]

    made = build_environment("python:max_turns=3,tool=true")
    assert pickle.loads(pickle.dumps(made)) == PythonEnv(max_turns=3, tool=True) == made
    assert (loop.run(tools(made)), loop.run(tools(world()))) == (["python"], [])
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        build_environment("python:timeout_s=0")


def test_a_fork_has_a_session_of_its_own(loop: asyncio.Runner) -> None:
    async def work() -> list[object]:
        env = build_environment("python")(TASK)
        await env.reset()
        await env.step(fenced("x = [6]"), truncated=False, calls=())
        fork = await env.fork()  # type: ignore[attr-defined]
        shown = [
            await each.step(fenced(code), truncated=False, calls=())
            for each, code in ((env, "x.append(7); x"), (fork, "x"))
        ]
        await env.close()
        await fork.close()
        return [step.messages[0]["content"] for step in shown]

    assert loop.run(work()) == ["Output:\n[6, 7]", "Output:\n[6]"]
