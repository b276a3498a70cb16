"""`--env repository:FILE`: the model changes a repository in a shell, and hidden tests decide the reward."""

import asyncio
import json
import pickle
import tempfile
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest

from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.envs.protocol import Step, reset_env, step_env
from forge_rl.errors import ConfigError, TaskError
from forge_rl.sandbox import SandboxError, shared_pool
from forge_rl.sandbox.durable import DivergedError
from forge_rl.types import ToolCall
from forge_rl.worlds.repository import RepositoryEnv
from tests.sandbox_pool import kill_servers, only_pytest
from tests.test_repositories import commit, git

TEST = "from add import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "add.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "test_old.py").write_text("import add\n\ndef test_old():\n    assert add.add(1, 0) == 1\n")
    commit(folder)
    return folder


@pytest.fixture(scope="module")
def packages() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # sessions have a /tmp of their own
        yield only_pytest(Path(folder))


@pytest.fixture
def environment(repository: Path, packages: Path, tmp_path: Path) -> RepositoryEnv:
    row = {
        "repository": str(repository),
        "revision": git(repository, "rev-parse", "HEAD"),
        "problem": "add subtracts.",
        "tests": ["test_add.py::test_add", "test_old.py"],
        "test_files": {"test_add.py": TEST},
    }
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    flag = f"repository:{tmp_path / 'tasks.jsonl'},packages={packages},store={tmp_path / 'store'},max_turns=4"
    return pickle.loads(pickle.dumps(build_environment(f"{flag},held_out_share=0,memory_mib=512")))


def played(environment: RepositoryEnv, *completions: str) -> list[Step]:
    """Play an episode of the first task; skips where this machine cannot isolate sessions."""

    async def main() -> list[Step]:
        try:
            [source] = sources_of(environment, 0).values()
        except SandboxError as error:
            pytest.skip(str(error))
        env = environment(source.draw())
        try:
            assert "```sh" in (await reset_env(env)).messages[0]["content"]
            return [await step_env(env, each, parsed=(each, ())) for each in completions]
        finally:
            await env.close()

    return asyncio.run(main())


def test_a_repaired_repository_is_rewarded_and_its_output_shown(environment: RepositoryEnv):
    look, kill, repair, end = played(
        environment,
        "```sh\nls; cat none\n```",
        "```bash\nsed -i s/-/+/ add.py; kill -9 $PPID\n```",
        "So:\n```\npython -m pytest -q test_old.py 2>&1 | tail -n 1; git --version | cut -c -3; pwd\n```",
        "It adds now.",
    )
    assert (
        look.messages[0]["content"]
        == "Output:\nadd.py\ntest_old.py\ncat: none: No such file or directory\nexit status 1"
    )
    assert "files are kept" in kill.messages[0]["content"]
    assert "1 passed" in repair.messages[0]["content"]
    assert "/workspace" in repair.messages[0]["content"]
    assert (end.done, end.reward, dict(end.parts)) == (True, 1.0, {"tests_passed": 1.0})


async def test_a_session_that_dies_between_commands_is_replaced_with_its_files(environment: RepositoryEnv):
    async def main() -> Step:
        env = environment(environment.tasks[0])
        try:
            await reset_env(env)
            await env.session.run("echo 1 > kept; (sleep 0.1; kill -9 $PPID) > /dev/null 2>&1 &")
            await asyncio.wait_for(env.session._session._body.watched.exited.wait(), 20)
            assert await env.session.run("cat kept") == "1"
            await env.session.run("sed -i s/-/+/ add.py; (sleep 0.1; kill -9 $PPID) > /dev/null 2>&1 &")
            await asyncio.wait_for(env.session._session._body.watched.exited.wait(), 20)
            return await step_env(env, "Done.", parsed=("Done.", ()))
        finally:
            await env.close()

    assert (await main()).reward == 1.0


async def test_a_server_that_dies_costs_no_turn(environment: RepositoryEnv):
    async def killed_in(work: Awaitable[str]) -> str:
        running = asyncio.ensure_future(work)
        await asyncio.sleep(0.5)
        await kill_servers(packages=environment.package_folders)
        return await running

    async def main() -> tuple[list[str], Step]:
        env = environment(environment.tasks[0])
        await reset_env(env)
        try:
            stamp = await env.session.run(
                "sed -i s/-/+/ add.py; date +%N > stamp; echo 1 in 0.$RANDOM s; cat stamp > /dev/null"
            )
            await kill_servers(packages=environment.package_folders)
            kept = await env.session.run(
                "test $(cat stamp) -gt 0 && git diff --no-index --stat /dev/null add.py | tail -n 1"
            )
            half = await killed_in(env.session.run("echo 1 >> log; sleep 1.5; cat log"))
            return [stamp[:4], kept, half], await step_env(env, "Done.", parsed=("Done.", ()))
        finally:
            await env.close()

    shown, end = await main()
    assert (shown[0], shown[2]) == ("1 in", "1")
    assert "1 file changed" in shown[1]
    assert end.reward == 1.0


async def test_a_fork_that_answers_at_once_is_scored_on_the_files_so_far(environment: RepositoryEnv):
    [source] = sources_of(environment, 0).values()
    env = environment(source.draw())
    try:
        await reset_env(env)
        text = "```sh\nsed -i s/-/+/ add.py\n```"
        await step_env(env, text, parsed=(text, ()))
        fork = await env.fork()
        try:
            assert (await step_env(fork, "Done.", parsed=("Done.", ()))).reward == 1.0
        finally:
            await fork.close()
    finally:
        await env.close()


async def test_commands_that_cannot_be_rerun_are_an_error_of_the_episode(environment: RepositoryEnv):
    async def main() -> None:
        env = environment(environment.tasks[0])
        try:
            await env.session.run("date +%N")
            running = asyncio.ensure_future(env.session.run("sleep 2"))
            await asyncio.sleep(0.5)
            await kill_servers(packages=environment.package_folders)
            await running
        finally:
            await env.close()

    with pytest.raises(DivergedError, match="command 1 of an episode showed"):
        await main()


def test_edited_tests_do_not_count_and_part_of_the_tests_is_a_part(environment: RepositoryEnv):
    first, end = played(
        environment,
        "```sh\necho 'def test_add(): pass' > test_add.py; echo 'def test_old(): pass' > test_old.py\n"
        "printf 'def add(a, b):\\n    return 1\\n' > add.py\n```",
        "Done.",
    )
    assert first.messages[0]["content"] == "Output:\n(no output)"
    assert (end.reward, dict(end.parts)) == (0.0, {"tests_passed": 0.5})


async def test_a_model_trained_to_call_tools_sees_and_calls_the_shell(environment: RepositoryEnv):
    async def main() -> tuple[str, Step]:
        env = RepositoryEnv(environment.file, store=environment.store, tool=True)(environment.tasks[0])
        try:
            [tool] = (await reset_env(env)).tools
            call = ToolCall(id="1", name="shell", arguments='{"command": "cat add.py | head -n 1"}')
            return json.dumps(tool), await step_env(env, "", parsed=("", (call,)))
        finally:
            await env.close()

    tool, step = await main()
    assert '"name": "shell"' in tool
    assert [each["content"] for each in step.messages] == ["def add(a, b):"]


def test_rows_of_swe_bench_are_read(tmp_path: Path):
    row = {
        "repo": "owner/name",
        "base_commit": "1" * 40,
        "problem_statement": "It fails.",
        "instance_id": "owner__name-1",
        "FAIL_TO_PASS": '["tests/a.py::b", "tests/a.py::c[1]", "tests/a.py::d[no", "tests/a.py::d[or"]',
        "PASS_TO_PASS": "[]",
        "test_patch": "diff --git a/x b/x\n",
    }
    (tmp_path / "swe.jsonl").write_text(json.dumps(row))
    [task] = RepositoryEnv(str(tmp_path / "swe.jsonl"), store=str(tmp_path)).tasks
    assert (task.id, task.messages[0]["content"]) == ("owner__name-1", "It fails.")
    assert task.truth["repository"] == "https://github.com/owner/name"
    assert task.truth["tests"] == ["tests/a.py::b", "tests/a.py::c[1]", "tests/a.py::d"]
    assert task.truth["revision"] == "1" * 40


@pytest.mark.parametrize(
    ("text", "options", "error", "said"),
    [
        (
            '{"repository": "x", "problem": "p", "tests": ["a"]}',
            "",
            TaskError,
            r"tasks.jsonl:1: there is no 'revision'",
        ),
        ('{"repository": "x", "revision": "r", "problem": "p"}', "", TaskError, "no tests were given"),
        ("{", "", TaskError, "tasks.jsonl:1: Expecting"),
        ("", "", ConfigError, "has no tasks"),
        ("{}", ",packages=/nowhere", ConfigError, "is not a folder"),
        ("{}", ",memory_mib=1", ConfigError, "memory_mib"),
        ("{}", ",nothing=1", ConfigError, "its options are"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, options: str, error: type, said: str, tmp_path: Path):
    (tmp_path / "tasks.jsonl").write_text(text)
    with pytest.raises(error, match=said):
        build_environment(f"repository:{tmp_path / 'tasks.jsonl'}{options}")


def test_rows_and_their_strings_may_have_any_character_of_json(tmp_path: Path):
    row = {"repository": "x", "revision": "r", "problem": "a\u2028b\x85c", "tests": ["a"]}
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps(row, ensure_ascii=False)}\n\n")
    [task] = RepositoryEnv(str(tmp_path / "tasks.jsonl"), store=str(tmp_path)).tasks
    assert task.messages[0]["content"] == row["problem"]


async def test_an_episode_that_is_cancelled_while_its_session_starts_keeps_no_place(
    environment: RepositoryEnv, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("forge_rl.worlds.repository._START", "import time\nprint({packages!r})\ntime.sleep(1000)")
    pool = await shared_pool(environment.package_folders)
    places = pool._places._value
    env = environment(environment.tasks[0])
    await reset_env(env)
    running = asyncio.ensure_future(env.session.run("true"))
    while pool._places._value == places:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # until the session runs what it is started with
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await env.close()
    assert pool._places._value == places
