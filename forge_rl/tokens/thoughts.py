"""Separates a completion's thoughts from its answer: thoughts are not graded, and calls in them are not run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from forge_rl.token_arrays import TokenIds
from forge_rl.tokens.text_stream import whole_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>", "<channel|>"),
    ("◁think▷", "◁/think▷"),
)
"""Tags around a thought, by model family. Most families, and models that learn to think, write the first."""
_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_FINAL = re.compile(
    r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>(.*?)(?=<\|(?:end|return|call|start)\|>|\Z)",
    re.DOTALL,
)
"""A message for the user in gpt-oss's format; those on other channels are thoughts and calls."""


def without_thoughts(text: str, tags: tuple[str, str] = _TAGS[0], *, is_open: bool = False) -> str:
    """Return a text without its thoughts, finished or not, and without blanks after them.

        without_thoughts("<think>2 and 3</think> 5")  # "5"
        without_thoughts("<think>perhaps 5")  # ""

    A closing tag without an opening one ends a thought that the prompt has opened.

    Args:
        tags: opening and closing tag.
        is_open: whether the text begins within a thought.
    """
    opening, closing = tags
    if not is_open and opening not in text and closing not in text:
        return text
    parts: list[str] = []
    begin = 0
    for tag in re.finditer(f"{re.escape(opening)}|{re.escape(closing)}", text):
        if tag.group() == closing:
            if not is_open:
                parts.clear()
            is_open, begin = False, tag.end()
        elif not is_open:
            parts.append(text[begin : tag.start()])
            is_open = True
    if not is_open:
        parts.append(text[begin:])
    return "".join(parts).lstrip()


class Thoughts:
    """Finds the answer in completions of one model, by the tags in its chat template or vocabulary.

        thoughts = Thoughts(tokenizer.hf, tokenizer.stop_ids)
        thoughts.answer(prompt_ids, token_ids, text)

    Args:
        hf: the model's tokenizer.
        stop_ids: ids of tokens that end a turn.
    """

    def __init__(self, hf: PreTrainedTokenizerFast, stop_ids: Sequence[int] = ()) -> None:
        self._hf = hf
        self._stop_ids = np.asarray(stop_ids, np.int32)
        added_vocab, template = hf.get_added_vocab(), str(hf.chat_template)
        self.is_harmony = _CHANNEL in added_vocab and _MESSAGE in added_vocab
        """Whether thoughts are messages on a channel of their own, as gpt-oss writes them."""
        in_template = [tags for tags in _TAGS if any(tag in template for tag in tags)]
        in_vocabulary = [tags for tags in _TAGS if tags[1] in added_vocab]
        # The template knows best; a vocabulary may have tags that its model never writes.
        self.tags = (*in_template, *in_vocabulary, *_TAGS)[0]
        """Opening and closing tag."""
        self.expected = bool(self.is_harmony or in_template)
        """Whether the chat template knows of thoughts."""
        self._has_opening = self.tags[0] in template
        self.tag_ids = tuple(added_vocab.get(tag, -1) for tag in self.tags)
        """Ids of these tags; -1 for one that is no token of its own."""
        special = set(hf.all_special_tokens)
        self._is_special = any(tag in special for tag in self.tags)

    def opened(self, prompt_ids: TokenIds) -> bool:
        """Return True if a prompt ends within a thought."""
        ids = np.asarray(prompt_ids, np.int32)
        opening, closing = self.tag_ids
        # The tags are no tokens of their own in this vocabulary, so only the prompt's text can tell.
        if opening < 0 or closing < 0:
            tail = self._hf.decode(ids[-16:].tolist(), skip_special_tokens=False)
            return bool(tail.rstrip().endswith(self.tags[0]))
        # Text of users never becomes these tokens, so only the template and the model have written them.
        last_opening = _last(ids, [opening])
        return last_opening > _last(ids, [closing]) and last_opening > _last(ids, self._stop_ids)

    def ended(self, prompt_ids: TokenIds) -> bool | None:
        """Return whether a prompt has ended a thought of the turn that it opens; None if the tags are no tokens."""
        opening, closing = self.tag_ids
        if self.is_harmony or opening < 0 or closing < 0:
            return None
        ids = np.asarray(prompt_ids, np.int32)
        return _last(ids, [closing]) > max(_last(ids, [opening]), _last(ids, self._stop_ids))

    def lacks(self, prompt_ids: TokenIds, text: str) -> bool:
        """Return True if a completion, with its tags, is an answer without a thought, finished or not.

        Such are completions without tags where neither the prompt nor the model has opened a thought, if the chat
        template has the opening tag. If it has none, the model may think without writing one.

        Args:
            text: the completion or its first characters other than blanks.
        """
        opening, closing = self.tags
        if self.is_harmony or not self._has_opening or closing in text or text.lstrip().startswith(opening):
            return False
        return not self.opened(prompt_ids)

    def answer(
        self, prompt_ids: TokenIds, token_ids: TokenIds, text: str, decode: Callable[[TokenIds], str] | None = None
    ) -> str | None:
        """Return a completion's text without its thoughts; None if it has none.

        Args:
            text: the completion without special tokens, or with some.
            decode: returns the text of some of the completion's tokens; None for their text without special tokens.
        """
        ids = np.asarray(token_ids, np.int32)
        if self.is_harmony:
            return self._final(ids)
        # Tags that are ordinary tokens are in the text; special ones are not, so tokens must be searched instead.
        if not self._is_special:
            answer = without_thoughts(text, self.tags, is_open=self.opened(prompt_ids))
            return None if answer == text else answer
        spoken = self._spoken(ids, self.opened(prompt_ids))
        if spoken is None:
            return None
        if decode is not None:
            return whole_characters(decode(ids[spoken])).lstrip()
        return whole_characters(str(self._hf.decode(ids[spoken].tolist(), skip_special_tokens=True))).lstrip()

    def _spoken(self, ids: npt.NDArray[np.int32], is_open: bool) -> npt.NDArray[np.bool_] | None:
        """Return which tokens are outside of thoughts, as `without_thoughts` does for text; None if all are."""
        spoken, begin = np.zeros(len(ids), np.bool_), 0
        places = np.flatnonzero(np.isin(ids, self.tag_ids))
        if not is_open and not len(places):
            return None
        for place in places.tolist():
            if ids[place] == self.tag_ids[1]:
                if not is_open:
                    spoken[:] = False
                is_open, begin = False, place + 1
            elif not is_open:
                spoken[begin:place], is_open = True, True
        if not is_open:
            spoken[begin:] = True
        return spoken

    def _final(self, ids: npt.NDArray[np.int32]) -> str | None:
        text = whole_characters(self._hf.decode(ids.tolist(), skip_special_tokens=False))
        return "".join(_FINAL.findall(text)) if _CHANNEL in text else None


def _last(ids: npt.NDArray[np.int32], tokens: Sequence[int] | npt.NDArray[np.int32]) -> int:
    """Return the index of the last of these tokens; -1 if there is none."""
    places = np.flatnonzero(np.isin(ids, tokens))
    return int(places[-1]) if len(places) else -1
