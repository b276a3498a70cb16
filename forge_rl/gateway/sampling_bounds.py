"""Ranges of a request's sampling settings, outside of which logits become NaN or steps slow for all requests, and the
maximum length of a scored prompt."""

from __future__ import annotations

from collections.abc import Mapping

from forge_rl.gateway.errors import ApiError

_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.01, 2),
    "top_p": (1e-6, 1),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0.1, 10),
}
"""Minimum and maximum of each setting."""
_COUNTS = ("top_k", "min_tokens")
_MOST_COUNT = 2**31 - 1
_BIAS = 100.0
"""Maximum absolute bias on a token's logit."""
_LISTS = {"logit_bias": 1024, "stop_token_ids": 1024, "allowed_token_ids": 1 << 18, "bad_words": 128}
"""Maximum entries of each list of tokens or words."""
_MOST_ENTRIES = 1 << 18
"""Maximum entries of such a list times completions of a request, which each hold a copy."""
_MOST_BAD_WORDS = 1024
"""Maximum bad_words times completions of a request: each token is compared with them in Python."""
_MOST_WORD_CHARACTERS = 128
PROMPT_LOGITS_BYTES = 1 << 30
"""Maximum bytes of the logits of a scored prompt, which an engine holds all at once in float32."""


def check_sampling(settings: Mapping[str, object], wanted: int) -> None:
    """Raise ApiError with the parameter's name if a sampling setting of a request is out of range.

    Args:
        settings: parameters of the request by name; those that are not sampling settings are ignored.
        wanted: number of completions requested.
    """
    for name, (least, most) in _RANGES.items():
        value = settings.get(name)
        zero_is_greedy = name == "temperature" and value == 0
        if value is not None and not zero_is_greedy and not (_is_number(value) and least <= value <= most):  # type: ignore[operator]
            words = "0, or a number" if name == "temperature" else "a number"
            raise _refusal(name, f"{words} from {least:g} to {most:g}")
    for name in _COUNTS:
        value = settings.get(name)
        least = -1 if name == "top_k" else 0
        if value is not None and not (type(value) is int and least <= value <= _MOST_COUNT):
            raise _refusal(name, f"an integer from {least} to {_MOST_COUNT}")
    for name, most in _LISTS.items():
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, dict if name == "logit_bias" else list):
            raise _refusal(name, "an object" if name == "logit_bias" else "a list")
        together = _MOST_BAD_WORDS if name == "bad_words" else _MOST_ENTRIES
        if len(value) > most or len(value) * wanted > together:
            raise _refusal(name, f"of at most {most} entries, and {together} over all completions")
    biases = settings.get("logit_bias")
    if isinstance(biases, dict) and not all(_is_number(each) and abs(each) <= _BIAS for each in biases.values()):
        raise _refusal("logit_bias", f"an object of numbers from {-_BIAS:g} to {_BIAS:g}")
    words_kept_out = settings.get("bad_words")
    if isinstance(words_kept_out, list) and not all(
        isinstance(word, str) and 0 < len(word) <= _MOST_WORD_CHARACTERS for word in words_kept_out
    ):
        raise _refusal("bad_words", f"a list of words with 1 to {_MOST_WORD_CHARACTERS} characters")


def most_scored_tokens(vocab_size: int) -> int:
    """Return the maximum length in tokens of a scored prompt, for a model with `vocab_size` logits."""
    return PROMPT_LOGITS_BYTES // (4 * vocab_size)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refusal(name: str, wanted: str) -> ApiError:
    return ApiError(400, f"{name} must be {wanted}", param=name, code="invalid_value")
