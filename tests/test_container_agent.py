"""Agents whose processes work in the containers of tasks: what they do there is scored, and mini-swe-agent is one."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peer_environments import MINI_SWE
from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.errors import ConfigError
from forge_rl.gateway.agent_command import AgentCommand
from forge_rl.sandbox import SandboxError, shared_pool
from forge_rl.types import Outcome, Sampling
from forge_rl.worlds.container import Attempt, ContainerSession, JudgeSession
from forge_rl.worlds.container_agent import ContainerAgents
from recipes import agent_command
from tests.commands import Command, metrics, tiny_run
from tests.container_images import host_layer, layer, written_layout
from tests.fake_backend import FakeBackend, letters_of
from tests.harbor_tasks import FILES, TASKS, write_tasks
from tests.peer_pythons import peer_python
from tests.sandbox_pool import loop_with_pool, needs_bubblewrap
from tests.test_agent_command import ASKS, python
from tests.test_agent_openai import PolicyClient, attempts_of

MINI = Path(__file__).parent.parent / "recipes" / "agents" / "mini_swe.py"
AGENT = f"""{ASKS}
import subprocess, sys
program = os.environ["FORGE_RL_CONTAINER"]
def docker(*arguments):
    return subprocess.run([program, *arguments], capture_output=True, text=True)
name = docker("run", "-d", "--name", "x", "-w", "/", "--rm", "image", "sleep", "2h").stdout.strip()
done = docker("exec", "-w", "/app", "-e", "A=1 2", name, "bash", "-lc", ask())
print(json.dumps([done.returncode, done.stdout, done.stderr]), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    yield from loop_with_pool("process")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the ten tasks, and a store of their image."""
    folder = tmp_path_factory.mktemp("harbor")
    layers = [host_layer(folder / "made"), layer(folder / "made", "files", FILES)]
    (layers[1] / "app" / "run.sh").chmod(0o644)
    write_tasks(folder / "tasks", written_layout(folder / "layout", layers, WorkingDir="/app", Env=["A=b"]))
    return folder


def flag(folder: Path) -> str:
    return f"harbor:{folder / 'tasks'},images={folder / 'store'},held_out_share=0,local=true"


@pytest.fixture(scope="module")
def mini_python() -> Path:
    """The Python of an environment with mini-swe-agent, made once."""
    return peer_python(MINI_SWE)


def episode_of(loop: asyncio.Runner, folder: Path, command: Any, replies: list[str], name: str = "sort") -> Any:
    """Run one episode of an agent with scripted replies, and keep its stderr in agent.log."""
    environment = build_environment(flag(folder))
    [source] = sources_of(environment, 0).values()
    task = next(task for task in (source.draw() for _ in TASKS) if task.id == name)
    agent = AgentCommand(command, log=folder / "agent.log", workplaces=ContainerAgents(environment))

    backend = FakeBackend([letters_of(reply) for reply in replies])

    async def work() -> Any:
        async with attempts_of(agent) as attempts:
            return await attempts(task, PolicyClient(backend, Sampling(max_tokens=300)))  # type: ignore[arg-type]

    return loop.run(work())


def test_what_an_agent_does_in_the_container_is_scored(loop: asyncio.Runner, folder: Path):
    solution = f"echo $A; echo lost >&2; {TASKS['sort'][1]}; exit 3"
    episode = episode_of(loop, folder, python(AGENT), [solution])
    assert (episode.outcome, episode.reward) == (Outcome.COMPLETED, 1.0), episode.problem
    line = (folder / "agent.log").read_text().splitlines()[-1]
    assert json.loads(line) == [3, "1 2\n", "lost\n"]
    assert [turn.text for turn in episode.turns] == [solution]
    assert episode_of(loop, folder, python(AGENT), ["true"]).reward == 0.0


def test_first_commands_at_once_share_a_session_and_one_that_comes_late_leaves_none(loop: asyncio.Runner, folder: Path):
    environment = build_environment(flag(folder))
    [source] = sources_of(environment, 0).values()
    container = environment.container(source.draw())._container

    async def judge(session: JudgeSession, attempt: Attempt) -> tuple[float, dict[str, float]]:
        return float(len({change.path for change in attempt.changes} & {"app/1", "app/2", "app/3"})), {}

    async def work() -> float:
        session = ContainerSession(container, judge)
        opening = asyncio.ensure_future(session.execute("true"))
        await asyncio.sleep(0)
        await session.close()  # the session that the command opens meanwhile, too
        assert await opening is None
        # Closing waits for no image: here its pull never ends.
        session = ContainerSession(container, judge)
        session._place.open = asyncio.Event().wait  # type: ignore[method-assign, assignment]
        opening = asyncio.ensure_future(session.execute("true"))
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await session.close()
        assert await opening is None
        assert await session.execute("true") is None
        session = ContainerSession(container, judge)
        try:
            await asyncio.gather(*(session.execute(f"touch /app/{number}") for number in (1, 2, 3)))
            return (await session.score())[0]
        finally:
            await session.close()

    assert loop.run(work()) == 3.0, "all changes are in one session"


def test_a_command_of_an_agent_that_is_cut_off_ends_with_its_container(loop: asyncio.Runner, folder: Path):
    environment = build_environment(flag(folder))
    [source] = sources_of(environment, 0).values()
    agents, task = ContainerAgents(environment), source.draw()

    async def work() -> tuple[int, int]:
        pool = await shared_pool(profile="process", images=str(folder / "store"))
        places = pool._places._value
        async with agents.open(task) as container:
            program = container.variables["FORGE_RL_CONTAINER"]
            command = await asyncio.create_subprocess_exec(program, "exec", "x", "sleep", "1000")
            while (session := container._session._session) is None or not session._sessions.counts["run"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            command.kill()
            await command.wait()
        await asyncio.sleep(1)  # in which a session that is rebuilt would take a place again
        return places, pool._places._value

    before, after = loop.run(work())
    assert before == after


@pytest.mark.parametrize("status", [0, 1])
def test_an_agent_whose_sandbox_fails_is_not_to_blame(
    loop: asyncio.Runner, folder: Path, monkeypatch: pytest.MonkeyPatch, status: int
):
    async def execute(self: ContainerSession, *arguments: Any, **options: Any) -> None:
        raise SandboxError("no sandbox is left")

    monkeypatch.setattr(ContainerSession, "execute", execute)
    code = f"{ASKS}\nask()\nimport subprocess, sys\nprogram = os.environ['FORGE_RL_CONTAINER']\n"
    code += f"subprocess.run([program, 'exec', 'x', 'true']); sys.exit({status})"
    episode = episode_of(loop, folder, python(code), ["Hi."])
    assert (episode.outcome, episode.problem) == (Outcome.INFRASTRUCTURE_ERROR, "no sandbox is left")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["cp", "a", "b"], "container: there is no 'cp': run, exec, stop, kill or rm"),
        (["exec", "--privileged", "x", "id"], "container: exec has no option --privileged"),
        (["exec", "x"], "container: exec needs a container and a command"),
    ],
)
def test_other_uses_of_the_program_are_refused(loop: asyncio.Runner, folder: Path, arguments: list[str], told: str):
    code = f"{ASKS}\nask()\nimport subprocess, sys\nprogram = os.environ['FORGE_RL_CONTAINER']\n"
    code += f"sys.exit(subprocess.run([program, *{arguments}]).returncode != 125)"
    assert episode_of(loop, folder, python(code), ["Hi."]).outcome is Outcome.COMPLETED
    assert (folder / "agent.log").read_text().splitlines()[-1] == told


def test_tasks_without_containers_are_refused():
    with pytest.raises(ConfigError, match="have no containers for an agent to work in"):
        ContainerAgents(build_environment("game"))


@needs_bubblewrap
async def test_a_reward_beside_the_tasks_own_tests_is_refused(folder: Path):
    config = agent_command.Config(env=flag(folder), rewards=("math",))
    with pytest.raises(ConfigError, match="--reward has no effect, as the environment scores its episodes itself"):
        await agent_command.main(config)


@pytest.mark.nightly
def test_mini_swe_agent_solves_a_task(loop: asyncio.Runner, folder: Path, mini_python: Path):
    block = "THOUGHT: so be it.\n\n```mswea_bash_command\n{}\n```"
    replies = [block.format("ls"), block.format(TASKS["sort"][1])]
    replies.append(block.format("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
    episode = episode_of(loop, folder, [str(mini_python), str(MINI)], replies)
    assert (episode.outcome, episode.reward) == (Outcome.COMPLETED, 1.0), (folder / "agent.log").read_text()
    assert [turn.text for turn in episode.turns] == replies
    [segment] = episode.segments  # what it sends back is what was generated, token by token
    assert sum(segment.trained) == sum(len(turn.token_ids) for turn in episode.turns)


VOWELS = """#!/bin/bash
printf '0.%03d' $(grep -o '[aeiou]' /app/text | wc -l) > /logs/verifier/reward.txt
"""


@pytest.mark.nightly
def test_a_run_trains_on_turns_of_mini_swe_agent(
    folder: Path, mini_python: Path, commands: list[Command], tiny_model: Path, tmp_path: Path
):
    write_tasks(tmp_path / "tasks", f"oci:{folder / 'layout'}")
    for script in (tmp_path / "tasks").glob("*/tests/test.sh"):
        script.write_text(VOWELS)
    config = {
        "agent": {"system_template": "Write.", "instance_template": "{{task}}", "step_limit": 2},
        "model": {"action_regex": r"\A(.*)\Z", "observation_template": "Go on.", "model_kwargs": {"drop_params": True}},
        "environment": {"interpreter": ["/bin/sh", "-c", 'printf %s "$0" >> /app/text']},
    }  # all that this small model writes is a command, which keeps its text
    (tmp_path / "mini.yaml").write_text(json.dumps(config))
    agent = shlex.join([str(mini_python), str(MINI), "-c", str(tmp_path / "mini.yaml")])
    env = f"harbor:{tmp_path / 'tasks'},images={folder / 'store'},held_out_share=0,local=true"
    flags: tuple[str, ...] = (
        "--command",
        agent,
        "--env",
        env,
        "--steps",
        "2",
        "--checkpoint-every",
        "0",
        "--groups-per-batch",
        "2",
    )
    flags += ("--group-size", "2", "--generator.max-tokens", "16")
    out = tmp_path / "run"
    command = tiny_run(commands, tiny_model, out, *flags, recipe="recipes.agent_command")
    assert command.end(500) == 0, command.output
    episodes = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    trained = [episode for episode in episodes if episode["step"]]
    assert {episode["outcome"] for episode in trained} <= {"completed", "truncated"}
    assert len({episode["reward"] for episode in trained}) > 1
    assert any(row.get("grad_norm", 0) > 0 for row in metrics(out))
