"""A whole run of GRPO whose episodes work, and are scored, in sessions of an image."""

import json
from pathlib import Path

import pytest

from tests import images
from tests.commands import Command, metrics, tiny_run
from tests.container_images import host_layer, layer, packed_folder, written_layout
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
    """Each task has an image of its own, and an episode takes until what was named is there, however slow pulls are."""
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
        flags = ("--tasks", "--env", f"{path}:world", "--steps", "3", "--checkpoint-every", "0")
        command = tiny_run(commands, tiny_model, out, *flags)
        assert command.end(500) == 0, command.output
        blobs = {name: times for name, times in registry.requests.items() if "/blobs/" in name}
    rows = metrics(out)
    counts = {
        name: [row[f"environment/image_{name}"] for row in rows if f"environment/image_{name}" in row]
        for name in ("late", "wait_s", "uses", "prefetched")
    }
    assert sum(counts["late"]) == 0, counts
    assert sum(counts["prefetched"]) >= sum(counts["uses"]) / 2 > 0, counts
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
