"""The run folder: continued by the same command, refused to another one."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.run.run_dir import check_space, choose_folder, prepare_folder, versions


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 2
    lr: float = 0.1
    display: str = "auto"


def test_the_same_command_gets_the_same_folder_until_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = choose_folder(Config(), "grpo", None)
    assert first.parent == Path("runs")
    prepare_folder(first, Config())
    assert choose_folder(Config(), "grpo", None) == first
    assert choose_folder(Config(lr=0.2), "grpo", None) != first
    (first / "summary.json").write_text(json.dumps({"steps": 2}))
    assert choose_folder(Config(), "grpo", None) == Path(f"{first}-2")


def test_another_config_is_refused_and_the_flag_named(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "run", Config())
    with pytest.raises(ConfigError, match=r"--lr was 0\.1, is 0\.2"):
        choose_folder(Config(lr=0.2), "grpo", tmp_path / "run")
    assert choose_folder(Config(steps=5, display="plain"), "grpo", tmp_path / "run") == tmp_path / "run"


def test_a_finished_run_is_continued_only_with_more_steps(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "run", Config())
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"steps": 2}))
    with pytest.raises(ConfigError, match="finished after 2 steps"):
        choose_folder(Config(), "grpo", tmp_path / "run")
    choose_folder(Config(steps=3), "grpo", tmp_path / "run")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="no run folder"):
        choose_folder(Config(), "grpo", tmp_path)


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "run", Config())
    with pytest.raises(CheckpointError, match="another process"):
        prepare_folder(tmp_path / "run", Config())


def test_too_little_space_and_an_unwritable_folder_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="free"):
        check_space(tmp_path, 1 << 60)
    check_space(tmp_path, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        prepare_folder(tmp_path / "file" / "run", Config())


def test_the_versions_name_packages_python_and_commit() -> None:
    found = versions()
    assert {"python", "git", "torch", "torchtitan"} <= set(found)
