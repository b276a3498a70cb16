"""Figures that are older than a change of what they measure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools import figures
from tools.measure_figures import measure
from tools.python_code import read_code
from tools.stale_figures import DEPENDENCIES, benchmark_paths, stale


def test_every_figure_depends_on_files_that_exist() -> None:
    reports = {path.stem: json.loads(path.read_text()) for path in figures.FOLDER.glob("*.json")}
    assert DEPENDENCIES.keys() == reports.keys() | figures.unmeasured()
    paths = {path for paths in DEPENDENCIES.values() for path in paths}
    paths |= {path for report in reports.values() for path in benchmark_paths(report["command"])}
    assert {path for path in paths if not (figures.ROOT / path).exists()} == set()


class Repository:
    """A Git checkout with a figure of benchmarks.sandbox in its root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "-q")

    def git(self, *words: str) -> str:
        """Run a Git command; return what it prints."""
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
        return subprocess.check_output(["git", *identity, *words], cwd=self.folder, text=True).strip()

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def move(self, source: str, target: str) -> None:
        """Move a file."""
        (self.folder / target).parent.mkdir(parents=True, exist_ok=True)
        self.git("mv", source, target)

    def commit(self, message: str) -> str:
        """Commit all files; return the commit."""
        self.git("add", "-A")
        self.git("commit", "-qm", message)
        return self.git("rev-parse", "HEAD")

    def change(self, name: str) -> str:
        """Append a statement to a file, or write it, and commit; return the commit."""
        path = self.folder / name
        self.write(name, path.read_text() + "total += 1\n" if path.exists() else f"{path.stem} = total = 0\n")
        return self.commit(f"change of {name}")

    def measure(self, commit: str) -> None:
        """Write the figure of a commit."""
        report = {"commit": commit, "command": "python -m benchmarks.sandbox"}
        (self.folder / "sandbox.json").write_text(json.dumps(report))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    repository = Repository(tmp_path)
    repository.write(".gitignore", "sandbox.json\n")
    return repository


def test_a_figure_is_stale_after_a_change_of_its_paths_only(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = repository.folder
    monkeypatch.setattr(figures, "FOLDER", folder)
    first = repository.change("forge_rl/sandbox/inside/cells.py")
    repository.measure(first)
    repository.change("forge_rl/weights/volume.py")
    assert figures.main(figures.Config(stale=True)) == 0
    repository.measure(f"{first} with uncommitted changes")
    assert list(stale(folder)) == [f"sandbox: measured at {first[:8]} with uncommitted changes"]
    repository.move("forge_rl/sandbox/inside/cells.py", "forge_rl/sandbox/inside/cell_loop.py")
    repository.commit("a file moves")
    repository.measure(first)
    assert list(stale(folder)) == []
    second = repository.change("benchmarks/sandbox.py")
    assert figures.main(figures.Config(stale=True)) == 1
    assert f"sandbox: other code since {first[:8]}: benchmarks/sandbox.py; the last" in capsys.readouterr().out
    repository.change("forge_rl/sandbox/inside/cell_loop.py")
    repository.measure(second)
    [line] = stale(folder)
    assert line.endswith("the last commit: " + repository.git("log", "-1", "--format=%h %s"))
    repository.measure("0" * 40)  # as in a shallow clone
    assert list(stale(folder)) == [f"sandbox: its commit {'0' * 40} is not in this clone's history"]


BEFORE = '''
from library.maths import scale as by
from typing import Any

LIMIT = 3

class Doubling:
    """Doubles."""

    factor: int = 2

    def __call__(self, values: Any) -> list[Any]:
        """Old."""
        found: list[Any] = []
        for each in values:
            try:
                found.append(by(each) * self.factor)
            except TypeError as error:
                raise ValueError(f"{each} is wrong", LIMIT) from error
        return [each for each in found if each]

def apart(pair):
    low, high = pair
    def inner():
        nonlocal low
        low = high
        return low
    return low - high + inner()
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Old.", "New."),
        ("LIMIT = 3", "LIMIT: int = 3  # why"),
        ("found", "products"),
        ("each", "value"),
        ("error", "problem"),
        ("low", "first"),
        ("inner", "swap"),
        (" is wrong", " cannot be doubled"),
        ("values: Any", "values: list[float]"),
        ("scale as by", "scale"),
        ("from typing import Any\n", "from typing import TYPE_CHECKING, Any\nif TYPE_CHECKING:\n    import this\n"),
    ],
)
def test_what_computes_nothing_is_no_code(old: str, new: str) -> None:
    after = BEFORE.replace(old, new).replace("by(", "scale(" if new == "scale" else "by(")
    assert after != BEFORE
    assert read_code(after) == read_code(BEFORE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("LIMIT", "BOUND"),
        ("factor: int", "factor: float"),
        ("= 2", "= 2.0"),
        ("factor", "ratio"),
        ("low, high", "high, low"),
        ("ValueError", "KeyError"),
        ('wrong", LIMIT', 'wrong", 0'),
        (" if each]", " if found]"),
        ("return low - high", "return low - LIMIT"),
        ("nonlocal low", "pass"),
        ("library.maths", "library.others"),
        ("import scale as", "import double as"),
        ("from typing", "import library.patches\nfrom typing"),
        ("def apart(pair)", "def apart(values)"),
        ("each for each in found", "found for each in found"),
    ],
)
def test_what_may_act_is_code(old: str, new: str) -> None:
    after = BEFORE.replace(old, new)
    assert after != BEFORE
    assert read_code(after) != read_code(BEFORE)


def test_a_name_of_an_outer_scope_is_not_that_of_an_inner_one() -> None:
    shadowed = "def f():\n    def g():\n        x = 1\n        return x\n    return x + g()\n"
    assert read_code(shadowed) == read_code(shadowed.replace("x = 1", "y = 1").replace("return x\n ", "return y\n "))
    assert read_code(shadowed) != read_code(shadowed.replace("x = 1", "y = 1"))
    assert read_code(shadowed) != read_code(shadowed.replace("x", "y")), "a global one"
    by_name = "def f():\n    x = 1\n    return locals()\n"
    assert read_code(by_name) != read_code(by_name.replace("x", "y"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "{name: [x for x in rows] + [other] for name in rows}",
            "{name: [name for x in rows] + [other] for name in rows}",
        ),
        ("def f():\n    import forge_rl.a\n", "def f():\n    import forge_rl.b\n"),
        ("try:\n    import forge_rl.a\nfinally:\n    pass\n", "try:\n    import forge_rl.b\nfinally:\n    pass\n"),
    ],
)
def test_scopes_that_shadow_names_and_imports_within_blocks_are_code(before: str, after: str) -> None:
    assert read_code(before) != read_code(after)


def test_moved_code_is_the_same_and_changed_code_is_not(repository: Repository) -> None:
    repository.write("forge_rl/sandbox/pool.py", "from forge_rl.system.sums import add\n\ntotal = add(1, 2)\n")
    repository.write("forge_rl/sandbox/host.py", "HOST = 1\n")
    repository.write("forge_rl/sandbox/shared.py", "HOST = 2\n")
    repository.write("forge_rl/system/sums.py", "def add(a, b):\n    return a + b\n")
    first = repository.commit("a start")

    def stale_files(*moves: tuple[str, str], **texts: str) -> str:
        """Return what is stale after moves and new texts, by the end of the file's name; undo them then."""
        for source, target in moves:
            repository.move(source, target)
        for name, text in texts.items():
            repository.write(name.replace("__", "/") + ".py", text)
        repository.commit("a change")
        lines = list(stale(repository.folder))
        repository.git("reset", "-q", "--hard", first)
        return " ".join(line.partition(": ")[2].partition("; ")[0] for line in lines)

    repository.measure(first)
    assert stale_files(("forge_rl/sandbox/host.py", "forge_rl/runtime/hosting.py")) == ""
    moved_import = "from forge_rl.arithmetic import add\n\ntotal = add(1, 2)\n"
    sums = ("forge_rl/system/sums.py", "forge_rl/arithmetic.py")
    assert stale_files(sums, forge_rl__sandbox__pool=moved_import) == ""
    passed_on = {"forge_rl__arithmetic": "from forge_rl.system.sums import add as add\n"}
    assert stale_files(forge_rl__sandbox__pool=moved_import, **passed_on) == ""
    other = {"forge_rl__arithmetic": "def add(a, b):\n    return a - b\n"}
    assert "pool.py" in stale_files(forge_rl__sandbox__pool=moved_import, **other)
    moved_elsewhere = ("forge_rl/sandbox/host.py", "forge_rl/runtime/hosting.py")
    assert "host.py" in stale_files(moved_elsewhere, forge_rl__runtime__hosting="HOST = 3\n")
    swapped = {"forge_rl__sandbox__host": "HOST = 2\n", "forge_rl__sandbox__shared": "HOST = 1\n"}
    assert "host.py and 1 more" in stale_files(**swapped)
    (repository.folder / "forge_rl/sandbox/host.py").unlink()
    assert "host.py" in stale_files(), "a file is gone"
    assert "host.py" in stale_files(forge_rl__sandbox__host="HOST = = 1\n")


def test_a_benchmark_includes_the_modules_of_benchmarks_that_it_imports() -> None:
    assert benchmark_paths("python -m benchmarks.trees --layers 1") == [
        "benchmarks/trees.py",
        "benchmarks/layouts.py",
        "benchmarks/ranks.py",
        "benchmarks/ports.py",
    ]
    assert "benchmarks/container_sessions.py" in benchmark_paths("python -m benchmarks.containers")
    assert "benchmarks/long_row.py" in benchmark_paths("python -m benchmarks.gpu"), "of a package"


def test_figures_are_measured_by_their_own_commands_and_a_failure_keeps_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "writer.py").write_text(  # a figure's file in the checkout stays until all are measured
        "import json, pathlib, sys\n"
        "_, kind, _, path = sys.argv\n"
        "if kind == 'bad': sys.exit(1)\n"
        "assert 'command' in pathlib.Path('figures/good.json').read_text()\n"
        "pathlib.Path(path).write_text(json.dumps({'value': kind}))\n"
    )
    folder = tmp_path / "figures"
    folder.mkdir()
    for name in ("good", "bad"):
        (folder / f"{name}.json").write_text(json.dumps({"command": f"python -m writer {name}"}))
    bad_text = (folder / "bad.json").read_text()
    assert measure(folder, ["bad", "good"], tmp_path) == ["bad"]
    assert json.loads((folder / "good.json").read_text()) == {"value": "good"}
    assert (folder / "bad.json").read_text() == bad_text


def test_a_figure_without_a_file_is_not_measured() -> None:
    with pytest.raises(SystemExit, match=r"no thing\.json"):
        figures.measure_again(["thing"])
