"""Training in a user's own world: one flag, a file of a few lines; the engine drafts tokens meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from forge_rl.metrics.episode_reader import EpisodeFile
from forge_rl.metrics.recorder import recorded_files
from tests.commands import Command, metrics, tiny_flags, tiny_run
from tests.seeded_answers import EAGER
from tests.test_run import run_here

WORLD = """
from forge_rl.envs.protocol import Observation, Step

class World:
    def __init__(self, task, turns=2):
        self.task, self.turns = task, turns

    async def reset(self):
        return Observation(messages=self.task.messages)

    async def step(self, completion, *, truncated):
        self.turns -= 1
        vowels = sum(letter in "aeiou" for letter in completion) / max(1, len(completion))
        if not self.turns:
            return Step(done=True, reward=vowels, parts={"cut": truncated})
        return Step(done=False, reward=vowels, messages=({"role": "user", "content": "More vowels."},))
"""


@pytest.mark.long
def test_a_run_trains_in_a_users_world_and_refuses_an_edited_one(
    commands: list[Command],
    run_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, out = tmp_path / "mine.py", tmp_path / "run"
    path.write_text(WORLD)
    flags = ("--env", f"{path}:World,turns=3", "--steps", "2", "--evaluation.every", "2", "--checkpoint-every", "1")
    # Colder, a random model repeats itself, and drafts are taken.
    flags += ("--generator.speculation", f"suffix:{EAGER}", "--generator.temperature", "0.1")
    command = tiny_run(commands, run_model, out, *flags)
    assert command.end(400) == 0, command.output
    episodes = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    assert {episode["turns"] for episode in episodes if episode["step"]} == {3}
    files = {(step, kind): EpisodeFile(path) for step, kind, path in recorded_files(out)}
    assert [*files] == [(0, "evaluated"), (1, "trained"), (2, "evaluated"), (2, "trained")]
    assert [row["reward"] for row in files[1, "trained"].listing()].count(None) == 0
    for record in files[1, "trained"]:
        second = record.episode.turns[1]
        assert second.messages == ({"role": "user", "content": "More vowels."},)
        assert second.seconds > 0 < second.response_s
        if record.trained is not None:
            assert record.trainer_gaps is not None
            assert np.abs(record.trainer_gaps).max() < 1e-3, "the trainer's logprobs are close to the engine's"
    assert any(record.trained is not None for record in files[1, "trained"])
    rows = metrics(out)
    assert sum(row.get("rollout/drafted", 0) for row in rows) > 0
    assert all(0 < row["reward"] < 3 for row in rows if "reward" in row)
    assert any("cut" in name for row in rows for name in row), rows[-1]

    path.write_text(WORLD.replace("aeiou", "aeiouy"))
    shared = tiny_flags(run_model, out)
    assert run_here("tests.tiny", *shared, *flags, "--steps", "3", monkeypatch=monkeypatch) == 1
    assert "mine.py was edited" in capsys.readouterr().err
