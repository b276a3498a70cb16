"""Figures that are older than a change of what they measure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools import figures
from tools.stale_figures import DEPENDENCIES, benchmark_paths, code, stale


def test_every_figure_depends_on_files_that_exist() -> None:
    reports = {path.stem: json.loads(path.read_text()) for path in figures.FOLDER.glob("*.json")}
    assert DEPENDENCIES.keys() == reports.keys() | figures.unmeasured()
    paths = {path for paths in DEPENDENCIES.values() for path in paths}
    paths |= {path for report in reports.values() for path in benchmark_paths(report["command"])}
    assert {path for path in paths if not (figures.ROOT / path).exists()} == set()


def test_a_figure_is_stale_after_a_change_of_its_paths_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "FOLDER", tmp_path)

    def git(*words: str) -> str:
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
        return subprocess.check_output(["git", *identity, *words], cwd=tmp_path, text=True).strip()

    def change(name: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.read_text() + "total += 1\n" if path.exists() else f"{path.stem} = total = 0\n")
        git("add", name)
        git("commit", "-qm", f"change of {name}")
        return git("rev-parse", "HEAD")

    def measured(commit: str) -> None:
        report = {"commit": commit, "command": "python -m benchmarks.sandbox"}
        (tmp_path / "sandbox.json").write_text(json.dumps(report))

    git("init", "-q")
    first = change("forge_rl/sandbox/inside/cells.py")
    measured(first)
    change("forge_rl/weights/volume.py")
    assert figures.main(figures.Config(stale=True)) == 0
    measured(f"{first} with uncommitted changes")
    assert list(stale(tmp_path)) == [f"sandbox: measured at {first[:8]} with uncommitted changes"]
    git("mv", "forge_rl/sandbox/inside/cells.py", "forge_rl/sandbox/inside/cell_loop.py")
    git("commit", "-qm", "a file moves")
    measured(first)
    assert list(stale(tmp_path)) == []
    second = change("benchmarks/sandbox.py")
    assert figures.main(figures.Config(stale=True)) == 1
    assert f"sandbox: other code since {first[:8]}: benchmarks/sandbox.py; the last" in capsys.readouterr().out
    change("forge_rl/sandbox/inside/cell_loop.py")
    measured(second)
    [line] = stale(tmp_path)
    assert line.endswith("the last commit: " + git("log", "-1", "--format=%h %s"))
    measured("0" * 40)  # as in a shallow clone
    assert list(stale(tmp_path)) == [f"sandbox: its commit {'0' * 40} is not in this clone's history"]


def test_prose_and_names_of_local_variables_are_no_code() -> None:
    before = 'LIMIT = 3\n\ndef double(value):\n    """Old."""\n    found = value * 2\n    return found\n'
    after = "LIMIT = 3  # why\n\ndef double(value: int) -> int:\n    product = value * 2\n    return product\n"
    assert code(before) == code(after)
    for old, new in (("LIMIT = 3", "LIMIT = 4"), ("* 2", "* 3"), ("return product", "return value"), ("LIMIT", "LOW")):
        assert code(after.replace(old, new)) != code(before)
    swapped = "def f(x):\n    a, b = x\n    return a - b\n"
    assert (
        code(swapped)
        == code(swapped.replace("a,", "low,").replace("a -", "low -"))
        != code(swapped.replace("a - b", "b - a"))
    )


def test_a_benchmark_includes_the_modules_of_benchmarks_that_it_imports() -> None:
    assert benchmark_paths("python -m benchmarks.trees --layers 1") == [
        "benchmarks/trees.py",
        "benchmarks/layouts.py",
        "benchmarks/ranks.py",
        "benchmarks/ports.py",
    ]
    assert "benchmarks/container_sessions.py" in benchmark_paths("python -m benchmarks.containers")
    assert "benchmarks/long_row.py" in benchmark_paths("python -m benchmarks.gpu"), "of a package"
