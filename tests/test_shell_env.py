"""Episodes in which the model uses a shell."""

import asyncio
import json
import pickle
from collections.abc import Iterator

import pytest

from forge_rl.envs.env_flag import build_environment
from forge_rl.envs.protocol import Step
from forge_rl.envs.tool import Tool
from forge_rl.errors import ConfigError
from forge_rl.sandbox import shared_pool
from forge_rl.sandbox.durable import DivergedError
from forge_rl.types import Task, ToolCall
from forge_rl.worlds.code_world import CodeSession, CodeSettings, CodeWorld
from tests.sandbox_pool import kill_servers, loop_with_pool

TASK = Task(id="1", source="s", messages=({"role": "user", "content": "?"},))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    yield from loop_with_pool("process")


def play(
    loop: asyncio.Runner, *answers: str | ToolCall, flag: str = "shell:timeout_s=60,max_output_chars=400"
) -> list[Step]:
    """Steps of an episode whose model writes these commands in a block, or makes these calls, or answers."""

    async def work() -> list[Step]:
        env = build_environment(flag)(TASK)
        await env.reset()
        try:
            return [
                await env.step("", truncated=False, calls=(answer,))
                if isinstance(answer, ToolCall)
                else await env.step(answer, truncated=False, calls=())
                for answer in answers
            ]
        finally:
            await env.close()

    return loop.run(work())


def fenced(commands: str) -> str:
    return f"I look.\n```bash\n{commands}\n```"


def test_blocks_and_calls_share_files_until_the_answer(loop: asyncio.Runner):
    call = ToolCall(id="7", name="shell", arguments=json.dumps({"commands": "cat notes"}))
    first, second, other, last = play(loop, fenced("echo 6 > notes"), call, fenced("cd /; pwd"), "```python\n1\n```")
    assert first.messages == ({"role": "user", "content": "Output:\n(no output)"},)
    assert second.messages == ({"role": "tool", "tool_call_id": "7", "name": "shell", "content": "6"},)
    assert other.messages[0]["content"] == "Output:\n/"
    assert (last.done, last.output) == (True, "```python\n1\n```")


@pytest.mark.parametrize(
    ("commands", "shown"),
    [
        ("echo a; echo b >&2; exit 3", "a\nb\nexit status 3"),
        ("echo a; kill -9 $$; sleep 9", "a\nexit status 137"),
        ("sleep 9", "error: the command exceeded its wall-clock limit: killed"),
        ("python3 -c 'x = b\"x\" * (600 << 20)'", "exceeded the session's memory limit"),
        ("ls /root /work; ls ~", "No such file"),
        ("seq 9999", "characters left out"),
    ],
)
def test_the_model_is_shown_what_its_commands_did(loop: asyncio.Runner, commands: str, shown: str):
    flag = f"shell:timeout_s={2 if commands == 'sleep 9' else 60},max_output_chars=400"
    first, second = play(loop, fenced(commands), fenced("echo still here"), flag=flag)
    assert shown in str(first.messages[0]["content"])
    assert len(str(first.messages[0]["content"])) < 600
    assert second.messages[0]["content"] == "Output:\nstill here"


def test_a_dead_sandbox_costs_no_turn_if_commands_are_deterministic(loop: asyncio.Runner):
    async def work(first: str) -> str:
        env = build_environment("shell")(TASK)
        await env.reset()
        await env.step(fenced(first), truncated=False, calls=())
        await kill_servers("process")
        try:
            step = await env.step(fenced("cat notes"), truncated=False, calls=())
        finally:
            await env.close()
        return str(step.messages[0]["content"])

    assert loop.run(work("echo 6 >> notes; echo took 0.$RANDOM s")) == "Output:\n6"
    with pytest.raises(DivergedError, match="cell 1 of a session gave"):
        loop.run(work("date +%N"))


@pytest.mark.usefixtures("loop")
def test_the_flag_has_options_and_travels_to_other_processes():
    made = pickle.loads(pickle.dumps(build_environment("shell:max_turns=3,tool=true")))
    assert (made.max_turns, made.tool, made.settings.instruction) == (3, True, "")
    for wrong in ("shell:max_turns=0", "shell:timeout_s=0", "shell:timeout_s=9999.0", "shell:shell=zsh"):
        with pytest.raises(ConfigError, match="shell"):
            build_environment(wrong)


def test_each_profile_has_a_pool_of_its_own(loop: asyncio.Runner):
    async def work() -> bool:
        pools = [await shared_pool(profile=profile) for profile in ("process", "process", "standard")]
        return pools[0] is pools[1] and pools[1] is not pools[2]

    assert loop.run(work())


def test_a_fork_has_a_session_of_its_own(loop: asyncio.Runner) -> None:
    async def work() -> list[object]:
        env = build_environment("shell")(TASK)
        await env.reset()
        await env.step(fenced("echo 6 > notes"), truncated=False, calls=())
        fork = await env.fork()  # type: ignore[attr-defined]
        shown = [
            await each.step(fenced(code), truncated=False, calls=())
            for each, code in ((env, "echo 7 >> notes; cat notes"), (fork, "cat notes"))
        ]
        await env.close()
        await fork.close()
        return [step.messages[0]["content"] for step in shown]

    assert loop.run(work()) == ["Output:\n6\n7", "Output:\n6"]


async def test_calls_are_not_run_once_others_have_taken_the_time_of_their_completion():
    class Slow(CodeSession):
        async def run(self, commands: str) -> str:
            """Run commands."""
            await asyncio.sleep(0.2)
            return commands

        async def fork(self) -> CodeSession:
            return self

        async def close(self) -> None: ...

    settings = CodeSettings(flag="--env shell:", max_turns=3, timeout_s=0.1)
    tool = Tool(Slow.run, is_method=True, alias="shell")
    world = CodeWorld(settings, TASK, tool=tool, session=Slow())
    calls = [ToolCall(id=str(place), name="shell", arguments=f'{{"commands": "{place}"}}') for place in range(4)]
    step = await world.step("", truncated=False, calls=calls)
    refusal = "error: not run, as the calls before it took 0.1 s"
    assert [message["content"] for message in step.messages] == ["0", "1", refusal, refusal]
    assert [call.error for call in step.calls] == ["", "", refusal, refusal]
