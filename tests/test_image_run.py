"""A whole run of GRPO whose episodes work, and are scored, in sessions of an image."""

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_rl.sandbox import SandboxError
from forge_rl.sandbox.images import ContainerImage
from tests import images
from tests.commands import Command, metrics, tiny_run
from tests.container_images import host_layer, layer, packed_folder, written_layout
from tests.container_machine import container_machine, machine_image
from tests.docker_server import DockerServer
from tests.harbor_tasks import write_tasks

WORLD = """
from forge_rl.worlds.harbor import HarborEnv

class Writer:
    def __init__(self, env):
        self.env = env

    async def reset(self):
        return await self.env.reset()

    async def step(self, completion, *, truncated):
        text = completion.replace("END_OF_TEXT", "")
        block = "```sh\\n{{ cat << 'END_OF_TEXT'\\n" + text.replace("```", "") + "\\nEND_OF_TEXT\\n}} > /app/text\\n```"
        step = await self.env.step(block, truncated=False, calls=())
        return step if step.done else await self.env.step("Done.", truncated=False, calls=())

    async def close(self):
        await self.env.close()

class World:
    def __init__(self):
        self.tasks = HarborEnv("{tasks}", images="{store}", held_out_share=0, local=True)

    def __call__(self, task):
        return Writer(self.tasks(task))

    def prepare(self, tasks):
        return self.tasks.prepare(tasks)

    def sources(self, seed):
        return self.tasks.sources(seed)

world = World()
"""
VOWELS = """#!/bin/bash
cd /app
vowels=$(grep -o '[aeiou]' text | wc -l)
printf '{"reward": 0.%03d, "inside": %d}' $vowels "$(cat /inside)" > /logs/verifier/reward.json
"""


@pytest.mark.nightly
def test_no_episode_waits_for_a_slow_pull_that_could_have_been_foreseen(
    commands: list[Command], tiny_model: Path, tmp_path: Path
):
    """Each task has an image of its own, and an episode takes until what was named is there, however slow pulls are.

    A batch starts after the one before has ended, so that its images are there, or were not foreseen.
    """
    layers, out = tmp_path / "made", tmp_path / "run"
    base = packed_folder(host_layer(layers))
    with images.registry(dribble_s=0.4) as registry:
        write_tasks(tmp_path / "tasks", "one")
        for number, task in enumerate(sorted((tmp_path / "tasks").iterdir())):
            top = packed_folder(layer(layers, f"top-{number}", {"app/x": str(number), "inside": "1"}))
            reference = registry.add(images.image([base, top], {"WorkingDir": "/app"}), f"it:{number}")
            settings = task / "task.toml"
            settings.write_text(settings.read_text().replace('docker_image = "one"', f'docker_image = "{reference}"'))
            (task / "tests" / "test.sh").write_text(VOWELS)
        path = tmp_path / "mine.py"
        world = WORLD.format(tasks=tmp_path / "tasks", store=tmp_path / "store")
        slow = f"""        await asyncio.wait([image_lookahead({str(tmp_path / "store")!r})._fetching])
        return step if step.done"""
        imports = "import asyncio\nfrom forge_rl.worlds.image_lookahead import image_lookahead\n"
        path.write_text(imports + world.replace("        return step if step.done", slow))
        flags = ("--tasks", "--env", f"{path}:world", "--steps", "4", "--checkpoint-every", "0")
        command = tiny_run(commands, tiny_model, out, *flags, "--schedule.kind", "synchronous")
        assert command.end(500) == 0, command.output
        blobs = {name: times for name, times in registry.requests.items() if "/blobs/" in name}
    rows = metrics(out)
    counts = {
        name: [row[f"environment/image_{name}"] for row in rows if f"environment/image_{name}" in row]
        for name in ("late", "wait_s", "uses", "prefetched")
    }
    assert sum(counts["late"]) == 0, counts
    assert sum(counts["uses"]) >= 3 * 8, "eight episodes a batch, each counted once"
    assert sum(counts["prefetched"]) == sum(counts["uses"]) - 8, "all but those of the first batch"
    assert max(counts["wait_s"]) >= 0.4, "the first batch could not be foreseen"
    assert set(blobs.values()) == {1}, "no pull was begun twice"


@pytest.mark.long
def test_a_run_trains_on_tasks_with_an_image(commands: list[Command], tiny_model: Path, tmp_path: Path):
    layers, out = tmp_path / "made", tmp_path / "run"
    reference = written_layout(
        tmp_path / "layout", [host_layer(layers), layer(layers, "files", {"app/x": "", "inside": "1"})]
    )
    write_tasks(tmp_path / "tasks", reference)
    for script in (tmp_path / "tasks").glob("*/tests/test.sh"):
        script.write_text(VOWELS)
    path = tmp_path / "mine.py"
    path.write_text(WORLD.format(tasks=tmp_path / "tasks", store=tmp_path / "store"))
    flags = ("--tasks", "--env", f"{path}:world", "--steps", "2", "--checkpoint-every", "0")
    command = tiny_run(commands, tiny_model, out, *flags)
    assert command.end(400) == 0, command.output
    episodes = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    trained = [episode for episode in episodes if episode["step"]]
    assert {episode["outcome"] for episode in trained} <= {"completed", "truncated"}
    assert len({episode["reward"] for episode in trained}) > 1
    rows = metrics(out)
    assert any(row.get("grad_norm", 0) > 0 for row in rows)
    inside = [value for row in rows for name, value in row.items() if "inside" in name]
    assert inside
    assert set(inside) == {1.0}, "the tests run in the image"
    assert any(row.get("environment/image_prefetched", 0) > 0 for row in rows), "what comes next is fetched before"


ROW_TEST = """#!/bin/bash
set -uxo pipefail
cd /testbed
: '>>>>> Start Test Output'
even=$(( ($(grep -o '[aeiou]' answer | wc -l) + 1) % 2 ))
[ $even = 1 ] && echo "PASSED t::even" || echo "FAILED t::even - odd"
[ $even = 1 ]
: '>>>>> End Test Output'
"""


@pytest.mark.nightly
def test_a_run_trains_on_rows_of_swebench_in_containers_of_docker(
    commands: list[Command], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    row = {"image": "task:1", "repo": "a/b", "FAIL_TO_PASS": ["t::even"], "PASS_TO_PASS": [], "eval_script": ROW_TEST}
    rows = [{**row, "instance_id": f"a__b-{number}", "problem_statement": f"Write {number}."} for number in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    world = WORLD.replace("worlds.harbor import HarborEnv", "worlds.swebench import SweBenchEnv")
    rented = 'SweBenchEnv("{tasks}", provider="docker", memory_mib=256'
    world = world.replace('HarborEnv("{tasks}", images="{store}"', rented).replace("/app/text", "/testbed/answer")
    path, out = tmp_path / "mine.py", tmp_path / "run"
    path.write_text(world.replace(", local=True", "").format(tasks=tmp_path / "rows.jsonl"))
    image = machine_image(tmp_path / "made", {"testbed/answer": "", "app/x": ""})
    with docker_in_a_thread(tmp_path / "made", image) as server:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{server.socket}")
        flags = ("--tasks", "--env", f"{path}:world", "--steps", "2", "--checkpoint-every", "0")
        command = tiny_run(commands, tiny_model, out, *flags)
        assert command.end(400) == 0, command.output
        assert len(server.commands) > 0
        assert server.containers == {}
    episodes = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    trained = [episode for episode in episodes if episode["step"]]
    assert {episode["outcome"] for episode in trained} <= {"completed", "truncated"}
    assert {episode["reward"] for episode in trained} == {0.0, 1.0}
    assert any(row.get("grad_norm", 0) > 0 for row in metrics(out))


@contextlib.contextmanager
def docker_in_a_thread(store: Path, image: ContainerImage) -> Iterator[DockerServer]:
    """Serve a stand-in of Docker in a thread, to the processes of a run."""
    opened, stopped = queue.SimpleQueue[DockerServer | BaseException](), threading.Event()

    async def serve() -> None:
        try:
            async with (
                container_machine(store, {"task:1": image}) as machine,
                DockerServer(store.parent, machine) as server,
            ):
                opened.put(server)
                await asyncio.to_thread(stopped.wait)
        except BaseException as error:
            opened.put(error)
            raise

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        server = opened.get()
        if isinstance(server, SandboxError):
            pytest.skip(str(server))
        assert isinstance(server, DockerServer), server
        yield server
    finally:
        stopped.set()
        thread.join()
