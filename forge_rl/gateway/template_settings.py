"""Chat template variables that a request may set: none that could be rendered as a message."""

from __future__ import annotations

import re
from collections.abc import Mapping

from forge_rl.gateway.errors import ApiError

_TEMPLATE_WORD = re.compile(r"[A-Za-z0-9_.-]{0,64}")
"""Strings that a request may pass to a chat template; no control token has this form."""
_TEMPLATE_OWN = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "self", "raise_exception", "strftime_now", "range"),
        *("dict", "lipsum", "cycler", "joiner", "namespace", "loop", "caller", "varargs", "kwargs"),
    }
)
"""Arguments of the template renderer and names of its functions, which a request may not set."""
_SPECIAL_TOKENS = ("_token", "_special_tokens")
"""Suffixes of variables with special tokens: bos_token, eos_token, additional_special_tokens."""


def template_settings(found: Mapping[str, object]) -> dict[str, object]:
    """Return the subset of vLLM's chat template variables that a request may set."""
    return {name: value for name, value in found.items() if _may_set(name) and value is not None}


def _may_set(name: str) -> bool:
    """Return whether a request may set a chat template variable."""
    return name not in _TEMPLATE_OWN and not name.endswith(_SPECIAL_TOKENS)


def check_template(settings: object) -> None:
    """Raise ApiError if a request's template variables could be rendered as a message."""
    if settings is None:
        return
    good = isinstance(settings, dict) and all(
        name.isidentifier() and _may_set(name) and (isinstance(value, bool | int | float | None) or _is_word(value))
        for name, value in settings.items()
    )
    if not good:
        problem = (
            "chat_template_kwargs may hold only numbers, true, false, null and single words, and may not set special "
            "tokens or the renderer's own variables"
        )
        raise ApiError(400, problem, param="chat_template_kwargs", code="invalid_value")


def _is_word(value: object) -> bool:
    return isinstance(value, str) and _TEMPLATE_WORD.fullmatch(value) is not None
