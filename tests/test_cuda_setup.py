"""Setting up for CUDA: what the machine must have is said before anything is downloaded, and by which way it comes."""

import os
import subprocess
from pathlib import Path

import pytest

from tools import cuda_machine
from tools.cuda_machine import problems

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("driver", "programs", "header", "messages"),
    [
        ("580.65.06", {"gcc"}, True, []),
        ("595.1", {"clang"}, True, []),
        ("570.133.20", {"gcc"}, True, ["is '570.133.20': CUDA 13 needs 580"]),
        ("[N/A]", {"gcc"}, True, ["needs 580"]),
        (None, {"gcc"}, True, ["no NVIDIA driver"]),
        ("580.65.06", {"python3"}, True, ["apt install gcc"]),
        ("580.65.06", {"gcc"}, False, ["Python.h is missing"]),
        ("550.1", set(), False, ["550.1", "compiler", "Python.h"]),
    ],
)
def test_what_a_machine_lacks_is_said(
    driver: str | None, programs: set[str], header: bool, messages: list[str], tmp_path: Path
) -> None:
    if header:
        (tmp_path / "Python.h").touch()
    lines = problems(driver=driver, include=tmp_path, find_program=lambda name: name if name in programs else None)
    assert len(lines) == len(messages)
    assert all(part in line for part, line in zip(messages, lines, strict=True))


@pytest.mark.parametrize(("answer", "version"), [("580.65.06\n580.65.06\n", "580.65.06"), ("", None)])
def test_a_driver_says_its_version(
    answer: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cuda_machine.driver_version() is None
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
    program.chmod(0o700)
    assert cuda_machine.driver_version() == version


@pytest.mark.parametrize(("driver", "status"), [("570.1", 1), ("580.1", 0), (None, 0)])
def test_only_a_gpu_that_could_not_be_used_stops_the_setup(
    driver: str | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_machine, "driver_version", lambda: driver)
    monkeypatch.setattr(cuda_machine, "problems", lambda *, driver, include: [] if driver == "580.1" else ["lacking"])
    assert cuda_machine.main() == status


@pytest.mark.parametrize(
    ("extra", "links", "folder"),
    [("cpu", "", "/wheels"), ("cuda", "", ""), ("cuda", "/wheels", ""), ("cuda", "/own", "/own")],
)
def test_a_folder_of_wheels_for_cpus_is_not_used_for_cuda(extra: str, links: str, folder: str, tmp_path: Path) -> None:
    rule = '\n.PHONY: said\nsaid:\n\t@echo "[$$UV_FIND_LINKS] $(BACKEND)"\n'
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text() + rule)
    command = ["make", "--silent", "said", f"EXTRA={extra}", f"VENV={tmp_path}"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PIP_FIND_LINKS": "/wheels", "UV_FIND_LINKS": links},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"[{folder}]"
    if extra == "cuda":
        command = ["make", "--dry-run", "--always-make", "setup", "EXTRA=cuda", f"VENV={tmp_path}"]
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        (check,) = (number for number, line in enumerate(lines) if "cuda_machine" in line)
        assert check < min(number for number, line in enumerate(lines) if "uv pip install" in line)


def test_a_setup_without_a_gpu_says_that_it_skips_the_driver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_machine, "driver_version", lambda: "570.1")
    assert cuda_machine.main(["--without-driver"]) == 0
    assert "the driver is not checked" in capsys.readouterr().err
    assert cuda_machine.main([]) == 1
