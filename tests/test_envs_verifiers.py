"""Environments of the verifiers package: a worker's faults, staged; and the real package."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import forge_rl.worlds.verifiers
from benchmarks.ports import unused_port
from forge_rl.envs.env_flag import build_environment
from forge_rl.errors import ConfigError, ForgeError, ReplicaError
from forge_rl.gateway import GatewayConfig, Session
from forge_rl.gateway.agents import serving_agents
from forge_rl.sandbox.inside.seccomp import session_filter
from forge_rl.system.interpreters import interpreter
from forge_rl.types import Episode, Outcome, Score, Task
from forge_rl.worlds.peers.agent_credit import AgentCredit
from forge_rl.worlds.verifiers import PACKAGE, VerifiersEnv, VerifiersSettings
from tests.commands import Command, metrics, tiny_run
from tests.fake_backend import FakeBackend, tokenizer
from tests.test_agent_openai import PolicyClient, ask

LETTERS = Path(__file__).parent / "peers" / "forge_rl_letters"
POLICY = SimpleNamespace(base_url="http://policy/v1", key="secret")

PEER = """#!{python}
import json, os, sys, time
command, config = sys.argv[3:5]
if command == "list":
    if json.loads(config)["taskset"]["id"] == "lost":
        sys.exit("no module named lost")
    for number in range(20):
        prompt = [{{"role": "user", "content": f"What is {{number}} + 1?"}}]
        print(json.dumps({{"id": str(number), "key": f"k{{number}}", "messages": prompt, "data": {{"idx": number}}}}))
    sys.exit()
def say(line): print(json.dumps(line), flush=True)
say({{"id": 0}})
for line in sys.stdin:
    call = json.loads(line)
    if "ping" in call:
        say({{"id": call["id"], "result": None}})
    elif "task" in call and call["task"]["idx"] == -1:
        say({{"id": call["id"], "error": "TaskError: no truth"}})
    elif "task" in call and call["task"]["idx"] >= 0:
        parts = {{"pid": os.getpid(), "key": float(call["key"] == "secret")}}
        say({{"id": call["id"], "result": {{"reward": 0.5, "parts": parts, "answer": "5"}}}})
    elif call.get("task", {{}}).get("idx") == -3:
        time.sleep(1000)
"""


@pytest.fixture
def peer(tmp_path: Path) -> str:
    """An interpreter that speaks as one with verifiers does, and fails on demand."""
    path = tmp_path / "python"
    path.write_text(PEER.format(python=sys.executable))
    path.chmod(0o700)
    return str(path)


def task_of(environment: VerifiersEnv, index: int | None = None) -> Task:
    (source,) = environment.sources(0).values()
    task = source.draw()
    return task if index is None else replace(task, truth={**task.truth, "data": {"idx": index}})


async def test_its_tasks_are_a_source_and_its_scores_have_parts(peer: str, tmp_path: Path, nothing_left: None):
    environment = build_environment(f"verifiers:sums,python={peer},workers=2,held_out_share=0.3")
    assert isinstance(environment, VerifiersEnv)
    (source,) = environment.sources(0).values()
    held_out = {task.id for task in source.held_out(99)}
    assert 0 < len(held_out) < 15
    assert not held_out & {source.draw().id for _ in range(50)}
    assert pickle.loads(pickle.dumps(environment.reward))(None, None) == Score(total=0.0)

    async with environment.serving(tmp_path):
        scores = [await environment.agent(source.draw(), POLICY) for _ in range(4)]
        assert [(score.total, score.answer, score.parts["key"]) for score in scores] == [(0.5, "5", 1.0)] * 4
        assert len({score.parts["pid"] for score in scores}) == 2
        with pytest.raises(ForgeError, match="TaskError: no truth"):
            await environment.agent(task_of(environment, -1), POLICY)


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_worker_that_dies_or_hangs_is_replaced_and_replayed(
    peer: str, tmp_path: Path, nothing_left: None, hangs: bool, monkeypatch: pytest.MonkeyPatch
):
    environment = VerifiersEnv("sums", VerifiersSettings(python=peer, hang_s=0.5 if hangs else 300.0))

    monkeypatch.setattr("forge_rl.worlds.verifiers._PING_S", 0.2)
    async with environment.serving(tmp_path):
        first = int((await environment.agent(task_of(environment), POLICY)).parts["pid"])
        lost = asyncio.ensure_future(environment.agent(task_of(environment, -3 if hangs else -2), POLICY))
        await asyncio.sleep(0.1)
        if not hangs:
            os.kill(first, signal.SIGKILL)
        with pytest.raises(ReplicaError, match="signal 9"):
            await lost

        async def again() -> bool:
            try:
                return int((await environment.agent(task_of(environment), POLICY)).parts["pid"]) != first
            except ReplicaError:
                return False

        async with asyncio.timeout(30):
            while not await again():  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def test_a_worker_that_does_not_start_again_is_infrastructure(peer: str, tmp_path: Path, nothing_left: None):
    environment = VerifiersEnv("sums", VerifiersSettings(python=peer))
    task = task_of(environment)
    async with environment.serving(tmp_path):
        pid = int((await environment.agent(task, POLICY)).parts["pid"])
        Path(peer).write_text("#!/bin/false\n")  # noqa: ASYNC240
        os.kill(pid, signal.SIGKILL)
        problem = ""
        async with asyncio.timeout(60):
            while "did not start" not in problem:
                try:
                    await environment.agent(task, POLICY)
                except ReplicaError as error:
                    problem = str(error)
                await asyncio.sleep(0.01)


RELAYED = """
import os, socket, sys
connections, answers = [], 0
for _ in range(40):
    connections.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10))
    connections[-1].sendall(b"x")
    try:
        answers += connections[-1].recv(1) == b"x"
    except OSError:
        pass
mine = [pid for pid in os.listdir("/proc") if pid.isdigit() and os.stat(f"/proc/{pid}").st_uid == os.getuid()]
print(answers, len(mine))
"""


# One that other users may run, unlike that of an environment in root's home.
SYSTEM_PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin")


@pytest.mark.skipif(os.geteuid() != 0 or SYSTEM_PYTHON is None, reason="needs root, and a Python for all users")
def test_connections_of_a_confined_program_count_as_its_processes():
    launcher = Path(forge_rl.worlds.verifiers.__file__).parent / "peers" / "confined_program.py"
    port = unused_port()

    def echo(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1):
                connection.sendall(data)

    def serve(host: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=echo, args=(host.accept()[0],), daemon=True).start()

    # Not in pytest's own folder, which other users may not enter.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as host:
        Path(folder).chmod(0o711)
        path = Path(folder) / "s"
        host.bind(str(path))
        path.chmod(0o666)
        host.listen()
        threading.Thread(target=serve, args=(host,), daemon=True).start()
        settings = {"uid": 0x50012345, "ports": {str(port): str(path)}, "processes": 12, "filter": ""}
        settings |= {"variables": ["PATH"], "home": "/"}
        command = [sys.executable, "-I", "-S", launcher, json.dumps(settings), SYSTEM_PYTHON, "-c", RELAYED, str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            answers, processes = map(int, process.communicate(timeout=60)[0].split())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        host.shutdown(socket.SHUT_RDWR)
    assert 0 < answers < 12
    assert processes <= 12


def test_an_environment_that_cannot_be_loaded_says_why(peer: str):
    with pytest.raises(ConfigError, match=r"cannot load 'lost' under .*\nno module named lost") as caught:
        VerifiersEnv("lost", VerifiersSettings(python=peer)).sources(0)
    assert "package=PACKAGE" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("workers=0", r"--env verifiers:workers is 0"),
        ("workers=two", r"workers is 'two': .*\n.*\n.*\n.*pass a value of type int"),
        ("hang_s=0", r"--env verifiers:hang_s is 0\.0"),
        ("settings=1", r"has no option 'settings'.*\n?.*\n?.*\n.*package, python"),
    ],
)
def test_an_option_of_its_settings_is_checked(peer: str, options: str, message: str):
    with pytest.raises(ConfigError) as caught:
        build_environment(f"verifiers:sums,python={peer},{options}")
    assert re.search(message, f"{caught.value}\n{caught.value.hint}")


def test_other_options_are_the_tasksets(peer: str):
    environment = build_environment(f"verifiers:sums,python={peer},hang_s=5,words=30")
    assert isinstance(environment, VerifiersEnv)
    assert (environment.settings.hang_s, environment._config["taskset"]) == (5.0, {"id": "sums", "words": 30})


async def episodes(environment: VerifiersEnv, logs: Path, answers: Sequence[str], count: int) -> list[Episode]:
    """Play with scripted answers at a real gateway."""
    (source,) = environment.sources(0).values()
    judge = SimpleNamespace(form="episode")
    async with (
        environment.serving(logs),
        serving_agents(environment.agent, GatewayConfig(), FakeBackend(), tokenizer(), judge) as run,  # type: ignore[arg-type]
    ):
        clients = [PolicyClient(FakeBackend(answers)) for _ in range(count)]
        return list(await asyncio.gather(*(run(source.draw(), client) for client in clients)))


async def test_the_workers_score_counts_and_its_death_is_infrastructure(peer: str, tmp_path: Path):
    async def agent(task: Task, session: Session) -> Score:
        await ask(session)
        if task.id == "dead":
            raise ReplicaError("its process was killed", service="verifiers:sums")
        return Score(total=0.25, parts={"a": 1.0}, turns=(0.5,), answer="4")

    judge = SimpleNamespace(form="group")
    client = PolicyClient(FakeBackend())
    async with serving_agents(agent, GatewayConfig(), FakeBackend(), tokenizer(), judge) as run:  # type: ignore[arg-type]
        good, bad = [
            await run(Task(id=name, source="s", messages=({"role": "user", "content": "?"},)), client)
            for name in ("good", "dead")
        ]
    assert (good.outcome, good.reward, good.score.parts, good.score.answer) == (
        Outcome.COMPLETED,
        0.25,
        {"a": 1.0},
        "4",
    )
    assert (good.text, good.score.turns) == ("Hello there.", (0.5,))
    assert (bad.outcome, bad.problem) == (Outcome.INFRASTRUCTURE_ERROR, "verifiers:sums: its process was killed")


@pytest.mark.parametrize("winner_reward", [1.0, 0.0])
def test_a_game_that_one_agent_wins_and_the_other_loses_is_refused(winner_reward: float) -> None:
    credit, loser_reward = AgentCredit(), -1.0 if winner_reward else 1.0
    names = ["black", "white"]
    with pytest.raises(RuntimeError, match=f"black, white add up to {winner_reward + loser_reward:g} in each game"):
        _ = [
            credit.mean(names, [winner_reward, loser_reward] if number % 3 else [loser_reward, winner_reward])
            for number in range(100)
        ]
    with pytest.raises(RuntimeError, match="teaches nothing"):
        credit.mean(names, [winner_reward, loser_reward])


def test_agents_whose_rewards_rise_together_have_their_mean() -> None:
    credit = AgentCredit()
    for number in range(100):
        assert credit.mean(["proposer", "solver"], [1.0, 0.5 * (number % 4)]) == 0.5 + 0.25 * (number % 4)
        assert credit.mean(["proposer", "solver"], [0.0, 0.0]) == 0.0
        assert credit.mean(["solver"], [-1.0]) == -1.0
    assert {credit.mean(["proposer", "solver"], [0.0, 1.0]) for _ in range(100)} == {0.5}, "the solver solves all"


@pytest.fixture(scope="session")
def verifiers_python() -> str:
    """An interpreter with the package and the tests' environment: $FORGE_RL_VERIFIERS_PYTHON, or one that uv makes."""
    if python := os.environ.get("FORGE_RL_VERIFIERS_PYTHON"):
        return python
    return str(interpreter([PACKAGE, "uv", str(LETTERS)]))


@pytest.mark.long
async def test_the_real_package_plays_episodes_at_the_gateway(
    verifiers_python: str, tmp_path: Path, nothing_left: None
):
    environment = VerifiersEnv("forge_rl_letters", VerifiersSettings(python=verifiers_python), words=30)
    played = await episodes(environment, tmp_path, ["aaxx"], 12)
    assert [(each.outcome, each.reward, dict(each.score.parts)) for each in played] == [
        (Outcome.COMPLETED, 1.0, {"vowels": 1.0, "letters": 4.0})
    ] * 12
    assert all(each.turns[0].text == "aaxx" for each in played)
    with pytest.raises(ConfigError, match=r"(?s)cannot load 'forge_rl_letters'.*nonsense"):
        VerifiersEnv("forge_rl_letters", VerifiersSettings(python=verifiers_python), nonsense=1).sources(0)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bubblewrap: apt-get install bubblewrap")
def test_programs_of_a_harness_are_confined_and_reach_the_policy(
    verifiers_python: str, tmp_path: Path, nothing_left: None
):
    settings = VerifiersSettings(python=verifiers_python, harness="null")
    environment = VerifiersEnv("forge_rl_letters", settings, words=30)
    played = asyncio.run(episodes(environment, tmp_path, ["aaxx"], 2))
    assert [(each.outcome, each.reward) for each in played] == [(Outcome.COMPLETED, 1.0)] * 2
    (tmp_path / "secret").write_text("top secret")
    scripts = Path(forge_rl.worlds.verifiers.__file__).parent / "peers"
    probe, given = Path(__file__).parent / "peers" / "confined_probe.py", session_filter(has_network=True).hex()
    command = [verifiers_python, str(probe), str(scripts), given, str(tmp_path / "secret")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("uid") not in ((os.getuid(), 0) if os.geteuid() == 0 else ())
    assert found == {
        "endpoint": repr(b"HTTP/1.0 200 OK\r\n\r\nhello"),
        "other port": "ConnectionRefusedError",
        **dict.fromkeys(("secret", "shadow", "environ", "unix socket"), "FileNotFoundError"),
        **dict.fromkeys(("read link", "write link"), "SandboxError"),
        "kill": "ProcessLookupError",
        "variable": "",
        "processes": True,
        "write": "OSError",
        "own": "None",
        "mount": -1,
        "unshare": -1,
        "bpf": -1,
        "kept": "1\nkept\n",
        "new": False,
        "left": False,
    }


@pytest.mark.nightly
def test_an_environment_of_the_real_package_trains(
    verifiers_python: str, commands: list[Command], tiny_model: Path, tmp_path: Path, nothing_left: None
):
    env = f"verifiers:forge_rl_letters,python={verifiers_python},workers=2"
    command = tiny_run(
        commands,
        tiny_model,
        tmp_path,
        *("--tasks", "--env", env, "--steps", "2", "--evaluation.tasks", "2", "--checkpoint-every", "0"),
    )
    assert command.end(600) == 0, command.output
    rows = metrics(tmp_path)
    assert (
        sum(row["outcomes/completed"] + row["outcomes/truncated"] for row in rows if "outcomes/completed" in row) >= 16
    )
    assert all(row["grad_norm"] > 0 for row in rows if "grad_norm" in row)
    assert (tmp_path / "logs" / "verifiers-1.log").exists()
