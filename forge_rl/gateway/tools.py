"""vLLM's tool parsers: find the tool calls in a whole completion, and in one that is still being decoded."""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import ConfigError
from forge_rl.gateway.chat import ToolCall


@dataclass(frozen=True, kw_only=True)
class CallDelta:
    """Part of a tool call that some tokens add; id and name come with the first one."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ToolParser:
    """One of vLLM's tool parsers, imported when it is first needed: vLLM takes seconds.

    Args:
        name: the parser's name in vLLM.
        tokenizer: the model's tokenizer.
    """

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._loading = asyncio.Lock()
        self._loaded: tuple[Any, Any] | None = None  # vLLM has no types that we follow

    async def load(self) -> None:
        """Import the parser in a thread, once.

        Raises:
            ConfigError: there is no parser of that name, or it does not fit the tokenizer.
        """
        async with self._loading:
            if self._loaded is None:
                self._loaded = await asyncio.to_thread(self._load)
                gc.freeze()  # garbage collection would hold up the loop for half a second to look at all of vLLM

    async def asked(self, tools: Sequence[Mapping[str, object]]) -> Any:
        """Return a request's tools as the parser takes them."""
        await self.load()
        assert self._loaded is not None
        return self._loaded[1].model_validate(
            {"messages": [{"role": "user", "content": ""}], "tools": list(tools), "tool_choice": "auto"}
        )

    def reader(self, asked: Any, prompt_ids: list[int]) -> ToolReader:
        """Make a reader of one completion, of what `asked` returned."""
        assert self._loaded is not None, "asked comes first"
        return ToolReader(self._loaded[0](self._tokenizer.hf, asked.tools), asked, prompt_ids)

    def _load(self) -> tuple[Any, Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser.parser_manager import ParserManager
        from vllm.tool_parsers import ToolParserManager

        if self.name not in (known := ToolParserManager.list_registered()):
            raise ConfigError(
                f"vLLM has no tool parser {self.name!r}", hint=f"set --tool-parser to one of {', '.join(known)}"
            )
        try:
            parser = ParserManager.get_parser(
                tool_parser_name=self.name, enable_auto_tools=True, tokenizer=self._tokenizer.hf
            )
        except TypeError as error:
            raise ConfigError(
                f"the tool parser {self.name!r} does not fit the model: {error}", hint="set another --tool-parser"
            ) from error
        return parser, ChatCompletionRequest


class ToolReader:
    """Finds the tool calls in one completion. What the parser cannot read is text."""

    def __init__(self, parser: Any, request: Any, prompt_ids: list[int]) -> None:
        self._parser = parser
        self._request = request
        self._prompt_ids = prompt_ids

    def parse(self, text: str, token_ids: Sequence[int]) -> tuple[str, tuple[ToolCall, ...]]:
        """Return content and calls of a whole completion."""
        try:
            _, content, calls = self._parser.parse(
                text, self._request, enable_auto_tools=True, model_output_token_ids=list(token_ids)
            )
        except Exception:  # a parser may raise on anything that a model writes
            return text, ()
        return content or "", tuple(
            ToolCall(id=call.id or new_call_id(), name=call.name, arguments=call.arguments) for call in calls or ()
        )

    def parse_delta(self, text: str, token_ids: Sequence[int], *, finished: bool) -> tuple[str, list[CallDelta]]:
        """Return content and calls that some tokens add to a completion."""
        try:
            delta = self._parser.parse_delta(
                text, list(token_ids), self._request, prompt_token_ids=self._prompt_ids, finished=finished
            )
        except Exception:  # as above
            return text, []
        if delta is None:
            return "", []
        calls = [
            CallDelta(
                index=call.index,
                id=(call.id or new_call_id()) if call.function and call.function.name else None,
                name=call.function.name if call.function else None,
                arguments=(call.function.arguments or "") if call.function else "",
            )
            for call in delta.tool_calls or ()
        ]
        return delta.content or "", calls


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
