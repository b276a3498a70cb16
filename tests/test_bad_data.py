"""Bad files of tasks and bad flags about them: each has one clear message, which names file, place and value."""

import gzip
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forge_rl.data.data_config import DataConfig
from forge_rl.data.scan import PromptLengths, check_tasks
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.errors import ConfigError, ForgeError, TaskError
from forge_rl.tokens.tokenizer import Tokenizer
from tests.tiny import bundled_tokenizer

GOOD = '{"question": "2+3?", "answer": "5"}\n'


def lines(*rows: object, name: str = "a.jsonl") -> Callable[[Path], str]:
    """Makes a writer of a file of these rows behind a good one; returns what --tasks is given."""

    def write(folder: Path) -> str:
        (folder / name).write_text(
            GOOD + "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
        )
        return name

    return write


def raw(content: bytes, name: str = "a.jsonl") -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / name).write_bytes(content)
        return name

    return write


def named(tasks: str, *files: str) -> Callable[[Path], str]:
    """Makes a writer of good files; returns what --tasks is given."""

    def write(folder: Path) -> str:
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(GOOD)
        return tasks

    return write


def keyed(keys: str, write: Callable[[Path], str]) -> Callable[[Path], str]:
    return lambda folder: f"{write(folder)}:{keys}"


def saved(folder: Path) -> str:
    (folder / "saved").mkdir()
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return "./saved"


def shard_of_datasets(folder: Path) -> str:
    (folder / "saved").mkdir()
    (folder / "saved" / "state.json").write_text('{"_data_files": [{"filename": "data-1.arrow"}]}')
    return "./saved"


FILES: dict[str, tuple[Callable[[Path], str], str]] = {
    "a wrong name": (named("trian.jsonl", "train.jsonl"), "no such file: trian.jsonl.*hint: .* has train.jsonl"),
    "a folder that is not there": (named("dta/a.jsonl"), "no such file: dta/a.jsonl.*there is no folder dta"),
    "a pattern without a match": (named("data/*.jsonl"), r"no file matches 'data/\*.jsonl'"),
    "an unknown kind": (named("./a.txt", "a.txt"), "a.txt has an unsupported suffix.*.jsonl"),
    "an empty file": (raw(b""), "a.jsonl is empty"),
    "blank lines alone": (raw(b"\n\n  \n"), "no row of 'a' can be trained on"),
    "a folder without tasks": (named("./data", "data/readme.txt"), "the folder data has no file of tasks"),
    "a folder of several kinds": (named("./data", "data/a.jsonl", "data/b.csv"), r"several kinds: .csv, .jsonl"),
    "a folder of splits": (saved, "saved has several splits.*add :split=NAME, one of train, test"),
    "files of several splits": (
        named("./data", "data/main/train-00000-of-00001.jsonl", "data/main/test-00000-of-00001.jsonl"),
        r"the files are of several splits: test, train\n.*such as \./data/\*\*/train\*",
    ),
    "folders of several splits": (named("data/*/a.jsonl", "data/train/a.jsonl", "data/dev/a.jsonl"), "dev, train"),
    "a split of a folder without any": (
        named("./data:split=train", "data/a.jsonl"),
        r"split is for data sets on the hub.*such as \./data/\*\*/train\*",
    ),
    "a split that is not there": (keyed("split=dev", saved), "saved has no split 'dev'"),
    "a line that is no JSON": (
        lines("{'question': 'What?'}\n"),
        r"a.jsonl, line 2: the row is not JSON, at character 2: .*\"\{'question'.*fix it, .*--data.max-bad-rows",
    ),
    "a line that is cut": (
        lines('{"question": "Wh'),
        "line 2: the row is not JSON, at character 14: unterminated string",
    ),
    "a line that is no object": (lines([1, 2]), r"line 2: the row is not a JSON object: \[1, 2\]"),
    "a line that is nested too deep": (
        lines("[" * 100_000 + "\n"),
        "line 2: the row cannot be read: maximum recursion",
    ),
    "a number with too many digits": (
        lines('{"question": ' + "9" * 5000 + "}\n"),
        "line 2: the row cannot be read: Exceeds",
    ),
    "a text that is not UTF-8": (
        raw(GOOD.encode() + b'{"question": "caf\xe9"}\n'),
        "line 2: the row is not UTF-8 at byte 18.*caf.xe9.*save it as UTF-8",
    ),
    "a lone surrogate": (
        lines('{"question": "a \\ud800 b"}\n'),
        r"line 2: column 'question' has a lone surrogate, U\+D800.*: 'a .ud800 b'",
    ),
    "no question": (
        lines({"problem": "2+3?"}),
        r"line 2: the row has no column 'question': \['problem'\].*:question=problem",
    ),
    "a column that is missing": (
        keyed("question=questoin", lines()),
        "line 1: column 'questoin' is missing.*did you mean question[?] the row has: question, answer",
    ),
    "a missing shard of a folder": (
        named("./data", "data/t-00000-of-00003.jsonl", "data/t-00002-of-00003.jsonl"),
        "1 of 3 shards are missing: data/t-00001-of-00003.jsonl.*fetch them",
    ),
    "a missing shard of a pattern": (
        named("data/*.jsonl", "data/t-00000-of-00002.jsonl"),
        "1 of 2 shards are missing: data/t-00001-of-00002.jsonl",
    ),
    "a missing shard that datasets wrote": (shard_of_datasets, "the file saved/data-1.arrow is missing"),
    "a field that is missing in a cell's JSON": (
        keyed("answer=meta.truth", raw(b'question,meta\n?,"{""other"": 1}"\n', name="a.csv")),
        "line 2: column 'meta.truth' is missing",
    ),
    "an empty question": (lines({"question": ""}), "line 2: column 'question' is empty"),
    "a blank question": (lines({"question": " \n"}), r"line 2: column 'question' is not text: ' \\n'"),
    "a question that is no context's length": (
        lines({"question": "a b " * (1 << 22)}),
        "line 2: column 'question' has 16,777,216 characters, more than 8,388,608: 'a b a b ",
    ),
    "a null question": (lines({"question": None}), "line 2: column 'question' is null"),
    "a question that is a number": (lines({"question": 5}), "line 2: column 'question' is not text: 5"),
    "an answer that is missing": (
        keyed("answer=answer", lines({"question": "?"})),
        "line 2: column 'answer' is missing",
    ),
    "a null answer": (
        keyed("answer=answer", lines({"question": "?", "answer": None})),
        "line 2: column 'answer' is null",
    ),
    "an empty answer": (
        keyed("answer=a", raw(b"q,question,a\n1,2+3?,5\n2,2+4?, \n", "a.csv")),
        "a.csv, line 3: column 'a' is empty.*its true answer",
    ),
    "an empty answer of the default column": (
        lines({"question": "?", "answer": ""}),
        "line 2: column 'answer' is empty",
    ),
    "an answer that is no number": (
        lines('{"question": "?", "answer": NaN}\n'),
        "line 2: column 'answer' is not a finite number: nan",
    ),
    "a list without answers": (lines({"question": "?", "answer": []}), "line 2: column 'answer' is empty"),
    "a field that is missing in a column": (
        keyed("answer=meta.truth", lines({"question": "?", "meta": {}})),
        "column 'meta.truth' is missing",
    ),
    "messages that are no list": (lines({"messages": {"role": "user"}}), "line 2: the row has no column 'question'"),
    "messages that are no JSON": (
        keyed("messages=messages", raw(b'{"messages": "hello"}')),
        "line 1: column 'messages' is not a list of messages and not JSON: .*'hello'",
    ),
    "no message": (lines({"messages": []}), "line 2: column 'messages' has no messages"),
    "a message without a role": (
        lines({"messages": [{"content": "x"}]}),
        "column 'messages' has a message 1 without a role",
    ),
    "a message without content": (
        lines({"messages": [{"role": "user", "content": None}]}),
        "column 'messages' has a message 1 without content",
    ),
    "messages that end with the answer": (
        lines({"messages": [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]}),
        "column 'messages' ends with an assistant message, so the prompt would contain the answer: '5'",
    ),
    "a message with an image": (
        lines({"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image_url"}]}]}),
        "column 'messages' has a message 1 with a part of the type 'image_url', which is not text",
    ),
    "tools that are no list": (
        lines({"question": "?", "tools": "add"}),
        "column 'tools' is not a list of tool schemas",
    ),
    "a tool that is no schema": (
        lines({"question": "?", "tools": ["add"]}),
        "column 'tools' has a tool 1 that is not a JSON",
    ),
    "a rubric without weights": (
        keyed("rubric=r", raw(b'{"question": "?", "r": [{"criterion": "Names it."}]}')),
        r"a.jsonl, line 1: column 'r' has a criterion 1 without a number in 'weight': \[.*Names it",
    ),
    "an id that is none": (keyed("id=n", raw(b'{"question": "?", "n": [1]}')), r"column 'n' is not an id.*: \[1\]"),
    "a column that would write to the terminal": (
        keyed("question=q", raw(b'{"\\u001b[31mred": 1}')),
        r"column 'q' is missing.*the row has: \\x1b\[31mred",
    ),
    "a JSON array that is cut": (raw(b'[{"question": "?"}', "a.json"), "a.json is not JSON"),
    "a CSV row with a field too many": (
        raw(b"question,answer\n2+3?,5\n3,4+5?,9\n", "a.csv"),
        "a.csv, line 3: the row has 3 fields, but the first row names 2 columns",
    ),
    "a CSV with an open quote": (raw(b'question\n"2+3?\n', "a.csv"), "a.csv has an unclosed quote"),
    "a CSV with quotes inside a field": (
        raw(b'question,answer\n2+3?,5\n6\'2" + 1,4\na 2" pipe,3\n', "a.csv"),
        "a.csv, line 3: the row has a quote in a field that is not quoted.*quote the whole field",
    ),
    "a CSV with text behind a quote": (raw(b'question\n"2"+"3"?\n', "a.csv"), "a.csv, line 2: the row is not CSV"),
    "a CSV with a column twice": (raw(b"a,b,a\n1,2,3\n", "a.csv"), "the first row names the column 'a' twice"),
    "a CSV that is not UTF-8": (
        raw(b"question\ncaf\xe9\n", "a.csv"),
        "line 2: column 'question' is not UTF-8.*save the file",
    ),
    "a Parquet file that is none": (raw(b"PAR1 and no more PAR1", "a.parquet"), "a.parquet cannot be read: "),
    "an Arrow file that is none": (raw(b"ARROW1 and no more", "a.arrow"), "a.arrow cannot be read: "),
    "a gzip file that is none": (raw(GOOD.encode(), "a.jsonl.gz"), "a.jsonl.gz cannot be decompressed"),
    "a gzip file that is cut": (
        raw(gzip.compress(GOOD.encode() * 1000, 0)[:20_000], "a.jsonl.gz"),
        "a.jsonl.gz cannot be decompressed|not JSON",
    ),
    "an unknown key": (
        named("a.jsonl:qestion=problem", "a.jsonl"),
        "has no option 'qestion'.*did you mean question",
    ),
    "a question and messages": (named("a.jsonl:question=a,messages=b", "a.jsonl"), "set both question and messages"),
    "a key without a value": (
        named("a.jsonl:question=", "a.jsonl"),
        "question has no value\n  .*a.jsonl:question=\n +\\^+\n",
    ),
    "a key that is given twice": (named("a.jsonl:question=a,question=b", "a.jsonl"), "'question' is given twice"),
    "a weight below 0": (named("a.jsonl*-1", "a.jsonl"), "the weight -1 is below 0"),
    "no name": (named(":question=a"), "there is no name.*:question=a"),
}


def draw_many(tasks: str) -> None:
    mixture = DataConfig(held_out_share=1e-9).build([tasks], seed=0)
    for _ in range(1100):
        mixture.draw_from(next(iter(mixture)))


@pytest.mark.parametrize("name", FILES)
def test_bad_tasks_have_one_clear_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, message = FILES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("forge_rl.data.sources.files.default_cache", lambda: tmp_path / "cache")
    with pytest.raises(TaskError) as caught:
        draw_many(write(tmp_path))
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)
    assert all(len(line) < 400 for line in str(caught.value).splitlines())
    assert "\x1b" not in str(caught.value)


FLAGS: dict[str, tuple[dict[str, object], str]] = {
    "a share of bad rows past all": ({"max_bad_rows": 1.0}, "--data.max-bad-rows is 1.0.*below 1"),
    "a negative share of bad rows": ({"max_bad_rows": -0.1}, "--data.max-bad-rows is -0.1"),
    "a held-out share of all": ({"held_out_share": 1.0}, "--data.held-out-share is 1.0"),
    "a template that names nothing": ({"template": "question"}, "the template 'question' uses no column"),
    "a template that is not there": ({"template": "my.jinja"}, "the template my.jinja cannot be read"),
    "a template that is none": ({"template": "{{ question"}, "the template '{{ question', line 1: "),
    "a template of another column": (
        {"template": "{{ problem }}"},
        "line 1: the row fails in the template: 'problem'",
    ),
    "a template that gives nothing": (
        {"template": "{% if 0 %}x{% endif %}"},
        "line 1: the row is rendered to empty text",
    ),
    "a template without JSON": (
        {"template": "{% block messages %}{{ question }}{% endblock %}"},
        "line 1: the row is not rendered to JSON by the template's block messages.*: '2.3[?]'",
    ),
    "a template of JSON that is too deep": (
        {"template": "{% block messages %}{{ '[' * 100000 }}{% endblock %}"},
        "line 1: the row is not rendered to JSON by the template's block messages",
    ),
    "a template that breaks out": (
        {"template": "{{ ''.__class__.__mro__ }}"},
        "line 1: the row fails in .*unsafe",
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_bad_flags_of_data_have_one_clear_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags, message = FLAGS[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(GOOD)
    with pytest.raises((TaskError, ConfigError)) as caught:
        DataConfig(**{"held_out_share": 1e-9, **flags}).build(["a.jsonl"], seed=0).draw_from("a")  # type: ignore[arg-type]
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)


# What only the scan before a run sees.


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return bundled_tokenizer()


def write(path: Path, *questions: str) -> str:
    path.write_text("".join(json.dumps({"question": question}) + "\n" for question in questions))
    return str(path)


def test_a_scan_counts_what_is_left_out_and_what_comes_twice(tmp_path: Path, tokenizer: Tokenizer) -> None:
    long = "long " * 300
    tasks = write(tmp_path / "a.jsonl", *(f"What is {n}?" for n in range(40)), "What  is 3?", long, long)
    with open(tasks, "a") as file:
        file.write("{\n")
    mixture = DataConfig(max_bad_rows=0.05).build([tasks], seed=0)
    scan = check_tasks(mixture, lambda: PromptLengths(tokenizer, 200), cache=tmp_path)["a"]
    assert (scan.rows, scan.bad, scan.duplicates, len(scan.too_long)) == (44, 1, 2, 2)
    description = scan.describe(200)
    assert re.fullmatch(
        r"44 rows; \d+ held out; 2 left out, as their prompts are longer than 200 tokens; 1 bad rows skipped, the "
        r"first: .*a.jsonl, line 44: the row is not JSON.*; 2 duplicates",
        description,
    ), description
    drawn = {str(mixture.draw_from("a").messages[0]["content"]) for _ in range(100)}
    assert long not in drawn | {str(task.messages[0]["content"]) for task in mixture.held_out(50)}
    assert len(drawn) == 41 - scan.held_out


@pytest.mark.parametrize("limit", [40, 41])
def test_a_prompt_is_too_long_by_its_tokens_and_not_by_its_bytes(
    limit: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    question = "so many words " * 4
    length = len(tokenizer.render([{"role": "user", "content": question}]))
    mixture = DataConfig(held_out_share=1e-9).build([write(tmp_path / "a.jsonl", question, "?")], seed=0)
    scan = check_tasks(mixture, lambda: PromptLengths(tokenizer, length + limit - 41), cache=tmp_path)["a"]
    assert len(scan.too_long) == (1 if limit == 40 else 0)


def test_tasks_both_evaluated_and_trained_on_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    train = write(tmp_path / "train.jsonl", *(f"What is {n}?" for n in range(40)))
    test = write(tmp_path / "test.jsonl", *(f"WHAT is {n}?" for n in range(35, 50)))
    check = partial(check_tasks, make_lengths=lambda: PromptLengths(tokenizer, 200), cache=tmp_path)
    with pytest.raises(
        TaskError, match=r"(?s)5 tasks of 'train' are also in the evaluation 'test', the first is .*line 36"
    ):
        check(DataConfig().build([train], seed=0, eval_tasks=[test]))
    mixture = DataConfig(overlap="leave-out").build([train], seed=0, eval_tasks=[test])
    assert check(mixture)["train"].trained == 35
    assert len({mixture.draw_from("train").id for _ in range(100)}) == 35


@pytest.mark.parametrize(
    ("tasks", "evaluated"),
    [("train.jsonl", "code.py:ROWS"), ("code.py:ROWS", "train.jsonl"), ("code.py:generate", "code.py:ROWS")],
)
def test_tasks_from_code_are_compared_with_what_is_evaluated(
    tasks: str, evaluated: str, users_folder: Path, tokenizer: Tokenizer
) -> None:
    write(users_folder / "train.jsonl", *(f"What is {n}?" for n in range(10)))
    rows = [{"question": f"What IS {n}?"} for n in range(5, 12)]
    code = f"ROWS = {rows!r}\ndef generate():\n    return iter([*ROWS, {{'question': 'What is left?'}}])\n"
    (users_folder / "code.py").write_text(code)
    check = partial(check_tasks, make_lengths=lambda: PromptLengths(tokenizer, 200), cache=users_folder)
    with pytest.raises(TaskError, match="are also in the evaluation 'test'"):
        check(DataConfig().build([tasks], seed=0, eval_tasks=[f"test={evaluated}"]))
    mixture = DataConfig(overlap="leave-out").build([tasks], seed=0, eval_tasks=[f"test={evaluated}"])
    check(mixture)
    (name,) = mixture
    prompts = {mixture.draw_from(name).prompt.lower() for _ in range(30)}
    assert not prompts & {task.prompt.lower() for task in mixture.eval_sets(100)["test"]}


@pytest.mark.parametrize("tasks", ["train.jsonl", "code.py:ROWS"])
def test_a_set_that_a_resumed_run_adds_is_not_trained_on(tasks: str, users_folder: Path, tokenizer: Tokenizer) -> None:
    write(users_folder / "train.jsonl", *(f"What is {n}?" for n in range(12)))
    write(users_folder / "test.jsonl", *(f"What IS {n}?" for n in range(5, 9)))
    (users_folder / "code.py").write_text("ROWS = [{'question': f'What is {n}?'} for n in range(12)]\n")

    def stream(data: DataConfig, state: dict[str, object] | None = None, **settings: Any) -> ResumableTaskStream:
        mixture = data.build([tasks], seed=0, **settings)
        if state is not None:
            mixture.restore_sources(state)
        check_tasks(mixture, make_lengths=lambda: PromptLengths(tokenizer, 200), cache=users_folder)
        tasks_of_mixture = ResumableTaskStream(mixture)
        if state is not None:
            tasks_of_mixture.restore(state, [])
        return tasks_of_mixture

    before = stream(DataConfig(held_out_share=1e-9))
    (name,) = before.source_order(1)
    for _ in range(3):
        before.draw_from(name)
    leaves_out = DataConfig(held_out_share=1e-9, overlap="leave-out")
    resumed = stream(leaves_out, before.state(), eval_tasks=["test=test.jsonl"])
    prompts = {resumed.draw_from(name).prompt for _ in range(30)}
    assert prompts == {f"What is {n}?" for n in (*range(5), *range(9, 12))}


def test_a_scan_of_a_large_file_is_kept_until_the_file_changes(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_rl.data.scan._CACHED_BYTES", 10)
    path = tmp_path / "a.jsonl"

    def scanned() -> tuple[object, int]:
        mixture = DataConfig().build([str(path)], seed=0)
        read = 0

        def count(original: Callable[[int, int], object], first: int, end: int) -> object:
            nonlocal read
            read += 1
            return original(first, end)

        source = mixture.sources["a"]
        monkeypatch.setattr(source, "read", partial(count, source.read))  # type: ignore[attr-defined]
        return check_tasks(mixture, lambda: PromptLengths(tokenizer, 60), cache=tmp_path / "cache"), read

    write(path, *(f"What is {n}?" for n in range(40)), "long " * 80)
    first, read = scanned()
    assert read == 1
    assert scanned() == (first, 0)
    write(path, *(f"What is {n}?" for n in range(41)), "long " * 80)
    assert scanned()[1] == 1
    (scan_file, *_) = (tmp_path / "cache" / "scans").iterdir()
    scan_file.write_text("[]")
    assert (tmp_path / "cache" / "scans").stat().st_mode & 0o077 == 0


NOTHING_LEFT: dict[str, tuple[list[str], dict[str, object], int, str]] = {
    "all are too long": (
        ["long " * 300] * 3,
        {},
        100,
        "no task of 'a' can be trained on.*raise --generator.max-model-len",
    ),
    "all are held out": (["one?"], {"held_out_share": 0.999999}, 100, "no task of 'a' can be trained on.*lower"),
    "too many are bad": (
        ["one?", ""],
        {"max_bad_rows": 0.1},
        100,
        "1 of 2 rows of 'a' are bad.*--data.max-bad-rows 0.1",
    ),
    "one is bad": (["one?", ""], {}, 100, "line 2: column 'question' is empty"),
}


@pytest.mark.parametrize("name", NOTHING_LEFT)
def test_a_scan_that_leaves_nothing_is_an_error(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    questions, flags, limit, message = NOTHING_LEFT[name]
    mixture = DataConfig(**flags).build([write(tmp_path / "a.jsonl", *questions)], seed=0)  # type: ignore[arg-type]
    with pytest.raises(TaskError) as caught:
        check_tasks(mixture, lambda: PromptLengths(tokenizer, limit), cache=tmp_path)
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)


def test_messages_that_the_chat_template_refuses_are_named(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD + json.dumps({"messages": [{"role": "critic", "content": "?" * 200}]}) + "\n")
    mixture = DataConfig(held_out_share=1e-9).build([str(path)], seed=0)
    template = "{{ raise_exception('no critics') if messages[0].role == 'critic' }}{{ messages[0].content }}"
    monkeypatch.setattr(tokenizer.hf, "chat_template", template)
    with pytest.raises(ForgeError, match=r"a.jsonl, line 2: the chat template of .* refuses"):
        check_tasks(mixture, lambda: PromptLengths(tokenizer, 100), cache=tmp_path)


@pytest.mark.parametrize(
    ("rows", "listed_rows", "row_count"), [(7, 5, "7 of 7"), (3, 3, "3 of 3"), (2000, 5, "1,000 of 1,000")]
)
def test_a_wrong_column_lists_the_columns_and_five_of_the_bad_rows(
    rows: int, listed_rows: int, row_count: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD * rows)
    mixture = DataConfig().build([f"{tmp_path}/a.jsonl:question=problem"], seed=0)
    with pytest.raises(TaskError) as caught:
        check_tasks(mixture, lambda: PromptLengths(tokenizer, 100), cache=tmp_path)
    message = str(caught.value)
    assert message.count("column 'problem' is missing") == listed_rows
    assert f"a.jsonl, line {listed_rows}: column" in message
    assert f"{row_count} rows from there on are bad" in message
    assert "the row has: question, answer" in message


def test_a_bad_row_among_good_ones_is_named_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD * 3 + "{}\n" + GOOD * 3)
    mixture = DataConfig().build([f"{tmp_path}/a.jsonl"], seed=0)
    with pytest.raises(TaskError, match="line 4") as caught:
        check_tasks(mixture, lambda: PromptLengths(tokenizer, 100), cache=tmp_path)
    assert "from there on" not in str(caught.value)
