"""Data sets of Harbor's registry, from a registry and a repository on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.errors import ConfigError


def commit(repository: Path, text: str) -> str:
    """Write two tasks with an instruction, and commit them."""
    for name in ("one", "two"):
        folder = repository / "tasks" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.toml").write_text('version = "1.0"\n')
        (folder / "instruction.md").write_text(f"{text} {name}.")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for arguments in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", text)):
        subprocess.run(["git", *arguments], cwd=repository, check=True, capture_output=True)
    out = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, check=True, capture_output=True, text=True)
    return out.stdout.strip()


def dataset(repository: Path, version: str, revision: str, *names: str, **changes: str) -> dict[str, Any]:
    rows = [{"name": name, "git_url": str(repository), "git_commit_id": revision, "path": f"tasks/{name}"} | changes
            for name in names]  # fmt: skip
    return {"name": "small-bench", "version": version, "description": "", "tasks": rows}


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    repository = tmp_path / "repository"
    repository.mkdir()
    old, new = commit(repository, "Old"), commit(repository, "New")
    file = tmp_path / "registry.json"
    sets = [dataset(repository, "2.0", old, "one"), dataset(repository, "10.0", new, "one", "two")]
    file.write_text(json.dumps(sets))
    return file


def prompts(registry: Path, name: str) -> list[str]:
    environment = build_environment(f"harbor:{name},registry={registry},datasets={registry.parent / 'cache'}")
    sources_of(environment, 0)
    return [task.instructions[0] for task in environment.tasks]  # type: ignore[attr-defined]


def test_a_data_set_is_fetched_at_its_commits_and_needs_no_network_again(registry: Path):
    assert prompts(registry, "small-bench@2.0") == ["Old one."]
    assert prompts(registry, "small-bench") == ["New one.", "New two."], "10.0 is newer than 2.0"
    shutil.rmtree(registry.parent / "repository")
    registry.unlink()
    assert prompts(registry, "small-bench@2.0") == ["Old one."]
    assert prompts(registry, "small-bench") == ["New one.", "New two."]


async def test_it_is_fetched_within_an_event_loop(registry: Path):
    assert prompts(registry, "small-bench@2.0") == ["Old one."]


@pytest.mark.parametrize(
    ("name", "told"),
    [("smal-bench", "no data set 'smal-bench'.*did you mean small-bench"), ("small-bench@3", "no version '3'.*2.0")],
)
def test_unknown_names_are_told_with_near_ones(registry: Path, name: str, told: str):
    with pytest.raises(ConfigError) as caught:
        prompts(registry, name)
    assert re.search(told, f"{caught.value.message} {caught.value.hint}")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"path": "../../etc"}, "not inside its repository"),
        ({"path": "/etc"}, "not inside its repository"),
        ({"name": "../x"}, "not inside its repository"),
        ({"path": "tasks/three"}, "has no task 'tasks/three'"),
        ({"git_commit_id": "main"}, "not a commit's full hash"),
        ({"git_commit_id": "0" * 40}, "cannot be fetched"),
        ({"git_url": "ext::sh -c true"}, "is not a repository"),
    ],
)
def test_what_could_do_harm_or_change_is_refused(registry: Path, changes: dict[str, str], told: str):
    rows = json.loads(registry.read_text())
    rows[0]["tasks"][0] |= changes
    registry.write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match=told):
        prompts(registry, "small-bench@2.0")
    assert not [*(registry.parent / "cache").glob("small-bench@2.0-*/")]


def test_a_link_out_of_a_task_is_refused(registry: Path):
    repository = registry.parent / "repository"
    os.symlink("/etc/passwd", repository / "tasks" / "one" / "solution")
    registry.write_text(json.dumps([dataset(repository, "1", commit(repository, "Link"), "one")]))
    with pytest.raises(ConfigError, match="solution is a link out of the task's folder"):
        prompts(registry, "small-bench")


def test_a_registry_that_cannot_be_read_and_no_git_are_told(registry: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"registry .*/none.json cannot be read"):
        prompts(registry.parent / "none.json", "small-bench")
    registry.with_name("bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a list of data sets"):
        prompts(registry.with_name("bad.json"), "small-bench")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="git, which is not installed"):
        prompts(registry, "small-bench")
