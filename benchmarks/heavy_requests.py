"""The heaviest requests that the gateway accepts: in text, messages, tools, prompts, values and completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_HI = {"role": "user", "content": "Hi"}
_SPARE_BYTES = 4096
"""Bytes reserved in a body for everything except its long part."""
_VALUES = 12_000


def heavy_requests(model: str, most_bytes: int, *, smoke: bool = False) -> Iterator[tuple[str, str, bytes]]:
    """Yield each request's name, path below /v1, and body.

    Args:
        model: name of the model.
        most_bytes: maximum accepted body size.
        smoke: make short requests.
    """
    size = (most_bytes - _SPARE_BYTES) // (64 if smoke else 1)
    long = _words(size)
    # Requests too long for the context are rejected once their tokens are counted.
    for name, path, fields in (
        ("one long message", "/chat/completions", {"messages": [_user(long)]}),
        ("one long tool", "/chat/completions", {"messages": [_HI], "tools": [_tool(0, long)]}),
        ("a long system text", "/messages", {"messages": [_HI], "system": long, "max_tokens": 1}),
        ("a long count", "/messages/count_tokens", {"messages": [_HI], "system": long}),
        ("many messages", "/chat/completions", {"messages": [_HI] * 4096, "max_tokens": 1}),
        ("many long messages", "/chat/completions", {"messages": [_user(_words(size // 4096 - 40))] * 4096}),
        ("many messages", "/messages", {"messages": [_HI] * 4096, "max_tokens": 1}),
        ("many parts", "/messages/count_tokens", {"messages": [_user([{"type": "text", "text": "a"}] * _VALUES)]}),
        ("many tools", "/chat/completions", {"messages": [_HI], "tools": _tools(1000)}),
        ("many values", "/chat/completions", {"messages": [_HI], "max_tokens": 1, "metadata": [{}] * _VALUES}),
        ("many values in a tool", "/chat/completions", {"messages": [_HI], "tools": [_tool(0, "", [0] * 120_000)]}),
        ("many completions with tools", "/chat/completions", {
            "messages": [_HI], "max_tokens": 4, "n": 128, "tools": _tools(100),
        }),
        ("many logprobs", "/chat/completions", {
            "messages": [_HI], "max_tokens": 16 if smoke else 256, "n": 24, "logprobs": True, "top_logprobs": 20,
        }),
        ("many prompts", "/completions", {"prompt": [_words(size // 128 - 4)] * 128, "max_tokens": 1}),
        ("many prompts, streamed", "/completions", {"prompt": ["and"] * 128, "max_tokens": 64, "stream": True}),
        ("many token ids", "/completions", {"prompt": [[5] * 130_000] * 2, "max_tokens": 1}),
        ("one long input", "/responses", {"input": long}),
        ("many items", "/responses", {"input": [_HI] * 4096, "max_output_tokens": 1}),
        ("many wrong items", "/responses", {"input": [{"type": "nonsense"}] * 4096}),
        ("one long prompt", "/completions", {"prompt": long, "max_tokens": 1}),
    ):  # fmt: skip
        yield f"{path} {name}", path, json.dumps({"model": model, **fields}, separators=(",", ":")).encode()


def _words(size: int) -> str:
    return ("word " * (size // 5 + 1))[: max(size, 1)]


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _tools(size: int) -> list[dict[str, Any]]:
    return [_tool(number, _words(size)) for number in range(512)]


def _tool(number: int, description: str, numbers: list[int] | None = None) -> dict[str, Any]:
    schema = {"type": "object", "properties": {}, **({"enum": numbers} if numbers else {})}
    return {"type": "function", "function": {"name": f"t{number}", "description": description, "parameters": schema}}
