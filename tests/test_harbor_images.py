"""Harbor tasks that have an image: solutions are rewarded, nothing is not, and neither are tricks."""

import asyncio
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.envs.protocol import reset_env, step_env
from forge_rl.errors import TaskError
from forge_rl.sandbox.images.image import ContainerImage, ImageSettings
from forge_rl.sandbox.providers.roots import VARIABLES, RootListing
from forge_rl.sandbox.workspaces.changes import Change, Entry
from forge_rl.sandbox.workspaces.image_changes import counted
from forge_rl.sandbox.workspaces.image_programs import LayerNames
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


PYTHONS = {
    "opt/python-3/bin/python3.12": "",
    "opt/python-3/lib/python3.12/json.py": "",
    "opt/python": "-> python-3",
    "opt/venv-1/bin/python": "-> /opt/python/bin/python3.12",
    "opt/venv-1/bin/pytest": "#!/opt/runner/bin/python\n",
    "opt/venv-1/bin/tool": "-> /opt/tool/main",
    "opt/venv-1/bin/work": "-> /app/work.py",
    "opt/venv-1/lib64": "-> lib",
    "opt/venv-1/pyvenv.cfg": "home = /opt/copied/bin\nversion = 3.12\n",
    "opt/copied/bin/python3": "",
    "opt/copied/lib/python3.12/json.py": "",
    "opt/runner/bin/python": "",
    "opt/runner/lib/python3.12/site-packages/a/b.py": "",
    "opt/tool/main": "",
    "app/work.py": "",
    "usr/lib/x86_64-linux-gnu/libm.so.6": "",
    "usr/lib/python3.11/copy.py": "",
}
"""A virtual environment in PATH, behind a link; its Python, and the one that it was copied from; a script's Python."""


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize(
    ("path", "before", "after", "counts"),
    [
        ("opt/venv", "link", "link", False),
        ("opt/venv", "link", "folder", False),
        ("opt/python", "link", "link", False),
        ("opt/venv-1/bin/python", "link", "file", False),
        ("opt/venv-1/bin/pip", None, "file", False),
        ("opt/venv-1/pyvenv.cfg", "file", "file", False),
        ("opt/venv-1/lib/python3.12/site-packages/json.py", None, "file", False),
        ("opt/venv-1/lib/python3.12/site-packages/new.py", None, "file", True),
        ("opt/python-3", "folder", "link", False),
        ("opt/python-3/bin/python3.12", "file", "file", False),
        ("opt/python-3/bin/pybuilddir.txt", None, "file", False),
        ("opt/python-3/lib/python3.12/json.py", "file", "file", False),
        ("opt/python-3/lib/python312.zip", None, "file", False),
        ("opt/python-3/lib/libm.so.6", None, "file", False),
        ("opt/copied/bin/python3", "file", "file", False),
        ("opt/copied/lib/python3.12/json", None, "folder", False),
        ("opt/runner/bin/python", "file", None, False),
        ("opt/runner/lib/python3.12/site-packages/a/b.py", "file", "file", False),
        ("opt/tool/main", "file", "file", False),
        ("opt/tool", "folder", None, False),
        ("opt/tool/notes", None, "file", True),
        ("app/work.py", "file", "file", True),
        ("app/venv/pyvenv.cfg", None, "file", True),
        ("usr/pyvenv.cfg", None, "file", False),
        ("usr/bin/pyvenv.cfg", None, "file", False),
        ("usr/lib/python311.zip", None, "file", False),
        ("usr/local/lib/python3.11/dist-packages/org", None, "folder", True),
        ("usr/local/lib/python3.11/dist-packages/org/python", None, "folder", False),
        ("opt/venv-1/lib64", "link", "folder", False),
        ("usr/local/lib/python3.11/dist-packages/msvcrt.py", None, "file", False),
        ("opt/lib/libm.so.6", None, "file", False),
        ("opt/lib/libnew.so", None, "file", True),
        ("app/env.sh", None, "file", False),
        ("app/pip.conf", None, "file", False),
        ("opt/venv-1/pip.conf", None, "file", False),
        ("app/uv.toml", None, "file", False),
        ("etc/dpkg/dpkg.cfg.d/hook", None, "file", False),
        ("var/lib/apt/lists/evil", None, "file", False),
        ("var/lib/dpkg/info/libc-bin.postinst", "file", "file", False),
        ("var/lib/dpkg/info/new.list", None, "file", True),
        ("srv/agent/.local/bin/env", None, "file", False),
        ("srv/agent/.bashrc", None, "file", False),
        ("srv/agent", "folder", "link", False),
        ("srv/agent/notes", None, "file", True),
        (".bashrc", None, "file", False),
    ],
)
def test_programs_behind_links_and_environments_are_the_images_own(
    tmp_path: Path, layers: int, is_listed: bool, path: str, before: str | None, after: str | None, counts: bool
):
    entries = {"file": Entry(mode=0o100755, data=b""), "folder": Entry(mode=0o040000)}
    entries["link"] = Entry(mode=0o120000, data=b"/app")
    variables = {"PATH": "/opt/venv/bin:/usr/bin:/bin", "LD_LIBRARY_PATH": "/opt/lib", "BASH_ENV": "/app/env.sh"}
    files = [PYTHONS, {"opt/venv": "-> venv-1"}]
    if layers == 1:
        files = [files[0] | files[1]]
    image = image_of(*(layer(tmp_path, str(place), part) for place, part in enumerate(files)), env=variables)
    root = listed_root(image, variables) if is_listed else LayerNames(image)
    change = Change(path=path, before=entries.get(before or ""), after=entries.get(after or ""))
    assert (counted([change], root, home="/srv/agent", work="/app") == [change]) == counts


def listed_root(image: ContainerImage, variables: Mapping[str, str]) -> RootListing:
    """A listing of an image's files, as a provider's container would make it."""
    lines = list[str]()
    for folder in image.layers:
        for place in folder.rglob("*"):
            path = place.relative_to(folder)
            lines.append(f"{place.lstat().st_mode:x} 1 1 1 /{path}")
            if place.is_symlink():
                lines.append(f"'/{path}' -> '{place.readlink()}'")
    described = [variables.get(name, "") for name in VARIABLES]
    described += ["/opt/venv/pyvenv.cfg", "home = /opt/copied/bin", "/opt/venv/bin/pytest", "#!/opt/runner/bin/python"]
    return RootListing.of("\n".join(lines).encode(), described)


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
