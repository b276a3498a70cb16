"""Fixtures for all tests, and what must be true when they end: no process and no file of theirs is left."""

import asyncio
import contextlib
import functools
import gc
import mmap
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import hypothesis  # its pytest plugin would import it at the end, while Monarch's threads still run
import pytest

from tests.commands import Command, forgotten, shared_memory

if TYPE_CHECKING:
    from tests.s3 import S3

ROOT = Path(__file__).parent.parent
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
# Each worker has a mark of its own, which begins with that of the session that started it.
MARK = f"{os.environ['FORGE_RL_TESTS']}/{WORKER}" if WORKER else uuid.uuid4().hex
if not WORKER:
    # Monarch's log, and the sockets of processes that are killed, stay where they are: here, which goes in the end.
    # This process, and so pytest's own folders, keep the usual place, which Python has looked up by now.
    TEMPORARY = tempfile.mkdtemp(prefix="forge_rl-")
    os.environ["TMPDIR"] = TEMPORARY

# Every process below this one inherits these: small models are quickest on one thread, actors of tests must be
# importable, and the mark tells our processes from anybody else's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave their core to the other worker's tests
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ["FORGE_RL_TESTS"] = MARK
# A background job of a shell ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def started_processes() -> set[int]:
    """Processes that this session started, also those whose parent has ended.

    Python's resource tracker is left out: it ends with pytest, and complains if it ends before. So are fork servers,
    which end with pytest too; what they fork is not.
    """
    mark = f"FORGE_RL_TESTS={MARK}"
    pids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours
            environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            ours = any(entry == mark or entry.startswith(f"{mark}/") for entry in environment)
            command = (folder / "cmdline").read_bytes()
            if ours and not any(name in command for name in (b"resource_tracker", b"fork server", b"fork_server")):
                pids.add(int(folder.name))
    return pids - {os.getpid()}


def left_behind(before: set[int]) -> set[int]:
    """Processes that this session started since; one that was killed ends when the machine has time for it."""
    until = time.monotonic() + 60
    while (left := started_processes() - before) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends what is left. A session with workers does it last, also for a worker that has crashed."""
    for pid in started_processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not WORKER:
        shutil.rmtree(TEMPORARY, ignore_errors=True)


LATEST_START = float(os.environ.get("FORGE_RL_TESTS_UNTIL", "inf"))
"""Seconds since 1970 after which no further test starts."""
OUT_OF_TIME = "not started: its time was up"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skips what would begin too late, before its fixtures start anything."""
    if time.time() > LATEST_START:
        pytest.skip(OUT_OF_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the tests that did not start, which a line of -ra would only count."""
    not_started = [
        report.nodeid
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and report.longrepr[2].endswith(OUT_OF_TIME)
    ]
    if not_started:
        terminalreporter.section(f"{len(not_started)} tests did not start: the time until FORGE_RL_TESTS_UNTIL was up")
        for nodeid in sorted(not_started):
            terminalreporter.line(nodeid)


hypothesis.settings.register_profile("forge_rl", deadline=None)  # a busy machine is no fault of the code
hypothesis.settings.load_profile("forge_rl")

# What a test starts, by the fixtures that it asks for and the helpers that its module has: about how many seconds.
STARTS = {
    "commands": 30,
    "served_engine": 20,
    "open_trainer": 20,
    "tiny_model": 10,
    "run_model": 10,
    "make_tiny_model": 10,
    "store_process": 5,
    "run_on_engine": 10,
    "wheel": 5,
    "two_ranks": 5,
    "run_ranks": 2,
    "sandbox": 2,
    "process_pool": 2,
    "nothing_left": 2,
    "started_processes": 2,
    "fake_service": 2,
    "other_process": 2,
    "cluster": 2,
    "process_group": 1,
    "shm": 1,
}
MEASURED = {
    "test_published_folders_go_the_whole_way": 180,
    "test_a_run_over_four_hosts_goes_on_when_one_of_each_kind_is_killed": 130,
    "test_a_run_whose_only_engine_is_elsewhere_trains": 95,
    "test_ranks_that_die_or_are_stopped_are_replaced_and_training_goes_on": 85,
    "test_a_run_on_examples_takes_the_same_steps_despite_deaths": 80,
    "test_a_run_survives_the_death_of_each_of_its_processes_in_any_order": 75,
    "test_a_stop_in_a_recovery_leaves_checkpoints_of_one_step": 75,
    "test_ctrl_c_saves_and_the_same_command_continues": 50,
    "test_what_flags_promise_is_above_zero_in_a_run": 65,
    "test_changes_from_another_process_hold_after_a_kill": 65,
    "test_a_run_on_a_file_resumes_at_the_exact_next_task": 45,
    "test_a_spare_with_the_same_weights_replaces_an_engine_whose_step_hangs": 60,
    "test_a_run_publishes_adapters_goes_on_and_leaves_an_adapter": 60,
    "test_another_user_gets_in_nowhere_and_the_run_goes_on": 55,
    "test_a_run_serves_its_versions_as_adapters_and_survives_the_death_of_an_engine": 55,
    "test_workers_that_share_experts_compute_what_one_does": 50,
    "test_engines_read_a_copied_model_and_send_their_logs": 50,
    "test_layouts_of_two_ranks_train_as_one_process": 40,
    "test_more_layouts_train_adapters_as_one_process": 40,
    "test_layouts_of_two_ranks_train_adapters_as_one_process": 12,
    "test_updates_and_versions_are_counted_apart_and_saved": 22,
    "test_ranks_that_share_rows_count_once_and_publish_one_model": 20,
    "test_a_run_without_optional_packages_reaches_its_end": 20,
    "test_a_run_is_opened_stepped_asked_given_a_new_reward_and_closed": 20,
    "test_losses_and_their_statistics_are_of_all_rows_on_all_ranks": 16,
    "test_the_kernels_agree_with_float64_and_models_with_their_plain_forms": 30,
    "test_lag_mixture_and_budgets_hold_in_any_order_of_events": 18,
    "test_the_kernels_agree_with_float64": 17,
    "test_a_store_that_hangs_or_dies_is_told_and_another_one_goes_on": 13,
    "test_a_server_that_dies_costs_no_turn": 11,
    "test_a_store_that_dies_is_started_again_with_its_versions_and_leases": 12,
}
"""Seconds of tests that take more than their fixtures say, with two workers on two cores that are idle otherwise."""


UNITS = {"FakeBackend": "gateway", "run_ranks": "ranks", "open_trainer": "trainer", "kv_cache_gib=": "engine"}
"""Names of what one worker runs, by a word of its files. They share what takes seconds to import: vLLM's server in this
process, and in one that forks them what ranks, trainers and engines need."""


@functools.cache
def work_unit(file: Path) -> str:
    """Names what one worker runs: a file, or all files that share imports."""
    text = file.read_text()
    return next((unit for word, unit in UNITS.items() if word in text), str(file))


@functools.cache
def may_have_long_tests(file: Path) -> bool:
    """Tells whether a test of a file may be long; profiles of sandboxes are, in the fixtures below."""
    return re.search(r"mark\.(long|nightly)|sandbox", file.read_text()) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files without long tests where those alone are asked for: importing all takes half a minute."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    if is_test and config.option.markexpr in ("long and not nightly", "nightly"):
        return not may_have_long_tests(collection_path) or None
    return None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Marks tests that start processes, and puts first what takes longest, so that the workers end at the same time."""
    seconds: dict[str, int] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        names = {*item.fixturenames, *vars(item.module)}
        if item.get_closest_marker("nightly") is not None:
            item.add_marker("long")
        starts = sum(processes for name, processes in STARTS.items() if name in names)
        is_long = item.get_closest_marker("long") is not None
        assert not is_long or may_have_long_tests(item.path), f"{item.path} would be left out where it must run"
        if starts or is_long:
            item.add_marker("processes")
        seconds[item.nodeid] = MEASURED.get(item.originalname, starts + 20 * is_long)
    yield
    unit_seconds: Counter[str] = Counter()  # what -m and -k left out is nobody's work
    for item in items:
        unit_seconds[work_unit(item.path)] += seconds[item.nodeid]
    items.sort(key=lambda item: -unit_seconds[work_unit(item.path)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Gives a worker one unit of work after the other."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        @functools.cache  # noqa: B019  one object, for the whole session
        def _split_scope(self, nodeid: str) -> str:
            return work_unit(ROOT / str(super()._split_scope(nodeid)))

    return Scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Leaves what was imported out of garbage collection: looking at all of it takes most of a second."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def semaphores_of_the_killed() -> Iterator[None]:
    """Removes the semaphores of Python's processes that a test killed together with the tracker that would have."""
    before = shared_memory()
    yield
    for path in forgotten(before, timeout_s=0):
        if path.name.startswith("sem.mp-"):
            with contextlib.suppress(PermissionError):  # another user's, whose processes cannot be looked into
                path.unlink(missing_ok=True)


@pytest.fixture
def high_descriptors() -> Iterator[None]:
    """Takes all descriptors below 1024, so that what a test opens has higher ones, which select.select rejects."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(2048, limits[1])), limits[1]))
    fds = [os.open("/dev/null", os.O_RDONLY)]
    try:
        while fds[-1] < 1024:
            fds.append(os.dup(fds[0]))
        yield
    finally:
        for fd in fds:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 3 M parameters with the bundled model's tokenizer; nobody writes to its folder."""
    from tests.tiny import bundled_folder, make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", bundled_folder())


@pytest.fixture(scope="session")
def run_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with 8192 tokens, for whole runs; nobody writes to its folder."""
    from tests.tiny import make_run_model

    return make_run_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that loads at once, see `make_small_tokenizer`; nobody writes to it."""
    from tests.tiny import make_small_tokenizer

    return make_small_tokenizer(tmp_path_factory.mktemp("model") / "tokenizer")


@pytest.fixture(scope="session")
def s3_server() -> Iterator["S3"]:
    """A stand-in for S3, for the whole session."""
    from tests.s3 import S3

    with contextlib.closing(S3()) as server:
        yield server


@pytest.fixture
def s3(s3_server: "S3", monkeypatch: pytest.MonkeyPatch) -> "S3":
    """A stand-in for S3 with an empty bucket, s3://bucket, which the environment leads to."""
    s3_server.forget()
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("aiobotocore.endpoint.AioEndpoint._sleep", _hurry)  # clients wait up to seconds between tries
    return s3_server


async def _hurry(_: object, seconds: float) -> None:
    await asyncio.sleep(seconds / 50)


@pytest.fixture(params=["file", "memory", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder that is not there yet, in each of these file systems."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    yield {
        "file": (tmp_path / "elsewhere").as_uri(),
        "memory": f"memory://{tmp_path.parent.name}-{tmp_path.name}",
        "s3": "s3://bucket/elsewhere",
    }[request.param]
    fsspec.filesystem("memory").store.clear()


@contextlib.contextmanager
def edited(address: str, folder: Path) -> Iterator[Path]:
    """Hand out a local copy of the folder at an address, and copy it back."""
    files, root = fsspec.url_to_fs(address, skip_instance_cache=True)
    files.get(root, str(folder), recursive=True)
    yield folder
    files.rm(root, recursive=True)
    files.put(str(folder), root, recursive=True)


@pytest.fixture
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, in which a user works: what is imported from it is forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    """Recipes that a test runs; none outlives it."""
    started: list[Command] = []
    try:
        yield started
    finally:
        for command in started:
            command.clean_up()


def command_line_of(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")[:300]
    except OSError:
        return "ended meanwhile"


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a process of its own behind."""
    before = started_processes()
    yield
    left = left_behind(before)
    commands = {pid: command_line_of(pid) for pid in left}
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes are left: {commands}"


@pytest.fixture(scope="session")
def store_process() -> Iterator[None]:
    """The process that the tests' stores share, from before a test that looks for processes that are left."""
    from tests.fake_store import shared_process

    asyncio.run(shared_process().start())
    yield
    asyncio.run(shared_process().close())


@pytest.fixture(scope="session")
def standard_pool() -> Iterator[object]:
    """A pool of sandboxes, `tests.sandbox_pool.SharedPool`, that tests share."""
    from tests.sandbox_pool import opened_pool

    yield from opened_pool("standard")


@pytest.fixture(scope="session")
def strict_pool() -> Iterator[object]:
    from tests.sandbox_pool import opened_pool

    yield from opened_pool("strict")


@pytest.fixture(scope="session")
def process_pool() -> Iterator[object]:
    from tests.sandbox_pool import opened_pool

    yield from opened_pool("process")


@pytest.fixture(params=["standard", pytest.param("strict", marks=pytest.mark.long)])
def sandbox(request: pytest.FixtureRequest) -> object:
    """The pool of each profile whose sessions run Python."""
    return request.getfixturevalue(f"{request.param}_pool")


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in shared memory; fails a test that leaves something in it."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="tests-"))
    yield folder
    left = [str(path) for path in folder.rglob("*")]
    shutil.rmtree(folder)
    assert not left


@pytest.fixture
def small_shm() -> Iterator[Path]:
    """A file system in memory with room for 16 pages."""
    folder = Path(tempfile.mkdtemp())
    command = ["mount", "-t", "tmpfs", "-o", f"size={16 * mmap.PAGESIZE}", "tmpfs", folder]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
        yield folder
        left = [str(path) for path in folder.rglob("*")]
        subprocess.run(["umount", "-l", folder], check=True)
        assert not left
    finally:
        folder.rmdir()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read a few lines at a time, copied in small batches, and their indexes are kept in the cache."""
    monkeypatch.setattr("forge_rl.data.sources.lines._READ_BYTES", 150)
    monkeypatch.setattr("forge_rl.data.sources.lines.INDEXED_BYTES", 1)
    monkeypatch.setattr("forge_rl.data.sources.derived._READ_BYTES", 600)
    monkeypatch.setattr("forge_rl.data.sources.columnar._COPIED_BYTES", 200)
    monkeypatch.setattr("forge_rl.data.sources.columnar._ROWS_AT_ONCE", 3)


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A process group of one, as a trainer of one rank has it."""
    import torch
    import torch.distributed as dist

    from forge_rl.engines.platform import init_distributed

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    init_distributed(0, 1, "", 0)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


assert "forge_rl" not in sys.modules, "conftest imports nothing of ours: tests of imports count on it"
