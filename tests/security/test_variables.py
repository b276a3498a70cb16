"""What child processes get of a run's environment, and what they can read of their ancestors'."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forge_rl.envs.worker import Worker
from forge_rl.errors import ConfigError
from forge_rl.runtime.commands import CommandLimits, run_command
from forge_rl.runtime.isolation import Isolation, check_isolation
from forge_rl.system.supervised import supervised
from forge_rl.system.variables import api_key, handed_on, kept_back, pop_key
from tests.fake_backend import until
from tests.security.other_user import ROOT, needs_root

KEPT_BACK = (
    "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN GITHUB_PAT DATABASE_URL MYAPIKEY OPENAI_API_KEYS "
    "API_KEY_2 DB_PASS PGPASSWORD SSH_PASSPHRASE SLACK_WEBHOOK_URL AZURE_STORAGE_CONNECTION_STRING HTTPS_PROXY "
    "https_proxy UV_INDEX_URL PIP_INDEX_URL KUBECONFIG SSH_AUTH_SOCK NPM_AUTH HF_TOKEN HF_TOKENS WANDB_API_KEY COOKIE "
    "JWT VAULT_ADDR SENTRY_DSN BEARER OPENAI_KEY_FILE OPENAI_API_KEY VLLM_API_KEY FORGE_RL_API_KEY ANYTHING "
    "FORGE_RL_PRIVATE_NETWORK"
)
HANDED_ON = (
    "PATH HOME LANG LC_ALL TMPDIR PYTHONPATH PYTHONHASHSEED LD_LIBRARY_PATH OMP_NUM_THREADS MALLOC_ARENA_MAX "
    "NCCL_DEBUG CUDA_VISIBLE_DEVICES VLLM_LOGGING_LEVEL TORCHINDUCTOR_CACHE_DIR TORCH_HOME HF_HOME HF_HUB_OFFLINE "
    "HYPERACTOR_X MONARCH_FILE_LOG FORGE_RL_TESTS TOKENIZERS_PARALLELISM TRITON_CACHE_DIR"
)


def test_children_get_what_is_listed_and_no_secret(monkeypatch: pytest.MonkeyPatch):
    for name in (*KEPT_BACK.split(), *HANDED_ON.split()):
        monkeypatch.setenv(name, "value")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:password@mirror.example")
    assert set(HANDED_ON.split()) <= handed_on().keys()
    assert not {*KEPT_BACK.split(), "HF_ENDPOINT"} & handed_on().keys()
    assert set(KEPT_BACK.split()) - kept_back().keys() == {"FORGE_RL_PRIVATE_NETWORK"}
    assert handed_on({"OPENAI_API_KEY": "its own"})["OPENAI_API_KEY"] == "its own"


def test_the_user_names_more_and_one_that_is_not_set_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORGE_RL_PASS_ENV", "")
    monkeypatch.setenv("MY_TOKEN", "value")
    monkeypatch.delenv("NOT_THERE", raising=False)
    assert "MY_TOKEN" not in handed_on()
    check_isolation(Isolation(pass_env=("MY_TOKEN",)))
    assert handed_on()["MY_TOKEN"] == "value"
    with pytest.raises(ConfigError, match="--pass-env names NOT_THERE, which is not set"):
        check_isolation(Isolation(pass_env=("NOT_THERE",)))


READS = """
import json, os
pid, seen = os.getpid(), {}
while pid > 1:
    try: seen[pid] = [each.partition("=")[2] for each in open(f"/proc/{pid}/environ").read().split("\\0")]
    except OSError as error: seen[pid] = error.strerror
    try: open(f"/proc/{pid}/mem", "rb").close(); seen[f"mem {pid}"] = "opened"
    except OSError as error: seen[f"mem {pid}"] = error.strerror
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
print(json.dumps([dict(os.environ), seen]))
"""
STARTS = """
import asyncio, ctypes, os, subprocess, sys
from forge_rl.runtime.commands import CommandLimits, run_command
from forge_rl.system.variables import hide
reads, python = sys.argv[1:]
before = dict(os.environ)
if python:  # becomes another user, as which it would have been started, but that ours may lie where others cannot go
    os.setgroups([]), os.setgid(65534), os.setuid(65534), ctypes.CDLL(None).prctl(4, 1)
    shows = "import os; print('hunter2' in open(f'/proc/{os.getppid()}/environ').read())"
    assert subprocess.check_output([python, "-c", shows], env={}) == b"True\\n", "else nothing is shown here"
hide()
if python:
    told = subprocess.check_output([python, "-c", reads], env={}, text=True)
else:
    command = [sys.executable, "-c", reads]
    told = asyncio.run(run_command(command, CommandLimits(memory_gib=2), variables={}, stdin=b"")).output
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
assert dict(os.environ) == before and getenv(b"AWS_ACCESS_KEY_ID") == b"hunter2", "it has them itself"
print(os.getpid(), told)
"""


def seen_by_a_command(python: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """Number of the process that has secrets, and what its child finds: its own variables, and those of ancestors."""
    variables = {**handed_on(), "AWS_ACCESS_KEY_ID": "hunter2", "DATABASE_URL": "hunter2"}
    command = [sys.executable, "-c", STARTS, READS, python]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)
    pid, _, reply = done.stdout.partition(" ")
    assert reply, done.stderr
    assert "hunter2" not in reply
    command_variables, observations = json.loads(reply)
    return pid, command_variables, observations


@pytest.mark.parametrize(
    ("flag", "option", "hint"),
    [
        ("--reward judge", "api_key_env=", "set it to the server's key, name another as api_key_env=NAME, or write"),
        ("--url", "--url-key-env", "set it to the key, or name another as --url-key-env NAME"),
        ("a served engine", "", "set it to the key"),
    ],
)
def test_a_key_that_is_missing_names_what_sets_it(flag: str, option: str, hint: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(ConfigError, match=f"^{flag}: the environment variable A_KEY is not set") as caught:
        api_key(flag, "A_KEY", option=option)
    assert caught.value.hint.startswith(hint)
    assert ("api_key_env" in caught.value.hint) == (option == "api_key_env=")
    for wrong in ("ключ", "secret\n", "sec\x1bret"):
        monkeypatch.setenv("A_KEY", wrong)
        with pytest.raises(ConfigError, match="white space, or has a character that no header can carry"):
            api_key(flag, "A_KEY", option=option)
    monkeypatch.setenv("A_KEY", "secret")
    assert api_key(flag, "A_KEY", option=option) == "secret"


def test_a_servers_key_is_removed_from_the_environment_and_one_that_no_request_can_carry_is_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("A_KEY", "secret")
    assert pop_key("the gateway", "A_KEY") == "secret"
    assert "A_KEY" not in os.environ
    assert pop_key("the gateway", "A_KEY") == ""
    for wrong in ("secret\n", " secret", "ключ"):
        monkeypatch.setenv("A_KEY", wrong)
        with pytest.raises(ConfigError, match=r"^the gateway: the environment variable A_KEY starts or ends") as caught:
            pop_key("the gateway", "A_KEY")
        assert wrong.strip() not in str(caught.value)


def test_a_command_gets_no_secret_and_no_ancestor_shows_one():
    pid, command_variables, observations = seen_by_a_command("")
    assert not {"AWS_ACCESS_KEY_ID", "DATABASE_URL"} & command_variables.keys()
    assert "*" * len("hunter2") in observations[pid] or os.geteuid() != 0, "root reads what is left there"


@needs_root
def test_a_process_of_the_same_user_reads_neither_variables_nor_memory():
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("there is no Python that another user may run")
    pid, _, observations = seen_by_a_command(python)
    assert (observations[pid], observations[f"mem {pid}"]) == ("Permission denied", "Permission denied")


def test_what_is_told_is_in_os_environ_alone():
    check = (
        "import ctypes, os, subprocess; from forge_rl.system.variables import take; take({'A_KEY': 'hunter2'})\n"
        "child = subprocess.check_output('env')\n"
        "print(os.environ['A_KEY'], b'hunter2' in child, ctypes.CDLL(None).getenv(b'A_KEY'),"
        "b'hunter2' in open('/proc/self/environ', 'rb').read(),"
        "subprocess.check_output('env', env=os.environ).count(b'hunter2'))"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "hunter2 False 0 False 1\n", done.stderr


ANSWERS = """
import json, os, sys
print('{"id": 0}', flush=True)
for line in sys.stdin:
    print(json.dumps({"id": json.loads(line)["id"], "result": dict(os.environ)}), flush=True)
"""


async def test_a_worker_of_another_interpreter_gets_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("DATABASE_URL", "hunter2")

    async def check() -> object:
        worker = await Worker.start("w", [sys.executable, "-c", ANSWERS], log=tmp_path / "log")
        try:
            return await worker.call({})
        finally:
            await worker.close()

    variables = await check()
    assert isinstance(variables, dict)
    assert "PATH" in variables
    assert "DATABASE_URL" not in variables


LEAVES = """
import os, sys, time
for session in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.environ.clear()
            os.execve("/bin/sleep", ["sleep", sys.argv[1]], {})
        os._exit(0)
while sys.argv[2:]:
    time.sleep(1)
"""


def left(seconds: str) -> list[str]:
    """Numbers of the processes that sleep for so long."""
    leaks = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended
            if (folder / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                leaks.append(folder.name)
    return leaks


@pytest.mark.parametrize("ending", ["by itself", "cancelled", "with its parent"])
async def test_nothing_that_a_command_started_outlives_it_in_whatever_session(ending: str, tmp_path: Path):
    seconds = f"{1000 + os.getpid()}.{len(ending)}"
    command = [sys.executable, "-c", LEAVES, seconds, *(["stay"] if ending != "by itself" else [])]
    run = (
        "import asyncio, sys; from forge_rl.runtime.commands import CommandLimits, run_command\n"
        "asyncio.run(run_command(sys.argv[1:], CommandLimits(memory_gib=2), variables={}, stdin=b''))"
    )

    other = await asyncio.create_subprocess_exec(*supervised(["sleep", f"{seconds}1"]))
    try:
        await until(lambda: len(left(f"{seconds}1")) == 1)
        if ending == "with its parent":
            parent = await asyncio.create_subprocess_exec(sys.executable, "-c", run, *command, cwd=ROOT)
            await until(lambda: len(left(seconds)) == 3)
            parent.kill()
            await parent.wait()
            await until(lambda: not left(seconds))
        else:
            limits = CommandLimits(memory_gib=2)
            working = asyncio.ensure_future(run_command(command, limits, variables={}, stdin=b""))
            if ending == "cancelled":
                await until(lambda: len(left(seconds)) == 3)
                working.cancel()
            await asyncio.wait([working])
        assert not left(seconds)
        assert len(left(f"{seconds}1")) == 1, "another command's processes are not touched"
    finally:
        other.terminate()
        await other.wait()


@pytest.mark.parametrize(("code", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9), ("kill -15 $$", -15)])
def test_a_supervisor_ends_as_its_command_does(code: str, status: int):
    assert subprocess.run(supervised(["sh", "-c", code])).returncode == status
