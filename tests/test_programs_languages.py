"""`--reward programs:language=...`: programs in other languages than Python, each input to a process of its own."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import pytest

from forge_rl.errors import ConfigError, TaskError
from forge_rl.rewards.reward_flag import build_reward
from forge_rl.types import Score, Task
from forge_rl.worlds.programs import Programs
from tests.sandbox_pool import loop_with_pool, needs_bubblewrap

CASES = [{"input": "20\n", "output": "40\n"}, {"input": "-1\n", "output": "-2\n"}]
DOUBLES = {
    "c": '#include <stdio.h>\nint main(){int n; scanf("%d", &n); printf("%d\\n", 2 * n);}',
    "shell": "read n; echo $((2 * n))",
}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    yield from loop_with_pool("process")


def score(loop: asyncio.Runner, language: str, text: str, *, partial: bool = False, **truth: object) -> Score:
    task = Task(
        id="1", source="s", messages=({"role": "user", "content": "Double it."},), truth={"cases": CASES, **truth}
    )
    return loop.run(Programs(language=language, partial=partial)(task, text))


@pytest.mark.parametrize(("language", "tag"), [("c", "c"), ("shell", "sh"), ("shell", "shell"), ("shell", "")])
def test_a_right_program_scores_1_in_each_language(loop: asyncio.Runner, language: str, tag: str):
    if language == "c" and shutil.which("gcc") is None:
        pytest.skip("there is no gcc here")
    assert score(loop, language, f"So:\n```{tag}\n{DOUBLES[language]}\n```").total == 1.0


@pytest.mark.parametrize(
    ("text", "feedback"),
    [
        ("```sh\nread n; echo $((n * n / 10))\n```", "it printed something else"),
        ("```sh\nread n; echo $((2 * n)); exit 3\n```", "exit status 3: "),
        ("```sh\necho no >&2; exit 1\n```", "exit status 1: no"),
        ("```python\nprint(2 * int(input()))\n```", "there is no code"),
    ],
)
def test_a_wrong_program_scores_0_and_says_why(loop: asyncio.Runner, text: str, feedback: str):
    result = score(loop, "shell", text)
    assert (result.total, result.feedback) == (0.0, feedback)


def test_a_score_is_the_share_of_inputs_which_share_no_files(loop: asyncio.Runner):
    text = "```sh\ntest -e seen && exit 9; touch seen; read n; echo $((n * n / 10))\n```"
    assert score(loop, "shell", text, partial=True).total == 0.5


def test_a_function_is_not_called_in_another_language(loop: asyncio.Runner):
    cases = {"inputs": [[1]], "outputs": [2], "fn_name": "double"}
    with pytest.raises(TaskError, match="names a function, double"):
        score(loop, "shell", "```sh\ntrue\n```", cases=cases)


@needs_bubblewrap
def test_a_language_that_is_unknown_or_absent_is_named_before_the_run():
    with pytest.raises(ConfigError, match=r"unknown language 'jaba'") as caught:
        build_reward(["programs:language=jaba"]).load(None)
    assert "did you mean java?" in caught.value.hint
    if shutil.which("rustc") is None:
        with pytest.raises(ConfigError, match="rust is not installed"):
            build_reward(["programs:language=rust"]).load(None)
