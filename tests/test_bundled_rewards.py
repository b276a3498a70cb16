"""Bundled rewards: answers, numbers, mathematics, formats, lengths, and what needs the group."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

import pytest

from forge_rl.data.sources import ReasoningGymSource
from forge_rl.errors import ForgeError, TaskError
from forge_rl.rewards.answers import Diversity, Exact, Match, Number
from forge_rl.rewards.auto import Auto
from forge_rl.rewards.choice import Choice
from forge_rl.rewards.extract import extract
from forge_rl.rewards.formats import Format, JSONSchema, Regex, last_fenced
from forge_rl.rewards.lengths import Length, Overlong
from forge_rl.rewards.maths import Maths
from forge_rl.rewards.workers import Workers
from forge_rl.types import Episode, Score, Task, Turn


def task(answer: object = "5", **truth: object) -> Task:
    return Task(id="t", source="s", messages=({"role": "user", "content": "?"},), truth={"answer": answer, **truth})


def of_tokens(count: int, text: str = "") -> Episode:
    ids = [0] * count
    turn = Turn(prompt_ids=[1], token_ids=ids, logprobs=ids, versions=ids, text=text)
    return Episode(task=task(), turns=(turn,))


async def _awaited(score: Any) -> Score:
    return await score if inspect.isawaitable(score) else score


@pytest.mark.parametrize(
    ("reward", "truth", "text", "total", "answer"),
    [
        (Exact(), "5", " 5\n", 1.0, "5"),
        (Exact(), "1,234", "1,234", 1.0, "1,234"),
        (Exact(), "yes", "Yes", 0.0, "Yes"),
        (Exact(extract="tagged"), ["yes", "yeah"], "<answer>yeah</answer>", 1.0, "yeah"),
        (Match(), "The Eiffel Tower", "eiffel tower!", 1.0, "eiffel tower"),
        (Match(), "well-known", "Well known", 0.0, "well known"),
        (Match(), "-5", "5", 0.0, "5"),
        (Match(), "3.5", "35", 0.0, "35"),
        (Match(), "1,000 km", "\N{LEFT DOUBLE QUOTATION MARK}1000 km.\N{RIGHT DOUBLE QUOTATION MARK}", 1.0, "1000 km"),
        (Match(partial=True), "red green blue", "the green red", 0.8, "green red"),
        (Number(), 5, "so 2 + 3 = 5.0", 1.0, "5"),
        (Number(), "#### 1,234", "1234", 1.0, "1234"),
        (Number(), "I add 2 and 3.\n#### 72", "It is 72.", 1.0, "72"),
        (Number(), 5, "none", 0.0, ""),
        (Number(tolerance=0.01), 3.1416, "3.14", 1.0, "3.14"),
        (Number(tolerance=0.001), 1000, "1000.9", 1.0, "1000.9"),
        (Number(tolerance=0.001), 1000, "1001.1", 0.0, "1001.1"),
        (Number(), [4, 5], "5", 1.0, "5"),
        (Auto(), "5", "I think 5.", 1.0, "5"),
        (Auto(), "Friday", "<answer>friday</answer>", 1.0, "friday"),
        (Auto(), "$\\frac{1}{2}$", "$\\frac{1}{2}$", 1.0, "0.5"),
        (Auto(), "B", "I choose (B), because A is wrong.\nAnswer: B", 1.0, "B"),
        (Number(), 2, "\\boxed{1/2}", 0.0, "0.5"),
        (Number(), 1234567, "1234568", 0.0, "1234568"),
        (Choice(), 1, "(B)", 1.0, "B"),
        (Choice(first=1), "2", "(B)", 1.0, "B"),
        (Choice(), "B. Paris", "Not A, so B", 1.0, "B"),
        (Format(), "5", "<think>2 and 3</think>\n<answer> 5 </answer>\n", 1.0, "5"),
        (Format(), "5", "Well: <think>2</think><answer>5</answer>", 0.0, ""),
        (Format(), "5", "<think>2</think> so <answer>5</answer>", 0.0, ""),
        (Format(), "5", "<think>2</think><answer>5</answer>!", 0.0, ""),
        (Format(), "5", "<answer>5</answer><think>2</think>", 0.0, ""),
        (Format(), "5", "<think><answer>5</think></answer>", 0.0, ""),
        (Format(), "5", "<think>2</think><answer>4</answer><answer>5</answer>", 0.0, ""),
        (Format(opened=True), "5", "2 and 3</think><answer>5</answer>", 1.0, "5"),
        (Format(think="", answer="final"), "5", "<final>5</final>", 1.0, "5"),
        (Regex(pattern=r"answer is (\d+)"), "5", "The answer is 5.", 1.0, "5"),
        (Regex(pattern=r"(is) (?P<answer>\d+)"), "5", "The answer is 5.", 1.0, "5"),
        (Regex(pattern=r"\d+", full=True), "5", "5.", 0.0, ""),
        (Length(tokens=8), "5", of_tokens(2), 0.25, ""),
        (Length(tokens=8), "5", of_tokens(9), 1.0, ""),
        # DAPO's equation 13 with L_max 20 and L_cache 4.
        (Overlong(max_tokens=20, cache_tokens=4), "5", of_tokens(16), 0.0, ""),
        (Overlong(max_tokens=20, cache_tokens=4), "5", of_tokens(17), -0.25, ""),
        (Overlong(max_tokens=20, cache_tokens=4), "5", of_tokens(20), -1.0, ""),
        (Overlong(max_tokens=20, cache_tokens=4), "5", of_tokens(90), -1.0, ""),
    ],
)
def test_a_completion_is_scored(reward: Any, truth: object, text: str | Episode, total: float, answer: str):
    score = reward(task(truth), text)
    score = score if isinstance(score, Score) else Score(total=score)
    assert (score.total, score.answer) == (pytest.approx(total), answer)


@pytest.mark.parametrize("reward", [Auto(), Exact(), Match(), Number()])
@pytest.mark.parametrize("truth", [{}, {"answer": None}, {"answer": []}, {"answer": {"value": 5}}])
def test_a_task_without_an_answer_is_an_error_that_names_the_flag(reward: Any, truth: dict[str, object]):
    without = Task(id="t", source="s", messages=(), truth={"solution": "5", **truth})
    with pytest.raises(
        TaskError, match=r"--reward \w+: the truth of task 't' of 's' has no answer.*'answer' is"
    ) as caught:
        reward(without, "5")
    assert "--tasks FILE:answer=COLUMN" in caught.value.hint
    assert type(reward)(key="solution")(without, "5").total == 1.0


def test_a_number_is_compared_with_numbers_alone():
    with pytest.raises(TaskError, match="true answer of task 't' has no number: 'five'"):
        Number()(task("five"), "5")


async def test_tasks_of_reasoning_gym_are_scored_by_their_verifier():
    drawn = ReasoningGymSource("chain_sum", {}, 0, 0.1).draw()
    entry = drawn.truth["entry"]
    assert isinstance(entry, dict)
    score = await _awaited(Auto()(drawn, f"It is {entry['answer']}."))
    assert (score.total, score.answer) == (1.0, entry["answer"])


def test_a_pattern_that_backtracks_for_ever_scores_zero():
    assert Regex(pattern="(a|aa)+$", timeout_s=0.1)(task(), "a" * 80 + "b").total == 0.0


async def test_json_is_held_against_its_schema(tmp_path: Path):
    schema = tmp_path / "s.json"
    schema.write_text('{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}')
    reward = JSONSchema(schema=schema, parsed=0.2)
    schema.unlink()  # it travels with the reward

    assert await reward(task(), '{"age": 5}') == Score(total=1.0, parts={"parsed": 1.0}, answer='{"age": 5}')
    assert (await reward(task(), 'Here it is:\n```json\n{"age": 5}\n```\n')).total == 1.0
    assert (await reward(task(), '{"age": "5"}')).total == 0.2
    for text in ("age: 5", "", "[" * 50_000, "1" * 200_000, '{"age": NaN}', '{"age": 5, "size": 1e400}'):
        assert await reward(task(), text) == Score(total=0.0, parts={"parsed": 0.0})
    # A pattern that backtracks for ever costs its completion alone.
    schema.write_text('{"pattern": "^(a|aa)+$"}')
    slow = JSONSchema(schema=schema, timeout_s=1.0)
    assert (await slow(task(), f'"{"a" * 80}b"')).total == 0.0
    assert (await slow(task(), '"aaa"')).total == 1.0


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("```json\n5\n```", "5"),
        ("It is ```\n\n 5\n6 \n  ``` so", "\n 5\n6 "),
        ("```\n4\n```\n```json  \n5\n```", "5"),
        ("```\n4\n``` and ```\n5\n```", "5"),
        ("```\n4\n```\n```\n5", "4"),
        ("```json 5 ```", None),
        ("5", None),
    ],
)
def test_the_last_fenced_block(text: str, inside: str | None):
    assert last_fenced(text) == inside


@pytest.mark.parametrize("piece", ["\n", "```\n", "<answer>", "\\boxed{", "<answer>\\boxed{1}"])
def test_text_that_patterns_would_take_hours_for_is_read_at_once(piece: str):
    text = f"```{piece * 30_000}"
    # Where it took quadratic time, this test would not end in an hour.
    last_fenced(text * 20)
    for answer_format in ("tagged", "boxed", "auto"):
        extract(answer_format, text * 20)


async def test_a_schema_never_reaches_for_the_network(tmp_path: Path):
    schema = tmp_path / "s.json"
    schema.write_text('{"$ref": "http://127.0.0.1:9/other.json"}')
    with pytest.raises(Exception, match="Unresolvable: http://127"):
        await JSONSchema(schema=schema)(task(), "{}")


def test_answers_that_others_give_too_score_less():
    episodes = [of_tokens(1, text) for text in ("five", "Five.", "six", "seven", "five")]
    scores = Diversity()(task("x"), episodes)
    assert [score.total for score in scores] == [0.5, 0.5, 1.0, 1.0, 0.5]
    assert [score.total for score in Diversity()(task("x"), episodes[:1])] == [1.0]


async def test_mathematics_is_compared_however_it_is_written():
    pytest.importorskip("math_verify")

    reward = Maths(timeout_s=20.0, processes=1)
    for truth, text, total in (
        ("1/2", r"so it is \boxed{0.5}", 1.0),
        (r"\frac{1}{2}", r"the answer is $\frac{2}{4}$", 1.0),
        ("(1,2)", r"\boxed{(1, 2)}", 1.0),
        (r"\sqrt{8}", r"It is $2\sqrt{2}$.", 1.0),
        ("x^2+1", "<answer>1 + x^2</answer>", 1.0),
        ("42", "I think 43", 0.0),
        ("42", "", 0.0),
        (["41", "42"], "42", 1.0),
    ):
        assert (await reward(task(truth), text)).total == total, text
    # Two that are equal have one answer, for a majority.
    first, second = [(await reward(task("1/2"), text)).answer for text in (r"\boxed{0.5}", r"\boxed{\frac12}")]
    assert first == second == "0.5"
    auto = Auto()(task(r"\frac{1}{2}"), r"\boxed{2/4}")
    assert (await _awaited(auto)).total == 1.0


async def test_an_answer_that_hangs_math_verify_is_wrong_and_ends_nothing():
    pytest.importorskip("math_verify")

    reward = Maths(timeout_s=1.0, processes=1)
    tower = "9^{9^{9^{9^{9}}}}"
    # Our own comparison is bounded. Only what it cannot read, written in the same signs, is math-verify's.
    assert await reward(task("x+1"), rf"\boxed{{{tower}}}") == Score(total=0.0, parts={"late": 0.0}, answer=tower)
    score = await reward(task(rf"\int_0^1 {tower} dx"), rf"\boxed{{\int_0^1 dx {tower}}}")
    assert (score.total, score.parts) == (0.0, {"late": 1.0})
    assert (await reward(task("x+1"), "1+x")).total in (0.0, 1.0)  # late too, where the machine is busy


def hangs(seconds: float) -> float:
    """Sleep, in a worker process."""
    time.sleep(seconds)
    return seconds


def fails(fault: str) -> None:
    """Raise, or die, in a worker process."""
    if fault == "die":
        import os

        os._exit(3)
    raise ValueError(fault)


def environment() -> list[str]:
    """Names of the variables of a worker process."""
    import os

    return sorted(os.environ)


async def test_a_worker_that_hangs_or_dies_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", "k")

    late = Workers(__name__, "hangs", processes=1, deadline_s=1.0)
    assert await late(60) is None
    assert await late(0) == 0
    dying = Workers(__name__, "fails", processes=1, deadline_s=60.0)
    assert await dying("die") is None
    with pytest.raises(ForgeError, match="ValueError: mine"):
        await dying("mine")
    assert "MY_API_KEY" not in str(await Workers(__name__, "environment", processes=1, deadline_s=60.0)())
    with pytest.raises(ForgeError, match="did not start: No module named 'gone'"):
        await Workers("gone", "f", processes=1, deadline_s=1.0)()
