"""Rewards: finding answers in text, and scoring them by reasoning-gym's verifiers."""

import asyncio
import pickle
from collections.abc import Callable, Iterator

import pytest

from forge_rl.data.sources import ReasoningGymSource
from forge_rl.errors import TaskError
from forge_rl.rewards import verifiers
from forge_rl.rewards.extract import boxed, extract, is_number, last_number, tagged
from forge_rl.rewards.verifiers import ReasoningGymReward
from forge_rl.types import Score, Task


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2 + 3 = 5", "5"),
        ("2 + 3 = 5.", "5"),
        ("The answer is 1,234.", "1234"),
        ("1,234,567.50 in all", "1234567.50"),
        ("the items 1,2,3", "3"),
        ("-7", "-7"),
        ("2 - 9 = -7", "-7"),
        ("2-9=-7", "-7"),
        ("2 - 9", "9"),
        ("10-3", "3"),
        ("3*-2", "-2"),
        ("(4)-3", "3"),
        ("\N{MINUS SIGN}7", "-7"),
        ("**12**", "12"),
        ("$5.25 left", "5.25"),
        (".5", ".5"),
        ("about 1.5e-05", "1.5e-05"),
        ("12345678", "12345678"),
        ("Version 2e", "2"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>4</answer> no, <answer>\n 5 </answer>.", "5"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>5", None),
    ],
)
def test_the_inside_of_the_last_tag(text: str, inside: str | None) -> None:
    assert tagged(text) == inside


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{5}", "5"),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{4} or \boxed{5}", "5"),
        (r"\boxed{4} or \boxed{5", "4"),
        ("5", None),
    ],
)
def test_the_inside_of_the_last_box(text: str, inside: str | None) -> None:
    assert boxed(text) == inside


@pytest.mark.parametrize(
    ("text", "gold", "answer"),
    [
        (r"<answer>3</answer> \boxed{4} 5", "3", "3"),
        (r"\boxed{4} and 5", "4", "4"),
        ("<answer>The sum is 3.</answer>", "3", "3"),
        ("2 + 3 = 5", "5", "5"),
        (" yes\n", "yes", "yes"),
        ("no number", "5", None),
        ("<answer>Friday</answer>, 5", "Friday", "Friday"),
    ],
)
def test_auto_takes_what_is_marked_and_of_it_the_number(text: str, gold: str, answer: str | None) -> None:
    assert extract("auto", text, gold) == answer


@pytest.mark.parametrize(
    ("text", "expected"), [("-7", True), ("1,234.5", True), ("3/4", False), ("5 m", False), ("0x1f", False)]
)
def test_a_number_and_nothing_else(text: str, expected: bool) -> None:
    assert is_number(text) is expected


DATASETS = [
    "aiw",
    "base_conversion",
    "basic_arithmetic",
    "binary_alternation",
    "bitwise_arithmetic",
    "calendar_arithmetic",
    "caesar_cipher",
    "chain_sum",
    "coin_flip",
    "complex_arithmetic",
    "count_bits",
    "count_primes",
    "course_schedule",
    "decimal_arithmetic",
    "decimal_chain_sum",
    "dice",
    "fraction_simplification",
    "gcd",
    "gsm_symbolic",
    "knights_knaves",
    "largest_island",
    "lcm",
    "leg_counting",
    "letter_counting",
    "maze",
    "mini_sudoku",
    "number_format",
    "number_sequence",
    "polynomial_equations",
    "power_function",
    "prime_factorization",
    "products",
    "simple_equations",
    "simple_geometry",
    "spell_backward",
    "syllogism",
    "time_intervals",
    "word_sorting",
]


def _gold(task: Task) -> str:
    entry = task.truth["entry"]
    assert isinstance(entry, dict)
    return str(entry["answer"])


Scoring = Callable[..., Score]


@pytest.fixture(scope="module")
def scored() -> Iterator[Scoring]:
    """Scores a text by a task; all share the processes that verify."""
    with asyncio.Runner() as runner:
        yield lambda task, text, **options: runner.run(ReasoningGymReward(**options, processes=1)(task, text))


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_gold_answer_scores_one_and_an_empty_one_zero(dataset: str, scored: Scoring) -> None:
    source = ReasoningGymSource(dataset, {}, 0, 0.1)
    for task in (source.draw() for _ in range(5)):
        gold = _gold(task)
        assert scored(task, f"Let me see, <answer>{gold}</answer>.").total == 1.0
        assert scored(task, gold).total == 1.0
        if is_number(gold):
            assert scored(task, f"After 12 steps, 3 + 4, the answer is {gold}.").total == 1.0
        assert scored(task, "").total == 0.0
        assert scored(task, "<answer>I do not know</answer>").total == 0.0


def _task(dataset: str, entry: dict[str, object]) -> Task:
    truth = {"dataset": dataset, "params": {}, "entry": entry}
    return Task(id="x", source=dataset, messages=(), truth=truth, verifier="reasoning_gym")


def test_a_wrong_number_scores_zero(scored: Scoring) -> None:
    task = _task("chain_sum", {"question": "2 + 3 =", "answer": "5", "metadata": {}})
    assert scored(task, "2 + 3 = 5").total == 1.0
    assert scored(task, "2 + 3 = 6").total == 0.0


def test_partial_credit_is_kept_only_when_not_strict(scored: Scoring) -> None:
    # reasoning-gym gives len("5") / len("55") to an answer that holds the right one.
    task = _task("chain_sum", {"question": "2 + 3 =", "answer": "5", "metadata": {}})
    assert scored(task, "55", strict=False).total == 0.5
    assert scored(task, "55", strict=True).total == 0.0


def test_text_that_a_verifier_chokes_on_scores_zero(scored: Scoring) -> None:
    # The verifier of prime_factorization raises ValueError on what is not a number.
    task = ReasoningGymSource("prime_factorization", {}, 0, 0.1).draw()
    assert scored(task, "zzz", extract="whole").total == 0.0


def test_a_verifier_that_hangs_costs_its_answer_alone(scored: Scoring) -> None:
    # That of coin_flip makes a Fraction of it, of a billion digits.
    task = ReasoningGymSource("coin_flip", {}, 0, 0.1).draw()
    late = scored(task, "<answer>1e1000000000</answer>", extract="tagged", timeout_s=1.0)
    assert (late.total, late.parts) == (0.0, {"late": 1.0})
    assert scored(task, _gold(task)).total == 1.0


def test_a_verifier_that_fails_on_the_gold_answer_too_raises(scored: Scoring) -> None:
    # The entry has no metadata, which that verifier wants.
    task = _task("word_ladder", {"question": "COLD to WARM", "answer": "COLD,WARM"})
    with pytest.raises(TaskError, match="the verifier of 'word_ladder' failed on task 'x': KeyError: 'metadata'"):
        scored(task, "COLD,WARM")


def test_a_score_outside_zero_to_one_raises(monkeypatch: pytest.MonkeyPatch, scored: Scoring) -> None:
    async def score(*given: object) -> float:
        return value

    monkeypatch.setattr(verifiers, "shared_workers", lambda *given: score)
    task, value = _task("chain_sum", {"question": "2 + 3 =", "answer": "5"}), 1.5
    with pytest.raises(TaskError, match=r"scored 1\.5, not 0 to 1"):
        scored(task, "6")
    value = float("nan")  # the distance of 5 to an answer that is no number
    assert scored(task, "6").total == 0.0


def test_a_task_of_another_source_raises(scored: Scoring) -> None:
    with pytest.raises(TaskError, match=r"is not from reasoning-gym.*\['answer'\]"):
        scored(Task(id="x", source="mine", messages=(), truth={"answer": "5"}), "5")


def test_a_reward_pickles() -> None:
    assert pickle.loads(pickle.dumps(ReasoningGymReward(strict=False))) == ReasoningGymReward(strict=False)
    task = ReasoningGymSource("chain_sum", {}, 0, 0.1).draw()
    assert pickle.loads(pickle.dumps(task)).verifier == task.verifier == "reasoning_gym"
