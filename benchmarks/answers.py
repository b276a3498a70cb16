"""Wrong answers that rewards pay: a table of answers, and constants against every data set of reasoning-gym.

python -m benchmarks.answers --json out.json

`auto`, `math`, `match` and `choice` score each answer of tests/answers.tsv, of which over half differ from the true
one by a character or two. Each data set of reasoning-gym that is offered draws tasks as a run does, and its reward
scores 40 constants, formulas, and copies of the question. Where one of them is the true answer, it may score.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.data.sources import ReasoningGymSource
from forge_rl.errors import TaskError
from forge_rl.rewards.answers import Match
from forge_rl.rewards.auto import Auto
from forge_rl.rewards.choice import Choice
from forge_rl.rewards.maths import Maths
from forge_rl.rewards.quantities import read_quantity
from forge_rl.rewards.verifiers import ReasoningGymReward
from forge_rl.types import Score, Task

TABLE = Path(__file__).parent.parent / "tests" / "answers.tsv"
CONSTANTS = (
    *("", "0", "1", "-1", "2", "3", "24", "0.0", "0x0", "1e400", "0/0", "1+1j", "6*4*1*1", "nan", "NaN", "inf", "-inf"),
    *("nan+nanj", "None", "null", "True", "False", "yes", "no", "x", "A", "B", "[]", "[[]]", "{}", "()", "[0]"),
    *('""', "?", "-", ".", "0\n0", "infeasible", "impossible", "I do not know"),
)
_MOST_LINES = 12
"""Maximum lines of a question that are tried as answers."""
_CHANCE = 0.1
"""Share of a data set's tasks that an answer other than the true one may solve; some have many solutions."""
_MOST_TRUE = 0.9
"""Share of a data set's tasks whose true answer may be the same."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Score wrong answers and constants."""

    tasks: int = 20
    """Tasks of each data set of reasoning-gym."""
    datasets: tuple[str, ...] = ()
    """Data sets to try; by default all that are offered."""
    seed: int = 3
    """Seed of the tasks."""

    def __post_init__(self) -> None:
        if self.tasks < 10:
            raise BenchmarkError(
                f"--tasks is {self.tasks}", hint="set it to 10 or more, to tell chance from a constant"
            )


class Row(NamedTuple):
    """An answer of the table."""

    kind: str
    truth: str
    answer: str
    right: bool


def table() -> list[Row]:
    """Read tests/answers.tsv."""
    rows = [line.split("\t") for line in TABLE.read_text().splitlines()[1:]]
    return [Row(kind, truth, answer, right == "1") for kind, truth, answer, right in rows]


async def misjudged(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the wrong answers that a reward scores above 0, and the right ones that it scores below 1.

    `match` compares words, so that only texts are held against it if they are right; `choice` refuses other kinds.
    """
    wrong_scored_right, right_scored_wrong = [], []
    for row in rows:
        task = Task(id="t", source="s", messages=({"role": "user", "content": "?"},), truth={"answer": row.truth})
        for name, reward in (("auto", Auto()), ("match", Match()), ("math", Maths()), ("choice", Choice())):
            if name == "choice" and row.kind != "choice":
                continue
            scored = reward(task, row.answer)
            score: Score = await scored if inspect.isawaitable(scored) else scored
            case = f"{name}: {row.answer!r} for {row.truth!r}"
            if not row.right and score.total > 0:
                wrong_scored_right.append(case)
            if row.right and score.total < 1 and (name != "match" or row.kind == "text"):
                right_scored_wrong.append(case)
    return wrong_scored_right, right_scored_wrong


def copies(task: Task) -> Iterator[tuple[str, str]]:
    """Yield names and texts of answers that are taken from a task's question or are formulas of its numbers."""
    question, entry = task.prompt, task.truth["entry"]
    assert isinstance(entry, dict)
    lines = [line.strip() for line in question.splitlines() if line.strip()]
    numbers = re.findall(r"-?\d+(?:\.\d+)?", question)
    yield "the question", question
    yield "the question behind its last colon", question.rpartition(":")[2].strip()
    for place, line in enumerate(lines[-_MOST_LINES:]):
        number = place - len(lines[-_MOST_LINES:])
        yield f"line {number}", line
        yield f"line {number} without its number", re.sub(r"^\W*\d+[.)]\s*", "", line)
    if numbers:
        yield "its first number", numbers[0]
        yield "its last number", numbers[-1]
        yield "its numbers", " ".join(numbers)
        yield "its numbers as JSON", f"[{', '.join(numbers)}]"
        yield "its numbers' sum, not computed", "+".join(numbers)
    metadata = entry["metadata"]
    # Answers that evaluate to the right value without any solving; a scorer that evaluates them pays for nothing.
    if "target" in metadata and "numbers" in metadata:
        yield (
            "0 times its numbers plus the target",
            f"({'+'.join(map(str, metadata['numbers']))})*0x0+{metadata['target']:#x}",
        )
    if "integrand" in metadata:
        yield "the integral, not computed", f"Integral({metadata['integrand']}, {metadata['variable']})"
    if "polynomial_expr" in metadata:
        yield "the product, not expanded", f"expand({metadata['polynomial_expr']})"


def is_true(answer: str, entry: object) -> bool:
    """Return whether an answer is the true one of an entry, which an answer of the same numbers is as well."""
    true = entry.get("answer") if isinstance(entry, dict) else None
    if true is None:
        return False
    if answer.strip().lower() == str(true).strip().lower():
        return True
    ours, theirs = read_quantity(answer), read_quantity(str(true))
    if ours is not None and theirs is not None and ours.value == theirs.value:
        return True
    try:
        pairs = list(zip(answer.split(), str(true).split(), strict=True))
        return bool(pairs) and all(float(left) == float(right) for left, right in pairs)
    except ValueError:
        return False


async def tried(dataset: str, config: Config) -> dict[str, object]:
    """Return a row about a data set: the answer that solves most of its tasks without being true, and those that do
    above chance."""
    reward, source = ReasoningGymReward(), ReasoningGymSource(dataset, {}, config.seed, 0.1)
    solved: Counter[str] = Counter()
    true: Counter[str] = Counter()

    async def score(task: Task, name: str, answer: str) -> None:
        scored = await reward(task, f"<answer>{answer}</answer>")
        if scored.total >= 1:
            true[name] += is_true(scored.answer, task.truth["entry"])
            solved[name] += 1

    for _ in range(config.tasks):
        task = source.draw()
        answers = [(repr(constant), constant) for constant in CONSTANTS] + list(copies(task))
        await asyncio.gather(*(score(task, name, answer) for name, answer in answers))
    false = {name: solved[name] - true[name] for name in solved}
    # Either more wrong answers pass than chance allows, or one constant is the true answer of nearly all tasks.
    above = [name for name in solved if false[name] > _CHANCE * config.tasks or true[name] > _MOST_TRUE * config.tasks]
    best = max(solved, key=lambda name: (false[name], solved[name]), default="")
    shares = {"solved": solved[best] / config.tasks, "not_true": false.get(best, 0) / config.tasks}
    return {
        "data_set": dataset,
        "best_answer": best if len(best) < 60 else best[:57] + "...",
        **shares,
        "above": "\n".join(above),
    }


def measure(config: Config, report: Report) -> None:
    """Fill the report."""
    from reasoning_gym.factory import DATASETS

    warnings.simplefilter("ignore")
    rows = table()

    async def main() -> None:
        wrong, right = await misjudged(rows)
        for case in (*wrong, *right):
            print(case)
        report.results |= {
            "answers": len(rows),
            "wrong_answers": sum(not row.right for row in rows),
            "wrong_scored_right": len(wrong),
            "right_scored_wrong": len(right),
        }
        refused = tried_sets = 0
        above: list[str] = []
        for dataset in config.datasets or sorted(DATASETS):
            try:
                row = await tried(dataset, config)
            except TaskError as error:
                row = {"data_set": dataset, "refused": error.message}
                refused += 1
            above += [f"{dataset}: {name}" for name in str(row.get("above", "")).splitlines()]
            tried_sets += 1
            if row.get("solved") != 0:
                report.rows.append(row)
            print(json.dumps(row), flush=True)
        report.results |= {
            "constants": len(CONSTANTS),
            "data_sets": tried_sets,
            "data_sets_refused": refused,
            "constants_that_score": len(above),
        }

    asyncio.run(main())


if __name__ == "__main__":
    run_benchmark("answers", Config, measure)
