"""Training on a user's own file: one command, and the same again after a stop, which goes on at the exact next task."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from forge_rl.data.data_config import DataConfig
from tests.commands import Command, metrics, tiny_run
from tests.fake_engine import FOLDER

STEPS, GROUPS = 8, 2
WAIT_S = 400.0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_on_a_file_resumes_at_the_exact_next_task(
    commands: list[Command], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    path, out = tmp_path / "sums.jsonl", tmp_path / "run"
    rows = [{"problem": f"{n} + 1 = ?", "solution": n + 1, "n": n} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = f"{path}:question=problem,answer=solution,id=n"
    source = DataConfig().build([tasks], seed=0)
    expected = [[source.draw_from("sums").id for _ in range(GROUPS)] for _ in range(STEPS)]
    assert len({id_ for batch in expected for id_ in batch}) < STEPS * GROUPS, "an epoch ends on the way"

    def run(steps: int = STEPS) -> Command:
        flags = ("--tasks", tasks, "--steps", str(steps), "--checkpoint-every", "1", "--evaluation.every", "0")
        return tiny_run(commands, tiny_model, out, *flags, recipe="tests.tiny_own")

    first = run()
    first.wait_for(r"sums: 12 rows; \d+ held out")
    first.wait_for("trained 3:", WAIT_S)
    first.process.kill()
    first.end()
    second = run()
    second.wait_for("trained 5:", WAIT_S)
    second.process.send_signal(signal.SIGINT)
    assert second.end() == 130
    third = run()
    assert third.end(WAIT_S) == 0, third.output
    trained, begins = {}, []
    for command in (first, second, third):
        lines = [found for line in command.lines if (found := re.fullmatch(r"trained (\d+): (.*)", line))]
        begins.append(int(lines[0][1]))
        trained |= {int(found[1]): found[2].split() for found in lines}
    assert begins[0] == 1
    assert begins[1] >= 2, "it was continued: only the newest checkpoint may not have been whole at the kill"
    assert begins[2] >= 6
    assert [sorted(trained[step + 1]) for step in range(STEPS)] == [sorted(batch) for batch in expected]
    assert metrics(out)[-1]["data/sums/epoch"] > 1
    assert "sums: all tasks were drawn; epoch 2 begins" in "".join(command.output for command in commands)

    path.write_text(path.read_text().replace("11 + 1", "11 + 2"))
    changed = run(STEPS + 1)
    assert changed.end(WAIT_S) == 1
    assert not any(line.startswith("generator starting") for line in changed.lines)
    said = r"error: the files of 'sums' have changed since the run was saved.*\n.*restore the old files"
    assert re.search(said, changed.output)
