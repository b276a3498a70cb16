"""Tokens that end a turn, in the model's settings and in its chat template."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from forge_rl.errors import ModelError
from forge_rl.tokens.tokenizer import Tokenizer

_GENERATION = "generation_config.json"


def final_stop(tokenizer: Tokenizer) -> int | None:
    """Return the token that ends a last answer: the template's, or else the model's end of text, if it has any."""
    end: int | None = tokenizer.hf.eos_token_id
    return end if tokenizer.turn_ends.trained is None else tokenizer.turn_ends.trained


def describe_added_stop(tokenizer: Tokenizer) -> str:
    """Return a line for the user if the template ends turns with a token that no setting of the model names, or ""."""
    if tokenizer.added_stop is None:
        return ""
    names = [tokenizer.hf.convert_ids_to_tokens(token) for token in tokenizer.configured_stop_ids]
    return (
        f"the chat template ends turns with {tokenizer.hf.convert_ids_to_tokens(tokenizer.added_stop)}, but the "
        f"model's settings name only {', '.join(map(str, names)) or 'no token'}: it also stops engines, and exported "
        f"models name it in {_GENERATION}"
    )


def name_added_stop(source: Path, target: Path) -> None:
    """Add the token that the chat template of `source` ends turns with to the generation config in `target`, if the
    model's settings do not name it. Without it, an exported model would not stop where it was trained to."""
    if stop_ids := _with_added_stop(source):
        path = target / _GENERATION
        settings = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(settings | {"eos_token_id": list(stop_ids)}, indent=2) + "\n")


@lru_cache(maxsize=4)
def _with_added_stop(source: Path) -> tuple[int, ...]:
    try:
        tokenizer = Tokenizer(source)
    except ModelError:  # a model that reads no messages, such as one of a test, has no turns
        return ()
    return tokenizer.stop_ids if tokenizer.added_stop is not None else ()
