"""Separates message text from the control tokens that the chat template writes."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from forge_rl.errors import ModelError

if TYPE_CHECKING:
    import tokenizers

_LOOKED_UP = ("role", "type")
"""Keys whose values templates compare with fixed names."""
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_PRIVATE_CODES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class HiddenMessages:
    """Messages without anything that reads as a control token: `control.encode(render(*hidden.parts), hidden)`."""

    parts: tuple[object, ...]
    """Messages and tools with some characters replaced by private-use ones."""
    characters: Mapping[str, str]
    """Original character by its private-use replacement."""

    def uncover(self, text: str) -> str:
        """Restore the hidden characters in a text rendered from the parts."""
        for private, character in self.characters.items():
            # ASCII JSON escapes it.
            text = text.replace(private, character).replace(json.dumps(private)[1:-1], character)
        return text


class ControlTokens:
    """Finds the control tokens of a rendered conversation that its template wrote, and encodes only those as tokens.

    Messages are rendered a second time with the characters that control tokens need replaced. What still reads as a
    control token was written by the template; one that forms across several messages or template text no longer does.

    Control tokens are the special tokens, and added tokens that look like tags, such as <think> and <tool_call>. Added
    words and runs of blanks are text. The model wrote the assistant's messages, so tags in them are tokens, and only
    special tokens become text.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._contents = {id: token.content for id, token in self._added.items() if _is_control(token)}
        self.ids = frozenset(self._contents)
        """Ids of the control tokens."""
        special = [token.content for id, token in self._added.items() if token.special and id in self._contents]
        self._all = _Forms(self._contents.values())
        self._special = _Forms(special)
        # Two cheap signs of a control token: its first telling character, and the characters at its ends.
        heads = {_head(content) for content in self._contents.values()}
        ends = {content[index] for content in self._contents.values() for index in (0, -1)}
        self._heads = "".join(sorted(heads))
        self._telling = sorted(heads | ends)
        self._normalizes = tokenizer.normalizer is not None
        self._changes_letters = self._normalizes and any(map(str.isalnum, self._telling))
        self._alphabet = sorted({letter for form in self._contents.values() for letter in form if not letter.isspace()})
        self._id_of = {content: id for id, content in self._contents.items()}

    def may_occur(self, parts: Iterable[object], rendered: str) -> bool:
        """Return False if no text in messages and tools can be part of a control token; a fast check.

        Args:
            rendered: the parts as rendered by the template.
        """
        if self._changes_letters or (self._normalizes and not rendered.isascii()):
            return True  # normalisation may turn other characters into those of control tokens
        texts, names = _strings(parts)
        joined_texts = "\n".join(itertools.chain(texts, names))
        return any(letter in joined_texts for letter in self._telling) or any(map(self._all.completes, texts))

    def hide(self, parts: tuple[Sequence[object], ...], rendered: str) -> HiddenMessages:
        """Replace characters that can be part of a control token with private-use ones.

        Args:
            parts: messages, tools, and any other inputs of the template.
            rendered: the parts as rendered by the template.

        Raises:
            ModelError: the parts leave too few private-use characters unused, or are nested too deeply.
        """
        # Replacements must occur nowhere in the text, or uncovering would change what a user wrote.
        texts = "".join(itertools.chain([rendered], *_strings(parts)))
        used_letters = set() if texts.isascii() else set(_PRIVATE.findall(texts))
        free = (chr(code) for code in itertools.chain(*_PRIVATE_CODES) if chr(code) not in used_letters)
        table = dict(zip(self._alphabet, free, strict=False))
        if len(table) < len(self._alphabet):
            raise ModelError(
                "the messages use nearly all of Unicode's private-use characters, and control tokens as well",
                hint="send text without private-use characters",
            )
        hiding = _CharacterMask(self._all, self._special, self._heads, table)
        try:
            hidden = tuple(
                [hiding.value(entry, by_model=place == 0 and _is_answer(entry)) for entry in part]
                for place, part in enumerate(parts)
            )
        except RecursionError as error:
            raise ModelError("messages or tools are nested too deeply", hint="send less deeply nested JSON") from error
        return HiddenMessages(hidden, {private: letter for letter, private in table.items()})

    def only_those_of(self, rendered: str, ids: Sequence[int]) -> bool:
        """Return True if the control tokens among the ids are exactly those in the rendered text, in order."""
        # Matches of a regular expression are ambiguous if one token's end can be the next one's beginning.
        if self._all.overlap:
            return False
        rendered_ids = [self._id_of[form] for form in self._all.pattern.findall(rendered)]
        return [id for id in ids if id in self._contents] == rendered_ids

    def encode(self, rendered: str, hidden: HiddenMessages) -> tuple[int, ...]:
        """Return the token ids of rendered hidden messages; text that was hidden yields no control tokens."""
        twin, names, ids = self._twin
        # Two steps, in this order: the template's own tokens get secret names first, so that what is uncovered
        # afterwards, the user's text, cannot read as any of them.
        text = hidden.uncover(self._all.pattern.sub(lambda match: names[match.group()], rendered))
        encoding = twin.encode(text, add_special_tokens=False)
        token_ids: list[int] = []
        # A vocabulary may contain the piece "<think>" as ordinary text merges; spelled in smaller pieces, it is text.
        for token, id in zip(encoding.tokens, encoding.ids, strict=True):
            if id in ids:
                token_ids.append(ids[id])
            elif self._is_vocabulary_of_its_own(token, id):
                token_ids += self._spelled(token)
            else:
                token_ids.append(id)
        return tuple(token_ids)

    @cached_property
    def _twin(self) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int | None, int]]:
        """Copy of the tokenizer with secret names for the control tokens; also names by content, and ids by new id.

        It shares the vocabulary, and otherwise treats text the same: blanks around control tokens, normalisation, and
        the beginning of a text.
        """
        import tokenizers

        twin = tokenizers.Tokenizer(self._tokenizer.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(self._tokenizer, part)) is not None:
                setattr(twin, part, value)
        secret = secrets.token_hex(16)
        names: dict[str, str] = {}
        for id, token in self._added.items():
            # Keep the first and last character, which the neighbouring text may depend on.
            content = token.content
            names[content] = f"{content[0]}{id}x{secret}{content[-1]}" if id in self._contents else content
        # New ids start at the size of the vocabulary, whose own ids may be larger.
        model, first = self._tokenizer.model, self._tokenizer.get_vocab_size(with_added_tokens=False)
        free = first
        while any(model.id_to_token(id) is not None for id in range(free, free + len(names))):
            free += 1
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        renamed_tokens = [
            tokenizers.AddedToken(names[token.content], **{flag: getattr(token, flag) for flag in flags})
            for _, token in sorted(self._added.items())
        ]
        twin.add_tokens([*(f"{secret}{number}" for number in range(free - first)), *renamed_tokens])
        ids = {twin.token_to_id(names[token.content]): id for id, token in self._added.items()}
        return twin, names, ids

    def _is_vocabulary_of_its_own(self, token: str, id: int) -> bool:
        """Return True for a control token that is also in the trained vocabulary; False for the unknown token."""
        return self._contents.get(id) == token and token != getattr(self._tokenizer.model, "unk_token", None)

    def _spelled(self, piece: str) -> list[int]:
        """Return the token ids of a vocabulary piece when spelled with other pieces."""
        token_ids: list[int] = []
        for part in (piece[:1], piece[1:]) if len(piece) > 1 else ():
            for token in self._tokenizer.model.tokenize(part):
                is_whole = self._is_vocabulary_of_its_own(token.value, token.id)
                token_ids += self._spelled(token.value) if is_whole else [token.id]
        return token_ids


class _Forms:
    """Texts of control tokens and their fragments."""

    def __init__(self, contents: Iterable[str]) -> None:
        forms = sorted(contents)
        self.pattern = re.compile(_longest_of(forms) if forms else r"(?!)")
        self._words = {words for form in forms for words in _words_of(form)}
        self._longest = max(map(len, forms), default=0)
        self._beginnings = {form[:length] for form in forms for length in range(1, len(form))}
        # All proper prefixes and suffixes, to find what template text could complete to a control token.
        self._ends = {form[length:] for form in forms for length in range(1, len(form))}
        self.overlap = not self._beginnings.isdisjoint(self._ends)
        """True if one token's suffix can be another's prefix."""

    def completes(self, text: str) -> bool:
        """Return True if a text is a control token or words of one, which a template could write the rest around."""
        return text.strip() in self._words

    def begun_by(self, text: str) -> int:
        """Return the length of the longest suffix of a text that begins a control token."""
        return next((length for length in self._lengths(text) if text[-length:] in self._beginnings), 0)

    def ended_by(self, text: str) -> int:
        """Return the length of the longest prefix of a text that ends a control token."""
        return next((length for length in self._lengths(text) if text[:length] in self._ends), 0)

    def _lengths(self, text: str) -> range:
        return range(min(len(text), self._longest - 1), 0, -1)


class _CharacterMask:
    """Replaces the characters that control tokens need with private-use ones, one for one."""

    def __init__(self, strict: _Forms, special: _Forms, heads: str, table: Mapping[str, str]) -> None:
        self._strict = strict
        self._special = special
        self._heads = {head: table[head] for head in heads}
        self._table = str.maketrans(dict(table))

    def value(self, value: object, *, by_model: bool) -> object:
        """Hide characters in all strings of a value; `by_model`: the model wrote them."""
        if isinstance(value, str):
            return self._text(value, by_model=by_model)
        if isinstance(value, Mapping):
            return {
                self._name(name): self._name(entry)
                if name in _LOOKED_UP and isinstance(entry, str)
                # Arguments of calls are the model's as well, but may quote a page or a user, so all control tokens are
                # text there.
                else self.value(entry, by_model=by_model and name != "tool_calls")
                for name, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return type(value)([self.value(entry, by_model=by_model) for entry in value])
        return value

    def _name(self, name: object) -> object:
        """Hide characters in a name that templates compare: a name that is only a word of a control token stays."""
        return self._mark(self._ends(name, self._strict)) if isinstance(name, str) else name

    def _text(self, text: str, *, by_model: bool) -> str:
        forms = self._special if by_model else self._strict
        if forms.completes(text):
            return text.translate(self._table)
        # The model's own tags, such as <think>, stay tokens; its special tokens, and ends of them, are hidden.
        if by_model:
            return self._ends(forms.pattern.sub(lambda match: match.group().translate(self._table), text), forms)
        return self._mark(self._ends(text, forms))

    def _mark(self, text: str) -> str:
        for head, private in self._heads.items():
            text = text.replace(head, private)
        return text

    def _ends(self, text: str, forms: _Forms) -> str:
        """Hide the ends of a text that the surrounding text could complete; templates may strip blanks."""
        if length := forms.ended_by(bare := text.lstrip()):
            blanks = len(text) - len(bare)
            text = text[:blanks] + bare[:length].translate(self._table) + bare[length:]
        if length := forms.begun_by(bare := text.rstrip()):
            rest = len(bare) - length
            text = text[:rest] + bare[rest:].translate(self._table) + text[len(bare) :]
        return text


def _strings(parts: Iterable[object]) -> tuple[list[str], list[str]]:
    """Return all strings in nested lists and objects: texts, and names (keys and values that templates compare)."""
    texts: list[str] = []
    names: list[str] = []
    # A loop, not recursion: messages may be nested more deeply than Python's stack.
    pending = list(parts)
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict | Mapping):
            names += (name for name in value if isinstance(name, str))
            names += (entry for name in _LOOKED_UP if isinstance(entry := value.get(name), str))
            pending += (entry for name, entry in value.items() if name not in _LOOKED_UP or not isinstance(entry, str))
        elif isinstance(value, list | tuple):
            pending += value
    return texts, names


def _longest_of(forms: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of some texts; its speed hardly depends on their number."""
    # Forms that begin alike share a branch, so each position of the text is tried once and not once per token.
    by_first: dict[str, list[str]] = {}
    is_end = False
    for form in forms:
        is_end = is_end or not form
        if form:
            by_first.setdefault(form[0], []).append(form[1:])
    branches = [re.escape(first) + _longest_of(endings) for first, endings in by_first.items()]
    if not branches:
        return ""
    return branches[0] if len(branches) == 1 and not is_end else f"(?:{'|'.join(branches)})" + "?" * is_end


def _words_of(form: str) -> Iterable[str]:
    """Return all substrings of a control token that split none of its words."""
    inner = (cut for cut in range(1, len(form)) if not (form[cut - 1].isalnum() and form[cut].isalnum()))
    return (form[begin:end] for begin, end in itertools.combinations([0, *inner, len(form)], 2))


def _is_answer(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _is_control(token: tokenizers.AddedToken) -> bool:
    """Return True for special tokens and for added tokens that look like tags, not for blanks and words."""
    content = token.content.strip(" \t\r\n▁")
    if not content or token.special:
        return bool(content)
    return not (content[0].isalnum() or content[-1].isalnum()) and any(map(str.isalnum, content))


def _head(content: str) -> str:
    """Return the first character that distinguishes a control token from words."""
    marks = (letter for letter in content if not (letter.isalnum() or letter.isspace() or letter in "_▁"))
    return next(marks, content[0])
