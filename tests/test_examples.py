"""Episodes of given answers: which tokens are trained, by transformers' own masks and by templates written by hand."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_rl.data.data_config import DataConfig
from forge_rl.data.examples import comparison_episodes, conversation_episodes, preference_episodes
from forge_rl.data.mixture import Mixture
from forge_rl.data.scan import check_tasks
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.errors import TaskError
from forge_rl.rollout.examples import ExampleLengths, ExampleMaker, Examples
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode, Message, Task
from tests.tiny import bundled_tokenizer

MARKED = """{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}
{%- generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML with the marks from which transformers makes a mask."""

THINKING = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- set said = message.content.split('</think>')[-1].strip() %}
{%- if message.role != 'assistant' %}{{- message.content }}
{%- elif loop.index0 > ns.last and '</think>' in message.content %}
{{- '<think>\\n' + message.content.split('</think>')[0].split('<think>')[-1].strip() + '\\n</think>\\n\\n' + said }}
{%- elif loop.index0 > ns.last %}{{- '<think>\\n\\n</think>\\n\\n' + said }}
{%- else %}{{- said }}{% endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + opening|default('') }}{% endif %}"""
"""Like Qwen3's: thinking stays only after the last user message."""


CHATML = "{% for one in messages %}<|im_start|>{{ one.role }}\n"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def task_of(*prompt: Message, **truth: object) -> Task:
    return Task(id="1", source="s", messages=prompt, truth=truth)


@pytest.fixture(scope="module")
def folder(small_tokenizer: Path) -> Path:
    return small_tokenizer


def tokenizer_of(folder: Path, target: Path, template: str) -> Tokenizer:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(folder / name, target / name)
    (target / "chat_template.jinja").write_text(template)
    return Tokenizer(target)


def texts(episode: Episode, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Prompt and completion of each turn."""
    return [
        (tokenizer.decode(turn.prompt_ids, skip_special=False), tokenizer.decode(turn.token_ids, skip_special=False))
        for turn in episode.turns
    ]


CONVERSATIONS: list[list[Message]] = [
    [user("2+3?"), assistant("5")],
    [user("2+3?"), assistant("It is 5.\n"), user("And 4 more?"), assistant("  9, of course"), user("?"), assistant("")],
    [{"role": "system", "content": "Add."}, user("1+1"), assistant("2é\n\n\n2"), user("\n"), assistant("\n\nwhat?")],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_trained_are_the_tokens_that_transformers_marks(messages: list[Message], folder: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(folder, tmp_path, MARKED)
    first = next(at for at, one in enumerate(messages) if one["role"] == "assistant")
    (episode,) = conversation_episodes(task_of(*messages[:first], completion=messages[first:]), tokenizer)
    expected: Any = tokenizer.hf.apply_chat_template(
        [dict(one) for one in messages], return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    trained = np.array(expected["assistant_masks"], np.bool_)
    end = int(trained.nonzero()[0][-1]) + 1
    (segment,) = episode.segments
    assert segment.token_ids.tolist() == expected["input_ids"][:end]
    assert segment.trained.tolist() == trained[:end].tolist()
    assert not segment.logprobs.any()
    assert {version for turn in episode.turns for version in turn.versions.tolist()} == {-1}


def test_the_bundled_models_turns_end_with_their_stop_token() -> None:
    tokenizer = bundled_tokenizer()
    completion = [assistant("5"), user("And 4 more?"), assistant("9<|im_end|>")]
    (episode,) = conversation_episodes(task_of(user("2+3?"), completion=completion), tokenizer)
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    begin = system + "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    (first, second) = texts(episode, tokenizer)
    assert first == (begin, "5<|im_end|>")
    middle = "<|im_end|>\n<|im_start|>user\nAnd 4 more?<|im_end|>\n<|im_start|>assistant\n"
    assert second == (begin + "5" + middle, "9<|im_end|><|im_end|>")
    assert len(episode.segments) == 1
    assert [turn.token_ids.tolist().count(2) for turn in episode.turns] == [1, 1], "a row cannot end a turn"
    assert [turn.text for turn in episode.turns] == ["5", "9<|im_end|>"]
    (plain,) = conversation_episodes(task_of(user("2+3?"), answer="5"), tokenizer)
    assert texts(plain, tokenizer) == [first]


def test_thinking_is_trained_in_its_turn_and_absent_from_later_prompts(folder: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(folder, tmp_path, THINKING)
    completion = [assistant("<think>2 and 3</think>5"), user("+4?"), assistant("9")]
    (episode,) = conversation_episodes(task_of(user("2+3?"), completion=completion), tokenizer)
    begin = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    assert texts(episode, tokenizer) == [
        (begin, "<think>\n2 and 3\n</think>\n\n5<|im_end|>"),
        (
            begin + "5<|im_end|>\n<|im_start|>user\n+4?<|im_end|>\n<|im_start|>assistant\n",
            "<think>\n\n</think>\n\n9<|im_end|>",
        ),
    ]
    assert len(episode.segments) == 2


def test_thoughts_that_an_answer_removes_from_before_it_are_in_its_prompt(folder: Path, tmp_path: Path) -> None:
    thought = "{{ '<t>' + one.thinking if one.thinking and (loop.last or messages[-1].role == 'user') }}"
    tokenizer = tokenizer_of(folder, tmp_path, CHATML + thought + "{{ one.content }}" + END)
    completion = [{**assistant("5"), "thinking": "ONE"}, user("+4?"), {**assistant("9"), "thinking": "TWO"}]
    (episode,) = conversation_episodes(task_of(user("2+3?"), completion=completion), tokenizer)
    begin = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    middle = "<|im_end|>\n<|im_start|>user\n+4?<|im_end|>\n<|im_start|>assistant\n"
    assert texts(episode, tokenizer) == [
        (begin, "<t>ONE5<|im_end|>"),
        (f"{begin}<t>ONE5{middle}", "<t>TWO9<|im_end|>"),
    ]


def test_an_opening_that_an_answer_lacks_is_not_in_its_prompt(folder: Path, tmp_path: Path) -> None:
    opening = MARKED.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
    assert opening != MARKED
    tokenizer = tokenizer_of(folder, tmp_path, opening)
    for text in ("5", "<think>\n2 and 3</think>5"):
        (episode,) = conversation_episodes(task_of(user("2+3?"), completion=text), tokenizer)
        ((prompt, said),) = texts(episode, tokenizer)
        assert prompt + said == f"<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>"
        assert prompt.endswith("<think>\n") == text.startswith("<think>\n")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages|length }}{% for one in messages %}{{ one.content }}{% endfor %}", "changes the messages before"),
        (
            "{% for one in messages %}{% if one.role == 'user' %}{{ one.content }}{% endif %}{% endfor %}",
            "does not show an assistant message",
        ),
        ("{{ raise_exception('no!') if messages|length > 1 }}x", "refuses messages.*no!"),
    ],
)
def test_a_template_that_hides_what_to_train_is_an_error(
    template: str, said: str, folder: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(folder, tmp_path, template)
    with pytest.raises(TaskError, match=said):
        conversation_episodes(task_of(user("2+3?"), completion="5"), tokenizer)


CALL: dict[str, Any] = {"function": {"name": "add", "arguments": '{"a": "x\\n"}'}}
CALLS = (
    "{% for call in one.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments ARGUMENTS }}{% endfor %}"
)
TOOLS = "{% for tool in tools or [] %}{{ tool|tojson }}{% endfor %}"
HABITS = {
    "shows all": CHATML + "{{ one.content }}" + END,
    "cuts thoughts": CHATML + "{{ one.content.split('</think>')[-1] }}" + END,
    "reads reasoning_content": CHATML
    + "{{ '<t>' + one.reasoning_content if one.reasoning_content }}{{ one.content.split('</think>')[-1] }}"
    + END,
    "reads thinking": CHATML
    + "{{ '<t>' + one.thinking if one.thinking }}{{ one.content.split('</think>')[-1] }}"
    + END,
    "calls alone": TOOLS
    + CHATML
    + "{% if one.tool_calls %}"
    + CALLS.replace("ARGUMENTS", "|tojson")
    + "{% else %}{{ one.content }}{% endif %}"
    + END,
    "arguments as text": TOOLS + CHATML + CALLS.replace("ARGUMENTS", "") + "{{ one.content }}" + END,
    "no system": CHATML.replace("%}<", "if one.role != 'system' %}<") + "{{ one.content }}" + END,
}
"""Templates that each have one habit of published ones."""
IN_TEXT, IN_FIELD = assistant("<think>\nTWO\n</think>\n\nFIVE"), {**assistant("FIVE"), "reasoning_content": "TWO"}
TRAINED: list[tuple[str, dict[str, object], str]] = [
    ("shows all", IN_TEXT, "<think>\nTWO\n</think>\n\nFIVE<|im_end|>"),
    ("shows all", IN_FIELD, "<think>\nTWO\n</think>\n\nFIVE<|im_end|>"),
    ("cuts thoughts", IN_TEXT, "message 3's thoughts would not be trained: the chat template leaves out 'TWO'"),
    ("cuts thoughts", IN_FIELD, "message 3's thoughts would not be trained"),
    ("cuts thoughts", assistant("TWO</think>FIVE"), "message 3's thoughts would not be trained"),
    ("cuts thoughts", assistant("<think>5</think>55"), "message 3's thoughts would not be trained: .* '5'"),
    ("reads reasoning_content", IN_FIELD, "<t>TWOFIVE<|im_end|>"),
    ("reads reasoning_content", IN_TEXT, "<t>TWOFIVE<|im_end|>"),
    ("reads thinking", IN_FIELD, "<t>TWOFIVE<|im_end|>"),
    (
        "shows all",
        {**assistant("FIVE"), "tool_calls": [CALL]},
        'FIVE\n<tool_call>\n{"name": "add", "arguments": {"a": "x\\n"}}\n</tool_call><|im_end|>',
    ),
    ("calls alone", {**assistant(""), "tool_calls": [CALL]}, 'add{"a": "x\\n"}<|im_end|>'),
    (
        "calls alone",
        {**assistant("FIVE"), "tool_calls": [CALL]},
        "message 3's text beside its tool call would not be trained",
    ),
    ("arguments as text", {**assistant(""), "tool_calls": [CALL]}, 'add{"a": "x\\n"}<|im_end|>'),
    ("shows all", {**assistant("FIVE"), "tool_plan": "TWO"}, "message 3's tool_plan would not be trained"),
    ("shows all", {**assistant("FIVE"), "refusal": "TWO"}, "message 3's refusal would not be trained"),
    ("no system", assistant("FIVE"), "message 1's text would not be shown: the chat template leaves out 'SYS'"),
]


@pytest.mark.parametrize(("habit", "answer", "expected"), TRAINED)
def test_text_that_is_given_is_trained_or_the_row_is_refused(
    habit: str, answer: dict[str, object], expected: str, folder: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(folder, tmp_path, HABITS[habit])
    task = task_of({"role": "system", "content": "SYS"}, user("2+3?"), completion=[answer])
    if "would not be" in expected:
        with pytest.raises(TaskError, match=expected):
            conversation_episodes(task, tokenizer)
        return
    ((_, said),) = texts(conversation_episodes(task, tokenizer)[0], tokenizer)
    assert said == expected


def test_a_left_out_message_that_another_repeats_is_refused(folder: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(folder, tmp_path, HABITS["no system"])
    task = task_of({"role": "system", "content": "Add."}, user("Add. 2+3?"), completion=[assistant("5")])
    with pytest.raises(TaskError, match="message 1's text would not be shown: the chat template leaves out 'Add\\.'"):
        conversation_episodes(task, tokenizer)


def test_blanks_do_not_give_a_short_text_the_place_of_a_long_one(folder: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(folder, tmp_path, HABITS["shows all"])
    task = task_of(user("What is 2+3?"), assistant("15"), user("1" + " " * 9), completion=[assistant("6")])
    assert conversation_episodes(task, tokenizer)


def test_an_answer_of_weight_0_is_shown_to_later_ones_and_not_trained(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    wrong = {**assistant("WRONG"), "weight": 0}
    (episode,) = conversation_episodes(task_of(user("?"), completion=[wrong, user("Sure?"), assistant("9")]), tokenizer)
    ((prompt, said),) = texts(episode, tokenizer)
    assert "WRONG<|im_end|>" in prompt
    assert said == "9<|im_end|>"
    with pytest.raises(TaskError, match="all its answers have weight 0"):
        conversation_episodes(task_of(user("?"), completion=[wrong]), tokenizer)


def test_a_run_says_which_row_lacks_text_and_how_many_have_rewritten_turns(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tokenizer = tokenizer_of(folder, tmp_path / "model", THINKING.replace("'</think>' in message.content", "false"))
    path = tmp_path / "a.jsonl"
    chat = [user("2+3?"), assistant("5"), user("Sure?"), assistant("Yes.")]
    path.write_text(json.dumps({"messages": chat}) + "\n")

    def scanned() -> tuple[Mixture, ExampleMaker, str]:
        mixture = DataConfig(held_out_share=1e-9).build([str(path)], seed=0, kind="conversation")
        maker = ExampleMaker(conversation_episodes, tokenizer, longest=1000)
        return mixture, maker, check_tasks(mixture, lambda: ExampleLengths(maker), cache=tmp_path)["a"].describe(1000)

    mixture, maker, told = scanned()
    assert "1 of the 1 looked at are trained turn by turn, as the chat template changes earlier turns" in told
    examples = Examples(ResumableTaskStream(mixture), mixture.sources, maker, groups=2)
    asyncio.run(examples.next_batch())
    assert examples.metrics() == {"data/a/rewritten_turns": 2.0}
    path.write_text(path.read_text() + json.dumps({"messages": [user("?"), assistant("<think>A</think>B")]}) + "\n")
    place = r"a\.jsonl, line 2: message 2's thoughts would not be trained"
    with pytest.raises(TaskError, match=place):
        scanned()
    unscanned = DataConfig(held_out_share=1e-9).build([str(path)], seed=0, kind="conversation")
    with pytest.raises(TaskError, match=place):
        asyncio.run(Examples(ResumableTaskStream(unscanned), unscanned.sources, maker, groups=2).next_batch())


def test_a_run_names_the_columns_and_fields_that_it_does_not_train(folder: Path, tmp_path: Path) -> None:
    chat = [{**user("2+3?"), "name": "Ann"}, {**assistant("It is 5."), "id": "m1"}]
    columns = {"label": False, "documents": [{"text": "Two and three"}], "said": "It is 5.", "empty": ""}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat, **columns}) + "\n")
    mixture = DataConfig(held_out_share=1e-9).build([f"{tmp_path}/a.jsonl"], seed=0, kind="conversation")
    maker = ExampleMaker(conversation_episodes, Tokenizer(folder), longest=1000)
    description = check_tasks(mixture, lambda: ExampleLengths(maker), cache=tmp_path)["a"].describe(1000)
    assert description.endswith("neither shown to the model nor trained: documents, label, messages' name"), description


def test_a_pair_whose_answers_the_template_writes_alike_is_refused(folder: Path) -> None:
    task = task_of(user("?"), chosen="5", rejected=[{**assistant("5"), "name": "me"}])
    for make in (preference_episodes, comparison_episodes):
        with pytest.raises(TaskError, match="the same tokens for its chosen and its rejected"):
            make(task, Tokenizer(folder))


@pytest.mark.parametrize("truth", [{}, {"completion": []}, {"answer": 5}, {"completion": ["5"]}])
def test_a_task_without_a_given_answer_is_an_error(truth: dict[str, object], folder: Path) -> None:
    with pytest.raises(TaskError, match="has no completion or answer to train on"):
        conversation_episodes(task_of(user("2+3?"), **truth), Tokenizer(folder))
    with pytest.raises(TaskError, match="has no rejected to train on"):
        preference_episodes(task_of(user("2+3?"), chosen="5", **truth), Tokenizer(folder))


def test_a_pair_is_two_conversations_and_a_comparison_ends_with_one_token(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    task = task_of(user("2+3?"), chosen=[assistant("5")], rejected="6")
    chosen, rejected = preference_episodes(task, tokenizer)
    assert [texts(each, tokenizer)[0][1] for each in (chosen, rejected)] == ["5<|im_end|>", "6<|im_end|>"]
    for episode, text in zip(comparison_episodes(task, tokenizer), "56", strict=True):
        (turn,) = episode.turns
        whole = tokenizer.render([user("2+3?"), assistant(text)], add_generation_prompt=False)
        assert turn.prompt_ids.tolist() == list(whole)
        assert len(turn.token_ids) == 1
