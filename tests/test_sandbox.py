"""Sandbox sessions: what cells do and return, limits, forks, the way back, pools, and that nothing is left of them."""

import ast
import asyncio
import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forge_rl.errors import ConfigError
from forge_rl.sandbox import Limits, Pool, SandboxError
from forge_rl.sandbox.host import Host
from forge_rl.sandbox.inside import cells, cgroups
from forge_rl.sandbox.inside.server import missing_layers
from forge_rl.sandbox.limits import MEDIA_TYPES
from forge_rl.sandbox.pool import Profile
from tests.sandbox_pool import LIMITS, SharedPool, left_in_cgroups

IN_C = "import itertools\nmax(itertools.repeat(0))"
"""A loop that never returns to the interpreter."""


def test_state_stays_between_cells_and_the_last_expression_is_the_value(sandbox: SharedPool):
    async def work():
        async with sandbox.pool.session() as session:
            first = await session.run("import math\nx = 6\ndef f(): return x * 7")
            x = await session.run("print('é', end='')\nf()")
            last = await session.run("_, math.tau > 6, __name__")
            return first, x, last

    first, x, last = sandbox.run(work())
    assert (first.value, first.error, first.stdout) == (None, None, "")
    assert (x.value, x.stdout, x.error) == ("42", "é", None)
    assert last.value == "(42, True, '__main__')"
    assert 0 < x.usage.wall_s < 20
    assert x.usage.memory_bytes > 1 << 20


def test_an_error_names_its_line_and_the_session_goes_on(sandbox: SharedPool):
    async def work():
        async with sandbox.pool.session() as session:
            results = [await session.run(code) for code in ("y = 1\n1 / 0", "x = (", "import sys; sys.exit(3)", "y")]
            return results, session.alive

    (error, syntax, left, last), alive = sandbox.run(work())
    assert error.error.name == "ZeroDivisionError"
    assert 'File "<cell 1>", line 2' in error.error.traceback
    assert "1 / 0" in error.error.traceback
    assert "cells.py" not in error.error.traceback
    assert syntax.error.name == "SyntaxError"
    assert (left.error.name, left.error.message) == ("SystemExit", "3")
    assert last.value == "1"
    assert alive


@pytest.mark.parametrize(
    ("code", "stdout", "stderr"),
    [
        ("import sys; print(1); print(2, file=sys.stderr)", "1\n", "2\n"),
        ("import sys; sys.stdout.buffer.write(b'3\\xff')", "3\ufffd", ""),
        ("import subprocess; print(4); subprocess.run('echo 5; echo 6 >&2', shell=True); print(7)", "4\n5\n7\n", "6\n"),
        ("import os, sys; os.write(1, b'8'); sys.stdout = None", "8", ""),
    ],
)
def test_what_a_cell_and_its_programs_print_is_captured(sandbox: SharedPool, code: str, stdout: str, stderr: str):
    result = sandbox.cell(code)
    assert result.error is None
    assert (result.stdout, result.stderr) == (stdout, stderr)


@pytest.mark.parametrize("code", ["print('x' * 10**6)", "import os\nfor _ in range(3): os.write(1, b'x' * 10**6)"])
def test_output_is_cut_at_its_limit_also_the_next_cells(sandbox: SharedPool, code: str):
    async def work():
        async with sandbox.pool.session() as session:
            return await session.run(code), await session.run("print('y')"), await session.run("'z' * 10**6")

    long, short, value = sandbox.run(work())
    most = Limits().output_bytes
    assert (len(long.stdout), long.cut) == (most, True)
    assert (short.stdout, short.cut) == ("y\n", False)
    assert len(value.value) == most


def test_images_come_back_as_bytes_with_their_type(sandbox: SharedPool):
    png, jpeg = "b'\\x89PNG\\r\\n\\x1a\\n' + b'.' * n", "b'\\xff\\xd8\\xff' + b'.' * n"
    shown = f"class Shown:\n  def _repr_png_(self): return {png}\nn = 7\nShown()"

    async def work():
        async with sandbox.pool.session() as session:
            codes = (f"n = 9; {png}", jpeg, shown, f"n = {LIMITS.transfer_bytes}; {jpeg}", "b'GIF'", "_")
            return [await session.run(code) for code in codes]

    whole, other, drawn, large, text, last = sandbox.run(work())
    assert (whole.image.media_type, whole.image.data) == ("image/png", b"\x89PNG\r\n\x1a\n" + b"." * 9)
    assert (other.image.media_type, len(other.image.data)) == ("image/jpeg", 12)
    assert (drawn.image.media_type, len(drawn.image.data), drawn.value[:17]) == ("image/png", 15, "<__main__.Shown o")
    assert (large.image, large.cut, large.error) == (None, True, None)
    assert (text.image, text.value, last.value) == (None, "b'GIF'", "b'GIF'")


def test_a_figure_and_a_picture_are_images():
    figure, picture = pytest.importorskip("matplotlib.figure"), pytest.importorskip("PIL.Image")
    for value in (figure.Figure(figsize=(1, 1)), picture.new("RGB", (2, 2))):
        kind, data = cells._image(value)
        assert (kind, data[:8]) == ("image/png", MEDIA_TYPES["image/png"])


def test_a_cell_that_takes_too_long_is_interrupted_and_its_state_stays(sandbox: SharedPool):
    async def work():
        async with sandbox.pool.session() as session:
            long = await session.run("n = 0\nwhile True: n += 1", wall_s=0.2)
            cpu = await session.run("while True: n += 1", wall_s=15, cpu_s=0.2)
            return long, cpu, await session.run("n > 0")

    long, cpu, after = sandbox.run(work())
    assert (long.error.name, long.error.message) == ("CellOverrun", "the cell exceeded its wall-clock limit")
    assert (cpu.error.name, cpu.error.message) == ("CellOverrun", "the cell exceeded its CPU limit")
    assert cpu.usage.wall_s < 14
    assert after.value == "True"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (IN_C, "CellOverrun"),
        ("def f():\n  while True: pass\nwhile True:\n  try: f()\n  except BaseException: pass", "CellOverrun"),
        ("x = b'x' * (200 << 20)", "OutOfMemory"),
        ("import os; os._exit(3)", "Ended"),
        ("import os; os.kill(os.getpid(), 9)", "Ended"),
    ],
)
def test_a_cell_that_resists_ends_only_its_session_which_can_be_restored(sandbox: SharedPool, code: str, error: str):
    async def work():
        async with sandbox.pool.session(undo=True) as session, sandbox.pool.session() as other:
            await session.run("x = 1")
            await other.run("x = 2")
            result = await session.run(code, wall_s=1 if error == "CellOverrun" else 60)
            with pytest.raises(SandboxError, match="the session has ended"):
                await session.run("x")
            await session.restore()
            return result, await session.run("x"), await other.run("x")

    result, restored, other = sandbox.run(work())
    assert result.error.name == error
    assert (restored.value, other.value) == ("1", "2")


def test_restore_undoes_one_cell(sandbox: SharedPool):
    async def work():
        async with sandbox.pool.session(undo=True) as session:
            with pytest.raises(SandboxError, match="no earlier state"):
                await session.restore()
            for code in ("x = [1]", "x.append(2)", "x.append(3)"):
                await session.run(code)
            await session.put("kept", b"1")
            await session.restore()
            with pytest.raises(SandboxError, match="no earlier state"):
                await session.restore()
            return await session.run("import os; x, os.listdir()")

    assert sandbox.run(work()).value == "([1, 2], [])"


def test_a_fork_goes_on_apart(sandbox: SharedPool):
    async def work():
        async with sandbox.pool.session() as session:
            await session.run("import random, tempfile; x = [1]; random.seed(5); open('a', 'w').write('1')")
            async with await session.fork() as fork:
                await session.run("x.append(2); open('a', 'w').write('2')")
                both = [await one.run("x, open('a').read()") for one in (session, fork)]
                rolls = {(await one.run("random.random()")).value for one in (session, fork)}
                folders = {(await one.run("tempfile.gettempdir()")).value for one in (session, fork)}
                async with await fork.fork() as third:
                    await fork.run("import os; os._exit(0)")
                    return [one.value for one in both], rolls, folders, await third.run("x"), await session.run("x")

    both, rolls, folders, third, first = sandbox.run(work())
    assert both == ["([1, 2], '2')", "([1], '1')"]
    assert len(rolls) == len(folders) == 2
    assert (third.value, first.value) == ("[1]", "[1, 2]")


def test_a_fork_has_the_folder_as_it_was(sandbox: SharedPool):
    async def work():
        async with sandbox.pool.session() as session:
            await session.run("import os, pathlib; os.makedirs('a/b'); pathlib.Path('a/b/c').write_text('1')")
            await session.run("os.chmod('a/b/c', 0o750); os.utime('a/b/c', (7, 7)); os.mkfifo('p'); os.mkfifo('a/p')")
            await session.run("os.symlink('a/b', 'link'); os.symlink('/nowhere', 'a/dead'); os.chmod('a', 0o500)")
            await session.run("os.mkdir('shut'); open('shut/x', 'w'); os.chmod('shut/x', 0); os.chmod('shut', 0)")
            async with await session.fork() as fork:
                code = "found = os.stat('link/c'); oct(found.st_mode), found.st_mtime, open('a/b/c').read()"
                return await fork.run(code), await fork.run("sorted(os.listdir()), sorted(os.listdir('a'))")

    inside, names = sandbox.run(work())
    assert inside.value == "('0o100750', 7.0, '1')"
    assert names.value == "(['a', 'link', 'shut'], ['b', 'dead'])"


def test_sessions_do_not_share_random_numbers_or_users(sandbox: SharedPool):
    async def work():
        async with sandbox.pool.session() as one, sandbox.pool.session() as two:
            code = "import os, random, uuid; random.random(), uuid.uuid4(), os.getuid()"
            return [await session.run(code) for session in (one, two)]

    one, two = (result.value.split(", ") for result in sandbox.run(work()))
    assert len(one) == 3
    assert not set(one) & set(two)


def test_files_go_in_and_out(sandbox: SharedPool):
    data = bytes(range(256)) * 4096

    async def work():
        async with sandbox.pool.session() as session:
            await session.put("folder/x.bin", data)
            assert await session.get("folder/x.bin") == data
            assert (await session.run("len(open('folder/x.bin', 'rb').read())")).value == str(len(data))
            for path, message in (("nothing", "No such file"), ("folder", "not a regular file")):
                with pytest.raises(SandboxError, match=message):
                    await session.get(path)
            with pytest.raises(SandboxError, match=r"No space left|File too large"):
                await session.put("large", b"x" * (5 << 20))
            assert session.alive

    sandbox.run(work())


def test_closing_a_session_ends_its_cell(sandbox: SharedPool):
    async def work():
        async with sandbox.pool.session() as session:
            cell = asyncio.create_task(session.run("import time; time.sleep(60)", wall_s=60))
            await asyncio.sleep(0.1)
            await session.close()
            async with asyncio.timeout(10):
                return (await cell).error

    error = sandbox.run(work())
    assert (error.name, "the session was closed" in error.message) == ("Ended", True)


def test_a_cancelled_cell_ends_its_session(sandbox: SharedPool):
    async def work():
        async with sandbox.pool.session() as session:
            cell = asyncio.create_task(session.run("import time; time.sleep(60)"))
            await asyncio.sleep(0.1)
            cell.cancel()
            await asyncio.wait([cell])
            assert cell.cancelled()
            assert not session.alive

    sandbox.run(work())


@pytest.mark.usefixtures("sandbox")  # which skips where there can be none
async def test_who_waits_gets_a_place_in_order_and_a_full_pool_says_so():
    order = []
    async with Pool(warm=0, sessions=1, servers=1) as pool:
        first = await pool.open()
        with pytest.raises(SandboxError, match="all 1 sessions are open"):
            await pool.open(wait_s=0.05)
        with pytest.raises(SandboxError, match="none can be forked"):
            await first.fork()

        async def wait(name):
            async with pool.session():
                order.append(name)

        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(wait(name))
                await asyncio.sleep(0)
            await first.close()
    assert order == ["a", "b", "c"]


async def test_a_strict_session_is_alone_and_its_fork_outlives_it(sandbox: SharedPool):
    async def work():
        async with Pool(profile="strict", warm=0, servers=1) as pool, pool.session() as session:
            names = ("user", "pid", "mnt", "net", "ipc", "uts")
            code = f"import os\n[os.stat('/proc/self/ns/' + name).st_ino for name in {names}], os.listdir('/tmp')"
            inside = await session.run(f"x = 1\n{code}")
            async with await session.fork() as fork:
                await session.run("import os; os._exit(0)")
                after = await fork.run("x, [pid for pid in os.listdir('/proc') if pid.isdigit()] == [str(os.getpid())]")
                await session.close()
                return inside, after, await fork.run("x + 1")

    inside, after, last = await work()
    spaces, files = ast.literal_eval(inside.value)
    assert len(spaces) == 6
    assert not {os.stat(f"/proc/self/ns/{name}").st_ino for name in os.listdir("/proc/self/ns")} & set(spaces)
    assert files == ["0"]
    assert (after.value, last.value) == ("(1, True)", "2")


def test_a_session_and_its_fork_are_each_in_limited_cgroups(sandbox: SharedPool):
    async def work():
        async with sandbox.pool.session() as session, await session.fork() as fork:
            names = [one._body.name for one in (session, fork)]
            trees = left_in_cgroups(sandbox.pool.hosts[0].tree)
            deadline = time.monotonic() + 10  # a fork is moved while it already answers
            while not all((tree / names[1] / "cgroup.procs").read_text() for tree in trees):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            members = [[(tree / name / "cgroup.procs").read_text().split() for tree in trees] for name in names]
            folders = [tree / name for tree in trees for name in names]
            limits, memory = (
                {file.read_text().strip() for folder in folders for file in folder.glob(pattern)}
                for pattern in ("pids.max", "memory.[lm]*limit_in_bytes")
            )
            return members, limits, memory

    (first_pids, second_pids), limits, memory = sandbox.run(work())
    assert len(first_pids) > 0
    assert all(pids == first_pids[0] and len(pids) == 1 for pids in first_pids)
    assert all(pids == second_pids[0] != first_pids[0] for pids in second_pids)
    assert limits == {str(LIMITS.processes)}
    assert memory <= {str(LIMITS.memory_bytes)}


@pytest.mark.usefixtures("sandbox")
async def test_sessions_with_limits_of_their_own_are_kept_warm_too():
    """As rewards that run code ask for; and none with limits that nobody asks for any more."""
    own, once = replace(LIMITS, output_bytes=1 << 20), replace(LIMITS, output_bytes=1 << 19)

    async with Pool(limits=LIMITS, sessions=8, warm=2, servers=1) as pool:
        for limits in (own, once, *[own] * 18):
            async with pool.session(limits=limits) as session:
                assert (await session.run("2 + 2")).value == "4"
                assert session.limits == limits
                async with asyncio.timeout(60):
                    while pool._warming.total():  # noqa: ASYNC110 -- a pool has no event for it
                        await asyncio.sleep(0.01)
        opened, warm = pool.opened, [limits for limits, _ in pool._warm]
    assert opened["warm"] >= 15
    assert opened.total() == 20
    assert warm == [own] * 2


@pytest.mark.usefixtures("sandbox")
async def test_a_warm_session_that_cannot_start_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    starting, failed = Pool._start, list[str]()

    async def start(pool: Pool, limits: Limits, workspace: str | None = None) -> object:
        if asyncio.current_task() is not opening:
            failed.append("warm")
            raise OSError(24, "Too many open files")
        return await starting(pool, limits, workspace)

    async def work() -> str:
        nonlocal opening
        opening = asyncio.current_task()
        async with Pool(limits=LIMITS, sessions=4, warm=1, servers=1) as pool, pool.session() as session:
            await asyncio.sleep(0.05)
            return (await session.run("2 + 2")).value

    opening: asyncio.Task[object] | None = None
    monkeypatch.setattr(Pool, "_start", start)
    assert await work() == "4"
    assert failed


async def test_all_sessions_together_are_limited():
    async with Pool(warm=0, servers=1, sessions=8, memory_bytes=64 << 20) as pool:
        async with asyncio.TaskGroup() as group:
            code = "x = b'x' * (24 << 20)\nimport time; time.sleep(0.3)"  # each has 512 MiB of its own
            cells = [group.create_task(_cell(pool, code)) for _ in range(6)]
        async with pool.session() as session:
            results, after = [cell.result() for cell in cells], (await session.run("1")).value
    assert "OutOfMemory" in {result.error.name for result in results if result.error is not None}
    assert after == "1"


async def _cell(pool: Pool, code: str):
    async with pool.session() as session:
        return await session.run(code)


def test_hierarchies_of_either_version_are_found(tmp_path: Path):
    """Text as in cgroups(7) and proc(5): a mount shows a hierarchy from its root on."""
    for folder, enabled in (("", "cpu memory pids"), ("a", "memory"), ("a/b", "")):
        (tmp_path / "v2" / folder).mkdir(exist_ok=True, parents=True)
        (tmp_path / "v2" / folder / "cgroup.subtree_control").write_text(enabled)
    line = "30 20 0:26 {root} {path} rw,relatime - {kind} cgroup rw,{options}"
    new = line.format(root="/", path=tmp_path / "v2", kind="cgroup2", options="nsdelegate")
    every = frozenset(cgroups.CONTROLLERS)
    assert cgroups.hierarchies(new, "0::/a/b") == [cgroups.Hierarchy(2, every, str(tmp_path / "v2"))]
    (tmp_path / "v2" / "cgroup.subtree_control").write_text("pids")
    without = cgroups.hierarchies(new, "0::/a/b")
    assert without == [cgroups.Hierarchy(2, frozenset(), str(tmp_path / "v2/a/b"))]
    assert cgroups.lacking(without) == "memory, pids, cpu"
    old = "\n".join(
        line.format(root=root, path=f"/c/{names}", kind="cgroup", options=names)
        for root, names in (("/docker/x", "memory"), ("/", "cpu,cpuacct"), ("/", "pids"), ("/", "blkio"))
    )
    assert cgroups.hierarchies(old, "4:memory:/docker/x/y\n3:cpu,cpuacct:/z\n2:pids:/\n1:blkio:/") == [
        cgroups.Hierarchy(1, frozenset({"memory"}), "/c/memory/y"),
        cgroups.Hierarchy(1, frozenset({"cpu"}), "/c/cpu,cpuacct/z"),
        cgroups.Hierarchy(1, frozenset({"pids"}), "/c/pids"),
    ]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("victim", ["server", "keeper"])
def test_a_killed_server_is_replaced_and_leaves_nothing(victim: str):
    async def work():
        async with Pool(warm=1, sessions=8, servers=1) as pool:
            session = await pool.open()
            await session.run("import os\nif os.fork() == 0:\n  import time; time.sleep(100)")
            (host,) = pool.hosts
            trees = left_in_cgroups(host.tree)
            assert trees
            keeper = host.process.pid
            inside = {int(pid) for tree in trees for pid in _processes(tree)}
            assert len(inside) >= 2  # the session and its child, perhaps a warm one
            os.kill(_child(keeper) if victim == "server" else keeper, signal.SIGKILL)
            with pytest.raises(SandboxError, match="server is gone"):
                await session.run("import time; time.sleep(100)")
            await session.close()
            async with pool.session() as other:
                assert (await other.run("1")).value == "1"
            return [tree for tree in trees if tree.exists()], [pid for pid in inside if _alive(pid)]

    assert asyncio.run(work()) == ([], [])


@pytest.mark.long
@pytest.mark.usefixtures("sandbox")
async def test_retried_work_is_right_while_servers_and_sessions_die():
    picks = random.Random(1)

    async def episode(pool: Pool, at: int) -> str | None:
        while True:
            with contextlib.suppress(SandboxError):
                async with pool.session() as session:
                    results = [await session.run(f"x = {at}")] + [await session.run("x += 1; x") for _ in range(5)]
                    if all(result.error is None for result in results):
                        return results[-1].value

    async def kill_some(pool: Pool, seen: set[str]) -> None:
        while True:
            await asyncio.sleep(0.05)
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                host = picks.choice(pool.hosts)
                seen.add(host.tree)
                pids = sorted(pid for tree in left_in_cgroups(host.tree)[:1] for pid in _processes(tree))
                victims = (host.process.pid, _child(host.process.pid), *[int(picks.choice(pids))] * 8)
                os.kill(picks.choice(victims), signal.SIGKILL)

    async def work():
        seen: set[str] = set()
        async with Pool(warm=2, servers=2, sessions=16) as pool:
            killing = asyncio.create_task(kill_some(pool, seen))
            values = await asyncio.gather(*(episode(pool, at) for at in range(200)))
            assert killing.cancel()
        return values, [tree for name in seen for tree in left_in_cgroups(name)]

    values, left = await work()
    assert values == [str(at + 5) for at in range(200)]
    assert left == []


@pytest.mark.usefixtures("sandbox")
def test_a_killed_owner_leaves_nothing():
    program = """if True:
        import asyncio
        from forge_rl.sandbox import Pool
        async def main():
            async with Pool(servers=1) as pool, pool.session() as session:
                await session.run("import os\\nif os.fork() == 0:\\n  import time; time.sleep(100)")
                print(pool.hosts[0].tree, flush=True)
                await session.run("import time; time.sleep(100)", wall_s=100)
        asyncio.run(main())
    """
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    tree = owner.stdout.readline().strip()
    inside = {int(pid) for folder in left_in_cgroups(tree) for pid in _processes(folder)}
    assert len(inside) >= 2
    owner.kill()
    owner.communicate()
    deadline = time.monotonic() + 20
    while left_in_cgroups(tree) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left_in_cgroups(tree) == []
    assert not [pid for pid in inside if _alive(pid)]


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def _processes(tree: Path) -> set[str]:
    found = set()
    for file in tree.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            found |= set(file.read_text().split())
    return found


def _alive(pid: int) -> bool:
    try:
        return "forge_rl-sandbox" in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False


@pytest.mark.usefixtures("sandbox")
def test_another_user_is_refused_and_told_why():
    program = """if True:
        import asyncio, os, sys
        import forge_rl.sandbox.pool
        os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
        from forge_rl.sandbox import Pool, SandboxError
        async def main():
            try:
                async with Pool(servers=1, without=["cgroup", "landlock", "seccomp"]): pass
            except SandboxError as error:
                print(error)
        asyncio.run(main())
    """
    code = f"import sys; sys.path.insert(0, {os.getcwd()!r})\n"
    done = subprocess.run([sys.executable, "-c", code + program], capture_output=True, text=True)
    assert "only root can give each session a user of its own" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"servers": 0}, r"Pool\(servers=0\)"),
        ({"sessions": 0}, "room for 0 sessions"),
        ({"without": ["uid"]}, r"without=\['uid'\]"),
        ({"profile": "loose"}, "profile='loose'"),
        ({"limits": lambda: Limits(wall_s=0)}, "wall_s is 0"),
        ({"limits": lambda: Limits(cpu_s=-1.0)}, "cpu_s is -1"),
        ({"limits": lambda: Limits(cpu_s=float("inf"))}, "cpu_s is inf"),
        ({"limits": lambda: Limits(wall_s=float("inf"))}, "wall_s is inf"),
        ({"limits": lambda: Limits(cpus=float("inf"))}, "cpus is inf"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(arguments: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Pool(**{name: value() if callable(value) else value for name, value in arguments.items()})


async def test_a_module_that_cannot_be_preloaded_is_named(sandbox: SharedPool):
    async def work():
        async with Pool(preload=["no_such_module"], servers=1):
            pass

    with pytest.raises(SandboxError, match="cannot import no_such_module"):
        await work()


def test_a_session_begins_without_the_modules_that_would_slow_its_fork(sandbox: SharedPool):
    async def work():
        async with sandbox.pool.session() as session:
            return await session.run(
                "import sys\n{'shutil', 'lzma', 'bz2', 'tempfile', 'threading'} & set(sys.modules)"
            )

    assert sandbox.run(work()).value == "set()"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    ("profile", "number", "printed"),
    [
        pytest.param("standard", 1, r"rows: 3\n 6 None\n", id="cells"),
        pytest.param("process", 2, r"notes/b:two\n 0 None\n9\n10\n\n\{.*'python': .*\}\n42\n\n", id="commands"),
        pytest.param("standard", 3, r"(?s:diff --git .*\+ {4}return a \+ b\n.*)3\n", id="workspaces"),
    ],
)
def test_the_documents_examples_run(profile: Profile, number: int, printed: str):
    if missing := missing_layers(profile):
        pytest.skip(f"sandbox sessions cannot be isolated here: {missing}")
    page = (Path(__file__).parent.parent / "docs" / "doors" / "sandbox.md").read_text()
    program = page.split("```python\n")[number].split("```")[0]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert re.fullmatch(printed, done.stdout), done.stdout


def test_importing_the_sandbox_loads_little():
    program = "import sys, forge_rl.sandbox.pool; sys.exit(bool({'torch', 'monarch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.usefixtures("sandbox", "high_descriptors")
async def test_a_pool_starts_in_a_program_with_many_files_and_no_two_sessions_have_one_user():
    async with Pool(limits=LIMITS, sessions=4, warm=0, servers=1) as pool, pool.session() as first:
        # A later session whose number leads to the same user id.
        pool._names = itertools.count(1 + (1 << 16))
        async with pool.session() as second:
            users = [(await session.run("import os; os.getuid()")).value for session in (first, second)]
    assert len(set(users)) == 2


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_pool_that_does_not_start_leaves_no_server(is_cancelled: bool, monkeypatch: pytest.MonkeyPatch):
    hosts = list[Host]()

    class SecondFails(Host):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            hosts.append(self)

        async def _send(self, message: object, fds: Sequence[int] = ()) -> None:
            if len(hosts) == 1:
                await super()._send(message, fds)
            elif is_cancelled:
                raise asyncio.CancelledError
            else:
                raise OSError("no second server")

    monkeypatch.setattr("forge_rl.sandbox.pool.Host", SecondFails)
    with pytest.raises(asyncio.CancelledError if is_cancelled else SandboxError):
        await Pool(warm=0, servers=2).__aenter__()
    assert [host.process.poll() is None for host in hosts] == [False, False]


def test_a_cell_has_no_limit_of_an_earlier_one(sandbox: SharedPool):
    async def work():
        async with sandbox.pool.session() as session:
            code = "import resource; resource.getrlimit(resource.RLIMIT_CPU)"
            return [(await session.run(code, cpu_s=cpu_s)).value for cpu_s in (None, 5.0, None)]

    first, limited, last = sandbox.run(work())
    assert first == last != limited


@pytest.mark.long
@pytest.mark.usefixtures("sandbox")
async def test_a_server_holds_more_sessions_than_each_may_have_files():
    async with Pool(profile="strict") as pool, contextlib.AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(pool.session()) for _ in range(270)]
        result = [(await sessions[at].run("import resource; resource.getrlimit(7)")).value for at in (0, -1)]
    assert result == ["(256, 256)"] * 2
