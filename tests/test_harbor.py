"""Task folders of Harbor, read and listed; those that need a container are refused by name."""

from __future__ import annotations

import asyncio
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.envs.protocol import Step, reset_env, step_env
from forge_rl.errors import ConfigError, TaskError
from forge_rl.types import Task
from forge_rl.worlds.harbor import read_tasks
from forge_rl.worlds.harbor_trial import memory_bytes, parsed_reward
from tests.sandbox_pool import kill_servers, loop_with_pool

IMAGE = 'schema_version = "1.4"\n[task]\nname = "acme/sort"\n[environment]\ndocker_image = "ubuntu:24.04"\n'


def make_task(folder: Path, toml: str = "", instruction: str | None = "Do it.", **files: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    if instruction is not None:
        (folder / "instruction.md").write_text(instruction)
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_sh", ".sh")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def test_tasks_are_read_from_a_folder_of_them_and_say_what_they_need(tmp_path: Path):
    make_task(tmp_path / "a", IMAGE)
    make_task(tmp_path / "more" / "b", environment__Dockerfile="FROM scratch", tests__test_sh="exit 0")
    composed = {"environment__Dockerfile": "FROM scratch", "environment__docker-compose.yaml": ""}
    make_task(tmp_path / "more" / "f", tests__test_sh="exit 0", **composed)
    make_task(tmp_path / "more" / "g", IMAGE.replace("sort", "ready"), tests__test_sh="exit 0")
    make_task(tmp_path / "c", "[agent]\ntimeout_sec = 60.0\n")
    script = make_task(tmp_path / "d")
    (script / "tests").mkdir()
    (script / "tests" / "test.sh").write_text("exit 0")
    steps = make_task(tmp_path / "e", '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n', None)
    others = {"gpu": "[environment]\ngpus = 1", "apart": '[verifier]\nenvironment_mode = "separate"'}
    others |= {"where": '[environment]\nworkdir = "/usr/x"', "key": '[verifier.env]\nKEY = "${KEY}"'}
    for name, toml in others.items():
        make_task(tmp_path / "others" / name, toml, tests__test_sh="exit 0")
    for name in ("one", "two"):
        (steps / "steps" / name).mkdir(parents=True)
        (steps / "steps" / name / "instruction.md").write_text(f"Do {name}.")
    has_builder = shutil.which("buildah") or shutil.which("podman")
    assert {task.name: task.needs for task in read_tasks(tmp_path)} == {
        "acme/sort": "tests/test.sh, which a task with an image has",
        "acme/ready": "",
        "b": "" if has_builder else "buildah or podman, to build environment/Dockerfile",
        "f": "several containers from environment/docker-compose.yaml",
        "c": "",
        "d": "",
        "e": "2 steps",
        "apart": "a container of its own for the verifier",
        "gpu": "a GPU",
        "key": "the variable ${KEY} of this machine",
        "where": "the folder '/usr/x'",
    }
    assert read_tasks(steps)[0].instructions == ["Do one.", "Do two."]


async def test_tasks_that_need_a_container_are_refused_or_left_out(tmp_path: Path):
    for number in range(10):
        make_task(tmp_path / f"t{number}", IMAGE.replace("sort", f"sort{number}"))
    for number in range(3):
        make_task(tmp_path / f"u{number}", instruction=f"What is {number} + 1?")
    with pytest.raises(
        ConfigError, match=r"10 of 13 tasks in .*\n  acme/sort0: tests/test.sh.*\n(.*\n)+  and 2 more"
    ) as caught:
        sources_of(build_environment(f"harbor:{tmp_path}"), 0)
    assert "skip=true" in caught.value.hint
    environment = build_environment(f"harbor:{tmp_path},skip=true,held_out_share=0.4")
    (source,) = sources_of(environment, 0).values()
    drawn = {source.draw().id for _ in range(6)}
    held_out = {task.id for task in source.held_out(9)}
    assert (drawn | held_out, drawn & held_out) == ({"u0", "u1", "u2"}, set())
    task = source.draw()
    assert (await environment(task).reset()).messages == task.messages
    assert task.truth["folder"] == str(tmp_path / task.id)


@pytest.mark.parametrize(
    ("toml", "instruction", "message"),
    [
        ("[task\n", "Do it.", r"task.toml cannot be read: .*line 1"),
        ("", None, "has no instruction"),
        ("[[steps]]\n", "Do it.", "has no instruction: KeyError"),
        ('environment = "x"', "Do it.", "task.toml: .* are tables"),
        ('[environment]\nmemory = "2"', "Do it.", "task.toml: the memory is '2', not a size such as '2G'"),
        ('[environment]\nmemory_mb = "much"', "Do it.", "task.toml: the memory is 'much'"),
        ("[verifier]\ntimeout_sec = -1", "Do it.", "task.toml: .*timeout_sec. is -1"),
    ],
)
def test_a_task_that_cannot_be_read_names_its_file(tmp_path: Path, toml: str, instruction: str | None, message: str):
    make_task(tmp_path / "a", toml, instruction)
    with pytest.raises(TaskError, match=message):
        build_environment(f"harbor:{tmp_path}")


def test_a_task_of_another_source_is_refused_by_name(tmp_path: Path):
    make_task(tmp_path / "a", IMAGE)
    other = Task(id="1", source="sums", messages=({"role": "user", "content": "1 + 1"},))
    with pytest.raises(TaskError, match="'1' of 'sums' is none of --env harbor") as caught:
        build_environment(f"harbor:{tmp_path}")(other)
    assert "omit --tasks" in caught.value.hint


def test_a_folder_without_tasks_and_two_of_one_name_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="has no Harbor task"):
        build_environment(f"harbor:{tmp_path}")
    make_task(tmp_path / "a", IMAGE)
    make_task(tmp_path / "b", IMAGE)
    with pytest.raises(TaskError, match="both named 'acme/sort'"):
        build_environment(f"harbor:{tmp_path}")


TEST = """#!/bin/bash
python3 -c 'import usercustomize' 2> /dev/null && echo 9 > /logs/verifier/reward.txt && exit
sort -n list | cmp -s - /tests/sorted && [ "$(cat kept)" = "$KEPT" ] && [ -e ~/note ] && [ "$PWD" = /srv/work ]
echo "{\\"reward\\": $((1 - $?)), \\"lines\\": $(wc -l < list)}" > /logs/verifier/reward.json
"""
CONFIG = """[environment]
workdir = "/srv/work"
memory_mb = 512
[verifier.env]
KEPT = "yes"
[verifier]
timeout_sec = 5.0
"""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    yield from loop_with_pool("process")


def played(loop: asyncio.Runner, folder: Path, *commands: str, killed_after: int = -1) -> list[Step]:
    """Play an episode of a folder's only task, which ends with an answer; kill the sandbox's servers after a turn."""

    async def work() -> list[Step]:
        made = pickle.loads(pickle.dumps(build_environment(f"harbor:{folder},held_out_share=0")))
        [source] = sources_of(made, 0).values()
        env, steps = made(source.draw()), []
        try:
            assert "```sh" in (await reset_env(env)).messages[0]["content"]
            for place, text in enumerate([*(f"```sh\n{each}\n```" for each in commands), "Done."]):
                steps.append(await step_env(env, text, parsed=(text, ())))
                if place == killed_after:
                    await kill_servers("process")
        finally:
            await env.close()
        return steps

    return loop.run(work())


@pytest.fixture
def sorting(tmp_path: Path) -> Path:
    files = {"environment__list": "2\n1\n", "tests__sorted": "1\n2\n3\n", "tests__test_sh": TEST}
    return make_task(tmp_path / "sorting", CONFIG, **files)


@pytest.mark.parametrize("killed_after", [-1, 0, 1])
def test_a_test_script_scores_the_files_that_the_model_left(loop: asyncio.Runner, sorting: Path, killed_after: int):
    work = "echo 3 >> list; echo yes > kept; touch ~/note"
    seen, _, end = played(loop, sorting, "cat list; ls -d /tests", work, killed_after=killed_after)
    assert "2\n1\nls: cannot access '/tests'" in str(seen.messages[0]["content"])
    assert (end.done, end.reward, dict(end.parts)) == (True, 1.0, {"reward": 1.0, "lines": 3.0})


def test_what_the_model_leaves_cannot_write_the_reward_or_change_the_tests(loop: asyncio.Runner, sorting: Path):
    trick = (
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 0 /logs/verifier; "
        "site=$(python3 -m site --user-site); mkdir -p $site; touch $site/usercustomize.py; "
        "mkdir /tests; (while true; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done) > /dev/null 2>&1 &"
    )
    _, end = played(loop, sorting, trick)
    assert (end.reward, dict(end.parts)) == (0.0, {"reward": 0.0, "lines": 2.0})


@pytest.mark.parametrize(
    ("script", "reward"),
    [("sleep 60", 0.0), ("curl none; exit 3", "curl"), ("echo x > /logs/verifier/reward.txt", "x")],
)
def test_a_script_without_a_reward_is_an_error_and_one_that_hangs_is_0(
    loop: asyncio.Runner, tmp_path: Path, script: str, reward: object
):
    folder = make_task(tmp_path / "a", "[verifier]\ntimeout_sec = 1.0\n", tests__test_sh=f"#!/bin/sh\n{script}\n")
    if reward == 0.0:
        assert played(loop, folder)[-1].reward == 0.0
        return
    with pytest.raises(TaskError, match=f"(?s)reward.*{reward}"):
        played(loop, folder)


def test_tests_that_cannot_judge_what_the_model_left_score_it_0(loop: asyncio.Runner, tmp_path: Path):
    script = "#!/bin/sh\n[ -e list ] && echo 0.5 > /logs/verifier/reward.txt\n"
    folder = make_task(tmp_path / "a", CONFIG, environment__list="1", tests__test_sh=script)
    assert played(loop, folder, "true")[-1].reward == 0.5
    assert played(loop, folder, "rm list")[-1].reward == 0.0
    assert played(loop, folder, "head -c 200M /dev/zero > full")[-1].reward == 0.0


@pytest.mark.parametrize(
    ("environment", "mib"),
    [({}, 7), ({"memory_mb": 512}, 512), ({"memory": "2G"}, 2048), ({"memory": "1.5g"}, 1536), ({"memory": "64M"}, 64)],
)
def test_memory_is_a_number_of_mib_or_a_text_with_a_unit(environment: dict[str, object], mib: int):
    assert memory_bytes(environment, 7) == mib << 20


@pytest.mark.parametrize("text", ["[1]", "{}", '{"a": "1"}', '{"a": 1e999}', "nan", "[" * 9999])
def test_a_reward_is_made_of_finite_numbers(text: str):
    assert parsed_reward('reward.json\n{"a": 1, "b": 0.5}', "t") == (0.75, {"a": 1.0, "b": 0.5})
    with pytest.raises(TaskError, match="t has no reward"):
        parsed_reward(f"reward.{'txt' if text == 'nan' else 'json'}\n{text}", "t")
