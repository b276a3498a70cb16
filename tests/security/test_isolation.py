"""Other users and other machines at a program's sockets."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forge_rl.errors import ConfigError
from forge_rl.runtime import private_network
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.isolation import Isolation, check_isolation, other_people, public_ports
from forge_rl.system.redaction import is_secret
from tests.security.other_user import NOBODY, ROOT, as_user, can_make_networks, connects, needs_root

LISTENS = """
import json, os, signal, socket, sys, time
abstract, loopback = socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0))
name = f"forge_rl-{os.getpid()}"
abstract.bind("\\0" + name)
abstract.listen()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print(json.dumps([name, loopback.getsockname()[1], os.getpid()]), flush=True)
time.sleep(600)
"""
SERVES = """
import subprocess, sys
ASKS = "import os; os.dup(int(os.environ['FORGE_RL_PRIVATE_NETWORK'].split()[0]))"
from forge_rl.runtime.private_network import listen_outside
listener = listen_outside("127.0.0.1", 0)
child = subprocess.run([sys.executable, "-c", ASKS], close_fds=False, capture_output=True, text=True)
print(listener.getsockname()[1], child.stderr.splitlines()[-1], flush=True)
connection, _ = listener.accept()
connection.sendall(b"hello from inside")
try: listen_outside("127.0.0.1", listener.getsockname()[1])
except OSError as error: connection.sendall(f", {error.strerror.partition(' (')[0]}".encode())
try: listen_outside("203.0.113.7", 0)
except OSError as error: connection.sendall(f", {error.strerror.partition(' (')[0]}".encode())
"""


def start(*command: str, private: bool) -> subprocess.Popen[str]:
    prefix = [sys.executable, "-m", "forge_rl.runtime.private_network"] if private else []
    return subprocess.Popen(
        [*prefix, sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def private() -> bool:
    if not can_make_networks():
        pytest.skip("this machine does not let its users make networks of their own")
    return True


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A program that listens at an abstract socket and at a port of the loopback interface."""
    process = start("-c", LISTENS, private=request.param and request.getfixturevalue("private"))
    try:
        assert process.stdout is not None
        name, port, pid = json.loads(process.stdout.readline())
        assert pid == process.pid, "it keeps its number, so that signals reach it"
        yield process, name, port
    finally:
        process.kill()
        process.communicate()


@needs_root
@pytest.mark.parametrize("program", [False, True], indirect=True, ids=["open", "private"])
def test_another_user_reaches_sockets_only_outside_of_a_private_network(
    program: tuple[subprocess.Popen[str], str, int], request: pytest.FixtureRequest
):
    _, name, port = program
    is_open = "open" in request.node.name
    assert as_user(NOBODY, lambda: connects(socket.AF_UNIX, f"\0{name}")) is is_open
    assert as_user(NOBODY, lambda: connects(socket.AF_INET, ("127.0.0.1", port))) is is_open


@pytest.mark.parametrize("program", [True], indirect=True)
def test_not_even_this_user_comes_in_from_outside_and_signals_do(program: tuple[subprocess.Popen[str], str, int]):
    process, name, port = program
    assert not connects(socket.AF_UNIX, f"\0{name}")
    assert not connects(socket.AF_INET, ("127.0.0.1", port))
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 3
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, "the process outside ends with it"


def test_a_port_that_is_opened_outside_is_reached_and_errors_come_back(private: bool):
    process = start("-c", SERVES, private=True)
    try:
        assert process.stdout is not None
        port, _, of_child = process.stdout.readline().partition(" ")
        assert of_child == "OSError: [Errno 9] Bad file descriptor\n", "children do not inherit the way out"
        with socket.create_connection(("127.0.0.1", int(port))) as client, client.makefile() as reader:
            assert reader.read() == "hello from inside, Address already in use, Cannot assign requested address"
    finally:
        process.kill()
        process.communicate()


def test_a_private_network_reaches_only_the_loopback_interface(private: bool):
    script = """
import socket
def reach(address):
    with socket.socket() as s:
        s.settimeout(3)
        try: s.connect(address)
        except OSError as error: return error.strerror
        return "reached"
own = socket.create_server(("127.0.0.1", 0))
print(reach(("192.0.2.1", 80)), reach(own.getsockname()), sep=", ")
"""
    output, _ = start("-c", script, private=True).communicate(timeout=60)
    assert output == "Network is unreachable, reached\n"


def test_files_keep_their_owner_inside(private: bool, tmp_path: Path):
    script = f"import os; open({str(tmp_path / 'file')!r}, 'w').close(); print(os.getuid())"
    output, _ = start("-c", script, private=True).communicate(timeout=60)
    assert int(output) == os.getuid() == (tmp_path / "file").stat().st_uid


JUDGES = "import runpy, sys; made = runpy.run_path(sys.argv[1]); print(made['is_private'](), made['has_way_out']())"


@pytest.fixture
def alone(private: bool) -> Iterator[tuple[str, str]]:
    """A Python that every user may run, and the module's file where every user may read it."""
    python = shutil.which("python3", path="/usr/bin:/bin")  # ours may lie where other users cannot go
    if python is None:
        pytest.skip("there is no Python that another user may run")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        file = Path(shutil.copy(private_network.__file__, folder))
        os.chmod(folder, 0o755)
        os.chmod(file, 0o644)
        yield python, str(file)


def judged(alone: tuple[str, str], *prefix: str, user: int | None = None, script: str = JUDGES, **more: str) -> str:
    python, file = alone
    command = [*prefix, python, "-c", script, file]
    user = user if os.geteuid() == 0 else None
    environment = {"PATH": os.environ["PATH"], **more}
    done = subprocess.run(command, user=user, group=user, cwd="/", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("user", [None, NOBODY])
def test_a_network_of_its_own_is_known_by_what_the_kernel_says(alone: tuple[str, str], user: int | None):
    assert judged(alone, user=user) == "False False"
    assert judged(alone, alone[0], alone[1], user=user) == "True True"
    assert judged(alone, "unshare", "-Urn", user=user) == "True False", "one that the user made by hand"
    assert judged(alone, "unshare", "-Ur", user=user) == "False False"
    assert judged(alone, user=user, FORGE_RL_PRIVATE_NETWORK="7 99999") == "False False"


@needs_root
def test_root_is_private_where_it_went_and_not_where_another_user_is(alone: tuple[str, str]):
    assert judged(alone, "unshare", "-n") == "True False", "as ip netns does"
    other = "import subprocess; other = subprocess.Popen(['sleep', '60'], user=65534)\n"
    assert judged(alone, "unshare", "-n", script=f"{other}{JUDGES}; other.kill()") == "False False"
    first = ["unshare", "--pid", "--fork", "--mount-proc"]
    assert judged(alone, *first) == "False False"
    assert judged(alone, *first, *alone) == "True True", "also as the first process of a container"


def test_no_variable_and_no_open_socket_make_a_network_private(monkeypatch: pytest.MonkeyPatch):
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, other:
        for forged in ("7 99999", f"7777 {os.getpid()}", f"{ours.fileno()} {os.getpid()}", "x", ""):
            monkeypatch.setenv("FORGE_RL_PRIVATE_NETWORK", forged)
            assert not private_network.is_private()
            for isolation in (Isolation(strict_isolation=True), Isolation(strict_isolation=True, private_network=True)):
                with pytest.raises(ConfigError, match=r"refuses to start|not in a private network"):
                    check_isolation(isolation)


@needs_root
def test_a_user_without_privileges_makes_one_too(alone: tuple[str, str]):
    script = "import os; print('FORGE_RL_PRIVATE_NETWORK' in os.environ, os.getuid(), os.getgid())"
    assert judged(alone, *alone, user=NOBODY, script=script) == f"True {NOBODY} {NOBODY}"


@needs_root
def test_where_networks_are_forbidden_it_says_so_in_a_line():
    forbid = "import resource; open('/proc/sys/user/max_net_namespaces', 'w').write('0')"
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c"]
    command += [f"{forbid}\nfrom forge_rl.runtime.private_network import enter; enter(['true'])"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "max_net_namespaces" in done.stderr:
        pytest.skip("networks cannot be forbidden here")
    assert done.returncode == 1
    assert done.stderr.startswith("error: this machine does not let its users create private networks")
    assert "Traceback" not in done.stderr


def test_a_run_that_must_be_isolated_and_is_not_does_not_start():
    with pytest.raises(ConfigError, match="--strict-isolation refuses to start") as caught:
        check_isolation(Isolation(strict_isolation=True))
    assert "--private-network" in caught.value.hint


def test_a_session_outside_a_private_network_is_told_how_to_begin():
    with pytest.raises(ConfigError, match="not in a private network") as caught:
        check_isolation(Isolation(private_network=True))
    assert "python -m forge_rl.runtime.private_network" in caught.value.hint


@needs_root
def test_other_people_are_warned_of_and_the_systems_own_users_are_not():
    people = subprocess.Popen(["sleep", "60"], user=23456)
    system = subprocess.Popen(["sleep", "60"], user=NOBODY)
    try:
        assert "23456" in other_people()
        assert "nobody" not in other_people()
        assert "23456" in check_isolation(Isolation())
    finally:
        for process in (people, system):
            process.kill()
            process.wait()


def test_who_is_a_person_is_for_the_machine_to_say(tmp_path: Path):
    (tmp_path / "login.defs").write_text("# people\nUID_MIN\t\t\t70000\nUID_MAX 70001\nSYS_UID_MIN 100\n")
    assert other_people(tmp_path / "login.defs") == []


def test_public_ports_are_distinguished_from_loopback_ports():
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0)) as public:
        for with_hosts in (False, True):
            ports = public_ports(psutil.Process(), with_hosts=with_hosts)
            assert ports == [f"0.0.0.0:{public.getsockname()[1]}"]
    assert public_ports(psutil.Process()) == []


def test_processes_are_not_started_while_other_machines_reach_monarch(tmp_path: Path):
    with socket.create_server(("0.0.0.0", 0)), pytest.raises(ConfigError, match="where other machines can reach it"):
        Cluster(tmp_path).spawn("mesh")


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("PGPASSWORD", True),
        *(
            (name, True)
            for name in ("AWS_ACCESS_KEY_ID", "GITHUB_PAT", "DB_PASS", "HF_TOKENS", "API_KEY_2", "MYAPIKEY")
        ),
        *((name, True) for name in ("DATABASE_URL", "SENTRY_DSN", "Authorization", "SSH_PASSPHRASE", "NPM_AUTH")),
        *(
            (name, False)
            for name in ("max_tokens", "api_key_env", "api_key_file", "tokenizer", "path", "bypass", "keys")
        ),
        *((name, True) for name in ("OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "MY_SECRET")),
        *((name, False) for name in ("TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "PATH", "VLLM_MAX_TOKENS")),
    ],
)
def test_names_of_variables_that_are_secret(name: str, secret: bool):
    assert is_secret(name) is secret
