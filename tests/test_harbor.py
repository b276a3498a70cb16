"""Task folders of Harbor, read and listed; those that need a container are refused by name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.envs.harbor import read_tasks
from forge_rl.errors import ConfigError, TaskError

IMAGE = 'schema_version = "1.4"\n[task]\nname = "acme/sort"\n[environment]\ndocker_image = "ubuntu:24.04"\n'


def make_task(folder: Path, toml: str = "", instruction: str | None = "Do it.", **files: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    if instruction is not None:
        (folder / "instruction.md").write_text(instruction)
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def test_tasks_are_read_from_a_folder_of_them_and_say_what_they_need(tmp_path: Path):
    make_task(tmp_path / "a", IMAGE)
    make_task(tmp_path / "more" / "b", environment__Dockerfile="FROM scratch")
    make_task(tmp_path / "c", "[agent]\ntimeout_sec = 60.0\n")
    script = make_task(tmp_path / "d")
    (script / "tests").mkdir()
    (script / "tests" / "test.sh").write_text("exit 0")
    steps = make_task(tmp_path / "e", '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n', None)
    for name in ("one", "two"):
        (steps / "steps" / name).mkdir(parents=True)
        (steps / "steps" / name / "instruction.md").write_text(f"Do {name}.")
    assert {task.name: task.needs for task in read_tasks(tmp_path)} == {
        "acme/sort": "a container from ubuntu:24.04",
        "b": "a container from environment/Dockerfile",
        "c": "",
        "d": "a place to run tests/test.sh",
        "e": "2 steps",
    }
    assert read_tasks(steps)[0].instructions == ["Do one.", "Do two."]


def test_those_that_need_a_container_are_refused_by_name_and_count_or_left_out(tmp_path: Path):
    for number in range(10):
        make_task(tmp_path / f"t{number}", IMAGE.replace("sort", f"sort{number}"))
    for number in range(3):
        make_task(tmp_path / f"u{number}", instruction=f"What is {number} + 1?")
    with pytest.raises(
        ConfigError, match=r"10 of 13 tasks in .*\n  acme/sort0: .* ubuntu:24.04\n(.*\n)+  and 2 more"
    ) as caught:
        sources_of(build_environment(f"harbor:{tmp_path}"), 0)
    assert "skip=true" in caught.value.hint
    environment = build_environment(f"harbor:{tmp_path},skip=true,held_out_share=0.4")
    (source,) = sources_of(environment, 0).values()
    drawn = {source.draw().id for _ in range(6)}
    held_out = {task.id for task in source.held_out(9)}
    assert (drawn | held_out, drawn & held_out) == ({"u0", "u1", "u2"}, set())
    task = source.draw()
    assert asyncio.run(environment(task).reset()).messages == task.messages
    assert task.truth["folder"] == str(tmp_path / task.id)


@pytest.mark.parametrize(
    ("toml", "instruction", "message"),
    [
        ("[task\n", "Do it.", r"task.toml cannot be read: .*line 1"),
        ("", None, "has no instruction"),
        ("[[steps]]\n", "Do it.", "has no instruction: KeyError"),
    ],
)
def test_a_task_that_cannot_be_read_names_its_file(tmp_path: Path, toml: str, instruction: str | None, message: str):
    make_task(tmp_path / "a", toml, instruction)
    with pytest.raises(TaskError, match=message):
        build_environment(f"harbor:{tmp_path}")


def test_a_folder_without_tasks_and_two_of_one_name_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="has no Harbor task"):
        build_environment(f"harbor:{tmp_path}")
    make_task(tmp_path / "a", IMAGE)
    make_task(tmp_path / "b", IMAGE)
    with pytest.raises(TaskError, match="both named 'acme/sort'"):
        build_environment(f"harbor:{tmp_path}")
