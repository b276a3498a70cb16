"""Training on a user's own file: one command, and the same again after a kill, which goes on at the exact next task."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forge_rl.data.data_config import DataConfig
from tests.commands import Command, metrics, tiny_flags, tiny_run
from tests.fake_engine import FOLDER
from tests.test_run import run_here

STEPS, GROUPS = 8, 2
WAIT_S = 400.0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_on_a_file_resumes_at_the_exact_next_task(
    commands: list[Command],
    run_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    path, out = tmp_path / "sums.jsonl", tmp_path / "run"
    rows = [{"problem": f"{n} + 1 = ?", "solution": n + 1, "n": n} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = f"{path}:question=problem,answer=solution,id=n"
    source = DataConfig().build([tasks], seed=0)
    expected = [[source.draw_from("sums").id for _ in range(GROUPS)] for _ in range(STEPS)]
    assert len({id_ for batch in expected for id_ in batch}) < STEPS * GROUPS, "an epoch ends on the way"

    flags = ("--tasks", tasks, "--checkpoint-every", "1", "--evaluation.every", "0", "--steps")

    def run() -> Command:
        return tiny_run(commands, run_model, out, *flags, str(STEPS), recipe="tests.tiny_own")

    first = run()
    first.wait_for(r"sums: 12 rows; \d+ held out")
    first.wait_for("trained 3:", WAIT_S)
    first.process.kill()
    first.end()
    second = run()
    assert second.end(WAIT_S) == 0, second.output
    trained, begins = {}, []
    for command in (first, second):
        lines = [match for line in command.lines if (match := re.fullmatch(r"trained (\d+): (.*)", line))]
        begins.append(int(lines[0][1]))
        trained |= {int(match[1]): match[2].split() for match in lines}
    assert begins[0] == 1
    assert begins[1] >= 2, "it was continued: only the newest checkpoint may not have been whole at the kill"
    assert [sorted(trained[step + 1]) for step in range(STEPS)] == [sorted(batch) for batch in expected]
    assert metrics(out)[-1]["data/sums/epoch"] > 1
    assert "sums: all tasks were drawn; epoch 2 begins" in "".join(command.output for command in commands)

    path.write_text(path.read_text().replace("11 + 1", "11 + 2"))
    shared = tiny_flags(run_model, out)
    assert run_here("tests.tiny_own", *shared, *flags, str(STEPS + 1), monkeypatch=monkeypatch) == 1
    printed = capsys.readouterr()
    assert "generator starting" not in printed.out
    message = r"error: the files of 'sums' have changed since the run was saved.*\n.*restore the old files"
    assert re.search(message, printed.err)
