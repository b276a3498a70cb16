"""Decodes a completion token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from forge_rl.token_arrays import TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TextStream:
    """Decodes one completion token by token; a character that is split over tokens is returned with the last one. A
    character that is incomplete at the end is never returned, as in vLLM."""

    def __init__(self, hf: PreTrainedTokenizerFast, prompt_ids: TokenIds, skip_special: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = hf.backend_tokenizer
        self._fresh = lambda ids: DecodeStream(ids=ids, skip_special_tokens=skip_special)
        # Whether a word begins with a blank depends on the preceding tokens.
        self._stream = self._fresh(np.asarray(prompt_ids[-8:]).tolist())

    def add(self, token: int) -> str:
        """Return the text that a token adds; "" while a character is incomplete."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:
            # Invalid UTF-8 can make the stream lose its prefix (vLLM issue 17448).
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            self._stream = self._fresh([])
            return self._stream.step(self._tokenizer, token) or ""


def whole_characters(text: str) -> str:
    """Return the decoded text of a whole completion as `TextStream` returns it: without an incomplete character or
    other invalid UTF-8 at its end."""
    return text.rstrip("\ufffd")
