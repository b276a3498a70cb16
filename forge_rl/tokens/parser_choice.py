"""Samples of calls and thoughts as a model's chat template writes them, which the model's parsers must read back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from forge_rl.tokens.tokenizer import Tokenizer

_ASKED = {"role": "user", "content": "What is 2+3?"}
_TEXT, _THOUGHT = "Let me add these.", "The tool adds numbers."
_PROPERTIES = {"a": {"type": "integer"}, "s": {"type": "string"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "description": "Add.",
        "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["a"]},
    },
}
_ARGUMENTS = ({"a": 2, "s": "x"}, {"a": 31, "s": "y z"})
# The first marker that the template contains decides, so specific ones stand before those that they contain or that
# others also use.
_SIGNS = {
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<minimax:tool_call>": "minimax_m2",
    "]<]minimax[>[": "minimax_m3",
    "<seed:tool_call>": "seed_oss",
    "<|tool_call>": "gemma4",
    '<function name="': "minicpm5",
    "<arg_key>": "glm45",
    "<function=": "qwen3_coder",
    "<function_calls>": "olmo3",
    "<|tool_call_start|>": "lfm2",
    "<tool_call>": "hermes",
    "<|channel|>": "openai",
    "[TOOL_CALLS]": "mistral",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>": "deepseek_v3",
    "<|python_tag|>": "llama3_json",
    "ipython": "llama3_json",
}
"""Markers of tool calls in chat templates, with the parser to try first."""
_V3_BLOCK = "```json"
"""What DeepSeek V3 writes around arguments, and V3.1 does not."""
_USUAL = ("hermes", "llama3_json", "pythonic", "xlam", "mistral", "qwen3_coder", "deepseek_v3", "deepseek_v31")
_REASONING = {
    "<think>": ("deepseek_r1", "qwen3"),
    "[THINK]": ("mistral",),
    "<seed:think>": ("seed_oss",),
    "<mm:think>": ("minimax_m3",),
    "<|START_THINKING|>": ("cohere_command3", "cohere_command4"),
    "<|channel>": ("gemma4",),
}
"""Parsers to try first by the tag that opens a thought."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A completion as the chat template writes it, and what a parser must read from it."""

    text: str
    calls: tuple[tuple[str, Mapping[str, object]], ...] = ()
    """Name and arguments of each call."""
    content: str = ""
    """Text outside of calls and thoughts."""
    thought: str = ""

    def is_read(
        self,
        content: str | None,
        calls: Sequence[tuple[str, str]],
        thought: str | None = None,
        *,
        drops_content: bool = False,
    ) -> bool:
        """Return True if this is what a parser found: text, calls with JSON arguments, and the thought.

        Args:
            drops_content: accept that the parser drops text next to calls.
        """
        try:
            parsed_calls = [(name, json.loads(arguments)) for name, arguments in calls]
        except ValueError:
            return False
        same_thought = not self.thought or (thought or "").strip() == self.thought
        contents = {self.content, ""} if drops_content and self.calls else {self.content}
        return same_thought and parsed_calls == list(self.calls) and (content or "").strip() in contents


def tool_parsers_to_try(tokenizer: Tokenizer, registered: Sequence[str]) -> list[str]:
    """Return names of tool parsers, the likeliest first."""
    usual_names = [name for name in _USUAL if name in registered]
    return list(dict.fromkeys([tool_parser_by_sign(tokenizer), *usual_names, *registered]))


def tool_parser_by_sign(tokenizer: Tokenizer) -> str:
    """Return the tool parser that a marker in the chat template suggests."""
    template = str(tokenizer.hf.chat_template)
    name = next((name for sign, name in _SIGNS.items() if sign in template), "hermes")
    return "deepseek_v31" if name == "deepseek_v3" and _V3_BLOCK not in template else name


def reasoning_parsers_to_try(tokenizer: Tokenizer, registered: Sequence[str]) -> list[str]:
    """Return names of reasoning parsers, the likeliest first."""
    first_names = _REASONING.get(tokenizer.thoughts.tags[0], ())
    if tokenizer.model_type.startswith("qwen3"):
        first_names = tuple(reversed(first_names))
    return [*first_names, *(name for name in registered if name not in first_names)]


def samples_of_calls(tokenizer: Tokenizer) -> list[Sample]:
    """Return a call, two calls, and a call with text, as far as the chat template writes these."""
    samples: list[Sample] = []
    # Parsers differ in exactly these: several calls at once, and text next to a call.
    for content, arguments in (("", _ARGUMENTS[:1]), ("", _ARGUMENTS), (_TEXT, _ARGUMENTS[:1])):
        message = {"role": "assistant", "content": content, "tool_calls": _calls(tokenizer, arguments)}
        text = _written(tokenizer, message)
        if text is not None and text.count("add_numbers") >= len(arguments):
            calls = tuple(("add_numbers", call_arguments) for call_arguments in arguments)
            samples.append(Sample(text=text, calls=calls, content=content if content in text else ""))
    return samples


def samples_of_thoughts(tokenizer: Tokenizer, *, calls: bool) -> list[Sample]:
    """Return a thought with an answer, and one with a call if the chat template writes that and `calls` is set."""
    opening, closing = tokenizer.thoughts.tags
    answer: dict[str, object] = {"role": "assistant", "content": _TEXT}
    thought: dict[str, object] = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)
    text = _written(tokenizer, answer | thought)
    if text is None or _THOUGHT not in text:  # the template cuts or ignores thoughts
        is_opened = tokenizer.thoughts.opened(tokenizer.render([_ASKED]))
        text = f"{'' if is_opened else opening}\n{_THOUGHT}\n{closing}\n\n{_TEXT}"
    samples = [Sample(text=text, content=_TEXT, thought=_THOUGHT)]
    written_calls = _calls(tokenizer, _ARGUMENTS[:1])
    call_message: dict[str, object] = {"role": "assistant", "content": "", "tool_calls": written_calls}
    text = _written(tokenizer, call_message | thought) if calls else None
    if text is not None and _THOUGHT in text and "add_numbers" in text:
        samples.append(Sample(text=text, thought=_THOUGHT, calls=(("add_numbers", _ARGUMENTS[0]),)))
    return samples


def _calls(tokenizer: Tokenizer, arguments: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    return [
        {
            "id": tokenizer.call_ids.new("add_numbers", index),
            "type": "function",
            "function": {"name": "add_numbers", "arguments": call_arguments},
        }
        for index, call_arguments in enumerate(arguments)
    ]


def _written(tokenizer: Tokenizer, message: Mapping[str, object]) -> str | None:
    """Return what the chat template writes for an answer up to its end; None if it refuses the answer."""

    def render(*messages: Mapping[str, object], opened: bool = False) -> str:
        text: str = tokenizer.hf.apply_chat_template(
            [dict(message) for message in messages], tools=[TOOL], add_generation_prompt=opened, tokenize=False
        )
        return text

    try:
        before, prompt, full_text = render(_ASKED), render(_ASKED, opened=True), render(_ASKED, message)
    except Exception:  # templates can raise anything
        return None
    if full_text.startswith(prompt):
        text = full_text[len(prompt) :]
    else:  # the prompt opens a thought that the answer lacks, or the like: both begin with the same line
        begin = _shared(before, full_text)
        header = full_text[begin : max(begin, _shared(prompt, full_text))]
        text = full_text[begin + max(header.rfind(mark) for mark in "\n>]") + 1 :]
    if "add_numbers" not in text and _TEXT not in text:
        return None
    names = [tokenizer.hf.convert_ids_to_tokens(token) for token in tokenizer.stop_ids]
    # The stop token ends a completion, so parsers never see it or what follows.
    end_positions = [position for name in names if name and (position := text.find(name)) >= 0]
    return text[: min(end_positions, default=len(text))]


def _shared(first: str, second: str) -> int:
    """Return the length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
