"""Variables that a request may set of a chat template: none by which it could be read as a message."""

from __future__ import annotations

import re
from collections.abc import Mapping

from forge_rl.gateway.errors import ApiError

_TEMPLATE_WORD = re.compile(r"[A-Za-z0-9_.-]{0,64}")
"""Text that a request may give a chat template beside its messages; no control token is written so."""
_TEMPLATE_OWN = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "self", "raise_exception", "strftime_now", "range"),
        *("dict", "lipsum", "cycler", "joiner", "namespace", "loop", "caller", "varargs", "kwargs"),
    }
)
"""Arguments of what renders a chat template, and its functions, which are not a request's to set."""
_SPECIAL_TOKENS = ("_token", "_special_tokens")
"""Ends of the names by which a template writes special tokens: bos_token, eos_token, additional_special_tokens."""


def template_settings(found: Mapping[str, object]) -> dict[str, object]:
    """Return the variables of a chat template that are a request's to set, out of all that vLLM gives it."""
    return {name: value for name, value in found.items() if _may_set(name) and value is not None}


def _may_set(name: str) -> bool:
    """Return whether a variable of a chat template is a request's to set."""
    return name not in _TEMPLATE_OWN and not name.endswith(_SPECIAL_TOKENS)


def check_template(settings: object) -> None:
    """Raise ApiError if a request gives its chat template what could be read as a message."""
    if settings is None:
        return
    good = isinstance(settings, dict) and all(
        name.isidentifier() and _may_set(name) and (isinstance(value, bool | int | float | None) or _is_word(value))
        for name, value in settings.items()
    )
    if not good:
        problem = (
            "chat_template_kwargs may hold numbers, true, false, null and single words, by names of variables that are "
            "neither special tokens nor the template's own"
        )
        raise ApiError(400, problem, param="chat_template_kwargs", code="invalid_value")


def _is_word(value: object) -> bool:
    return isinstance(value, str) and _TEMPLATE_WORD.fullmatch(value) is not None
