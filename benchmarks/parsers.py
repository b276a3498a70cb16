"""Chat formats of published models by name: the parsers chosen, what they read back, and how conversations continue.

python -m benchmarks.parsers --json out.json

For each checkpoint of `benchmarks.models`, a small tokenizer gets the control tokens and a template of the published
format (tests/chat_formats.py). As at the start of a run, vLLM's parsers are chosen by what the template writes:

    tool_parser, reasoning_parser   the chosen parsers
    thoughts      whether the prompt or the model opens a thought; empty if the format has none
    calls_read    of the calls that the template writes (one, two, and one beside text), those read back exactly, and
                  whether text beside calls is dropped
    thoughts_read of a thought with an answer, a thought with a call, and an answer without a thought, the same
    continued     whether a question and a tool's output that follow a completion are written as in a whole
                  conversation, after its unchanged tokens
    refusal       what is refused, and why

gpt-oss's calls and thoughts are not tried: its parser reads ids of the model's own vocabulary.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.models import NATIVE, default_models
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.errors import ConfigError, ModelError
from forge_rl.token_arrays import TokenIds
from forge_rl.tokens.parser_choice import TOOL, Sample, samples_of_calls, samples_of_thoughts
from forge_rl.tokens.thoughts import without_thoughts
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.tokens.tool_parsers import ToolParser, parser_for, reasoning_parser_for
from forge_rl.tokens.tool_text import as_text

if TYPE_CHECKING:
    from tests.chat_templates import Format

_ASKED = {"role": "user", "content": "What is 2+3?"}
_ANSWER, _QUESTION, _OUTPUT = "It is five.", "And 4 more?", "OUTPUT 5"
_ARGUMENTS = ({"a": 2, "s": "x"}, {"a": 31, "s": "y z"})


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Choose parsers for models by name."""

    models: tuple[str, ...] = ()
    """Names of checkpoints, as in tests/chat_formats.py; by default all."""

    def __post_init__(self) -> None:
        if unknown := set(self.models) - set(default_models()):
            raise BenchmarkError(f"there is no model {min(unknown)!r}", hint="see tests/chat_formats.py for the names")


class Result(NamedTuple):
    """What was found out about a model."""

    row: dict[str, object]
    is_right: bool
    """Whether parsers, stops and refusals are those of its format."""
    samples: int
    samples_read: int


def measure(config: Config, report: Report) -> None:
    """Try each model, and print a table."""
    from tests.tiny import make_small_tokenizer

    names = config.models or default_models()
    with tempfile.TemporaryDirectory() as scratch:
        small_tokenizer = make_small_tokenizer(Path(scratch) / "tokenizer")
        results = [examine(name, small_tokenizer, Path(scratch) / str(index)) for index, name in enumerate(names)]
    report.rows += [result.row for result in results]
    report.results |= {
        "models": len(results),
        "parsers_right": sum(result.is_right for result in results),
        "samples": sum(result.samples for result in results),
        "samples_read": sum(result.samples_read for result in results),
        "models_continued": sum(result.row.get("continued") is True for result in results),
    }
    table = Table()
    for column in report.rows[0]:
        table.add_column(column)
    for row in report.rows:
        table.add_row(*map(str, row.values()))
    Console(highlight=False).print(table)


def examine(name: str, small_tokenizer: Path, folder: Path) -> Result:
    """Choose the parsers of a model as a run does, let them read samples, and continue a conversation.

    Args:
        small_tokenizer: folder of a tokenizer that gets the model's tokens and template.
        folder: new folder for it.
    """
    from tests.chat_formats import FORMATS, tokenizer_of

    chat_format = FORMATS[name]
    row: dict[str, object] = dict.fromkeys(
        ("model", "modelling", "tool_parser", "reasoning_parser", "thoughts", "calls_read", "thoughts_read"), ""
    )
    row |= {
        "model": name,
        "modelling": "native" if name in NATIVE else "transformers",
        "continued": None,
        "refusal": "",
    }
    try:
        tokenizer = tokenizer_of(name, small_tokenizer, folder)
    except ModelError as error:
        row["refusal"] = _reason(error, folder)
        return Result(row, not chat_format.template, 0, 0)
    try:
        row["tool_parser"] = parser_for(tokenizer)
    except ConfigError as error:
        row["refusal"] = _reason(error, folder)
    tool_parser = str(row["tool_parser"])
    row["reasoning_parser"] = reasoning_parser_for(tokenizer, tool_parser or "hermes")
    is_opened = tokenizer.thoughts.opened(tokenizer.render([_ASKED]))
    if row["reasoning_parser"]:
        row["thoughts"] = "opened by the prompt" if is_opened else "opened by the model"
    samples, samples_read = 0, 0
    # gpt-oss's parser reads the tokens of its own vocabulary, by their ids, so that no small tokenizer can have them.
    is_tried = not tokenizer.thoughts.is_harmony
    for column, written in (
        ("calls_read", _calls(tokenizer) if tool_parser and is_tried else []),
        ("thoughts_read", _thoughts(tokenizer, is_opened) if row["reasoning_parser"] and is_tried else []),
    ):
        readings = [_read(tokenizer, tool_parser, str(row["reasoning_parser"]), sample) for sample in written]
        read_count = sum(reading is not None for reading in readings)
        if written:
            is_dropped = column == "calls_read" and "dropped" in readings
            row[column] = f"{read_count} of {len(written)}" + ("; text beside is dropped" if is_dropped else "")
        samples, samples_read = samples + len(written), samples_read + read_count
    row["continued"] = _continues(tokenizer, is_callable=bool(tool_parser))
    return Result(row, _is_right(tokenizer, chat_format, row, is_opened), samples, samples_read)


def _is_right(tokenizer: Tokenizer, chat_format: Format, row: dict[str, object], is_opened: bool) -> bool:
    stops = {tokenizer.hf.convert_ids_to_tokens(token) for token in tokenizer.stop_ids}
    return (
        (row["tool_parser"], row["reasoning_parser"]) == (chat_format.tool_parser, chat_format.reasoning_parser)
        and is_opened == chat_format.opens
        and stops == {*chat_format.stops, chat_format.end}
        and tokenizer.hf.convert_ids_to_tokens(tokenizer.turn_ends.trained) == chat_format.end
        and ("dropped" in str(row["calls_read"])) == chat_format.drops_text
    )


def _calls(tokenizer: Tokenizer) -> list[Sample]:
    """Return samples of calls: the template's, or in Hermes' format, in which tools are text, if it writes none."""
    if tokenizer.shows_tools:
        return samples_of_calls(tokenizer)
    samples = []
    for content, arguments in (("", _ARGUMENTS[:1]), ("", _ARGUMENTS), (_ANSWER, _ARGUMENTS[:1])):
        calls = [{"function": {"name": "add_numbers", "arguments": values}} for values in arguments]
        (message,) = as_text([{"role": "assistant", "content": content, "tool_calls": calls}], ())
        named_calls = tuple(("add_numbers", values) for values in arguments)
        samples.append(Sample(text=str(message["content"]), calls=named_calls, content=content))
    return samples


def _thoughts(tokenizer: Tokenizer, is_opened: bool) -> list[Sample]:
    """Return samples of thoughts, and an answer without one if the prompt opens none."""
    samples = samples_of_thoughts(tokenizer, calls=tokenizer.shows_tools)
    return samples if is_opened else [*samples, Sample(text=_ANSWER, content=_ANSWER)]


def _read(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str, sample: Sample) -> str | None:
    """Return how parsers read a sample as the gateway does: "whole", "dropped" without text beside calls, or None."""
    from forge_rl.tokens import vllm_parsers as vllm

    prompt, ids = tokenizer.render([_ASKED]), tokenizer.encode(sample.text)
    if tokenizer.thoughts.opened(prompt) and tokenizer.thoughts.tags[1] not in sample.text:
        reasoning_parser = ""  # some templates write a call without ending the thought that the prompt has opened
    loaded_parser = ToolParser(tool_parser or "hermes", tokenizer, reasoning_parser)
    asyncio.run(loaded_parser.load())
    request = vllm.ChatCompletionRequest.model_validate({"messages": [], "tools": [TOOL], "tool_choice": "auto"})
    parser = loaded_parser.cls(tokenizer.hf, request.tools)
    parser.adjust_request(request)
    parser.set_prompt_token_ids(prompt)
    text = tokenizer.decode(ids, skip_special=request.skip_special_tokens)
    thought, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=list(ids))
    if not reasoning_parser:
        content = without_thoughts(content or "", tokenizer.thoughts.tags)
    parsed_calls = [(call.name, call.arguments) for call in calls or ()]
    if sample.is_read(content, parsed_calls, thought) and bool(thought and thought.strip()) == bool(sample.thought):
        return "whole"
    return "dropped" if sample.is_read(content, parsed_calls, thought, drops_content=True) else None


def _continues(tokenizer: Tokenizer, *, is_callable: bool) -> bool:
    """Return whether a question and a tool's output after a completion are appended as the template writes them."""
    inner = tokenizer.turn_ends.inner
    assert inner is not None, "all of these templates separate turns"
    stop, end = inner if inner in tokenizer.stop_ids else tokenizer.stop_ids[-1], tokenizer.decode([inner], False)
    question, answer = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}
    turn = (*tokenizer.render([_ASKED]), *tokenizer.encode(_ANSWER))
    extended = tokenizer.extend((*turn, stop), [question])
    whole = tokenizer.render([_ASKED, answer, question])
    # From the end of the turn on: before it, a completion may have a line break, and a history no thought.
    rest, whole_rest = (_after(tokenizer, ids).partition(end)[2] for ids in (extended, whole))
    is_same = tuple(extended[: len(turn)]) == turn and rest == whole_rest and _QUESTION in rest
    if not is_callable:
        return is_same
    prompt = (*tokenizer.render([_ASKED], tools=[TOOL]), *tokenizer.encode(_ANSWER))
    # As vLLM's parsers name calls, which some templates refuse.
    call_id = "chatcmpl-tool-0011223344556677"
    output = {"role": "tool", "name": "add_numbers", "content": _OUTPUT, "tool_call_id": call_id}
    calls = [{"id": call_id, "type": "function", "function": {"name": "add_numbers"}}]
    called = tokenizer.extend((*prompt, stop), [output], tools=[TOOL], calls=calls)
    return is_same and tuple(called[: len(prompt)]) == prompt and _OUTPUT in _after(tokenizer, called)


def _after(tokenizer: Tokenizer, ids: TokenIds) -> str:
    return tokenizer.decode(ids, skip_special=False).rpartition(_ANSWER)[2]


def _reason(error: ConfigError | ModelError, folder: Path) -> str:
    """Return what the user reads, without the folder's name."""
    return str(error.message).replace(f" in {folder}", "").replace(f" of {folder}", "")


if __name__ == "__main__":
    run_benchmark("parsers", Config, measure)
