"""Encodes texts that begin alike, such as a conversation up to each of its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


class PrefixEncoder:
    """Encodes texts as `encode` does, but reuses the ids of the previous text for a common beginning, up to its last
    special token.

        encoder = PrefixEncoder(tokenizer.hf.backend_tokenizer, tokenizer.encode)
        encoder("<|im_start|>user\\n2+3?<|im_end|>\\n")
        encoder("<|im_start|>user\\n2+3?<|im_end|>\\n<|im_start|>assistant\\n5<|im_end|>\\n")

    The result is the same, as tokenizers look for special tokens before they normalise and split a text, and encode
    each part between two of them separately. Special tokens that absorb neighbouring blanks, or that tokenizers look
    for in normalised text, cannot be relied on; with only such tokens in a vocabulary, texts are encoded whole.

    Args:
        tokenizer: the tokenizer of `encode`.
        encode: returns the ids of a text.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, encode: Callable[[str], tuple[int, ...]]) -> None:
        added_tokens = tokenizer.get_added_tokens_decoder()
        self._encode = encode
        self._splitting = {
            id: token.content
            for id, token in added_tokens.items()
            if token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        }
        self._longest = max((len(token.content) for token in added_tokens.values()), default=0)
        self._text = ""
        self._ids: tuple[int, ...] = ()

    def __call__(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text."""
        ids = self._continued(text)
        self._text, self._ids = text, self._encode(text) if ids is None else ids
        return self._ids

    def _continued(self, text: str) -> tuple[int, ...] | None:
        """Return the ids of a text, partly from the previous text's; None if the two do not begin alike."""
        # Up to here, no added token can reach into the part in which the texts differ.
        limit = shared_length(self._text, text) - self._longest
        places = {
            id: place for id, form in self._splitting.items() if (place := text.rfind(form, 0, max(0, limit))) >= 0
        }
        if not places:
            return None
        id, place = max(places.items(), key=lambda item: item[1])
        form = self._splitting[id]
        # Each occurrence in the text must be that token, or the place of the token among the ids is unknown.
        if self._text.count(form) != self._ids.count(id):
            return None
        rest_ids = self._encode(text[place:])
        if rest_ids[:1] != (id,):
            return None
        index = len(self._ids)
        for _ in range(self._text.count(form, place)):
            index -= 1
            while self._ids[index] != id:
                index -= 1
        return (*self._ids[:index], *rest_ids)


def shared_length(first: str | tuple[int, ...], second: str | tuple[int, ...]) -> int:
    """Return the length of the longest common prefix."""
    low, high = 0, min(len(first), len(second))
    # Bisected, as slices are compared hundreds of times faster than items in a loop.
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
