"""Attacks on the sandbox from inside of a session: each fails, harms no other session and leaves the server healthy."""

import ast
import contextlib
import os
import socket
import struct
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forge_rl.sandbox import PoolSession, SandboxError
from forge_rl.sandbox.images import ContainerImage
from forge_rl.sandbox.inside import seccomp
from tests.container_images import busybox_layer, carried_python, debian_image, image_of
from tests.sandbox_pool import LIMITS, SharedPool, opened_pool

CALL = """import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*a): return libc.syscall(*a), ctypes.get_errno()
"""
"""Then `call(...)` makes a system call, and returns its result and errno."""


_LONG = ("strict", "process", "debian_image")
_NIGHTLY = ("musl_image", "standard_image", "strict_image")


@pytest.fixture(
    params=[
        "standard",
        *(pytest.param(name, marks=pytest.mark.long) for name in _LONG),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in _NIGHTLY),
    ]
)
def sandbox(request: pytest.FixtureRequest) -> SharedPool:
    """The pool of each profile, also in images; code runs as a cell, or as a program under bubblewrap."""
    return request.getfixturevalue(f"{request.param}_pool")


@pytest.fixture(scope="module")
def debian_image_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """A pool whose sessions are of an image of Debian, in which they are root."""
    store = tmp_path_factory.mktemp("store")
    image = debian_image(store, env={"PYTHONDONTWRITEBYTECODE": "1"}, working_folder="/work")
    yield from opened_pool("process", image=image, images=store)


@pytest.fixture(scope="module")
def musl_image_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """A pool whose sessions are of an image with busybox and musl, to which the attacks bring their Python."""
    store = tmp_path_factory.mktemp("store")
    carried, python = carried_python(store)
    variables = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHOME": "/carried/usr"}
    image = image_of(busybox_layer(store), carried, env=variables, working_folder="/work")
    yield from opened_pool("process", image=image, python=python, images=store)


@pytest.fixture(scope="module")
def standard_image_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """A pool of this machine's Python in an image of Debian."""
    store = tmp_path_factory.mktemp("store")
    yield from opened_pool("standard", image=debian_image(store, working_folder="/work"), images=store)


@pytest.fixture(scope="module")
def strict_image_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """The same with namespaces of their own, in an image with busybox and musl, and nothing else."""
    store = tmp_path_factory.mktemp("store")
    yield from opened_pool("strict", image=image_of(busybox_layer(store), working_folder="/work"), images=store)


@pytest.fixture(scope="module", autouse=True)
def neighbours() -> Iterator[dict[SharedPool, PoolSession]]:
    """A session of each pool, which lives beside all that attack."""
    sessions: dict[SharedPool, PoolSession] = {}
    yield sessions
    for pool, session in sessions.items():
        if not pool.loop.is_closed():  # with a pool of this module its sessions have ended
            assert pool.value("1 + 1") == "2", "a new session opens after all attacks"
            pool.run(session.close())


@pytest.fixture(autouse=True)
def healthy(sandbox: SharedPool, neighbours: dict[SharedPool, PoolSession]) -> Iterator[None]:
    """A neighbour, opened before the attack, lives on, and so does the server."""

    async def open_neighbour() -> PoolSession:
        session = await sandbox.pool.open()
        await sandbox.run_in(session, "secret = '7'; open('secret', 'w').write('7')")
        return session

    session = neighbours.pop(sandbox, None) or sandbox.run(open_neighbour())
    hosts = list(sandbox.pool.hosts)
    yield
    neighbours_secrets = "open('secret').read()" + ("" if sandbox.profile == "process" else " + secret")
    assert sandbox.run(sandbox.run_in(session, neighbours_secrets)).value in ("'7'", "'77'")
    assert sandbox.pool.hosts == hosts
    assert not any(host.lost for host in hosts)
    neighbours[sandbox] = session


def refusals(sandbox: SharedPool, attempts: Sequence[str]) -> list[str]:
    """Run attempts in one fresh session; return the class of each one's error, or "" of one that got through."""
    code = f"""
        def refusal(attempt):
            try: exec(attempt, {{}})
            except Exception as error: return type(error).__name__
            return ""
        [refusal(attempt) for attempt in {list(attempts)!r}]
    """
    errors: list[str] = ast.literal_eval(sandbox.value(textwrap.dedent(code)) or "")
    return errors


# What a session could use up.


def test_fork_bomb(sandbox: SharedPool):
    roomy = replace(LIMITS, memory_bytes=512 << 20)  # so that the number of processes stops it, not their memory
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert sandbox.cell(bomb, roomy, wall_s=1).error.name == "CellOverrun"


def test_thread_bomb(sandbox: SharedPool):
    thread = "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    result = sandbox.cell(f"import threading, time\nfor _ in range(500): {thread}", wall_s=10)
    assert result.error.name == "RuntimeError"
    assert "can't start new thread" in result.error.message


@pytest.mark.parametrize(
    "code",
    [
        "x = [bytearray(b'x' * (1 << 20)) for _ in range(400)]",
        "import mmap\nx = mmap.mmap(-1, 400 << 20)\nfor i in range(0, 400 << 20, 4096): x[i] = 1",
        "import os\nfor _ in range(400): os.write(os.memfd_create('x'), b'x' * (1 << 20))",
    ],
    ids=["heap", "mapping", "memory files"],
)
def test_memory_bomb(sandbox: SharedPool, code: str):
    """Four times the limit: it would come to a good end."""
    if os.geteuid() != 0:
        pytest.skip("this user has no cgroups")
    assert sandbox.cell(code).error.name == "OutOfMemory"


def test_memory_bomb_of_children(sandbox: SharedPool):
    if os.geteuid() != 0:
        pytest.skip("this user has no cgroups")
    code = """
        import os, time
        for _ in range(20):
            if os.fork() == 0:
                x = b"x" * (20 << 20)
                time.sleep(1)
                os._exit(0)
        sum(os.wait()[1] != 0 for _ in range(20))
    """
    result = sandbox.cell(textwrap.dedent(code))
    assert result.error is not None or int(result.value) > 0


def test_memory_of_sockets_and_pipes_is_bounded(sandbox: SharedPool):
    code = """
        import socket
        pairs = []
        while True:
            a, b = socket.socketpair()
            a.setblocking(False)
            pairs.append((a, b))
            a.send(b"x" * (1 << 20))
    """
    assert sandbox.cell(textwrap.dedent(code), wall_s=5).error.name in ("OSError", "OutOfMemory")


def test_disk_fill(sandbox: SharedPool):
    code = "f = open('x', 'wb', buffering=0)\ntry:\n  while True: f.write(b'x' * (1 << 20))\nexcept OSError: pass\n"
    assert 0 < int(sandbox.value(f"{code}import os; os.path.getsize('x')")) <= LIMITS.scratch_bytes


def test_inode_exhaustion(sandbox: SharedPool):
    code = "import os\nn = 0\ntry:\n  while True:\n    os.mkdir(str(n)); n += 1\nexcept OSError: pass\nn"
    assert 0 < int(sandbox.value(code)) < LIMITS.scratch_files


def test_huge_output_of_programs(sandbox: SharedPool):
    result = sandbox.cell("import subprocess; subprocess.run('yes', shell=True)", wall_s=3)
    assert len(result.stdout) == LIMITS.output_bytes
    assert result.cut


def test_endless_loop_in_c(sandbox: SharedPool):
    assert sandbox.cell("import re; re.match('(a*)*b', 'a' * 60)", wall_s=0.3).error.name == "CellOverrun"


def test_limits_cannot_be_raised(sandbox: SharedPool):
    for kind in ("NPROC", "NOFILE", "FSIZE", "CORE", "MEMLOCK"):
        code = f"import resource as r\nr.setrlimit(r.RLIMIT_{kind}, (1 << 30, 1 << 30))"
        assert sandbox.refused(code) in ("PermissionError", "ValueError")


# Files.


def in_layers(image: ContainerImage, path: str) -> bool:
    """Tells whether an image has a file."""
    return any((layer / path[1:]).exists() for layer in image.layers)


_MACHINES = ("/etc/passwd", "/etc/shadow", "/x")
_OWN_IN_PROCESS = (*(str(Path.home()), "/proc/1/environ", "/proc/1/mem", "/proc/sys/kernel/core_pattern", "/dev/shm"),)


def test_what_a_command_sees_is_its_own(sandbox: SharedPool):
    if sandbox.profile != "process" or sandbox.image is not None:
        pytest.skip("commands without an image only")
    own = "[open('/proc/1/environ').read(), os.listdir('/dev/shm'), os.listdir('/tmp'), os.listdir('/home')]"
    assert sandbox.value(f"import os; {own}") == "['', [], [], ['sandbox']]"
    seen = ast.literal_eval(sandbox.value(f"import os; sorted(os.walk({str(Path.home())!r}))[:3]") or "[]")
    assert all(str(folder).startswith(sys.base_prefix) or not files for folder, _, files in seen)


def test_the_machines_files_cannot_be_read(sandbox: SharedPool):
    paths = {
        *("/etc/shadow", str(Path.home()), "/proc/1/environ", "/proc/1/mem", "/proc/kcore"),
        *("/proc/sys/kernel/core_pattern", "/dev/mem", "/dev/kmsg", "/sys/kernel", "/sys/fs/cgroup"),
        *(str(Path(__file__)), "/dev/shm", "/run", "/var/log"),
    }
    if sandbox.profile == "process":
        paths -= {*_OWN_IN_PROCESS}
    if sandbox.image is not None:  # whose own files these are, or the session's
        paths -= {"/dev/shm", *(path for path in paths if in_layers(sandbox.image, path))}
    attempts = [
        f"import os\nos.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read()" for path in paths
    ]
    errors = dict(zip(paths, refusals(sandbox, attempts), strict=True))
    assert {*errors.values()} <= {"FileNotFoundError", "PermissionError"}, errors


def test_nothing_can_be_written_elsewhere(sandbox: SharedPool):
    paths = {"/etc/x", "/usr/x", "/usr/bin/x", "/x", "/proc/x", "/dev/x", f"{sys.base_prefix}/x", "/proc/self/mem2"}
    errors = dict(zip(paths, refusals(sandbox, [f"open({path!r}, 'w').close()" for path in paths]), strict=True))
    writable = [path for path in paths if sandbox.image is not None and not path.startswith(("/proc", "/dev"))]
    assert {errors.pop(path) for path in writable} <= {"", "FileNotFoundError"}
    assert {*errors.values()} <= {"FileNotFoundError", "PermissionError", "OSError"}, errors
    assert not any(map(os.path.lexists, paths))
    if sandbox.image is not None:
        assert not any(in_layers(sandbox.image, path) for path in writable)
        in_another_session = sandbox.value(f"import os; any(map(os.path.lexists, {writable!r}))")
        assert in_another_session == "False"


def test_what_all_sessions_run_cannot_be_changed(sandbox: SharedPool):
    for path in ("json.__file__", "'/bin/sh'", "'/etc/passwd'"):
        if sandbox.image is not None and (path[0] == "'" or sandbox.profile == "process"):
            spoilt = f"import json\nopen({path}, 'r+b').write(b'spoilt'); open({path}, 'rb').read(6)"
            assert sandbox.value(spoilt) == "b'spoilt'"
            assert sandbox.value(f"import json\nopen({path}, 'rb').read(6)") != "b'spoilt'"  # in another session
            continue
        assert sandbox.refused(f"import json\nopen({path}, 'r+b')") in ("PermissionError", "OSError")


def test_other_sessions_files_cannot_be_found(sandbox: SharedPool):
    if sandbox.profile != "standard" or sandbox.image is not None:
        pytest.skip("other sessions have no name here")

    async def work():
        async with sandbox.pool.session() as victim, sandbox.pool.session() as session:
            folder = (await victim.run("import os; os.chmod('..', 0o777); os.chmod('.', 0o777); os.getcwd()")).value
            results = [
                await session.run(f"import os\n{attack}")
                for attack in (
                    f"open({folder} + '/x', 'w')",
                    f"os.listdir({folder})",
                    "os.listdir('/tmp')",
                    "open('/tmp/x', 'w')",
                    f"os.chdir({folder}); os.listdir()",
                )
            ]
            return [result.error.name for result in results]

    assert sandbox.run(work()) == ["PermissionError"] * 5


@pytest.mark.parametrize("link", ["/etc/shadow", "/proc/1/environ", "../../x", "/dev/zero"])
def test_links_lead_transfers_nowhere(sandbox: SharedPool, link: str):
    def machines() -> list[int]:
        return [os.path.lexists(name) and os.stat(name).st_mtime_ns for name in _MACHINES]

    before = machines()

    async def work():
        async with sandbox.pool.session() as session:
            await sandbox.run_in(session, f"import os; os.symlink({link!r}, 'x'); os.symlink('/etc', 'folder')")
            if (sandbox.profile, link, sandbox.image) == ("process", "/proc/1/environ", None):
                assert await session.get("x") == b""
            else:
                with pytest.raises(SandboxError, match="could not transfer"):
                    await session.get("x")
            if sandbox.image is not None:  # whose own files these are
                await session.put("folder/passwd", b"root::0:0::/:/bin/sh")
                with contextlib.suppress(SandboxError):
                    await session.put("x", b"1")
                assert machines() == before
                return
            with pytest.raises(SandboxError, match="could not transfer"):
                await session.put("folder/passwd", b"root::0:0::/:/bin/sh")
            if link != "/dev/zero":
                with pytest.raises(SandboxError, match="could not transfer"):
                    await session.put("x", b"1")

    sandbox.run(work())


def test_a_pipe_in_place_of_a_file_does_not_hang_a_transfer(sandbox: SharedPool):
    async def work():
        async with sandbox.pool.session() as session:
            await sandbox.run_in(session, "import os; os.mkfifo('x')")
            with pytest.raises(SandboxError, match="not a regular file"):
                await session.get("x")

    sandbox.run(work())


# Other processes.


def _has_own_first_process(sandbox: SharedPool) -> bool:
    return sandbox.profile == "process" or os.geteuid() != 0


@pytest.mark.parametrize("target", ["1", "os.getpid() + 1", "os.getppid()", "-1", "0x7fffffff"])
def test_nobody_else_can_be_killed(sandbox: SharedPool, target: str):
    result = sandbox.cell(f"import os\nos.kill({target}, 9)")
    own = ("-1", "1", "os.getppid()") if _has_own_first_process(sandbox) else ("-1",)
    if target not in own or result.error is not None:  # which ignores it
        assert result.error.name in ("PermissionError", "ProcessLookupError")


def test_other_sessions_cannot_be_seen_killed_or_traced(sandbox: SharedPool):
    if sandbox.profile != "standard":
        pytest.skip("other sessions have no name here")

    async def work():
        async with sandbox.pool.session() as victim, sandbox.pool.session() as session:
            pid = (await victim.run("import os; os.getpid()")).value
            attacks = (
                f"os.kill({pid}, 0)",
                f"os.kill({pid}, 9)",
                f"open('/proc/{pid}/mem', 'rb')",
                f"open('/proc/{pid}/environ')",
                f"os.listdir('/proc/{pid}/fd')",
                f"os.pidfd_open({pid})",
                f"os.sched_setaffinity({pid}, [0])",
                f"os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
            )
            results = [await session.run(f"import os\n{attack}") for attack in attacks]
            seen = await session.run("import os\n[pid for pid in os.listdir('/proc') if pid.isdigit()], os.getpid()")
            return [result.error and result.error.name for result in results], seen

    errors, seen = sandbox.run(work())
    assert set(errors) <= {"PermissionError", "FileNotFoundError", "ProcessLookupError"}
    if seen.error is None:
        pids, own = ast.literal_eval(seen.value)
        assert set(pids) <= {str(own)}


def test_tracing_and_the_memory_of_processes_are_refused(sandbox: SharedPool):
    numbers = {"x86_64": (101, 310, 311, 312, 438, 434, 424), "aarch64": (117, 270, 271, 272, 438, 434, 424)}[
        os.uname().machine
    ]
    assert sandbox.value(f"{CALL}{{call(n, 0, 0, 0, 0, 0, 0) for n in {numbers}}}") == "{(-1, 1)}"


# Privileges, and system calls that reach much of the kernel.

DANGEROUS = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "kexec_load": (246, 104), "reboot": (169, 142), "quotactl": (179, 60),
    "swapon": (167, 224), "init_module": (175, 105), "finit_module": (313, 273), "acct": (163, 89),
    "syslog": (103, 116), "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201),
    "setuid": (105, 146), "setresuid": (117, 147), "setgroups": (116, 159), "capset": (126, 91),
    "personality": (135, 92), "ptrace": (101, 117), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "open_by_handle_at": (304, 265), "fsopen": (430, 430), "open_tree": (428, 428),
    "move_mount": (429, 429), "mount_setattr": (442, 442), "memfd_secret": (447, 447), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "kcmp": (312, 272), "mbind": (237, 235), "move_pages": (279, 239),
    "lookup_dcookie": (212, 18), "fanotify_init": (300, 262), "name_to_handle_at": (303, 264), "seccomp": (317, 277),
    "vmsplice": (278, 75), "setsockopt": (54, 208), "sethostname": (170, 161), "clock_settime": (227, 112),
    "settimeofday": (164, 170), "adjtimex": (159, 171), "vhangup": (153, 58), "setdomainname": (171, 162),
    "landlock_restrict_self": (446, 446), "inotify_init": (253, -1), "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
}  # fmt: skip


_NETWORK_CALLS = ("socket", "bind", "connect", "listen", "setsockopt")


def test_dangerous_system_calls_are_refused(sandbox: SharedPool):
    column = list(seccomp.ARCHITECTURES).index(os.uname().machine)
    numbers = {name: pair[column] for name, pair in DANGEROUS.items() if pair[column] >= 0}
    if sandbox.has_network:  # whose network is empty
        numbers = {name: number for name, number in numbers.items() if name not in _NETWORK_CALLS}
    code = f"{CALL}{{name: call(n, 0, 0, 0, 0, 0, 0) for name, n in {numbers}.items()}}"
    result = ast.literal_eval(sandbox.value(code))
    assert {name for name, answer in result.items() if answer != (-1, 1)} == set()


def test_clone_makes_no_namespaces(sandbox: SharedPool):
    flags = [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    cloned = f"def cloned(flag):\n  r = call({number}, ctypes.c_long(flag | 17), 0, 0, 0, 0)\n"
    cloned += "  if r[0] == 0: os._exit(0)\n  return r\n"
    assert sandbox.value(f"{CALL}{cloned}[cloned(flag) for flag in {flags}]") == str([(-1, 1)] * len(flags))


def test_clone3_does_not_exist(sandbox: SharedPool):
    code = f"{CALL}r = call(435, ctypes.create_string_buffer(88), 88)\nif r[0] == 0: os._exit(0)\nr"
    assert sandbox.value(code) == "(-1, 38)"


def test_unknown_and_foreign_system_calls(sandbox: SharedPool):
    assert sandbox.value(f"{CALL}call(1000)") == "(-1, 38)"
    if os.uname().machine == "x86_64":
        assert sandbox.value(f"{CALL}call(0x40000000 + 39)") == "(-1, 1)"


def test_32_bit_calls_end_the_session(sandbox: SharedPool):
    if os.uname().machine != "x86_64":
        pytest.skip("x86 only")
    # mov eax, 20 (getpid); int 0x80; ret
    code = (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"
    )
    assert sandbox.cell(code).error.name == "Ended"


def test_no_privileges_are_held_or_gained(sandbox: SharedPool):
    status = dict(
        line.split(":\t", 1)
        for line in ast.literal_eval(sandbox.value("open('/proc/self/status').read()")).splitlines()
    )
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"], status["Groups"].strip()) == ("1", "2", "")
    assert len(set(status["Uid"].split())) == 1
    if sandbox.has_network:  # an image's programs, whose root is another user outside
        uids = [line.split() for line in ast.literal_eval(sandbox.value("open('/proc/self/uid_map').readlines()"))]
        assert [(inside, count) for inside, _, count in uids] == [("0", "1")]
        return
    assert int(status["Uid"].split()[0]) not in (0, os.getuid())


def test_a_machine_out_of_memory_takes_sessions_first(sandbox: SharedPool):
    assert sandbox.value("open('/proc/self/oom_score_adj').read()") == repr("1000\n")
    lowered = "with open('/proc/self/oom_score_adj', 'w') as file: file.write('0')"
    assert sandbox.refused(lowered) in ("PermissionError", "OSError")


def test_programs_with_setuid_stay_what_they_are(sandbox: SharedPool):
    run = "subprocess.run(['su', '-c', 'id'], capture_output=True, stdin=subprocess.DEVNULL).returncode"
    assert sandbox.value(f"import subprocess; {run}") != "0"


# The network.


def test_no_sockets(sandbox: SharedPool):
    families = ["AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"]
    if not sandbox.has_network:  # an image's programs have a network of their own
        families += ["AF_INET", "AF_INET6", "AF_UNIX"]
    errors = refusals(sandbox, [f"import socket; socket.socket(socket.{family})" for family in families])
    assert errors == ["OSError" if sandbox.has_network else "PermissionError"] * len(families)


def test_the_network_of_an_image_leads_nowhere(sandbox: SharedPool):
    """Its programs reach each other, and neither this machine nor another."""
    if not sandbox.has_network:
        pytest.skip("other sessions have no sockets")
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        code = f"""
            import socket
            def reached(host, port):
                try: return bool(socket.create_connection((host, port), 2).close() or True)
                except OSError as error: return error.errno
            mine = socket.create_server(("127.0.0.1", 0))
            hosts = ["127.0.0.1", "10.0.0.1", "169.254.169.254", "1.1.1.1", "{socket.gethostname()}"]
            [reached(host, {port}) for host in hosts], reached("localhost", mine.getsockname()[1])
        """
        result = sandbox.cell(textwrap.dedent(code))
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert result.error is None, result
    outside, inside = ast.literal_eval(result.value)
    assert True not in outside
    assert inside is True


def test_a_named_address_of_an_image_is_all_that_it_reaches(sandbox: SharedPool):
    """Also by links of its own making: it can neither change its network nor enter another."""
    if not sandbox.has_network:
        pytest.skip("other sessions have no sockets")
    with socket.create_server(("0.0.0.0", 0)) as named, socket.create_server(("0.0.0.0", 0)) as other:
        ports = [listener.getsockname()[1] for listener in (named, other)]
        code = f"""
            import glob, os, socket, struct, fcntl
            def tried(work):
                try: return work() or "reached"
                except OSError as error: return error.errno
            def reached(host, port): return tried(lambda: socket.create_connection((host, port), 2).close())
            def entered(path): return tried(lambda: call({{"x86_64": 308, "aarch64": 268}}[os.uname().machine],
                os.open(path, os.O_RDONLY), 0)[0] and (_ for _ in ()).throw(OSError(1, "setns")))
            hosts = ["127.0.0.1", "127.0.0.2", "10.0.0.1", "10.9.8.7", "169.254.169.254", "{socket.gethostname()}"]
            bad = [reached(host, {ports[1]}) for host in hosts]
            bad += [reached(host, {ports[0]}) for host in hosts if host not in ("127.0.0.1", "{socket.gethostname()}")]
            bad += [tried(lambda family=family, kind=kind: socket.socket(family, kind).close())
                for family, kind in ((socket.AF_NETLINK, 3), (socket.AF_PACKET, 3), (socket.AF_INET, 3))]
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            bad += [tried(lambda: fcntl.ioctl(udp, 0x8914, struct.pack("16sh22x", b"lo", 0)) and None)]
            bad += [entered(path) for path in glob.glob("/proc/*/ns/net") + glob.glob("/proc/*/ns/user")]
            bad += [tried(lambda: socket.create_server(("127.0.0.1", {ports[0]})).close())]
            bad, reached("127.0.0.1", {ports[0]})
        """

        async def work():
            async with sandbox.pool.session(network=[f"127.0.0.1:{ports[0]}"]) as session:
                return await sandbox.run_in(session, CALL + textwrap.dedent(code))

        result = sandbox.run(work())
        assert result.error is None, result
        refused, reached = ast.literal_eval(result.value)
        assert "reached" not in refused, refused
        assert reached == "reached"
        named.accept()[0].close()
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()


def test_abstract_sockets_of_the_machine_cannot_be_reached(sandbox: SharedPool):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as box:
        name = b"\0forge_rl-test-" + os.urandom(8)
        listener.bind(name)
        listener.listen()
        box.bind(name + b"d")
        box.setblocking(False)
        for attack in (
            f"a.connect({name!r})",
            f"a.sendto(b'x', {name + b'd'!r})",
            f"socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', {name + b'd'!r})",
            f"a.sendmsg([b'x'], [], 0, {name + b'd'!r})",
            f"socket.socket(socket.AF_UNIX).connect({name!r})",
            f"socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', {name + b'd'!r})",
        ):
            assert sandbox.refused(f"import socket\na, b = socket.socketpair()\n{attack}") in (
                "PermissionError",
                "OSError",
                "ConnectionRefusedError",  # in an empty network
            )
        with pytest.raises(BlockingIOError):
            box.recv(1)


def test_the_control_channel_leads_nowhere_else(sandbox: SharedPool):
    """A session may write to its own channel only: it is a connected pair. A command has none."""
    code = """
        import os, socket
        found = []
        for fd in range(3, 256):
            try: s = socket.socket(fileno=os.dup(fd))
            except OSError: continue
            found.append((s.family.name, s.type.name, s.getpeername()))
        found
    """
    assert sandbox.value(textwrap.dedent(code)) == (
        "[]" if sandbox.profile == "process" else "[('AF_UNIX', 'SOCK_STREAM', '')]"
    )


def test_no_descriptors_are_inherited(sandbox: SharedPool):
    code = """
        import os
        def is_open(fd):
            try: os.fstat(fd)
            except OSError: return False
            return True
        sum(map(is_open, range(1024)))
    """
    assert sandbox.value(textwrap.dedent(code)) == (
        "3" if sandbox.profile == "process" else "4"  # three streams and the channel
    )


def test_no_variables_are_inherited(sandbox: SharedPool):
    seen_names = set(ast.literal_eval(sandbox.value("import os; list(os.environ)")))
    if sandbox.has_network:
        assert seen_names - {"PWD", "LC_CTYPE"} == {"PATH", "HOME", *sandbox.image.settings.env}
        return
    assert seen_names == {*("PATH", "LANG", "USER", "LOGNAME", "HOME", "TMPDIR", "PWD")}
    if sandbox.profile != "process":
        assert sandbox.refused("open('/proc/self/environ').read()") == "PermissionError"
    seen = sandbox.value("import subprocess; subprocess.check_output(['cat', '/proc/self/environ'])")
    assert os.environ["FORGE_RL_TESTS"] not in seen


# The protocol.


@pytest.fixture
def channel(sandbox: SharedPool) -> None:
    if sandbox.profile == "process":
        pytest.skip("commands have no channel")


CHANNEL = """if True:
    import os, socket, struct, json
    for fd in range(3, 256):
        try: channel = socket.socket(fileno=os.dup(fd)); channel.getpeername(); break
        except OSError: continue
    def frame(text, data=b""): return struct.pack(">II", len(text), len(data)) + text + data
"""
RESULT = '{"stdout": %s, "stderr": "", "value": null, "error": null, "cpu_s": 0, "memory_bytes": 0}'


@pytest.mark.usefixtures("channel")
@pytest.mark.parametrize(
    "attack",
    [
        "channel.send(struct.pack('>II', 0xffffffff, 0))",
        "channel.send(struct.pack('>II', 2, 0xffffffff) + b'{}')",
        "channel.send(frame(b'{'))",
        "channel.send(frame(b'[1]'))",
        "channel.sendall(frame(b'[' * 100000))",
        "channel.send(frame(b'\\xff\\xfe'))",
        "channel.send(frame(b'{}', b'data'))",
        "channel.send(frame(%r.replace('null,', 'null, \"image\": \"text/html\",').encode(), b'<b>'))"
        % (RESULT % '""'),
        "channel.send(frame(%r.replace('null,', 'null, \"image\": \"image/png\",').encode(), b'<b>'))"
        % (RESULT % '""'),
        "channel.send(frame(b'{}'))",
        "channel.send(frame(json.dumps({'stdout': 1}).encode()))",
        "channel.send(frame(%r.replace('null, \"cpu', '[\"a\"], \"cpu').encode()))" % (RESULT % '""'),
        "channel.send(frame(%r.replace('0,', 'NaN,').encode()))" % (RESULT % '""'),
        "channel.send(frame(%r.replace('0,', '1e999,').encode()))" % (RESULT % '""'),
        "channel.send(frame(%r.replace('0,', '9' * 5000 + ',').encode()))" % (RESULT % '""'),
        "import pickle; channel.send(frame(pickle.dumps({'stdout': print})))",
    ],
)
def test_a_broken_frame_ends_its_session(sandbox: SharedPool, attack: str):
    result = sandbox.cell(f"{CHANNEL}\n{attack}\nimport time; time.sleep(30)", wall_s=5)
    assert result.error.name == "BadFrame"


@pytest.mark.usefixtures("channel")
def test_half_a_frame_is_waited_for_no_longer_than_the_cell_may_take(sandbox: SharedPool):
    result = sandbox.cell(
        f"{CHANNEL}\nchannel.send(b'x' * 4)\nwhile True:\n  try:\n    time.sleep(1)\n  except: pass", wall_s=0.3
    )
    assert result.error.name in ("CellOverrun", "BadFrame")


@pytest.mark.usefixtures("channel")
def test_a_forged_result_is_text_within_limits(sandbox: SharedPool):
    attack = f"channel.sendall(frame({RESULT!r}.replace('%s', json.dumps('y' * 300000)).encode()))"
    result = sandbox.cell(f"{CHANNEL}\n{attack}")
    assert len(result.stdout) == LIMITS.output_bytes


def test_objects_are_never_unpickled(sandbox: SharedPool, tmp_path: Path):
    reduce = f"def __reduce__(self): return (open, ({str(tmp_path / 'x')!r}, 'w'))"
    assert sandbox.value(f"class X:\n  {reduce}\n  def __repr__(self): return 'y'\nX()") == "y"
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("channel")
def test_a_fork_that_is_another_process_stays_in_its_sessions_reach(sandbox: SharedPool):
    """A session that answers a fork by itself, from a process of its own, gains no more than a fork has."""
    if sandbox.image is not None:
        pytest.skip("Python in an image does not fork")
    code = f"""{CHANNEL}
import threading
def serve():
    head, fds, _, _ = socket.recv_fds(channel, 8, 8)
    text, data = struct.unpack(">II", head)
    channel.recv(text)
    new, birth = (socket.socket(fileno=fd) for fd in fds)
    birth.send(b"?")  # this very process asks to be moved
    birth.recv(1)
    channel.send(frame(b"{{}}"))
    new.send(frame(b'{{"ready": true}}'))
    while True: pass
channel.send(frame({(RESULT % '""')!r}.encode()))
serve()
"""

    async def work():
        async with sandbox.pool.session() as session:
            await session.run(code)
            fork = await session.fork()
            await fork.close()
            with pytest.raises(SandboxError):
                await session.fork()
            assert not session.alive

    sandbox.run(work())


# What could be shared.


@pytest.mark.usefixtures("channel")
def test_forks_share_no_clock_limit_or_random_state(sandbox: SharedPool):
    if sandbox.image is not None:
        pytest.skip("Python in an image does not fork")

    async def work():
        async with sandbox.pool.session() as session:
            await session.run("import random, signal, uuid")
            async with await session.fork() as one, await session.fork() as two:
                code = "random.random(), uuid.uuid4(), random.SystemRandom().random()"
                values = [(await each.run(code)).value for each in (session, one, two)]
                clocks = [(await each.run("signal.getitimer(signal.ITIMER_PROF)")).value for each in (one, two)]
                return values, clocks

    values, clocks = sandbox.run(work())
    assert len({part for value in values for part in value.split(", ")}) == 9
    assert clocks == ["(0.0, 0.0)"] * 2


def test_keyrings_are_out_of_reach(sandbox: SharedPool):
    if sandbox.profile == "process":
        assert sandbox.value("open('/proc/keys').read()") == "''"  # none that it may see
    else:
        assert sandbox.refused("open('/proc/keys').read()") in ("FileNotFoundError", "PermissionError")


def test_the_filter_of_each_architecture_by_a_second_reading():
    """Interpret the filter's instructions as linux/bpf_common.h defines them."""
    for machine, (architecture, column) in seccomp.ARCHITECTURES.items():
        program = list(struct.iter_unpack("=HBBI", seccomp.session_filter(machine)))

        def verdict(number, *arguments, architecture=architecture, program=program):
            data = struct.pack(
                "<IIQ6Q", number & 0xFFFFFFFF, architecture, 0, *(*arguments, *[0] * (6 - len(arguments)))
            )
            accumulator = at = 0
            while True:
                code, yes, no, k = program[at]
                at += 1
                match code:
                    case 0x20:
                        accumulator = struct.unpack_from("<I", data, k)[0]
                    case 0x54:
                        accumulator &= k
                    case 0x06:
                        return {0x7FFF0000: "allow", 0x80000000: "kill"}.get(k, k & 0xFFFF)
                    case _:
                        test = {
                            0x15: accumulator == k,
                            0x25: accumulator > k,
                            0x35: accumulator >= k,
                            0x45: accumulator & k,
                        }
                        at += yes if test[code] else no

        assert len(program) < 4096
        for name, pair in DANGEROUS.items():
            assert verdict(pair[column]) == 1, name
        read, clone, pair, sendto, prctl = (n[column] for n in ((0, 63), (56, 220), (53, 199), (44, 206), (157, 167)))
        assert verdict(read) == "allow"
        assert verdict(read, architecture=architecture ^ 1) == "kill"
        assert verdict(435) == verdict(463) == verdict(10_000) == 38
        assert verdict(clone, 17) == verdict(clone, 0x8000) == "allow"
        assert [verdict(clone, 1 << bit) for bit in (17, 25, 26, 27, 28, 29, 30)] == [1] * 7
        assert verdict(pair, 1, 1 | 0o2000000) == verdict(pair, 1, 5) == "allow"
        assert [verdict(pair, *kind) for kind in ((1, 2), (1, 3), (2, 1), (16, 1))] == [1] * 4
        assert verdict(sendto, 3) == "allow"
        assert verdict(sendto, 3, 0, 0, 0, 1) == verdict(sendto, 3, 0, 0, 0, 1 << 32) == 1
        assert verdict(prctl, 15) == "allow"
        assert verdict(prctl, 8) == verdict(prctl, 22) == 1
