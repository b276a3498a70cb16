"""Rows of SWE-bench with their images: fixes are rewarded, nothing is not, and neither are tricks."""

import asyncio
import json
import os
import pickle
import shutil
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pygments
import pytest

from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.envs.protocol import Step, reset_env, step_env
from forge_rl.errors import ConfigError, TaskError
from forge_rl.worlds.swebench import SweBenchEnv
from forge_rl.worlds.swebench_rows import END, EXIT_CODE, START, statuses_of, with_exit_code
from tests.container_images import DEBIAN, PYTHON, host_layer, layer, packages_layer, written_layout
from tests.sandbox_pool import loop_with_pool, only_pytest
from tests.swebench_tasks import FUNCTIONS, SHELL_TEST, fix, repository_files, tricks, write_rows


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    yield from loop_with_pool("process")


def played(loop: asyncio.Runner, environment: str, commands: dict[str, str | None]) -> dict[str, Step]:
    """Play an episode of each of these tasks, at the same time; return how they ended."""
    factory = pickle.loads(pickle.dumps(build_environment(f"{environment},held_out_share=0")))
    [source] = sources_of(factory, 0).values()
    tasks = {task.id: task for task in (source.draw() for _ in factory.tasks)}

    async def play(name: str) -> Step:
        env = factory(tasks[name])
        try:
            await reset_env(env)
            texts = [*([] if commands[name] is None else [f"```sh\n{commands[name]}\n```"]), "Done."]
            for text in texts:
                step = await step_env(env, text, parsed=(text, ()))
            return step
        finally:
            await env.close()

    async def work() -> list[Step]:
        return await asyncio.gather(*map(play, commands))

    return dict(zip(commands, loop.run(work()), strict=True))


@pytest.fixture(scope="module")
def shell_row(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flag of one row whose tests need a shell only."""
    folder = tmp_path_factory.mktemp("rows")
    layers = [host_layer(folder / "made"), layer(folder / "made", "files", {"testbed/answer": "", "testbed/kept": ""})]
    reference = written_layout(folder / "layout", layers)
    row = {"instance_id": "a__b-1", "repo": "a/b", "problem_statement": "Answer.", "image": reference}
    row |= {"FAIL_TO_PASS": ["t::fixed"], "PASS_TO_PASS": ["t::kept"], "eval_script": SHELL_TEST}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    return f"swebench:{folder / 'rows.jsonl'},images={folder / 'store'},memory_mib=256,local=true"


@pytest.mark.parametrize(
    ("commands", "reward", "share"),
    [
        (None, 0.0, 0.5),
        ("pwd > where; echo 42 > answer", 1.0, 1.0),
        ("echo 42 > answer; rm kept", 0.0, 0.5),
        ("echo 41 > answer", 0.0, 0.5),
        ("echo 42 > answer; cat /dev/zero > full", 0.0, 0.0),
        ("echo 'PASSED t::fixed' > answer", 0.0, 0.5),
        ("printf '#!/bin/true' > /bin/cat", 0.0, 0.5),
    ],
)
def test_the_rows_own_script_scores_what_the_model_changed(
    loop: asyncio.Runner, shell_row: str, commands: str | None, reward: float, share: float
):
    step = played(loop, shell_row, {"a__b-1": commands})["a__b-1"]
    assert (step.done, step.reward, dict(step.parts)) == (True, reward, {"tests_passed": share})


def test_images_are_named_as_data_sets_name_them(tmp_path: Path):
    row = {"instance_id": "Astropy__astropy-12907", "problem_statement": "x", "FAIL_TO_PASS": '["a.py::b"]'}
    r2e = {"repo_name": "pillow", "commit_hash": "ab12", "docker_image": "namanjain12/pillow_final:ab12"}
    outcomes = r'{"Test.\u001b[1ma\u001b[0m": "PASSED", "Test.b": "FAILED"}'
    r2e |= {"problem_statement": "x", "expected_output_json": outcomes}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n\n{json.dumps(r2e)}\n")
    first, second = (task.truth for task in SweBenchEnv(str(tmp_path / "rows.jsonl")).tasks)
    assert first["image"] == "swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"
    assert "pytest -rA --tb=no -p no:cacheprovider 'a.py'" in first["script"]
    assert (second["image"], second["fail_to_pass"]) == ("namanjain12/pillow_final:ab12", ["Test.a"])
    assert "bash run_tests.sh" in second["script"]
    gym = SweBenchEnv(str(tmp_path / "rows.jsonl"), image="xingyaoww/sweb.eval.x86_64.{id_s}")
    assert gym.tasks[0].truth["image"] == "xingyaoww/sweb.eval.x86_64.astropy_s_astropy-12907"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"rows.jsonl:1: "),
        ("[1]", "rows.jsonl:1: "),
        ('{"instance_id": "a", "problem_statement": "x"}', "there is no 'FAIL_TO_PASS'"),
        ('{"instance_id": "a", "problem_statement": "x", "FAIL_TO_PASS": []}', "names no test"),
        ('{"instance_id": "a", "problem_statement": "x", "FAIL_TO_PASS": ["a"], "eval_script": "ls"}', "prints no"),
        (
            '{"instance_id": "a", "problem_statement": "x", "FAIL_TO_PASS": ["a"], "image": "oci:/home"}',
            "names the image 'oci:/home'",
        ),
    ],
)
def test_rows_that_cannot_be_read_are_named(tmp_path: Path, text: str, message: str):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(TaskError, match=message):
        SweBenchEnv(str(tmp_path / "rows.jsonl"))


def test_a_script_keeps_the_characters_of_the_patch_that_it_applies(tmp_path: Path):
    patch = "--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-a\r\n+b\x0c\u2028\r\n"
    script = f"git apply - <<'END'\n{patch}END\n: '{START}'\npytest\n: '{END}'\n"
    row = {"instance_id": "a__b-1", "problem_statement": "x\u2028y", "FAIL_TO_PASS": ["t.py::t"]}
    rows = [{**row, "eval_script": script}, {**row, "instance_id": "a__b-2", "test_patch": patch}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    tasks = SweBenchEnv(str(tmp_path / "rows.jsonl")).tasks
    assert [task.prompt for task in tasks] == ["x\u2028y"] * 2
    assert all(f"\n{patch}" in str(task.truth["script"]) for task in tasks)
    assert str(tasks[0].truth["script"]).endswith(f": '{END}'\necho \"{EXIT_CODE}: $SWEBENCH_TEST_EXIT_CODE\"\n")


def test_files_without_rows_are_refused(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no tasks"):
        SweBenchEnv(str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match="cannot be read"):
        SweBenchEnv(str(tmp_path / "none.jsonl"))


def test_outcomes_are_read_from_the_lines_that_pytest_prints():
    log = "x PASSED a\nPASSED a.py::T::b\nFAILED a.py::c - assert 1 == 2\nERROR d.py\nPASSEDa\nSKIPPED [1] e.py:1: no\n"
    expected = {"a.py::T::b": "PASSED", "a.py::c": "FAILED", "d.py": "ERROR", "[1] e.py:1: no": "SKIPPED"}
    assert statuses_of(log, short_names=False) == expected
    assert statuses_of(log, short_names=True)["T.b"] == "PASSED"
    # As the data sets name them: up to the first space.
    log = "PASSED a.py::t[no args]\nPASSED a.py::t[x - y]\n"
    log += "PASSED a.py::u[a b]\nFAILED a.py::u[a c] - no\nPASSED a.py::u[a d]\n"
    statuses = statuses_of(log, short_names=False)
    assert [statuses[name] for name in ("a.py::t[no", "a.py::t[x", "a.py::t[x - y]")] == ["PASSED"] * 3
    assert (statuses["a.py::u[a"], statuses["a.py::u[a d]"]) == ("FAILED", "PASSED")
    coloured = "\x1b[32mPASSED\x1b[0m a.py::T::\x1b[1mb[x - y]\x1b[0m\n"
    assert statuses_of(coloured, short_names=True) == {"T.b[x - y]": "PASSED"}
    lines = with_exit_code("a\n: '>>>>> Start Test Output'\nb\n: '>>>>> End Test Output'\nc\n").splitlines()
    assert lines[3:6] == [
        "SWEBENCH_TEST_EXIT_CODE=$?",
        ": '>>>>> End Test Output'",
        'echo ">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE"',
    ]


@pytest.fixture(scope="module")
def python_image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder, and an image of Debian's Python with pytest, git and ten repositories."""
    folder = tmp_path_factory.mktemp("python")
    packages = packages_layer(folder / "made", "python", (*DEBIAN, *PYTHON, "git", "libpcre2-8-0"))
    (packages / "usr" / "bin" / "python3").symlink_to("python3.11")
    if not os.path.lexists(packages / "bin" / "sh"):
        (packages / "bin" / "sh").symlink_to("dash")
    site = folder / "made" / "site" / "files"
    only_pytest(site / "opt" / "site")
    shutil.copytree(Path(pygments.__file__).parent, site / "opt" / "site" / "pygments")
    ours = Path(pytest.__file__).parents[1]
    shutil.copy(ours / "py.py", site / "opt" / "site")
    [about] = ours.glob("pluggy-*.dist-info")
    shutil.copytree(about, site / "opt" / "site" / about.name)
    repositories = layer(folder / "made", "repositories", repository_files())
    settings = {"Env": ["PYTHONPATH=/opt/site"], "WorkingDir": "/testbed"}
    return folder, written_layout(folder / "layout", [packages, site, repositories], **settings)


def flag(image: tuple[Path, str], **columns: str) -> str:
    folder, reference = image
    write_rows(folder / "rows.jsonl", reference, **columns)
    return f"swebench:{folder / 'rows.jsonl'},images={folder / 'store'},memory_mib=512,local=true"


def check(loop: asyncio.Runner, environment: str, tried: Collection[str] = tuple(tricks("clamp"))) -> None:
    """Check that fixes are rewarded, and neither nothing nor a trick."""
    names = {f"acme__{name}-1": name for name in FUNCTIONS}
    solved = played(loop, environment, {task: fix(name) for task, name in names.items()})
    assert {task: step.reward for task, step in solved.items()} == dict.fromkeys(names, 1.0)
    empty = played(loop, environment, dict.fromkeys(names))
    assert {task: (step.reward, step.parts["tests_passed"]) for task, step in empty.items()} == dict.fromkeys(
        names, (0.0, 0.5)
    )
    for trick in tried:
        cheated = played(loop, environment, {task: tricks(name)[trick] for task, name in names.items()})
        assert {task: step.reward for task, step in cheated.items()} == dict.fromkeys(names, 0.0), trick


@pytest.mark.long
def test_ten_repositories_with_pytest(loop: asyncio.Runner, python_image: tuple[Path, str]):
    if sys.version_info[:2] != (3, 11):
        pytest.skip("pytest is copied from this Python, and Debian's is 3.11")
    check(loop, flag(python_image))


@pytest.mark.nightly
def test_ten_repositories_with_the_parsers_of_swebench(loop: asyncio.Runner, python_image: tuple[Path, str]):
    if sys.version_info[:2] != (3, 11):
        pytest.skip("pytest is copied from this Python, and Debian's is 3.11")
    python = os.environ.get("SWEBENCH_PYTHON", "")
    environment = flag(python_image, log_parser="parse_log_pytest") + (f",python={python}" if python else "")
    check(loop, environment, ["a plugin", "a log at the end"])  # each log takes a second to read
