"""`benchmarks.gpu`, as far as no device is needed: facts, parts that fail, hang or leave processes, figures, table."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import machine, runner
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.runner import Outcome, Part, run_parts, table


def part(name: str, code: str, **values: Any) -> Part:
    return Part(name=name, says="", command=(sys.executable, "-c", code, "{json}"), **{"needs": (), **values})


WRITES = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'gb_s': 12.5}))"
CHILD = (
    "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True); print('it hangs', flush=True)"
)


def assert_no_part_runs() -> None:
    around = os.environ.get(runner._MARK)  # check-cuda runs these tests as a part
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            variables = dict(variable.partition(b"=")[::2] for variable in path.read_bytes().split(b"\0"))
            left = variables.get(runner._MARK.encode())
            assert left is None or left.decode() == around, "what left a part's session ends with it"


def test_a_part_that_fails_or_hangs_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_GRACE_S", 0.5)
    parts = [
        part("good", WRITES),
        part("bad", f"{WRITES}; print('and then'); raise SystemExit('no room')"),
        part("hung", f"{CHILD}; import time; time.sleep(600)", limit_s=1.0),
        part("lacking", WRITES, needs=("gpu", "torch")),
        part("last", WRITES),
    ]
    outcomes_told: list[Outcome] = []
    outcomes = run_parts(parts, frozenset({"torch"}), tmp_path, outcomes_told.append)
    assert outcomes == outcomes_told
    assert [outcome.status for outcome in outcomes] == ["ok", "failed", "timed out", "skipped", "ok"]
    assert [outcome.figures for outcome in outcomes] == [{"gb_s": 12.5}, {"gb_s": 12.5}, {}, {}, {"gb_s": 12.5}]
    assert outcomes[1].said.splitlines() == ["and then", "no room"]
    assert outcomes[2].said == "it hangs"
    assert outcomes[3].said == "needs gpu"
    assert_no_part_runs()
    lines = table(outcomes).splitlines()
    assert "    gb_s 12.5" in lines
    assert any(line.startswith("hung") and "timed out" in line for line in lines)


def test_sigterm_ends_the_running_part_too(tmp_path: Path) -> None:
    def not_replaced(*_: object) -> None:
        raise AssertionError("SIGTERM would end this process at once")

    before = signal.signal(signal.SIGTERM, not_replaced)
    running = part("running", f"{CHILD}; import os, time; os.kill(os.getppid(), 15); time.sleep(600)")
    try:
        with pytest.raises(SystemExit) as caught:
            run_parts([running, part("next", WRITES)], (), tmp_path, lambda _: None)
        assert caught.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is not_replaced
        assert_no_part_runs()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_counts_of_tests_are_figures(tmp_path: Path) -> None:
    (outcome,) = run_parts([part("tests", "print('2 passed, 21 skipped in 3.01s')")], (), tmp_path, lambda _: None)
    assert outcome.figures == {"passed": 2, "skipped": 21}


def test_the_file_has_what_was_measured_when_the_next_part_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    looks = f"import json; print(len(json.load(open({str(path)!r}))['parts']), 'passed')"
    monkeypatch.setattr(
        command, "PARTS", (part("first", WRITES), part("second", looks), part("bad", "raise SystemExit(3)"))
    )
    assert command.main(["--json", str(path)]) == 1
    content = json.loads(path.read_text())
    assert {"date", "commit", "gpus", "versions", "cores", "kernel"} <= content.keys()
    assert [part["figures"] for part in content["parts"]] == [{"gb_s": 12.5}, {"passed": 1}, {}]
    assert "bad                failed" in capsys.readouterr().out
    assert command.main(["--json", str(path), "--only", "first"]) == 0
    with pytest.raises(SystemExit):
        command.main(["--only", "nothing"])


GPU_LINES = """NVIDIA H200, 143771 MiB, 4 MiB, 580.65.06, 5, 16
NVIDIA H200, 143771 MiB, 4 MiB, 580.65.06, 5, 16
"""


@pytest.mark.parametrize(
    ("visible", "parts"), [(None, {"gpu", "gpus"}), ("1", {"gpu"}), ("", set()), ("GPU-1,GPU-2", {"gpu", "gpus"})]
)
def test_what_a_machine_has_is_found_out(
    visible: str | None, parts: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{GPU_LINES}'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpus()[1]["memory.total"] == "143771 MiB"
    assert machine.has() - {"torch", "torchtitan", "vllm", "monarch", "transformers", "pytest"} == parts


def test_without_a_gpu_all_parts_are_skipped(tmp_path: Path) -> None:
    outcomes = run_parts(PARTS, frozenset({"torch", "vllm", "monarch", "pytest"}), tmp_path, lambda _: None)
    assert {outcome.status for outcome in outcomes} == {"skipped"}
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_each_part_names_what_there_is(part: Part) -> None:
    words = list(part.command)
    if "benchmarks.gpu.parts" in words:
        module, _, function = words[words.index("benchmarks.gpu.parts") + 1].rpartition(".")
        source = (machine.ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"\ndef {function}() -> dict[str, float]:" in source
    for word in words:
        if word.startswith("benchmarks."):
            assert list(machine.ROOT.glob(f"{word.split('.')[0]}/{word.split('.')[1]}*"))
        if word.startswith("tests/"):
            assert (machine.ROOT / word).is_file()
