"""Tasks with images whose containers a provider runs, against stand-ins of the providers' services."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.envs.protocol import reset_env, step_env
from forge_rl.sandbox import SandboxError
from tests.container_machine import ContainerMachine, container_machine, machine_image
from tests.docker_server import DockerServer
from tests.harbor_tasks import FILES, TASKS, TRICKS, write_tasks

ROW_TEST = """#!/bin/bash
set -uxo pipefail
cd /testbed
: '>>>>> Start Test Output'
[ "$(cat answer)" = 42 ] && echo "PASSED t::fixed" || echo "FAILED t::fixed - no"
[ -e kept ] && echo "PASSED t::kept" || echo "FAILED t::kept - no"
[ -e kept ] && [ "$(cat answer)" = 42 ]
: '>>>>> End Test Output'
"""


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[ContainerMachine]:
    """A machine with an image of the tasks' files."""
    image = machine_image(tmp_path / "made", FILES | {"testbed/answer": "", "testbed/kept": ""})
    (tmp_path / "made" / "files" / "files" / "app" / "run.sh").chmod(0o644)
    try:
        async with container_machine(tmp_path / "made", {"task:1": image}) as machine:
            yield machine
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture
async def docker(
    machine: ContainerMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[DockerServer]:
    """A Docker daemon's stand-in, by the machine's containers."""
    (tmp_path / "d").mkdir()
    async with DockerServer(tmp_path / "d", machine) as server:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{server.socket}")
        yield server


async def rewards(environment: str, commands: Mapping[str, str]) -> dict[str, float]:
    """Play an episode of each task that is named at the same time; return the rewards."""
    factory = build_environment(environment)
    [source] = sources_of(factory, 0).values()
    tasks = {task.id: task for task in (source.draw() for _ in factory.tasks)}

    async def play(name: str) -> float:
        env = factory(tasks[name])
        try:
            await reset_env(env)
            for text in (f"```sh\n{commands[name]}\n```", "Done."):
                step = await step_env(env, text, parsed=(text, ()))
            assert step.reward is not None
            return step.reward
        finally:
            await env.close()

    return dict(zip(commands, await asyncio.gather(*map(play, commands)), strict=True))


async def check_tasks(folder: Path, provider: str, *, few: bool = False) -> None:
    """Check that solutions are rewarded, and neither nothing nor a trick.

    Args:
        few: play three tasks, and one trick beside a solution.
    """
    write_tasks(folder / "tasks", "task:1")
    flag = f"harbor:{folder / 'tasks'},held_out_share=0,provider={provider}"
    names = ["sort", "link", "clean"] if few else [*TASKS]
    solutions = {name: f"cd /app\n{TASKS[name][1]}" for name in names}
    assert await rewards(flag, solutions) == dict.fromkeys(names, 1.0)
    assert await rewards(flag, dict.fromkeys(names, "true")) == dict.fromkeys(names, 0.0)
    for trick in () if few else TRICKS.values():
        assert await rewards(flag, dict.fromkeys(names, trick)) == dict.fromkeys(names, 0.0), trick
    assert await rewards(flag, {"sort": f"{solutions['sort']}\n{TRICKS['a program on the way']}"}) == {"sort": 1.0}


async def test_tasks_of_harbor_in_containers_of_docker(docker: DockerServer, tmp_path: Path):
    await check_tasks(tmp_path, "docker", few=True)
    assert docker.containers == {}


@pytest.mark.long
async def test_ten_tasks_of_harbor_in_containers_of_docker(docker: DockerServer, tmp_path: Path):
    await check_tasks(tmp_path, "docker")
    assert docker.containers == {}


@pytest.mark.parametrize(
    ("commands", "reward"),
    [("true", 0.0), ("echo 42 > answer", 1.0), ("echo 42 > answer; rm kept", 0.0), ("echo 41 > answer", 0.0)],
)
async def test_a_row_of_swebench_in_containers_of_docker(
    docker: DockerServer, tmp_path: Path, commands: str, reward: float
):
    row = {"instance_id": "a__b-1", "repo": "a/b", "problem_statement": "Answer.", "image": "task:1"}
    row |= {"FAIL_TO_PASS": ["t::fixed"], "PASS_TO_PASS": ["t::kept"], "eval_script": ROW_TEST}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    flag = f"swebench:{tmp_path / 'rows.jsonl'},memory_mib=256,provider=docker,held_out_share=0"
    assert await rewards(flag, {"a__b-1": commands}) == {"a__b-1": reward}
    assert docker.containers == {}
