"""`make check-cuda`: what it installs, its parts, their outcome, and the driver that finds no device."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.runner import Part
from tools.check_cuda import __main__ as command
from tools.check_cuda import config, imports, report
from tools.check_cuda.__main__ import PARTS

ROOT = Path(__file__).parent.parent
ROOM_BYTES = 15 << 30
"""What the environment takes, and what is downloaded for it."""


def part(name: str, code: str) -> Part:
    return Part(name=name, says="", command=(sys.executable, "-c", code, "{json}"), needs=())


def test_a_check_that_fails_ends_no_other_and_all_are_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writes = "import json, os, sys; json.dump({'seen': os.environ['CUDA_VISIBLE_DEVICES']}, open(sys.argv[1], 'w'))"
    parts = (part("first", writes), part("second", "raise SystemExit('no such name')"), part("third", writes))
    monkeypatch.setattr(command, "PARTS", parts)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert command.main([]) == 1
    output = capsys.readouterr().out
    assert "second: failed after" in output
    assert "no such name" in output
    table = output[output.index("part  ") :].splitlines()
    assert [line.split()[:2] for line in table if line.split()[0] in ("first", "second", "third")] == [
        ["first", "ok"],
        ["second", "failed"],
        ["third", "ok"],
    ]
    assert table.count("    seen ") == 2, "GPUs are hidden"
    assert command.main(["first", "third"]) == 0
    with pytest.raises(SystemExit):
        command.main(["fourth"])


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_each_check_names_what_there_is(part: Part) -> None:
    if "-m" in part.command:
        module = part.command[part.command.index("-m") + 1]
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    else:
        assert part.command[:2] == ("make", "check")


def test_figures_are_kept_and_failures_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["check", str(path)])
    assert report.report({"graphs": 8}) == 0
    assert report.report({"graphs": 9}, ["mask: 65 graphs"]) == 1
    assert json.loads(path.read_text()) == {"graphs": 9}
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED mask: 65 graphs"


def test_all_families_are_checked_and_all_modules_but_programs_imported() -> None:
    from forge_rl.engines.families import FAMILIES
    from tools.check_cuda import forward

    assert {family for family, _ in config.CASES} == set(FAMILIES)
    cases = [case for case, _ in forward.cases()]
    assert {case.family for case in cases} == set(FAMILIES)
    assert len({(case.family, case.name) for case in cases}) == len(cases)
    assert {"TP", "CP", "FSDP", "EP", "FSDP x EP x TP"} <= {case.name for case in cases if case.family == "gpt_oss"}
    modules = list(imports.modules())
    assert {"forge_rl", "forge_rl.gateway.agents", "recipes.grpo", "apps.gateway"} <= set(modules)
    assert not {name for name in modules if name.startswith("recipes.agents.") or ".peers." in name}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_a_driver_that_finds_no_device_takes_the_place_of_a_real_one() -> None:
    code = (
        "from tools.check_cuda.libcuda import load_libcuda; load_libcuda()\n"
        "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "100"


def test_the_checks_install_a_gpus_packages_into_their_own_folder() -> None:
    make = ["make", "--no-print-directory", "--dry-run", "--always-make", "check-cuda", "PYTHON=python3"]
    lines = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    (checked,) = (line for line in lines if "cuda_machine" in line)
    assert checked.endswith("--without-driver")
    installs = [line for line in lines if "uv pip install" in line]
    assert all(line.startswith(".cuda/bin/uv") for line in installs)
    assert sum("--require-hashes" in line for line in installs) == 1
    assert lines[-1].startswith(".cuda/bin/python -m tools.check_cuda")


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_what_a_cpu_can_prove_of_cuda_holds() -> None:
    if not ((ROOT / ".cuda").is_dir() or os.environ.get("FORGE_RL_CHECK_CUDA")):
        pytest.skip("it installs 9 GB into .cuda: set FORGE_RL_CHECK_CUDA=1, or run make check-cuda once")
    if not (ROOT / ".cuda").is_dir() and shutil.disk_usage(ROOT).free < ROOM_BYTES:
        pytest.skip(f"the disk has no room for {ROOM_BYTES >> 30} GB")
    parts = [part.name for part in PARTS if part.name != "check"]
    done = subprocess.run(["make", "check-cuda", f"ARGS={' '.join(parts)}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
