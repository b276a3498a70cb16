"""Agents in processes of their own: functions and command lines, what bounds them, and what their failures become."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_rl.errors import ConfigError
from forge_rl.gateway import Session, agent_command
from forge_rl.gateway.agent_command import AgentCommand, AgentError, AgentStartError
from forge_rl.runtime.commands import CommandLimits
from forge_rl.types import Outcome, Task
from recipes.agent_command import EXAMPLE
from tests.fake_backend import FakeBackend, until
from tests.processes import lives
from tests.test_agent_openai import PolicyClient, attempts_of

TASK = Task(
    id="7", source="s", messages=({"role": "user", "content": "What is 2 + 3?"},), truth={"answer": "a secret: 5"}
)
ASKS = """
import json, os, urllib.request
def ask(messages=({'role': 'user', 'content': 'Hi'},)):
    headers = {'Content-Type': 'application/json', 'Authorization': f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({'model': 'fake', 'messages': messages}).encode()
    request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, headers)
    answer = json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))
    return answer['choices'][0]['message']['content']
"""
"""Defines `ask` with few imports: those of OpenAI's client take half a second. AGENT and the bundled agent use it."""


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *arguments)


def episode_of(agent: Any, backend: FakeBackend | None = None, task: Task = TASK) -> Any:
    async def work() -> Any:
        async with attempts_of(agent) as attempts:
            return await attempts(task, PolicyClient(backend or FakeBackend()))

    return asyncio.run(work())


def test_the_bundled_agent_asks_again_and_its_turns_are_one_segment():
    episode = episode_of(AgentCommand(EXAMPLE), FakeBackend(["Let me see.", "It is 5."]))
    assert (episode.outcome, episode.output, episode.reward) == (Outcome.COMPLETED, "It is 5.", float(len("It is 5.")))
    assert [turn.text for turn in episode.turns] == ["Let me see.", "It is 5."]
    assert len(episode.segments) == 1


@pytest.mark.parametrize(
    ("prints", "scored"),
    [
        ("print('thinking'); print('5'); print()", "thinking\n5"),
        ("print('thinking'); print('{\"answer\": 5}'); print()", "5"),
        ("print('{\"answer\": 5}'); print('or 6')", '{"answer": 5}\nor 6'),
        ("print('{\"answer\": 5}')", "5"),
        ("print('{\"answer\": null}')", "Hello there."),
        ("print('{\"other\": 5}')", '{"other": 5}'),
        ("print('[' * 100000)", "[" * 100000),
        ("", "Hello there."),
    ],
)
def test_an_agents_output_or_its_last_line_or_answer_is_scored(prints: str, scored: str):
    episode = episode_of(AgentCommand(python(ASKS + f"ask()\n{prints}")))
    assert (episode.outcome, episode.text) == (Outcome.COMPLETED, scored)


def test_it_is_told_the_task_and_where_the_policy_is_and_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    tells = "import json, os, sys; given = sys.stdin.read(); print(json.dumps({'answer': json.dumps([given, " + (
        "open(os.environ['FORGE_RL_TASK_FILE']).read(), dict(os.environ), sys.argv])}))"
    )
    episode = episode_of(AgentCommand(python(f"{ASKS}ask(){chr(10)}{tells}", "an argument")))
    given, in_file, environment, arguments = json.loads(episode.output)
    assert given == in_file
    assert json.loads(given) == {"id": "7", "source": "s", "messages": [dict(TASK.messages[0])], "tools": []}
    assert "secret" not in given
    assert "hidden" not in str(environment)
    assert environment["OPENAI_BASE_URL"] == f"{environment['ANTHROPIC_BASE_URL']}/v1"
    assert environment["OPENAI_API_KEY"] == environment["ANTHROPIC_API_KEY"] != ""
    assert environment["FORGE_RL_MODEL"] == "fake"
    assert arguments[1:] == ["an argument"], "its key is on no command line, which all users see"
    assert not Path(environment["FORGE_RL_TASK_FILE"]).exists()


@pytest.mark.parametrize(
    ("code", "limits", "problem"),
    [
        ("ask(); raise KeyError('lost')", {}, "the agent's process ended with status 1: KeyError: 'lost'"),
        ("ask(); import os; os._exit(7)", {}, "ended with status 7: it printed no error"),
        ("ask(); import os; os.kill(os.getpid(), 9)", {}, "was ended by SIGKILL"),
        ("ask(); bytearray(1 << 32)", {"memory_gib": 3.0}, "MemoryError"),
        ("ask()\nwhile True: pass", {"cpu_s": 1.0}, "its CPU time limit"),
        ("ask(); f = [open('/dev/null') for _ in range(1024)]", {}, "Too many open files"),
        ("pass", {}, "the agent got no completion from the policy"),
    ],
)
def test_what_fails_is_the_agents_error_and_says_what_it_said(code: str, limits: dict[str, Any], problem: str):
    episode = episode_of(AgentCommand(python(ASKS + code), CommandLimits(**limits)))
    assert episode.outcome is Outcome.ENVIRONMENT_ERROR
    assert problem in episode.problem


def session(turns: int = 0) -> Any:
    """What a command is told of a session in which the policy was asked so often."""
    urls = {"base_url": "http://127.0.0.1:1/v1", "anthropic_url": "http://127.0.0.1:1", "key": "k", "model": "fake"}
    return SimpleNamespace(**urls, task_id="7", turns=(None,) * turns, refusal=None)


async def test_an_agent_whose_every_start_fails_for_one_cause_ends_the_run(tmp_path: Path):
    marker = tmp_path / "installed"
    missing = f"not os.path.exists({str(marker)!r})"
    code = f"import os, sys; print(os.getpid(), file=sys.stderr)\nif {missing}: import lost_package"
    agent = AgentCommand(python(code)).logging_to(tmp_path / "agent.log")

    async def fails(times: int) -> None:
        for _ in range(times):
            with pytest.raises(AgentError, match="No module named 'lost_package'") as caught:
                await agent(TASK, session())
            assert type(caught.value) is AgentError

    await fails(7)
    marker.touch()
    assert await agent(TASK, session(turns=1)) is None
    marker.unlink()
    await fails(7)
    with pytest.raises(AgentStartError, match=r"8 processes .* before they called the policy") as caught:
        await agent(TASK, session())
    assert "line 2, in <module>\nModuleNotFoundError: No module named" in caught.value.message
    assert str(tmp_path / "agent.log") in caught.value.hint
    log = (tmp_path / "agent.log").read_text()
    assert log.count("--- task 7: ended with status 1: ModuleNotFoundError") == 15
    assert log.count("--- task 7: ended with status 0") == 1
    assert (tmp_path / "agent.log").stat().st_mode & 0o077 == 0


def test_the_error_of_a_start_ends_the_run_and_that_of_an_episode_does_not():
    class Failing(AgentCommand):
        async def __call__(self, task: Task, session: Session) -> str | None:
            raise AgentStartError("every start fails")

    with pytest.raises(AgentStartError):
        episode_of(Failing("true"))


def test_a_log_of_agents_stays_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent_command, "_LOG_BYTES", 1000)
    monkeypatch.setattr(agent_command, "_LOGGED_BYTES", 600)
    agent = AgentCommand(python("import sys; sys.stderr.write('x' * 100000)"), log=tmp_path / "agent.log")

    async def check() -> None:
        for _ in range(5):
            await agent(TASK, session(turns=1))

    asyncio.run(check())
    assert [path.stat().st_size < 1700 for path in sorted(tmp_path.iterdir())] == [True, True]


def test_a_line_with_an_open_quotation_is_one_clear_message():
    with pytest.raises(ConfigError, match=r"'python \"agent\.py' is not a command line: No closing"):
        AgentCommand('python "agent.py')


async def test_python_is_the_interpreter_that_runs_this():
    agent = AgentCommand("python -c 'import sys; print(sys.executable)'")
    found = await agent(TASK, session(turns=1))
    assert found is not None
    assert Path(found).parent == Path(sys.executable).parent


def test_an_agent_that_fails_since_its_prompt_is_too_long_is_truncated():
    code = "ask(); ask(messages=[{'role': 'user', 'content': 'word ' * 5000}])"
    episode = episode_of(AgentCommand(python(ASKS + code)))
    assert (episode.outcome, episode.text) == (Outcome.TRUNCATED, "Hello there.")


async def test_all_that_it_started_ends_with_it_when_its_time_is_over(tmp_path: Path):
    started = tmp_path / "pids"
    sleeps = shlex.join(python("import time; time.sleep(600)"))
    code = f"{ASKS}ask()\nimport os, subprocess, time\nchild = subprocess.Popen({sleeps!r}, shell=True)\n" + (
        f"open({str(started)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\ntime.sleep(600)"
    )

    client = PolicyClient(FakeBackend())
    async with attempts_of(AgentCommand(python(code))) as attempts:
        attempts = replace(attempts, deadline_s=20.0)
        working = asyncio.ensure_future(attempts(TASK, client))
        await until(lambda: started.exists() and len(started.read_text().split()) == 2)
        client.own_s = 1e9
        episode = await asyncio.wait_for(working, 120)
    assert episode.outcome in (Outcome.TRUNCATED, Outcome.ENVIRONMENT_ERROR)
    pids = [int(pid) for pid in started.read_text().split()]
    await until(lambda: not any(lives(pid) for pid in pids))


async def test_no_more_run_at_a_time_than_may():
    code = ASKS + "import os\nask()\nprint(os.getpid())"
    backend = FakeBackend(gate=asyncio.Event())

    assert backend.gate is not None
    agent = AgentCommand(python(code), CommandLimits(at_a_time=2))
    async with attempts_of(agent) as attempts:
        working = [asyncio.ensure_future(attempts(TASK, PolicyClient(backend))) for _ in range(4)]
        await until(lambda: backend.open == 2, 300)
        backend.gate.set()
        episodes = await asyncio.gather(*working)
    assert backend.most_open == 2
    assert {episode.outcome for episode in episodes} == {Outcome.COMPLETED}


AGENT = f"""
{ASKS}
async def solve(task, session):
    assert (session.base_url, session.key) == (os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    return f"{{os.getpid()}} {{task.id}} {{task.truth}} {{ask(task.messages)}}"

def plain(task):
    import openai
    print("thinking", end="...")
    openai.OpenAI().chat.completions.create(model="fake", messages=list(task.messages))
"""


def test_a_text_names_an_agent_that_runs_in_a_process_of_its_own(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(AGENT)
    first, second = (episode_of(f"{file}:solve").output.split(" ", 2) for _ in range(2))
    assert first[1:] == second[1:] == ["7", "{} Hello there."]
    assert first[0] != second[0]
    assert episode_of(f"{file}:plain").text == "Hello there."


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ("solve", "'solve' does not name a function"),
        ("{folder}/none.py:solve", "none.py: No such file"),
        ("{folder}/mine.py:other", "has no other"),
        ("{folder}/mine.py:CONSTANT", "is not a function"),
        ("{folder}/broken.py:solve", "ZeroDivisionError"),
        ("no_such_module_of_mine:solve", "there is no module no_such_module_of_mine"),
    ],
)
def test_a_wrong_name_of_an_agent_is_told_before_anything_starts(agent: str, problem: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text(AGENT + "\nCONSTANT = 3\n")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=problem):
        episode_of(agent.format(folder=tmp_path))


def test_a_program_that_is_not_there_is_named():
    for command in ("", "no-such-program-of-mine --flag"):
        with pytest.raises(ConfigError, match=r"program .* was not found"):
            AgentCommand(command)
    with pytest.raises(ConfigError, match="memory-gib"):
        CommandLimits(memory_gib=0)
