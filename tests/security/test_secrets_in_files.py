"""Secrets of a config stay out of a run's files, and are no part of what makes it another run."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from forge_rl.metrics import Display, EventSink, PhaseClock, RunInfo, RunLog
from forge_rl.run.records.run_dir import as_flat_json, as_json, choose_folder, prepare_folder

SECRET = "hunter2"


@dataclass(frozen=True, kw_only=True)
class Judge:
    url: str = f"https://me:{SECRET}@judge.example/v1"
    api_key: str = SECRET
    hf_token: str | None = SECRET
    max_token: int = 7
    headers: dict[str, str] = field(default_factory=lambda: {"Secret": SECRET, "accept": "json"})
    hidden: str = field(default=SECRET, repr=False)


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 2
    password: str = SECRET
    judges: tuple[Judge, ...] = (Judge(),)
    judge: Judge = field(default_factory=Judge)


def test_secrets_are_left_out_of_what_files_boards_and_displays_show():
    flat = as_flat_json(Config())
    assert SECRET not in repr(flat)
    assert flat["judge.url"] == "https://judge.example/v1"
    assert (flat["judge.max_token"], flat["judge.headers.accept"], flat["steps"]) == (7, "json", 2)
    assert SECRET not in repr(as_json(Config()))
    assert not {"password", "judge.api_key"} & flat.keys()


def test_secrets_are_in_no_file_of_a_run_folder(tmp_path: Path):
    os.close(prepare_folder(tmp_path / "run", Config()))
    assert (tmp_path / "run" / "config.json").is_file()
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or SECRET not in path.read_text()


@pytest.mark.parametrize("password", ["", "another"])
def test_runs_that_differ_in_a_secret_alone_are_the_same_run(
    password: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    other = replace(Config(), password=password, judge=Judge(hf_token=None, url="https://judge.example/v1"))
    first, _ = choose_folder(Config(), "grpo", None)
    assert choose_folder(other, "grpo", None)[0] == first
    os.close(prepare_folder(first, Config()))
    assert choose_folder(other, "grpo", first) == (first, [])
    assert choose_folder(replace(other, steps=3), "grpo", None)[0] != first


def test_what_a_client_says_of_its_url_is_told_without_the_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = RunLog(Display("plain", phase_clock=PhaseClock()), EventSink(tmp_path / "events.jsonl"))
    log.start(RunInfo(recipe="grpo", model="m", folder=tmp_path, steps=1))
    for level in ("info", "warning", "fault"):
        log.event(f"https://me:{SECRET}@judge.example/v1?to=a@b cannot be reached", level)
    log.close()
    events = (tmp_path / "events.jsonl").read_text()
    assert events.count("https://judge.example/v1?to=a@b cannot be reached") == 3
    assert SECRET not in events + "".join(capsys.readouterr())
