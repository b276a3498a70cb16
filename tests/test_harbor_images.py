"""Harbor tasks that have an image: solutions are rewarded, nothing is not, and neither are tricks."""

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.envs.protocol import reset_env, step_env
from forge_rl.errors import TaskError
from forge_rl.sandbox.images.image import ImageSettings
from forge_rl.sandbox.workspaces.changes import Change, Entry
from forge_rl.sandbox.workspaces.image_changes import LayerNames, counted
from tests.container_images import host_layer, image_of, layer, written_layout
from tests.harbor_tasks import FILES, TASKS, TRICKS, write_tasks
from tests.sandbox_pool import loop_with_pool

NEXT = "\n# next completion\n"


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    yield from loop_with_pool("process")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flag of the ten tasks, with a store of their image."""
    folder = tmp_path_factory.mktemp("harbor")
    layers = [host_layer(folder / "made"), layer(folder / "made", "files", FILES)]
    (layers[1] / "app" / "run.sh").chmod(0o644)
    write_tasks(folder / "tasks", written_layout(folder / "layout", layers, WorkingDir="/app", Env=["A=b"]))
    return f"harbor:{folder / 'tasks'},images={folder / 'store'},held_out_share=0,local=true"


def rewards(loop: asyncio.Runner, environment: str, names: list[str], commands: dict[str, str]) -> dict[str, float]:
    """Play an episode of each task at the same time; return the rewards."""
    factory = pickle.loads(pickle.dumps(build_environment(environment)))
    [source] = sources_of(factory, 0).values()
    tasks = {task.id: task for task in (source.draw() for _ in TASKS)}

    async def play(name: str) -> float:
        env = factory(tasks[name])
        try:
            await reset_env(env)
            blocks = commands[name].split(NEXT) if name in commands else []
            texts = [*(f"```sh\n{block}\n```" for block in blocks), "Done."]
            for text in texts:
                step = await step_env(env, text, parsed=(text, ()))
            assert step.done
            assert step.reward is not None
            return step.reward
        finally:
            await env.close()

    async def work() -> list[float]:
        return await asyncio.gather(*map(play, names))

    return dict(zip(names, loop.run(work()), strict=True))


def test_solutions_are_rewarded_and_nothing_is_not(loop: asyncio.Runner, environment: str):
    names = [*TASKS]
    solutions = {name: f"cd /app\n{solution}" for name, (_, solution, _) in TASKS.items()}
    assert rewards(loop, environment, names, solutions) == dict.fromkeys(names, 1.0)
    assert rewards(loop, environment, names, {}) == dict.fromkeys(names, 0.0)


@pytest.mark.parametrize("trick", [*TRICKS])
def test_tricks_are_not_rewarded(loop: asyncio.Runner, environment: str, trick: str):
    names = [*TASKS]
    assert rewards(loop, environment, names, dict.fromkeys(names, TRICKS[trick])) == dict.fromkeys(names, 0.0)


@pytest.mark.parametrize("trick", [*TRICKS])
def test_a_solution_counts_beside_a_trick(loop: asyncio.Runner, environment: str, trick: str):
    commands = {"sort": f"cd /app\n{TASKS['sort'][1]}\n{TRICKS[trick]}"}
    assert rewards(loop, environment, ["sort"], commands) == {"sort": 1.0}


def test_changes_that_would_run_before_tests_do_not_count(tmp_path: Path):
    files = {"usr/bin/python3": "", "usr/lib/python3/json.py": "", "usr/local/lib/x.py": "", "bin/sh": ""}
    files |= {"opt/venv/lib/python3.12/site-packages/a/b.py": "", "app/venv/lib/python3.12/argparse.py": ""}
    files |= {"usr/lib/x86_64-linux-gnu/libm.so.6": ""}
    image = image_of(layer(tmp_path, "layer", files), env={"PATH": "/opt/venv/bin:/usr/bin:/bin", "PYTHONPATH": "/src"})
    assert isinstance(image.settings, ImageSettings)
    file, folder = Entry(mode=0o100755, data=b""), Entry(mode=0o040000)
    link = Entry(mode=0o120000, data=b"/app")
    added = {
        "app/main.py": True,
        "app/pyproject.toml": True,
        "usr/bin/new-program": True,
        "usr/local/lib/y.py": True,
        "etc/nginx.conf": True,
        "home/bob/notes": True,
        "root/.gitconfig": True,
        "srv/a/bin/python3": True,
        "usr/bin/pytest": False,
        "opt/venv/bin/python3": False,
        "opt/venv/bin/sh": False,
        "conftest.py": False,
        "json.py": False,
        "app/sitecustomize.py": False,
        "usr/lib/python3/evil.pth": False,
        "usr/lib/python3/plugin-1.dist-info/entry_points.txt": False,
        "home/bob/.bashrc": False,
        "root/.local/bin/env": False,
        "logs/verifier/reward.txt": False,
        "tests/test.sh": False,
        "etc/ld.so.preload": False,
        "etc/nsswitch.conf": False,
        "etc/ssl/openssl.cnf": False,
        "etc/ssl/certs/new.pem": True,
        "etc/alternatives/new": True,
        "etc/pip.conf": False,
        "etc/apt/sources.list.d/new.list": False,
        "root/.curlrc": False,
        "opt/venv/lib/libm.so.6": False,
        "opt/venv/lib/libnew.so.1": True,
        "usr/local/lib/libm.so.6": False,
        "src/new.py": True,
        "src/json.py": False,
        "usr/lib/python3/new.py": True,
        "opt/venv/lib/python3.12/site-packages/new.py": True,
        "opt/venv/lib/python3.12/site-packages/a/new.py": True,
        "app/venv/lib/python3.12/argparse.so": True,  # of no Python that is on the way
        "usr/lib/python3/json.so": False,
        "usr/lib/python3/a.py": False,
        "usr/local/lib/python3.12/dist-packages/json.py": False,
        "opt/venv/lib/python3.12/site-packages/a/b.so": False,
    }
    changes = [Change(path=path, before=None, after=file) for path in added]
    changes += [Change(path="usr/bin/python3", before=file, after=file)]
    changes += [Change(path="usr/lib/python3/json.py", before=file, after=None)]
    changes += [Change(path="usr/local/lib", before=folder, after=folder)]
    changes += [Change(path="opt", before=None, after=link), Change(path="usr/local", before=folder, after=link)]
    changes += [Change(path="usr/lib/python3/json", before=None, after=folder)]
    changes += [Change(path="usr/lib/python3/json/__init__.py", before=None, after=file)]
    changes += [Change(path="opt/venv/lib/python3.12/site-packages/a/b.py", before=file, after=file)]
    changes += [Change(path="usr/local/later", before=None, after=file)]  # below what does not count
    paths = [path for path, is_counted in added.items() if is_counted] + ["usr/local/lib"]
    assert [change.path for change in counted(changes, LayerNames(image))] == paths


@pytest.mark.parametrize(
    ("path", "before", "after", "counts"),
    [
        ("root", "folder", "link", False),
        ("home", "folder", "link", False),
        ("home/bob", "folder", "link", False),
        ("home/eve", None, "link", False),
        ("etc", "folder", "link", False),
        ("etc/ssl", "folder", "link", False),
        ("opt/venv/lib", "folder", "link", False),
        ("opt/venv/lib64", None, "link", False),
        ("opt/venv/lib/python3.12", "folder", "link", False),
        ("usr/lib64", "folder", "link", False),
        ("etc/alternatives/awk", "link", "link", False),
        ("opt/venv/lib/libpython3.so", "file", "file", False),
        ("src/json", None, "folder", False),
        ("src/main.py", "file", "file", True),
        ("home/bob", "folder", None, True),
        ("home/bob/work", "folder", "link", True),
        ("home/notes", None, "file", True),
        ("app/data", "folder", "link", True),
        ("opt/current", None, "link", True),
    ],
)
def test_a_folder_of_what_runs_before_tests_is_no_link(
    tmp_path: Path, path: str, before: str | None, after: str | None, counts: bool
):
    entries = {"file": Entry(mode=0o100755, data=b""), "folder": Entry(mode=0o040000)}
    entries["link"] = Entry(mode=0o120000, data=b"/app")
    files = {"opt/venv/lib/libpython3.so": "", "usr/lib/python3/json.py": "", "src/main.py": ""}
    image = image_of(layer(tmp_path, "layer", files), env={"PATH": "/opt/venv/bin:/usr/bin:/bin", "PYTHONPATH": "/src"})
    change = Change(path=path, before=entries.get(before or ""), after=entries.get(after or ""))
    assert (counted([change], LayerNames(image)) == [change]) == counts


@pytest.mark.parametrize(
    "command",
    [
        "echo > /app/broken",
        "echo > /app/broken; cat /dev/zero > /app/full",
        f"cat /dev/zero > /full; cat /dev/zero > /dev/shm/full{NEXT}echo 1{NEXT}echo 2",
    ],
)
def test_an_answer_that_tests_cannot_judge_gets_nothing(loop: asyncio.Runner, environment: str, command: str):
    tests = [*Path(environment.partition(":")[2].partition(",")[0]).glob("sort/tests/test.sh")]
    script = tests[0].read_text()
    tests[0].write_text(script.replace("cd /app\n", "cd /app\n[ ! -e broken ] || exit 1\n"))
    try:
        assert rewards(loop, environment, ["sort"], {"sort": command}) == {"sort": 0.0}
        tests[0].write_text("#!/bin/sh\nexit 1\n")
        with pytest.raises(TaskError, match="wrote no reward"):
            rewards(loop, environment, ["sort"], {"sort": "echo > x"})
    finally:
        tests[0].write_text(script)


@pytest.mark.parametrize("image", ["oci:/home", "docker-archive:/etc/passwd", "dockerfile:/app"])
def test_tasks_of_others_name_no_files_of_this_machine(tmp_path: Path, image: str):
    write_tasks(tmp_path / "tasks", image)
    with pytest.raises(TaskError, match=r"task\.toml: a task names the image"):
        sources_of(build_environment(f"harbor:{tmp_path / 'tasks'}"), 0)
