"""Commands in the profile `process`: their results, limits, files and languages."""

import asyncio
import os
import re
import time
from pathlib import Path

import pytest

from forge_rl.errors import ConfigError
from forge_rl.sandbox import Limits, Pool, Result, SandboxError, languages
from forge_rl.sandbox.inside import commands
from tests.sandbox_pool import LIMITS, SharedPool, left_in_cgroups


def run(pool: SharedPool, *lines: str | list[str], **arguments: object) -> list[Result]:
    """Run commands, one after the other in a fresh session, the last with the given arguments."""

    async def work() -> list[Result]:
        async with pool.pool.session() as session:
            results = [await session.run(line) for line in lines[:-1]]
            return [*results, await session.run(lines[-1], **arguments)]

    return pool.run(work())


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("echo a; echo b >&2; exit 3", {}, ("a\n", "b\n", 3)),
        (["printf", "%s|", "a b", "$HOME", "é"], {}, ("a b|$HOME|é|", "", 0)),
        ("kill -TERM $$", {}, ("", "", 143)),
        ("tr a-z A-Z", {"stdin": b"ab" * 100_000}, ("AB" * 32_768, "", 0)),
        ("head -c 1", {"stdin": b"ab" * 100_000}, ("a", "", 0)),
        ("printf '\\xff'", {}, ("\ufffd", "", 0)),
        ("cat; pwd; mkdir -p a; echo ~", {"env": {"PATH": "/bin"}}, ("/home/sandbox\n/home/sandbox\n", "", 0)),
        ("pwd", {"folder": "../../usr/bin"}, ("/usr/bin\n", "", 0)),
        ("echo $X; id -u; hostname", {"env": {"X": "1"}}, ("1\n1000\nsandbox\n", "", 0)),
    ],
)
def test_a_command_has_outputs_and_a_status(process_pool: SharedPool, command, arguments: dict, expected: tuple):
    [result] = run(process_pool, command, **arguments)
    assert (result.stdout, result.stderr, result.status, result.error) == (*expected, None)
    assert result.cut == (len(result.stdout) == LIMITS.output_bytes)


def test_nothing_of_the_environment_is_inherited(process_pool: SharedPool):
    [result] = run(process_pool, ["env"], env={"LD_PRELOAD": "/nowhere.so"})
    names = {line.partition("=")[0] for line in result.stdout.splitlines()}
    assert names == {"PATH", "LANG", "USER", "LOGNAME", "HOME", "TMPDIR", "PWD", "LD_PRELOAD"}


def test_files_stay_and_processes_do_not(process_pool: SharedPool):
    started = "setsid nohup sleep 99 & (trap '' TERM HUP; sleep 98) & echo x > here; echo y > /tmp/there"
    _, result = run(process_pool, started, "cat here /tmp/there; ls /proc | grep -c '^[0-9]'; ls /dev/shm")
    assert result.stdout.split() == ["x", "y", "4", "there"]  # bubblewrap, the shell, ls and grep


@pytest.mark.parametrize(
    ("command", "bounds", "error", "message"),
    [
        ("trap '' TERM; setsid sleep 99 & sleep 98", {"wall_s": 0.3}, "CellOverrun", "wall-clock"),
        ("exec >&- 2>&-; sleep 99", {"wall_s": 0.3}, "CellOverrun", "wall-clock"),
        ("while :; do :; done & while :; do :; done", {"cpu_s": 0.3}, "CellOverrun", "CPU"),
        (["python3", "-c", "x = bytearray(b'x' * (400 << 20))"], {}, "OutOfMemory", "memory limit"),
        (["no-such-program"], {}, "NotStarted", "No such file"),
        (["sh", "-c", "a\0b"], {}, "NotStarted", "NUL"),
        ("x" * 200_000, {}, "NotStarted", "too long"),
        ("pwd", {"folder": "nowhere"}, "NotStarted", "nowhere"),
    ],
)
def test_what_ends_a_command_leaves_its_session(
    process_pool: SharedPool, command, bounds: dict, error: str, message: str
):
    async def work():
        async with process_pool.pool.session() as session:
            await session.run("echo x > kept")
            failed = await session.run(command, **bounds)
            [host] = process_pool.pool.hosts
            left = (Path(one) / session._body.name / "cgroup.procs" for one in left_in_cgroups(host.tree))
            inside = {path.read_text() for path in left}
            return failed, await session.run("cat kept"), inside

    failed, after, inside = process_pool.run(work())
    assert (failed.error.name, after.stdout) == (error, "x\n")
    assert message in failed.error.message
    assert {len(text.split()) for text in inside} == {1}  # the session's own process


def kill_one(group: Path, victim: str) -> None:
    """Kill the first process of a name, once a cgroup has five: both, PID 1 inside, and two that sleep."""
    deadline = time.monotonic() + 20
    while len(pids := group.read_text().split()) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(next(pid for pid in map(int, pids) if victim in Path(f"/proc/{pid}/comm").read_text()), 9)


@pytest.mark.parametrize(("victim", "alive"), [("bwrap", True), ("python", False)])
def test_a_killed_part_ends_the_command_with_all_that_it_started(process_pool: SharedPool, victim: str, alive: bool):
    """Bubblewrap itself, or the session's own process."""

    async def work():
        async with process_pool.pool.session() as session:
            running = asyncio.create_task(session.run("setsid sleep 99 & echo; sleep 98"))
            [host] = process_pool.pool.hosts
            group = next(iter(left_in_cgroups(host.tree))) / session._body.name / "cgroup.procs"
            await asyncio.to_thread(kill_one, group, victim)
            result = await running
            return result.error.name, session.alive, len(group.read_text().split()) if alive else 1

    assert process_pool.run(work()) == ("Ended", alive, 1)


def test_a_result_says_what_a_command_used(process_pool: SharedPool):
    [result] = run(process_pool, "python3 -c 'x = b\"x\" * (40 << 20); sum(range(3_000_000))'")
    assert 40 << 20 < result.usage.memory_bytes <= LIMITS.memory_bytes
    assert 0 < result.usage.cpu_s <= 4 * result.usage.wall_s


def test_a_fork_has_the_files_and_its_own_limits(process_pool: SharedPool):
    async def work():
        async with process_pool.pool.session() as session:
            await session.run("echo 1 > x; echo 2 > /tmp/y")
            async with await session.fork() as fork:
                await fork.run("echo 3 > x")
                used = (await fork.run("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")).usage
                return (await session.run("cat x")).stdout, (await fork.run("cat x /tmp/y")).stdout, used

    first, second, used = process_pool.run(work())
    assert (first, second) == ("1\n", "3\n2\n")
    assert used.cpu_s > 0


def test_a_command_can_be_undone(process_pool: SharedPool):
    async def work():
        async with process_pool.pool.session(undo=True) as session:
            await session.run("echo 1 > x")
            await session.run("rm x")
            await session.restore()
            return await session.run("cat x")

    assert process_pool.run(work()).stdout == "1\n"


def test_commands_work_in_a_workspace(process_pool: SharedPool, tmp_path: Path):
    (tmp_path / "file").write_text("old\n")

    async def work():
        async with process_pool.pool.session(workspace=tmp_path) as session:
            result = await session.run("pwd; cat file; echo new > file")
            await session.put("other", b"1")
            async with await session.fork() as fork:
                await session.run("echo more > more; rm other")
                assert (await fork.run("pwd; ls; cat file")).stdout == "/workspace\nfile\nother\nnew\n"
                return result, await fork.diff()

    result, diff = process_pool.run(work())
    assert result.stdout == "/workspace\nold\n"
    assert re.findall(r"^[-+]\w+", diff, re.MULTILINE) == ["-old", "+new", "+1"]
    assert (tmp_path / "file").read_text() == "old\n"


SOURCES = {
    "python": "print(2 * int(input()))",
    "shell": "read x; echo $((2 * x))",
    "javascript": "console.log(2 * require('fs').readFileSync(0, 'utf8'))",
    "typescript": "declare var require: any; const x: number = +require('fs').readFileSync(0); console.log(2 * x)",
    "c": '#include <stdio.h>\nint main(void) { int x; scanf("%d", &x); printf("%d\\n", 2 * x); }',
    "c++": "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << 2 * x << std::endl; }",
    "go": 'package main\nimport "fmt"\nfunc main() { var x int; fmt.Scan(&x); fmt.Println(2 * x) }',
    "rust": "fn main() { let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap();"
    ' println!("{}", 2 * s.trim().parse::<i32>().unwrap()); }',
    "java": "class Main { public static void main(String[] a) {"
    " System.out.println(2 * new java.util.Scanner(System.in).nextInt()); } }",
    "ruby": "puts 2 * gets.to_i",
}
ROOMY = Limits(wall_s=100, memory_bytes=1 << 30, processes=128, scratch_bytes=512 << 20, scratch_files=20_000)


@pytest.mark.parametrize("language", languages.LANGUAGES)
def test_a_source_file_of_each_language_runs(process_pool: SharedPool, language: str):
    async def work():
        async with process_pool.pool.session(limits=ROOMY) as session:
            if language not in (found := await languages.installed(session)):
                return None
            assert re.search(r"\d", found[language])
            good = await languages.run_source(session, language, SOURCES[language], stdin=b"21\n")
            return good, await languages.run_source(session, language, "(]")

    results = process_pool.run(work())
    if results is None:
        pytest.skip(f"this machine has no {language}")
    good, bad = results
    assert (good.stdout, good.status) == ("42\n", 0), good
    assert bad.status not in (0, None)
    assert bad.stderr or bad.stdout


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ([], {}, "a command is"),
        (["ls", 1], {}, "a command is"),
        ("ls", {"env": {"A=B": "1"}}, "A=B"),
        ("ls", {"env": {"A": 1}}, "'A'"),
    ],
)
def test_a_wrong_command_is_refused(process_pool: SharedPool, command, arguments: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        run(process_pool, command, **arguments)


def test_code_has_no_arguments_of_commands(standard_pool: SharedPool):
    with pytest.raises(ConfigError, match="sessions of Python"):
        standard_pool.run(_with_stdin(standard_pool))


async def _with_stdin(pool: SharedPool) -> None:
    async with pool.pool.session() as session:
        await session.run("1", stdin=b"x")


@pytest.mark.usefixtures("process_pool")
async def test_without_bubblewrap_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commands, "_SEARCHED", "/nowhere")

    async def work():
        async with Pool(profile="process", without=["cgroup", "landlock", "seccomp"]):
            pass

    with pytest.raises(SandboxError, match="bubblewrap: there is no bwrap") as raised:
        await work()
    assert "apt-get install bubblewrap" in str(raised.value)
