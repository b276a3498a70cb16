"""Well-known benchmarks: where their rows are, how a row becomes a prompt, and how answers are scored."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge_rl.data.sources import Columns, IterableSource, hub
from forge_rl.data.sources.files import TABLES, find_files, open_tables
from forge_rl.data.sources.tables import RowError, Table
from forge_rl.errors import ConfigError, TaskError
from forge_rl.flags.texts import suggest

Row = Mapping[str, object]

_BOXED = " Reason step by step, and put the final answer within \\boxed{}."
_MOST_ANSWERS_BYTES = 1 << 26
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": ""}
"""Types of the Berkeley Function-Calling Leaderboard, and JSON Schema's; "" leaves the type out."""
_DEPTH = 16


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark: its data set, its prompt and its reward."""

    name: str
    hub: str = ""
    """Id of the data set on the hub; "" if it is read from files only."""
    config: str = ""
    split: str = "test"
    columns: tuple[str, ...]
    """Columns that each row must have."""
    id: str = ""
    """Column with an id; "" for a digest of the row."""
    row: Callable[[Row], Row]
    """Makes the prompt, a column `question` or `messages`, and the columns that the reward needs."""
    reward: str
    """Reward, as for --reward."""
    max_tokens: int
    """Tokens that answers of capable models usually need."""
    needs: str = ""
    """What scoring needs besides this package."""
    source: str = field(default="")
    """Paper or page that defines it."""


def benchmark(text: str) -> tuple[Benchmark, str, str]:
    """Parse NAME[@REVISION][=FILE]; return the benchmark, the revision and the file.

        benchmark("gsm8k=test.jsonl")

    Raises:
        ConfigError: the benchmark is unknown.
    """
    name, _, file = text.partition("=")
    name, _, revision = name.partition("@")
    definition = BENCHMARKS.get(name.strip().lower())
    if definition is None:
        raise ConfigError(
            f"--benchmark {text!r:.80}: {name!r:.40} is unknown",
            hint=f"{suggest(name, BENCHMARKS, 'benchmarks')}; --benchmark list describes them",
        )
    return definition, revision.strip(), file.strip()


def benchmark_source(text: str, cache: Path | None = None) -> IterableSource:
    """Return an evaluation-only source with the tasks of NAME[@REVISION][=FILE], in the order of their rows.

    Args:
        cache: folder for copies and indexes of files; by default the user's.

    Raises:
        ConfigError: the benchmark is unknown.
        TaskError: its data set cannot be fetched, or the file does not have its rows.
    """
    definition, revision, file = benchmark(text)
    tables = _file_tables(definition, file, cache) if file else [_hub_table(definition, revision)]
    columns = Columns(id=definition.id)
    # A function, so that each pass reads the tables from the start.
    return IterableSource(definition.name, lambda: _rows(definition, tables), held_out_share=1.0, columns=columns)


def _hub_table(definition: Benchmark, revision: str) -> Table:
    hint = f"download its rows elsewhere and give them: --benchmark {definition.name}=FILE, with the columns "
    hint += ", ".join(definition.columns)
    if not definition.hub:
        raise TaskError(
            f"the benchmark {definition.name} is read from a file", hint=f"{hint}; it is from {definition.source}"
        )
    try:
        return hub.fetch(definition.hub, config=definition.config, split=definition.split, revision=revision)
    except TaskError as error:
        raise TaskError(f"the benchmark {definition.name}: {error.message}", hint=f"{error.hint}; or {hint}") from error


def _file_tables(definition: Benchmark, file: str, cache: Path | None) -> list[Table]:
    tables = open_tables(find_files(file), cache and cache / TABLES)
    return [_AnsweredTable(table) for table in tables] if "ground_truth" in definition.columns else tables


def _rows(definition: Benchmark, tables: Sequence[Table]) -> Iterator[Row]:
    for table in tables:
        for number, raw_row in table.rows(0, len(table)):
            try:
                values = table.parse(raw_row)
                # Checked row by row, so that another data set under the benchmark's name fails at once and by its line.
                if lacking := [name for name in definition.columns if values.get(name) is None]:
                    has = ", ".join(map(str, values))
                    raise RowError(f"lacks {', '.join(lacking)}; it has {has:.200}")
                yield definition.row(values)
            except (RowError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise TaskError(
                    f"the benchmark {definition.name}: {table.path}, {table.describe(number)}: {error}",
                    hint=f"give a file whose rows have the columns {', '.join(definition.columns)}",
                ) from error


class _AnsweredTable:
    """Rows of a table, each with its `ground_truth` from the file of the same name in the folder possible_answer."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.path = table.path
        # The leaderboard keeps answers in files of their own; rows are matched by id, not by line.
        answers = table.path.parent / "possible_answer" / table.path.name
        self._answers: dict[str, object] = {}
        if answers.is_file():
            self._answers = _answers(answers)

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> object:
        return self._table.row(index)

    def rows(self, first: int, end: int) -> Iterator[tuple[int, object]]:
        return self._table.rows(first, end)

    def parse(self, row: object) -> Row:
        values = self._table.parse(row)
        # A row's own ground_truth wins: merged files already have it.
        return {"ground_truth": self._answers.get(str(values.get("id")))} | dict(values)

    def describe(self, row: int) -> str:
        return self._table.describe(row)


def _answers(path: Path) -> dict[str, object]:
    if path.stat().st_size > _MOST_ANSWERS_BYTES:
        raise TaskError(f"{path} has {path.stat().st_size} bytes", hint="give the leaderboard's own file")
    try:
        rows = [json.loads(line) for line in path.read_text().split("\n") if line.strip()]
        return {str(row["id"]): row["ground_truth"] for row in rows}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise TaskError(f"{path} cannot be read: {error!r}", hint="give the leaderboard's own file") from error


def _text(row: Row, name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise RowError("is not a text", column=name, value=value)
    return value


def _asked(name: str, answer: str, instruction: str) -> Callable[[Row], Row]:
    """Return a function that converts a row to one with a question and an answer."""

    def convert(row: Row) -> Row:
        # Columns that `Columns` would take for the prompt are left out; the question is made here.
        other_columns = {key: value for key, value in row.items() if key not in (name, "prompt", "messages")}
        return other_columns | {"question": _text(row, name) + instruction, "answer": str(row[answer])}

    return convert


def _mmlu_pro(row: Row) -> Row:
    options = row["options"]
    if not isinstance(options, list | tuple) or not 2 <= len(options) <= 26:
        raise RowError("is not a list of 2 to 26 options", column="options", value=options)
    option_lines = "\n".join(
        f"{letter}. {option}" for letter, option in zip(string.ascii_uppercase, options, strict=False)
    )
    last_letter = string.ascii_uppercase[len(options) - 1]
    question = (
        f"{_text(row, 'question')}\n\n{option_lines}\n\nThink step by step, then finish with "
        f'"The answer is (X)", where X is a letter from A to {last_letter}.'
    )
    return {"question_id": row["question_id"], "question": question, "answer": row["answer"]}


def _humaneval(row: Row) -> Row:
    question = (
        "Complete this Python function. Answer with the whole function in one block of code, with the imports that it "
        f"needs.\n\n```python\n{_text(row, 'prompt').rstrip()}\n```"
    )
    # The prompt runs before the answer's code, with its imports and helper functions.
    truth = {"setup": row["prompt"], "test": row["test"], "entry_point": row["entry_point"]}
    return {"task_id": row["task_id"], "question": question} | truth


def _mbpp(row: Row) -> Row:
    tests = row["test_list"]
    if not isinstance(tests, list | tuple) or not all(isinstance(test, str) for test in tests):
        raise RowError("is not a list of texts", column="test_list", value=tests)
    description = row.get("text") or row.get("prompt")
    # The data set's configs "full" and "sanitized" name these columns differently.
    imports = row.get("test_setup_code") or "\n".join(map(str, row.get("test_imports") or []))  # type: ignore[call-overload]
    tests_text = "\n".join(tests)
    instruction = "Answer with Python code in one block. It has to pass these tests:"
    question = f"{description}\n\n{instruction}\n\n```python\n{tests_text}\n```"
    return {"task_id": row["task_id"], "question": question, "tests": list(tests), "setup": str(imports)}


def _ifeval(row: Row) -> Row:
    return {
        "key": row["key"],
        "question": _text(row, "prompt"),
        "instruction_id_list": row["instruction_id_list"],
        "kwargs": row["kwargs"],
    }


def _bfcl(row: Row) -> Row:
    # A list of turns, each a list of messages; only single-turn categories can be scored by one answer.
    turns, functions = row["question"], row["function"]
    if not isinstance(turns, list) or len(turns) != 1 or not isinstance(turns[0], list):
        raise RowError("is not one turn of messages", column="question", value=turns)
    # Rows with one function may hold it without a list.
    functions = functions if isinstance(functions, list) else [functions]
    tools = [{"type": "function", "function": _schema(function)} for function in functions]
    for tool in tools:
        function = tool["function"]
        if not isinstance(function, dict):
            raise RowError("is not a list of functions", column="function", value=functions)
        # APIs allow no dots in names of functions; the reward counts them as underscores too.
        function["name"] = str(function.get("name", "")).replace(".", "_")
    return {"id": row["id"], "messages": turns[0], "tools": tools, "ground_truth": row["ground_truth"]}


def _schema(value: object, depth: int = 0) -> object:
    """Return a function's schema with JSON Schema's names of types."""
    if depth > _DEPTH:
        raise RowError("is nested too deeply", column="function")
    if isinstance(value, Mapping):
        schema = {str(key): _schema(inner, depth + 1) for key, inner in value.items()}
        kind = schema.get("type")
        if isinstance(kind, str) and kind in _JSON_TYPES:
            # "any" has no counterpart in JSON Schema: a schema without a type accepts every value.
            del schema["type"]
            schema |= {"type": _JSON_TYPES[kind]} if _JSON_TYPES[kind] else {}
        return schema
    return [_schema(inner, depth + 1) for inner in value] if isinstance(value, list) else value


_CODE = "a sandbox: Linux, and root or bubblewrap"
BENCHMARKS: Mapping[str, Benchmark] = {
    definition.name: definition
    for definition in (
        Benchmark(
            name="gsm8k",
            hub="openai/gsm8k",
            config="main",
            columns=("question", "answer"),
            row=_asked("question", "answer", " Reason step by step, and end with the answer as a number."),
            reward="number",
            max_tokens=512,
            source="arXiv:2110.14168",
        ),
        Benchmark(
            name="math-500",
            hub="HuggingFaceH4/MATH-500",
            columns=("problem", "answer"),
            row=_asked("problem", "answer", _BOXED),
            reward="math",
            max_tokens=4096,
            needs="math-verify",
            source="arXiv:2305.20050",
        ),
        Benchmark(
            name="aime-2024",
            hub="HuggingFaceH4/aime_2024",
            split="train",
            columns=("problem", "answer"),
            row=_asked("problem", "answer", _BOXED),
            reward="math",
            max_tokens=16384,
            needs="math-verify",
            source="maa.org",
        ),
        Benchmark(
            name="aime-2025",
            hub="math-ai/aime25",
            columns=("problem", "answer"),
            row=_asked("problem", "answer", _BOXED),
            reward="math",
            max_tokens=16384,
            needs="math-verify",
            source="maa.org",
        ),
        Benchmark(
            name="mmlu-pro",
            hub="TIGER-Lab/MMLU-Pro",
            columns=("question_id", "question", "options", "answer"),
            id="question_id",
            row=_mmlu_pro,
            reward="choice",
            max_tokens=2048,
            source="arXiv:2406.01574",
        ),
        Benchmark(
            name="ifeval",
            hub="google/IFEval",
            split="train",
            columns=("key", "prompt", "instruction_id_list", "kwargs"),
            id="key",
            row=_ifeval,
            reward="ifeval",
            max_tokens=1280,
            source="arXiv:2311.07911",
        ),
        Benchmark(
            name="humaneval",
            hub="openai/openai_humaneval",
            columns=("task_id", "prompt", "test", "entry_point"),
            id="task_id",
            row=_humaneval,
            reward="unit_tests:tests=test,setup=setup",
            max_tokens=1024,
            needs=_CODE,
            source="arXiv:2107.03374",
        ),
        Benchmark(
            name="mbpp",
            hub="google-research-datasets/mbpp",
            config="full",
            columns=("task_id", "test_list"),
            id="task_id",
            row=_mbpp,
            reward="unit_tests:tests=tests,setup=setup",
            max_tokens=1024,
            needs=_CODE,
            source="arXiv:2108.07732",
        ),
        Benchmark(
            name="bfcl",
            columns=("id", "question", "function", "ground_truth"),
            id="id",
            row=_bfcl,
            reward="function_calls",
            max_tokens=512,
            needs="a model with a format of tool calls; single-turn files, next to the folder possible_answer",
            source="https://github.com/ShishirPatil/gorilla",
        ),
    )
}
"""Benchmarks by name."""
