"""A run of recipes.sft: it starts the trainer alone, and takes the same steps whatever dies."""

import json
from pathlib import Path

import pytest

from tests.commands import Command, actor_of, metrics, tiny_run

ROWS = [{"question": f"What is {n} + {m}?", "answer": str(n + m)} for n in range(1, 9) for m in range(1, 9)]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_on_examples_takes_the_same_steps_despite_deaths(
    commands: list[Command], tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    arguments = ("--tasks", str(tmp_path / "rows.jsonl"), "--trainer.ranks", "2", "--trainer.optimizer.lr", "1e-3")
    arguments += ("--evaluation.every", "3", "--evaluation.tasks", "4", "--checkpoint-every", "2")
    out = tmp_path / "run"
    command = tiny_run(commands, tiny_model, out, *arguments, "--steps", "100000", recipe="recipes.sft")
    command.wait_for("step +5/")  # before which it waits until the checkpoint of step 2 is whole
    assert {path.name.partition("-")[0] for path in (out / "logs").iterdir()} == {"trainer"}
    actor_of(command, "trainer").kill()
    command.wait_for("trainer/0 failed.*SIGKILL")
    line = command.wait_for("the trainer was restarted; the run continues from step [0-9]+$")
    back = int(line.rpartition(" ")[2])
    assert back >= 2
    command.wait_for(f"trainer was restarted(.|\n)*step +{back + 3}/", whole=True)
    command.process.kill()
    command.end()
    assert "Traceback" not in command.output
    last = metrics(out)[-1]["step"] + 2
    again = tiny_run(commands, tiny_model, out, *arguments, "--steps", str(last), recipe="recipes.sft")
    again.wait_for("continued from")
    assert again.end(240) == 0, again.output
    alone = tmp_path / "alone"
    straight = tiny_run(commands, tiny_model, alone, *arguments, "--steps", str(last), recipe="recipes.sft")
    assert straight.end(240) == 0, straight.output
    losses = [
        [(row["step"], row.get("loss", 0.0), row.get("eval/held_out/loss", 0.0)) for row in metrics(folder)]
        for folder in (out, alone)
    ]
    assert [row[0] for row in losses[0]] == list(range(last + 1))
    for row, expected in zip(*losses, strict=True):
        assert row == pytest.approx(expected, rel=1e-4), (row, expected)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["score_after"] > summary["score_before"]
    assert summary["best"]["score"] == max(-row[2] for row in losses[0] if row[2])


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_answers_are_generated_and_scored_if_the_evaluation_asks_for_them(
    commands: list[Command], tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    arguments = ("--tasks", str(tmp_path / "rows.jsonl"), "--reward", "auto", "--checkpoint-every", "1")
    arguments += ("--evaluation.every", "1", "--evaluation.tasks", "4", "--trainer.max-restarts", "1", "--steps", "5")
    command = tiny_run(commands, tiny_model, tmp_path / "run", *arguments, recipe="recipes.sft")
    command.wait_for("step +2/")
    actor_of(command, "trainer").kill()
    assert command.end(400) == 0, command.output
    assert "the trainer was restarted" in command.output
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "held_out" in row] == [0, 1, 2, 3, 4, 5]
    for row in rows:
        assert 0 <= row["held_out"] == row["eval/held_out/avg@1"] <= 1
        assert row["eval/held_out/other_versions"] == 0
        assert row["eval/held_out/loss"] > 0
        assert "groups/uniform" not in row
    assert rows[-1]["eval/held_out/loss"] < rows[0]["eval/held_out/loss"]
