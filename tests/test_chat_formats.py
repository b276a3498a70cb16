"""Parsers, stops and continued conversations of published models by name, in the formats that they write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.models import default_models
from benchmarks.parsers import examine
from forge_rl.errors import ModelError
from forge_rl.tokens import vllm_parsers as vllm
from forge_rl.tokens.parser_choice import TOOL
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.tokens.tool_parsers import ToolParser
from forge_rl.types import Message
from tests.chat_formats import FORMATS, tokenizer_of
from tests.chat_templates import Format
from tests.fake_backend import FakeBackend, agent_of

ASKED = {"role": "user", "content": "2+3?"}
KIMI2, MISTRAL = "moonshotai/Kimi-K2-Instruct, with a tokenizer.json", "mistralai/Ministral-8B-Instruct-2410"
REFUSED = {
    "mistralai/Mistral-7B-v0.1": "has no chat template",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct, its text model": "none of vLLM's tool parsers reads the calls",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": "none of vLLM's tool parsers reads the calls",
}
THINKING = {id(known): name for name, known in FORMATS.items() if known.tags and known.reasoning_parser}
"""A checkpoint of each format with thoughts in tags, by the format."""


def call(name: str, call_id: str) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"a": 1}}}


def test_the_table_has_the_measured_checkpoints_and_no_others() -> None:
    assert FORMATS.keys() == set(default_models())


@pytest.mark.parametrize("name", FORMATS)
def test_a_published_format_is_read_back_and_continued(name: str, small_tokenizer: Path, tmp_path: Path) -> None:
    result = examine(name, small_tokenizer, tmp_path)
    assert result.is_right, result.row
    assert result.samples_read == result.samples, result.row
    assert REFUSED.get(name, "") in str(result.row["refusal"])
    assert (name in REFUSED) == bool(result.row["refusal"])
    if name not in REFUSED:
        assert result.samples >= 2 or FORMATS[name].tool_parser == "openai"
    assert result.row["continued"] is (True if FORMATS[name].template else None)


@pytest.mark.parametrize(
    ("name", "first_id", "second_id"),
    [
        (KIMI2, "functions.add:0", "functions.sub:1"),
        (MISTRAL, "74196fe72", "1b68f83fa"),
        ("Qwen/Qwen3-0.6B", "", ""),
    ],
)
def test_ids_of_calls_get_the_form_that_the_template_takes(
    name: str, first_id: str, second_id: str, small_tokenizer: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(name, small_tokenizer, tmp_path)
    calls = [call("add", "call_1"), call("sub", "call_2")]
    outputs = [{"role": "tool", "content": f"out {n}", "tool_call_id": f"call_{n}"} for n in (1, 2)]
    messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *outputs]
    whole_text = tokenizer.decode(tokenizer.render(messages, tools=[TOOL]), skip_special=False)
    assert whole_text.count(first_id) >= 2
    assert whole_text.count(second_id) >= 2
    prompt = tokenizer.render([ASKED], tools=[TOOL])
    end = tokenizer.hf.convert_tokens_to_ids(FORMATS[name].end)
    extended = tokenizer.extend((*prompt, end), outputs, tools=[TOOL], calls=calls)
    rest = tokenizer.decode(extended[len(prompt) + 1 :], skip_special=False)
    assert whole_text.endswith(rest)
    assert "out 1" in rest
    assert "out 2" in rest


def test_tools_stand_in_the_question_where_a_template_refuses_system_messages(
    small_tokenizer: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of("google/gemma-2-2b-it", small_tokenizer, tmp_path)
    text = tokenizer.decode(tokenizer.render([ASKED], tools=[TOOL]), skip_special=False)
    assert text.startswith("<bos><start_of_turn>user\n# Tools\n")
    assert text.endswith("\n\n2+3?<end_of_turn>\n<start_of_turn>model\n")
    system = {"role": "system", "content": "Be brief."}
    text = tokenizer.decode(tokenizer.render([system, ASKED], tools=[TOOL]), skip_special=False)
    assert text.startswith("<bos><start_of_turn>user\nBe brief.\n\n# Tools\n")
    with pytest.raises(ModelError, match="no system messages"):
        tokenizer.render([system, ASKED])


def test_an_output_that_a_template_would_leave_out_is_refused(small_tokenizer: Path, tmp_path: Path) -> None:
    """Gemma 4 ends a call with the token that opens its output, which must then be a stop."""
    tokenizer_of("google/gemma-4-E2B-it, its text model", small_tokenizer, tmp_path)
    (tmp_path / "generation_config.json").unlink()
    tokenizer = Tokenizer(tmp_path)
    output = {"role": "tool", "content": "5", "tool_call_id": "call00001"}
    with pytest.raises(ModelError, match=r"(?s)leaves out a tool's output.*eos_token_id"):
        tokenizer.extend(
            tokenizer.render([ASKED], tools=[TOOL]), [output], tools=[TOOL], calls=[call("add", "call00001")]
        )


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ({"enable_thinking": False}, "It is 5.", (None, "It is 5.")),
        ({}, "It is 5.", (None, "It is 5.")),
        ({}, "<think> is a tag", (" is a tag", None)),
        ({}, "The <think> is a tag.", (None, "The <think> is a tag.")),
        ({}, "2 and 3</think>5", ("2 and 3", "5")),
        ({}, "<think>2 and", ("2 and", None)),
    ],
)
def test_a_completion_without_tags_is_an_answer_unless_the_prompt_opens_a_thought(
    settings: dict[str, object], text: str, expected: tuple[str, str], small_tokenizer: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of("Qwen/Qwen3-0.6B", small_tokenizer, tmp_path)
    prompt = tokenizer.render([ASKED], settings=settings)
    assert read(tokenizer, "qwen3", prompt, text) == expected


def test_a_completion_without_tags_is_a_truncated_thought_if_the_prompt_opens_it(
    small_tokenizer: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of("Qwen/Qwen3.5-4B, its text model", small_tokenizer, tmp_path)
    assert read(tokenizer, "qwen3", tokenizer.render([ASKED]), "2 and") == ("2 and", None)


@pytest.mark.parametrize("name", THINKING.values())
def test_streams_tell_thoughts_from_answers(name: str, small_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name, small_tokenizer, tmp_path)
    opening, closing = tokenizer.thoughts.tags
    answer = {"role": "assistant", "content": f"{opening}Hm.{closing}Five."}  # whose tags are tokens in the prompt
    begin = "" if FORMATS[name].opens else opening
    for text, expected in (
        (f"{begin}2 and 3.{closing}It is 5.", ("2 and 3.", "It is 5.")),
        (f"{begin}2 and", ("2 and", "")),
        ("It is 5.", ("It is 5.", "") if FORMATS[name].opens else ("", "It is 5.")),
    ):
        for messages in ([ASKED], [ASKED, answer, ASKED]):
            assert streamed(tokenizer, FORMATS[name], messages, text) == expected


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
async def test_an_agent_gets_an_answer_without_a_thought(
    thinks: bool, stream: bool, small_tokenizer: Path, tmp_path: Path
) -> None:
    """A history with it continues the recorded turn, which the same parser has read."""
    tokenizer = tokenizer_of("Qwen/Qwen3-0.6B", small_tokenizer, tmp_path)
    completion = (*tokenizer.encode("It is five."), *tokenizer.hf.convert_tokens_to_ids(["<|im_end|>"]))
    async with agent_of(FakeBackend([completion, completion]), model=tmp_path) as agent:
        settings = {"chat_template_kwargs": {"enable_thinking": thinks}}
        message = await agent.ask([ASKED], extra_body=settings, stream=stream)
        assert (message["content"], message.get("reasoning")) == ("It is five.", None)
        await agent.ask([ASKED, message, ASKED], extra_body=settings, stream=stream)
        first, second = agent.session.close()
    assert tuple(second.prompt_ids[: len(first.context)]) == tuple(first.context)


def streamed(tokenizer: Tokenizer, chat_format: Format, messages: Sequence[Message], text: str) -> tuple[str, str]:
    """Return thought and answer as vLLM's server streams a completion, token by token."""
    request = vllm.ChatCompletionRequest.model_validate({"messages": [], "tools": [TOOL], "tool_choice": "auto"})
    cls = ToolParser(chat_format.tool_parser or "hermes", tokenizer, chat_format.reasoning_parser)._load()
    parser, prompt, ids = cls(tokenizer.hf, request.tools), list(tokenizer.render(messages)), tokenizer.encode(text)
    thought, content = "", ""
    for place, token in enumerate(ids, 1):
        delta_text = tokenizer.decode([token], skip_special=False)
        delta = parser.parse_delta(delta_text, [token], request, prompt, finished=place == len(ids))
        if delta is not None:
            thought, content = thought + (delta.reasoning or ""), content + (delta.content or "")
    return thought, content


def read(
    tokenizer: Tokenizer, reasoning_parser: str, prompt: tuple[int, ...], text: str
) -> tuple[str | None, str | None]:
    """Return thought and answer as vLLM's server reads a whole completion."""
    request = vllm.ChatCompletionRequest.model_validate({"messages": []})
    parser = ToolParser("hermes", tokenizer, reasoning_parser)._load()(tokenizer.hf, None)
    parser.set_prompt_token_ids(prompt)
    thought, content, _ = parser.parse(text, request, model_output_token_ids=list(tokenizer.encode(text)))
    return thought, content
