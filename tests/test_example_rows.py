"""Rows of given answers: conversations and pairs in the forms that data sets have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forge_rl.data.data_config import DataConfig
from forge_rl.data.sources import rows
from forge_rl.data.sources.messages import read_messages
from forge_rl.data.sources.rows import Columns, Kind, problem_key
from forge_rl.data.sources.tables import RowError
from forge_rl.errors import TaskError

ASKED = {"role": "user", "content": "2+3?"}
SAID = {"role": "assistant", "content": "5"}
OTHER = {"role": "assistant", "content": "6"}
MORE = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]}

CONVERSATIONS: list[tuple[Columns, dict[str, object], list[dict[str, object]]]] = [
    (Columns(), {"messages": [ASKED, SAID, *MORE]}, [SAID, *MORE]),
    (Columns(), {"messages": json.dumps([ASKED, SAID]), "answer": "six"}, [SAID]),
    (Columns(), {"messages": [ASKED, CALL, {"role": "tool", "content": "5"}, SAID], "tools": [TOOL]}, [CALL]),
    (Columns(), {"conversations": [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]}, [SAID]),
    (Columns(), {"prompt": "2+3?", "completion": "5", "answer": "six"}, [SAID]),
    (Columns(), {"prompt": [ASKED], "completion": [SAID, *MORE]}, [SAID, *MORE]),
    (Columns(), {"question": "2+3?", "answer": "5"}, [SAID]),
    (Columns(question="q", answer="meta.said"), {"q": "2+3?", "meta": {"said": "5"}, "completion": "6"}, [SAID]),
    (
        Columns(template="{{ a }}+{{ b }}?"),
        {"a": 2, "b": 3, "answer": '[{"a": 5}]'},
        [{**SAID, "content": '[{"a": 5}]'}],
    ),
]


@pytest.mark.parametrize(("columns", "row", "completion"), CONVERSATIONS)
def test_a_conversation_is_its_prompt_and_what_follows(
    columns: Columns, row: dict[str, object], completion: list[dict[str, object]]
) -> None:
    task, problem = replace(columns, kind="conversation").read(row, "t")
    assert task.messages == (ASKED,)
    assert task.truth["completion"][: len(completion)] == completion  # type: ignore[index]
    assert problem == problem_key("2+3?"), "an answer must not tell held-out problems apart"
    assert task.tools == ((TOOL,) if "tools" in row else ())


ARGUMENTS = {"a": 2, "b": None}
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": ARGUMENTS}}]}
FLAT = {"name": "add", "arguments": json.dumps(ARGUMENTS)}
TYPED = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}]}
THOUGHT = {**SAID, "reasoning_content": "2 and 3"}

FORMS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "parts": (
        {"role": "assistant", "content": [{"type": "text", "text": "5"}, {"type": "output_text", "text": "."}]},
        {**SAID, "content": "5\n."},
    ),
    "a part that is a thought": (
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "2 and 3"}, {"type": "text", "text": "5"}]},
        THOUGHT,
    ),
    "a thought in Ollama's words": ({**SAID, "thinking": "2 and 3", "tool_calls": []}, THOUGHT),
    "a thought given twice": ({**SAID, "reasoning": "2 and 3", "reasoning_content": "2 and 3"}, THOUGHT),
    "a thought in the text": ({**SAID, "content": "<think>2</think>5"}, {**SAID, "content": "<think>2</think>5"}),
    "arguments as text": ({**CALLED, "content": None, "tool_calls": [{"id": None, "function": FLAT}]}, CALLED),
    "no arguments": (
        {**CALLED, "tool_calls": [{"function": {"name": "add", "arguments": ""}}]},
        {**CALLED, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
    ),
    "calls as text": ({**CALLED, "tool_calls": json.dumps([FLAT])}, TYPED),
    "the former format's": ({"role": "assistant", "content": None, "function_call": FLAT}, TYPED),
    "ShareGPT's": ({"from": "function_call", "value": json.dumps(FLAT)}, TYPED),
    "untrained": ({**SAID, "weight": 0}, {**SAID, "weight": 0}),
    "untrained in axolotl's words": ({**SAID, "training": False}, {**SAID, "weight": 0}),
    "OpenRouter's thoughts": (
        {**SAID, "reasoning_details": [{"type": "reasoning.text", "text": "2 and 3", "signature": "x"}]},
        THOUGHT,
    ),
    "OpenRouter's thoughts, twice": (
        {**SAID, "reasoning": "2 and 3", "reasoning_details": [{"type": "reasoning.summary", "summary": "Adds."}]},
        THOUGHT,
    ),
    "OpenRouter's thoughts, hidden": (
        {**SAID, "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}, {"type": "reasoning.text"}]},
        SAID,
    ),
    "OpenRouter's thoughts, also hidden": (
        {**SAID, "reasoning": "2 and 3", "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
        THOUGHT,
    ),
    "OpenAI's refusal": ({"role": "assistant", "content": None, "refusal": "No."}, {**SAID, "content": "No."}),
    "untrained in ShareGPT's words": ({"from": "gpt", "value": "5", "train": False}, {**SAID, "weight": 0}),
    "trained": ({**SAID, "weight": 1.0}, SAID),
}


@pytest.mark.parametrize("name", FORMS)
def test_messages_of_all_data_sets_become_those_of_chat_templates(name: str) -> None:
    written, message = FORMS[name]
    row = {"messages": [ASKED, written]}
    task, _ = Columns(kind="conversation").read(row, "t")
    assert task.truth["completion"] == [message]
    assert read_messages("messages", [ASKED, message]) == [ASKED, message], "what was read is read again as it is"


def test_only_nulls_that_a_columnar_format_added_are_removed(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"default": None}}}}}
    bare: dict[str, object] = {"messages": [ASKED, CALLED], "tools": [tool]}
    filled = {"messages": [{**ASKED, "tool_calls": None}, {**CALLED, "content": None}], "tools": [tool]}
    for row, nulls in ((bare, True), (filled, False)):
        task, _ = Columns(kind="conversation").read(row, "t")
        text = json.dumps([task.truth, task.tools])
        assert ("null" in text) == nulls, text
    pq.write_table(pa.Table.from_pylist([bare]), tmp_path / "a.parquet")
    task = DataConfig(held_out_share=1e-9).build([f"{tmp_path}/a.parquet"], seed=0, kind="conversation").draw_from("a")
    assert "null" not in json.dumps([task.truth, task.messages, task.tools])


SHAREGPT = {"conversations": [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]}
FLAT_TOOL = {"name": "add", "parameters": {"type": "object"}}


@pytest.mark.parametrize("kind", ["prompt", "conversation"])
def test_a_rows_own_system_message_is_shown(kind: Kind) -> None:
    row: dict[str, object] = {"question": "2+3?", "answer": "5"} if kind == "prompt" else SHAREGPT
    columns = Columns(kind=kind, system="Add.")
    task, problem = columns.read({**row, "system": "Be brief."}, "t")
    assert task.messages == ({"role": "system", "content": "Be brief."}, ASKED)
    assert task.truth["system"] == "Be brief.", "rewards may take the column"
    assert problem == problem_key("2+3?")
    for other in (None, "", " ", 5):
        assert columns.read({**row, "system": other}, "t")[0].messages[0] == {"role": "system", "content": "Add."}
    template = replace(columns, template="{{ system }}, {{ 2 }}+3?", answer="a", system="")
    assert template.read({"system": "Sir", "a": "5"}, "t")[0].messages == ({**ASKED, "content": "Sir, 2+3?"},)


@pytest.mark.parametrize(
    "tools",
    [
        {"tools": [TOOL]},
        {"tools": json.dumps([FLAT_TOOL])},
        {"tools": [{"type": "function", **FLAT_TOOL}]},
        {"functions": [FLAT_TOOL]},
    ],
)
def test_tools_have_one_form_in_all_data_sets(tools: dict[str, object]) -> None:
    task, _ = Columns(kind="conversation").read({"messages": [ASKED, SAID], **tools}, "t")
    assert task.tools == (TOOL,)
    assert not task.truth.keys() & tools.keys()


@pytest.mark.parametrize("functions", ["def add(a, b): ...", ["add"]])
def test_a_column_of_code_or_names_holds_no_tools(functions: object) -> None:
    task, _ = Columns(kind="conversation").read({"messages": [ASKED, SAID], "functions": functions}, "t")
    assert (task.tools, task.truth["functions"]) == ((), functions)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"images": ["a.png"]}, "column 'images' holds something other than text"),
        ({"image": {"bytes": b"x", "path": None}}, "column 'image' holds something other than text"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "column 'chat_template_kwargs' has variables"),
        ({"chat_template_kwargs": '{"enable_thinking": false}'}, "column 'chat_template_kwargs' has variables"),
    ],
)
def test_columns_that_change_what_the_model_is_shown_are_refused(columns: dict[str, object], problem: str) -> None:
    for kind, row in (("conversation", SHAREGPT), ("prompt", {"question": "2+3?"})):
        with pytest.raises(RowError, match=problem):
            Columns(kind=kind).read({**row, **columns}, "t")
        Columns(kind=kind).read({**row, **dict.fromkeys(columns), "image": "debian:12"}, "t")


PAIRS: list[dict[str, object]] = [
    {"conversations": [{"from": "human", "value": "2+3?"}], "chosen": {"from": "gpt", "value": "5"}, "rejected": OTHER},
    {"prompt": "2+3?", "chosen": "5", "rejected": "6"},
    {"prompt": [ASKED], "chosen": [SAID], "rejected": [OTHER], "score": 1},
    {"question": "2+3?", "chosen": "5", "rejected": [OTHER]},
    {"chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]},
    {"prompt": "Not this: the conversations have their own.", "chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]},
]


@pytest.mark.parametrize("row", PAIRS)
def test_a_pair_is_a_prompt_and_two_answers(row: dict[str, object]) -> None:
    task, problem = Columns(kind="pair", system="Add.").read(row, "t")
    assert task.messages == ({"role": "system", "content": "Add."}, ASKED)
    assert (task.truth["chosen"], task.truth["rejected"]) == ([SAID], [OTHER])
    assert problem == problem_key("2+3?")
    assert task.truth.get("score") == row.get("score")


def test_the_prompt_of_two_conversations_is_all_that_they_have_in_common() -> None:
    row = {"good": [ASKED, SAID, *MORE], "bad": [ASKED, SAID, MORE[0], OTHER]}
    task, _ = Columns(kind="pair", chosen="good", rejected="bad").read(row, "t")
    assert task.messages == (ASKED, SAID, MORE[0])
    assert (task.truth["chosen"], task.truth["rejected"]) == ([MORE[1]], [OTHER])


@pytest.mark.parametrize(
    ("columns", "flag"),
    [({"question": "q"}, "q"), ({"messages": "m"}, "m"), ({"template": "{{ q }}"}, "--data.template")],
)
def test_a_prompt_that_whole_conversations_replace_is_refused_where_it_is_named(
    columns: dict[str, str], flag: str
) -> None:
    row = {"q": "3+3?", "m": [{"role": "user", "content": "3+3?"}], "chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]}
    with pytest.raises(RowError, match=f"'chosen' is a whole conversation, so that the prompt of {flag} would not"):
        Columns(kind="pair", **columns).read(row, "t")


BAD: list[tuple[Kind, dict[str, object], str]] = [
    ("conversation", {"question": "2+3?"}, "column 'question' has no answer: it ends with .* 'user'.*:answer=COLUMN"),
    ("conversation", {"messages": [ASKED, SAID, ASKED]}, "column 'messages' has no answer: it ends with .* 'user'"),
    ("conversation", {"messages": [SAID, ASKED, SAID]}, "column 'messages' begins with an assistant message"),
    ("conversation", {"prompt": [ASKED, SAID, ASKED], "completion": ""}, "column 'completion' is empty"),
    ("conversation", {"question": "2+3?", "answer": 5}, "column 'answer' is not a list of messages: 5"),
    (
        "conversation",
        {"prompt": "2+3?", "completion": [ASKED, SAID]},
        "column 'completion' does not continue the prompt",
    ),
    ("conversation", {"prompt": "2+3?", "completion": [SAID, ASKED]}, "'completion' does not end with an assistant"),
    ("pair", {"prompt": "2+3?", "chosen": "5"}, "column 'rejected' is missing"),
    ("pair", {"prompt": "2+3?", "chosen": "5", "rejected": None}, "column 'rejected' is null"),
    ("pair", {"prompt": "2+3?", "chosen": "5", "rejected": "5"}, "column 'chosen' is the same as 'rejected': '5'"),
    ("pair", {"chosen": "5", "rejected": "6"}, "has no column 'question'"),
    ("pair", {"prompt": [ASKED, SAID], "chosen": "5", "rejected": "6"}, "'prompt' ends with an assistant message"),
    (
        "pair",
        {"chosen": [*MORE], "rejected": [ASKED, OTHER]},
        "column 'chosen' has no message in common with 'rejected'",
    ),
    ("pair", {"chosen": [ASKED, SAID], "rejected": [ASKED, SAID, *MORE]}, "'chosen' does not continue the prompt with"),
    ("conversation", {"messages": [ASKED, {**SAID, "weight": 0.5}]}, "has a message 2 with the weight 0.5"),
    (
        "conversation",
        {"messages": [ASKED, {**CALLED, "tool_calls": [{"function": {"name": "add", "arguments": "{a"}}]}]},
        "has a message 2 whose call of 'add' has arguments that are not JSON",
    ),
    (
        "conversation",
        {"messages": [ASKED, {"role": "assistant", "content": [{"type": "image_url"}]}]},
        "has a message 2 with a part of the type 'image_url', which is not text",
    ),
    ("conversation", {"conversations": [{"from": "function_call", "value": "add"}]}, "whose tool calls are not JSON"),
    ("pair", {"chosen": [ASKED, SAID], "rejected": [ASKED]}, "'rejected' does not end with an assistant message"),
]


@pytest.mark.parametrize(("kind", "row", "said"), BAD)
def test_a_row_without_its_answers_is_named_with_its_column(
    kind: Kind, row: dict[str, object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(TaskError, match=rf"(?s)a\.jsonl, line 1: .*{said}"):
        DataConfig().build([str(path)], seed=0, kind=kind).draw_from("a")


def test_kinds_are_for_rows_of_files_and_name_their_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"q": "2+3?", "good": "5", "bad": "6"}) + "\n")
    named = f"{path}:question=q,chosen=good,rejected=bad"
    task = DataConfig(held_out_share=0.001).build([named], seed=0, kind="pair").draw_from("a")
    assert (task.truth["chosen"], task.truth["rejected"]) == ([SAID], [OTHER])
    for tasks, kind, said in (
        (named, "prompt", "has no option 'chosen'"),
        (f"{path}:kind=pair", "pair", "has no option 'kind'"),
        ("chain_sum", "pair", "generated tasks have no preferred answers"),
    ):
        with pytest.raises(TaskError, match=said):
            DataConfig().build([tasks], seed=0, kind=kind)  # type: ignore[arg-type]
    assert DataConfig().build(["chain_sum"], seed=0, kind="conversation").draw_from("chain_sum").truth["answer"]


@given(st.text(st.characters(max_codepoint=127) | st.sampled_from(" \n\x1f"), max_size=30))
@example("a \t\n  \x1f B")
def test_problems_in_ascii_have_the_keys_that_the_definition_gives(text: str) -> None:
    assert problem_key(text) == rows._digest(" ".join(text.split()).casefold().encode())
