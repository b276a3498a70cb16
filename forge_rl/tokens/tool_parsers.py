"""vLLM's parsers of tool calls and reasoning, under a limit on time; for use in the server and without it."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from forge_rl.errors import ConfigError
from forge_rl.system.encodable import encodable
from forge_rl.tokens.parser_choice import (
    TOOL,
    Sample,
    reasoning_parsers_to_try,
    samples_of_calls,
    samples_of_thoughts,
    tool_parser_by_sign,
    tool_parsers_to_try,
)
from forge_rl.tokens.thoughts import Thoughts, without_thoughts
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import ToolCall, Turn

_MOST_S, _MOST_PER_CHARACTER_S = 1.0, 1e-5
"""CPU time limit for parsing a whole completion: a fixed part, and a part per character. vLLM's slowest parser takes 3
microseconds per character of well-formed calls."""
_AGAIN_S = 0.05
"""Interval at which code that swallowed the error is interrupted again."""

PARSED: ContextVar[dict[str, Any] | None] = ContextVar("parsed completions", default=None)
"""Results of parsing a request's whole completions, by their text, as vLLM's server parses each a second time."""

T = TypeVar("T")


class ToolParser:
    """One of vLLM's tool parsers, chosen and imported on first use, as importing vLLM takes seconds.

        parser = ToolParser("", tokenizer)
        content, calls = await parser.parse(turn, task.tools)

    Args:
        name: vLLM's name of the tool parser; "" for the one that `parser_for` chooses.
        tokenizer: the model's tokenizer.
        reasoning: vLLM's name of the reasoning parser; "" leaves reasoning in the text.
        warn: called with a line when parsing a completion takes too long, which leaves it as text.
    """

    def __init__(
        self, name: str, tokenizer: Tokenizer, reasoning: str = "", warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self.name = name
        self.reasoning = reasoning
        self._tokenizer = tokenizer
        self._warn = warn
        self._loading = asyncio.Lock()
        self._cls: type[Any] | None = None
        self._thoughts = Thoughts(tokenizer.hf)

    @property
    def cls(self) -> type[Any]:
        """The parser's class; `load` must have been called."""
        assert self._cls is not None, "load comes first"
        return self._cls

    async def load(self) -> None:
        """Import the parser in a thread, once.

        Raises:
            ConfigError: vLLM has no parser of that name, or it does not support the tokenizer; or none reads the calls
                that the model's chat template writes.
        """
        async with self._loading:
            if self._cls is None:
                self._cls = await asyncio.to_thread(self._load)
                gc.freeze()  # a collection over all of vLLM would block the event loop for half a second

    async def parse(self, turn: Turn, tools: Sequence[Mapping[str, object]]) -> tuple[str, tuple[ToolCall, ...]]:
        """Return a turn's content and calls of `tools`, both without thoughts: a call that is only drafted in a
        thought does not count. Text that the parser cannot read is content."""
        await self.load()
        from forge_rl.tokens import vllm_parsers as vllm

        request_fields = {"messages": [], "tools": list(tools), "tool_choice": "auto"}
        request = vllm.ChatCompletionRequest.model_validate(request_fields)
        parser, ids = self.cls(self._tokenizer.hf, request.tools), turn.token_ids.tolist()
        if self._thoughts.is_harmony:
            return read_calls(parser, request, turn.text, ids)
        # Parsers that need special tokens in the text say so by changing `skip_special_tokens`.
        parser.adjust_request(request)
        text = without_thoughts(turn.text, self._thoughts.tags)
        content, calls = read_calls(parser, request, self._with_markers(text, ids, request), [])
        return content if calls else text, calls

    def _with_markers(self, text: str, ids: list[int], request: Any) -> str:
        """Return a completion's text with the special tokens that its calls may be marked by."""
        special_ids = set(self._tokenizer.hf.all_special_ids)
        if request.skip_special_tokens or special_ids.isdisjoint(ids):
            return text
        # The stop token is not part of the completion's text, and would otherwise look like a marker.
        if ids[-1] in self._tokenizer.stop_ids:
            ids = ids[:-1]
        if special_ids.isdisjoint(ids):
            return text
        return without_thoughts(self._tokenizer.decode(ids, skip_special=False), self._thoughts.tags)

    def _load(self) -> type[Any]:
        from forge_rl.tokens import vllm_parsers as vllm

        self.name = self.name or parser_for(self._tokenizer)
        # Parsers log a stack trace for each malformed call.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        for kind, name, manager in (
            ("tool", self.name, vllm.ToolParserManager),
            ("reasoning", self.reasoning, vllm.ReasoningParserManager),
        ):
            if name and name not in (registered := manager.list_registered()):
                raise ConfigError(
                    f"vLLM has no {kind} parser {name!r}", hint=f"set --{kind}-parser to one of {', '.join(registered)}"
                )
        try:
            parser = vllm.ParserManager.get_parser(
                tool_parser_name=self.name,
                reasoning_parser_name=self.reasoning or None,
                enable_auto_tools=True,
                tokenizer=self._tokenizer.hf,
                is_harmony=self._tokenizer.model_type == "gpt_oss",
            )
        except TypeError as error:
            raise ConfigError(
                f"the parsers {self.name!r} and {self.reasoning!r} do not support the model: {error}",
                hint="set another --tool-parser or --reasoning-parser",
            ) from error
        return _forgiving(parser, self._warn, self._tokenizer.thoughts if self.reasoning else None)


def parser_for(tokenizer: Tokenizer) -> str:
    """Return the name of vLLM's parser that reads back the calls that a model's chat template writes.

    Templates that do not render tools get them in Hermes' format, so calls are parsed in that format too. Otherwise
    this imports vLLM, which takes seconds. Where no parser reads all, the one of the template's markers may drop
    text next to calls, as vLLM's does for Gemma 4.

    Raises:
        ConfigError: no parser reads them.
    """
    if not tokenizer.shows_tools:
        return "hermes"
    samples = samples_of_calls(tokenizer)
    if not samples or tokenizer.thoughts.is_harmony:  # whose parser reads the tokens of its own vocabulary only
        return tool_parser_by_sign(tokenizer)
    from forge_rl.tokens import vllm_parsers as vllm

    # Names prove little: a parser is chosen only if it reads back what the model's own template writes.
    for name in tool_parsers_to_try(tokenizer, vllm.ToolParserManager.list_registered()):
        if _reads(name, "", tokenizer, samples):
            return name
    if _reads(signed_name := tool_parser_by_sign(tokenizer), "", tokenizer, samples, drops_content=True):
        return signed_name
    raise ConfigError(
        f"none of vLLM's tool parsers reads the calls that the chat template of {tokenizer.folder} writes, such as "
        f"{samples[0].text!r:.200}",
        hint="set --tool-parser (--gateway.tool-parser for agents) to the parser of the model's format, or change the "
        "model's chat_template.jinja",
    )


def reasoning_parser_for(tokenizer: Tokenizer, tool_parser: str) -> str:
    """Return the name of vLLM's parser that reads back the thoughts that a model's chat template writes; "" if the
    template knows of none. Imports vLLM.

    Args:
        tool_parser: name of the tool parser, which reads calls after a thought.

    Raises:
        ConfigError: no parser reads them.
    """
    if not tokenizer.thoughts.expected:
        return ""
    if tokenizer.thoughts.is_harmony:
        return "openai_gptoss"
    from forge_rl.tokens import vllm_parsers as vllm

    samples = samples_of_thoughts(tokenizer, calls=tokenizer.shows_tools)
    for name in reasoning_parsers_to_try(tokenizer, vllm.ReasoningParserManager.list_registered()):
        if _reads(tool_parser, name, tokenizer, samples):
            return name
    raise ConfigError(
        f"none of vLLM's reasoning parsers reads the thoughts that the chat template of {tokenizer.folder} writes, "
        f"such as {samples[0].text!r:.200}",
        hint="set --reasoning-parser (--gateway.reasoning-parser of a run) to the parser of the model's format, or to "
        "none to leave thoughts in the text",
    )


def _reads(
    tool: str, reasoning: str, tokenizer: Tokenizer, samples: Sequence[Sample], *, drops_content: bool = False
) -> bool:
    """Return True if parsers read back all samples, see `Sample.is_read`."""
    from forge_rl.tokens import vllm_parsers as vllm

    parser = ToolParser(tool, tokenizer, reasoning)
    try:
        cls = parser._load()
    except Exception:  # many parsers need tokens that the model has not
        return False
    for sample in samples:
        ids = tokenizer.encode(sample.text)
        body = {"messages": [], "tools": [TOOL], "tool_choice": "auto"}
        request = vllm.ChatCompletionRequest.model_validate(body)
        try:
            instance = cls(tokenizer.hf, request.tools)
            instance.adjust_request(request)
            text = tokenizer.decode(ids, skip_special=request.skip_special_tokens)
            thought, content, calls = instance.parse(
                text, request, enable_auto_tools=True, model_output_token_ids=list(ids)
            )
        except Exception:
            return False
        if not reasoning:
            content = without_thoughts(content or "", tokenizer.thoughts.tags)  # as templates open answers with
        parsed_calls = [(call.name, call.arguments) for call in calls or ()]
        if not sample.is_read(content, parsed_calls, thought, drops_content=drops_content):
            return False
    return True


def read_calls(parser: Any, request: Any, text: str, token_ids: Sequence[int]) -> tuple[str, tuple[ToolCall, ...]]:
    """Return content and calls of a whole completion; `parser` is vLLM's, created for `request`."""
    _, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=list(token_ids))
    if request.parallel_tool_calls is False:
        calls = (calls or [])[:1]
    return content or "", tuple(
        # A model can write lone surrogates as JSON escapes.
        ToolCall(
            id=encodable(call.id or f"call_{secrets.token_hex(12)}"),
            name=encodable(call.name),
            arguments=encodable(call.arguments),
        )
        for call in calls or ()
    )


def _forgiving(parser: type[Any], warn: Callable[[str], None], thoughts: Thoughts | None = None) -> type[Any]:
    """Return a subclass of the parser that returns completions as text if parsing fails or takes too long.

    vLLM's parsers may raise on a model's text, or take hours, in the event loop. A request's completion is parsed once.

    Args:
        thoughts: tells where the parser, which separates reasoning, must not find any.
    """
    from forge_rl.tokens import vllm_parsers as vllm

    class ForgivingParser(parser):
        _prompt_ids: Sequence[int] | None = None
        _has_begun = False

        def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
            self._prompt_ids = prompt_token_ids
            super().set_prompt_token_ids(prompt_token_ids)

        def is_reasoning_end(self, input_ids: list[int]) -> bool:
            # vLLM looks for a tag anywhere in a prompt, such as in what its system message says of thoughts.
            ended = thoughts.ended(input_ids) if thoughts is not None else None
            return bool(super().is_reasoning_end(input_ids)) if ended is None else ended

        def parse(self, model_output: str, *args: Any, **kwargs: Any) -> Any:
            parsed_completions = PARSED.get()
            if parsed_completions is None:
                return self._parse(model_output, *args, **kwargs)
            if model_output not in parsed_completions:
                parsed_completions[model_output] = self._parse(model_output, *args, **kwargs)
            return parsed_completions[model_output]

        def _parse(self, model_output: str, *args: Any, **kwargs: Any) -> Any:
            # Argument deltas are only for streams, and take quadratic time: 9 s for 20,000 characters.
            parts: list[Any] = [self, getattr(getattr(self, "_tool_parser", None), "_parser_engine", None)]
            for part in parts:
                if hasattr(part, "_stream_arg_deltas"):
                    part._stream_arg_deltas = False
            # vLLM takes a whole completion without tags for a thought that was truncated, but a model may answer at
            # once: if a template variable switches thoughts off, or an easy question needs none.
            ids = [] if self._prompt_ids is None else [int(token) for token in self._prompt_ids]
            answers_at_once = bool(thoughts and ids and thoughts.lacks(ids, model_output))

            def reads() -> Any:
                parsed = super(ForgivingParser, self).parse(model_output, *args, **kwargs)
                if thoughts is None or not answers_at_once or parsed[0] is None:
                    return parsed
                text = "".join((*thoughts.tags, model_output))
                return None, *super(ForgivingParser, self).parse(text, *args, **kwargs)[1:]

            try:
                return call_within(_MOST_S + _MOST_PER_CHARACTER_S * len(model_output), reads)
            except LateError:
                warn(f"the tool parser took too long for a completion of {len(model_output)} characters: it is text")
            except Exception:
                pass
            return None, model_output, []

        def parse_delta(
            self, delta_text: str, delta_token_ids: list[int], request: Any, prompt_token_ids: Any = None, **kwargs: Any
        ) -> Any:
            try:
                if thoughts is not None and not self._has_begun and delta_text.strip():
                    self._has_begun = True
                    ids = list(prompt_token_ids or ())
                    # A tag that is no token comes in pieces, by which an answer cannot be told from a thought.
                    are_tokens = min(thoughts.tag_ids) >= 0
                    if ids and are_tokens and thoughts.lacks(ids, delta_text) and not self.is_reasoning_end(ids):
                        tags = "".join(thoughts.tags)
                        super().parse_delta(tags, list(thoughts.tag_ids), request, ids, finished=False)
                return super().parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, **kwargs)
            except Exception:
                return vllm.DeltaMessage(content=delta_text)

    return ForgivingParser


class LateError(BaseException):
    """Raised in code that exceeds its time limit. Not an Exception, which that code might catch."""


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function, and interrupt it once it has used `seconds` of the thread's CPU time.

        call_within(1.0, lambda: pattern.findall(text))

    Python bytecode and the re and regex packages can be interrupted; other C code finishes first. Outside of
    the main thread, the only one in which Python runs signal handlers, the time is not limited.

    Raises:
        LateError: the function was interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    # CPU time of this thread, so that a machine under load does not make well-formed calls late.
    deadline = time.thread_time() + seconds
    runs = True

    def on_time(*_: object) -> None:
        if runs and time.thread_time() > deadline:  # the timer also counts other threads' time
            raise LateError

    before = signal.signal(signal.SIGVTALRM, on_time)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
            return function()
        finally:
            # First of all: a signal that arrives during the clean-up must raise nothing.
            runs = False
    finally:
        # Again, as one that arrived just before the line above has left the timer on.
        runs = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
