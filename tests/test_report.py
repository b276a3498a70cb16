"""The report of a benchmark: its numbers, its file, and its exit status when it fails."""

import getpass
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import grpo_step
from benchmarks.memory import tree_bytes, tree_sampler
from benchmarks.report import (
    BenchmarkConfig,
    BenchmarkError,
    Report,
    check_repeats,
    check_writable,
    machine,
    median,
    run_benchmark,
    spread,
)
from tools.figures import rows, shown


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Flags of a benchmark."""

    steps: int = 5


def measured(path: Path) -> dict[str, object]:
    report = Report("shuffle", Config(steps=3))
    report.rows = [{"seconds": 3.0}, {"seconds": 1.0}, {"seconds": 2.5}]
    report.measure("seconds", [3.0, 1.0, 2.5])
    report.results["speedup"] = 1.5
    report.versions["peer"] = {"trl": "1.2"}
    report.write(path)
    content: dict[str, object] = json.loads(path.read_text())
    return content


def test_the_median_of_an_even_count_is_the_mean_of_the_middle_two() -> None:
    assert median([4.0, 1.0, 10.0]) == 4.0
    assert median([4.0, 1.0, 10.0, 5.0]) == 4.5


def test_the_spread_is_the_lowest_and_the_highest() -> None:
    assert spread([4.0, 1.0, 10.0]) == (1.0, 10.0)


def test_no_measurements_give_an_error_and_no_number() -> None:
    with pytest.raises(BenchmarkError, match="nothing was measured"):
        median([])
    with pytest.raises(BenchmarkError, match="nothing was measured"):
        Report("shuffle").measure("seconds", [])


def test_too_few_repeats_for_a_median_are_refused_by_their_flag() -> None:
    check_repeats(5)
    with pytest.raises(BenchmarkError, match="--cold-repeats is 4, too few") as error:
        check_repeats(4, "--cold-repeats")
    assert "set --cold-repeats to 5 or more" in str(error.value)


def test_the_file_has_every_field_that_a_reader_needs(tmp_path: Path) -> None:
    content = measured(tmp_path / "out.json")
    assert content["benchmark"] == "shuffle"
    assert content["rows"] == [{"seconds": 3.0}, {"seconds": 1.0}, {"seconds": 2.5}]
    assert content["results"] == {"seconds": 2.5, "speedup": 1.5}
    assert content["settings"] == {"steps": 3}
    assert content["spreads"] == {"seconds": [1.0, 3.0, 3]}
    assert content["command"] == "python -m benchmarks.shuffle"
    versions = content["versions"]
    assert isinstance(versions, dict)
    assert versions["python"] == platform.python_version()
    assert versions["peer"] == {"trl": "1.2"}


def test_a_rows_text_stays_in_its_cell() -> None:
    report = {"rows": [{"model": "m", "refusal": "<|call|>", "gap": 0.25}, {"model": None}]}
    lines = rows(report, ["model", "refusal", "gap"]).splitlines()
    assert lines[2:] == ["| m | &lt;&#124;call&#124;> | 0.25 |", "|  |  |  |"]


def test_a_report_names_the_commit_and_uncommitted_changes() -> None:
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], capture_output=True, text=True, check=True).stdout.strip()

    commit = Report("shuffle").commit
    assert commit.startswith(git("rev-parse", "HEAD"))
    assert ("uncommitted changes" in commit) == bool(git("status", "--porcelain"))


def test_the_machine_is_described_but_not_named() -> None:
    machine_facts = machine()
    assert machine_facts["cores"] == len(os.sched_getaffinity(0))
    assert machine_facts["kernel"] == f"Linux {platform.release()}"
    assert isinstance(machine_facts["memory_gib"], float)
    assert machine_facts["memory_gib"] > 0
    text = json.dumps(machine_facts)
    assert platform.node() not in text
    assert f"/{getpass.getuser()}" not in text


def test_the_table_shows_median_spread_and_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        run_benchmark("shuffle", Config, lambda _, report: void(report.measure("seconds", [3.0, 1.0, 2.5])), args=[])
    assert exit.value.code == 0
    output = capsys.readouterr().out
    assert "2.5" in output
    assert "1 to 3" in output
    assert f"python {platform.python_version()}" in output


def test_a_report_replaces_an_older_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    measured(path)
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]


def test_a_number_that_is_not_finite_does_not_cost_the_report(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report = Report("shuffle")
    report.measure("seconds", [1.0, float("inf"), float("nan")])
    report.rows = [{"seconds": float("nan"), "parts": (1.0, float("-inf"))}]
    report.write(path)
    content = json.loads(path.read_text())
    assert content["results"] == {"seconds": None}
    assert content["rows"] == [{"seconds": None, "parts": [1.0, None]}]
    assert shown(None) == "-"


def test_a_write_that_fails_leaves_the_older_report_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BenchmarkError, match="No space left"):
        measured(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize(
    ("place", "why"), [("missing/out.json", "there is no folder"), (".", "it is a folder"), ("file/x", "no folder")]
)
def test_a_path_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, place: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchmarkError, match=why) as caught:
        check_writable(tmp_path / place)
    assert "--json" in caught.value.hint


def test_a_folder_that_cannot_be_written_is_refused_before_the_run() -> None:
    with pytest.raises(BenchmarkError, match="cannot be written"):
        check_writable(Path("/proc/out.json"))  # where even root makes no files


def test_a_benchmark_that_fails_exits_with_1_and_leaves_no_old_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    path.write_text('{"results": {"speedup": 9.0}}')

    def fail(config: Config, report: Report) -> None:
        report.results["speedup"] = 9.0
        raise BenchmarkError("the peer did not start", hint="install it")

    with pytest.raises(SystemExit) as exit:
        run_benchmark("shuffle", Config, fail, args=["--json", str(path)])
    assert exit.value.code == 1
    assert "shuffle failed: the peer did not start" in capsys.readouterr().err
    assert not path.exists()


def test_sigterm_unwinds_a_benchmark() -> None:
    code = (
        "import os, signal\n"
        "from benchmarks.report import BenchmarkConfig, run_benchmark\n"
        "def measure(config, report):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
        "    finally:\n"
        "        print('unwound')\n"
        "run_benchmark('shuffle', BenchmarkConfig, measure)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (143, "unwound\n")


def test_too_few_steps_for_a_median_are_refused() -> None:
    with pytest.raises(BenchmarkError, match="too few"):
        grpo_step.Config(steps=4)


def test_a_peer_that_fails_fails_the_benchmark_with_its_last_words(tmp_path: Path) -> None:
    code = "import sys; print('one', flush=True); sys.exit('no such model')"
    with (
        pytest.raises(BenchmarkError, match="no such model\nTRL ended with status 1"),
        grpo_step._process([sys.executable, "-c", code], "TRL", 60, quiet=tmp_path / "log") as child,
    ):
        assert list(child.stdout or ()) == ["one\n"]


def test_a_peer_that_hangs_is_ended_at_its_deadline(tmp_path: Path) -> None:
    code = "import signal; signal.pause()"
    with (
        pytest.raises(BenchmarkError, match="not done within 1 s"),
        grpo_step._process([sys.executable, "-c", code], "TRL", 1, quiet=tmp_path / "log") as child,
    ):
        assert grpo_step._next_row(child) is None


def test_a_side_takes_a_step_for_each_turn_and_then_ends(tmp_path: Path) -> None:
    code = "import json, sys\nprint('noise')\nfor turn in sys.stdin: print(json.dumps({'step': 1}), flush=True)"
    with grpo_step._process([sys.executable, "-c", code], "TRL", 60, quiet=tmp_path / "log") as child:
        assert [grpo_step._take_turn(child) for _ in range(3)] == [{"step": 1}] * 3
    assert child.returncode == 0


def test_memory_of_a_side_counts_each_page_once() -> None:
    code = (
        "import mmap, os\n"
        "shared, copied = mmap.mmap(-1, 32 << 20), b'1' * (32 << 20)\n"
        "shared.write(bytes(32 << 20))\n"
        "file = os.memfd_create('twice')\n"
        "os.truncate(file, 32 << 20)\n"
        "twice = [mmap.mmap(file, 32 << 20) for _ in range(2)]\n"
        "[mapping.write(bytes(32 << 20)) for mapping in twice]\n"
        "os.fork()\n"
        "private = b'1' * (64 << 20)\n"
        "shared[: 32 << 20 : 4096]\n"
        "os.write(1, b'{}\\n')\n"
        "os.read(0, 1)"
    )
    with grpo_step._process([sys.executable, "-c", code], "a side", 60) as child:
        assert grpo_step._next_row(child) == grpo_step._next_row(child) == {}
        sample = tree_sampler(child.pid)
        assert all(224 << 20 <= read() < 254 << 20 for read in (sample, lambda: tree_bytes(child.pid)))
        assert sample() == 0  # it is no higher
        child.communicate("..")
    assert tree_bytes(child.pid) == sample() == 0


def void(_: object) -> None:
    """Drop a value."""
