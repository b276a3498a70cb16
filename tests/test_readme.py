"""README's section "Your own", run as it stands there: its files, and its commands on a tiny model."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.commands import Command

README = (Path(__file__).parent.parent / "README.md").read_text()
SECTION = README.partition("\n## Your own\n")[2].partition("\n## ")[0]
FENCES = re.findall(r"```(\w+)\n(.*?)```", SECTION, flags=re.DOTALL)
FILES = {re.match(r"# (\S+)\n", text)[1]: text for kind, text in FENCES if kind == "python"}  # type: ignore[index]
COMMANDS = [line for kind, text in FENCES if kind == "sh" for line in text.splitlines()]
ROWS = [{"problem": f"What is {n} + {m}?", "solution": str(n + m)} for n in range(1, 7) for m in range(1, 7)]

SMALL = (
    *("--steps", "1", "--groups-per-batch", "2", "--group-size", "2", "--evaluation.tasks", "0", "--display", "plain"),
    *("--generator.max-model-tokens", "512", "--generator.max-new-tokens", "8", "--generator.kv-cache-gib", "0.25"),
    *("--checkpoint-every", "0"),
)


def test_the_section_has_a_command_for_each_way_in():
    assert set(FILES) == {"mine.py", "shop.py", "world.py", "agent.py"}
    assert len(COMMANDS) == 6


@pytest.mark.long
@pytest.mark.parametrize("line", COMMANDS, ids=[line.split("-m ")[1][:60] for line in COMMANDS])
def test_each_command_runs(
    line: str, commands: list[Command], tiny_model: Path, tmp_path: Path, nothing_left: None, monkeypatch
):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    words = shlex.split(line.replace('"python ', f'"{sys.executable} '))
    assert words[:2] == ["python", "-m"]
    small = (*SMALL, "--out", str(tmp_path / "run")) if "recipes." in line else ()
    command = Command(*words[2:], "--model", str(tiny_model), *small, cwd=tmp_path)
    commands.append(command)
    assert command.end(400) == 0, command.output
    if small:
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["steps"] == 1
