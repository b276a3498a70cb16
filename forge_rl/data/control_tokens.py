"""Keeps the text of messages apart from the control tokens that their chat template writes."""

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
"""Keys whose values templates compare with names of their own."""
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_PRIVATE_CODES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class Hidden:
    """Messages in which no control token can be read any more: `control.encode(render(*hidden.parts), hidden)`."""

    parts: tuple[object, ...]
    """Messages and tools as they were, but with private characters in place of some."""
    characters: Mapping[str, str]
    """Original character by the private one that stands in its place."""

    def uncover(self, text: str) -> str:
        """Return a text that was rendered of the parts, with the characters that were hidden."""
        for private, character in self.characters.items():
            # JSON that was written in ASCII holds it escaped.
            text = text.replace(private, character).replace(json.dumps(private)[1:-1], character)
        return text


class ControlTokens:
    """Finds out which control tokens of a rendered conversation its template wrote, and encodes it with only those.

    Messages are rendered a second time with characters in place of those that control tokens need; what still reads as
    a control token there was written by the template, also where text of several messages and of the template would
    have come together to form one.

    Control tokens are the special ones, and the added ones that look like tags, such as <think> and <tool_call>. Runs
    of blanks and words that were added to the vocabulary are text. An assistant's message is what the model wrote, so
    tags in it are tokens, and only special tokens are text.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._contents = {id: token.content for id, token in self._added.items() if _is_control(token)}
        special = [token.content for id, token in self._added.items() if token.special and id in self._contents]
        self._all = _Forms(self._contents.values())
        self._special = _Forms(special)
        heads = {_head(content) for content in self._contents.values()}
        ends = {content[at] for content in self._contents.values() for at in (0, -1)}
        self._heads = "".join(sorted(heads))
        self._telling = sorted(heads | ends)
        self._normalizes = tokenizer.normalizer is not None
        self._changes_letters = self._normalizes and any(map(str.isalnum, self._telling))
        self._alphabet = sorted({letter for form in self._contents.values() for letter in form if not letter.isspace()})
        self._id_of = {content: id for id, content in self._contents.items()}

    def may_occur(self, parts: Iterable[object], rendered: str) -> bool:
        """Return False if no text in messages and tools can be part of a control token, which is quick to see.

        Args:
            rendered: what the template makes of them.
        """
        if self._changes_letters or (self._normalizes and not rendered.isascii()):
            return True  # other characters may become those of control tokens
        texts, names = _strings(parts)
        joined = "\n".join(itertools.chain(texts, names))
        return any(letter in joined for letter in self._telling) or any(map(self._all.completes, texts))

    def hide(self, parts: tuple[Sequence[object], ...], rendered: str) -> Hidden:
        """Hide what can be part of a control token.

        Args:
            parts: messages, tools, and what else the template is given.
            rendered: what the template makes of them.

        Raises:
            ModelError: they hold every character that could stand for another, or are nested too deep.
        """
        texts = "".join(itertools.chain([rendered], *_strings(parts)))
        used = set() if texts.isascii() else set(_PRIVATE.findall(texts))
        free = (chr(code) for code in itertools.chain(*_PRIVATE_CODES) if chr(code) not in used)
        table = dict(zip(self._alphabet, free, strict=False))
        if len(table) < len(self._alphabet):
            raise ModelError(
                "the messages hold all of Unicode's private characters, and control tokens beside them",
                hint="send text",
            )
        hiding = _Hiding(self._all, self._special, self._heads, table)
        try:
            hidden = tuple(
                [hiding.value(entry, by_model=place == 0 and _is_answer(entry)) for entry in part]
                for place, part in enumerate(parts)
            )
        except RecursionError as error:
            raise ModelError("messages or tools are nested too deep", hint="send less deeply nested JSON") from error
        return Hidden(hidden, {private: letter for letter, private in table.items()})

    def only_those_of(self, rendered: str, ids: Sequence[int]) -> bool:
        """Return True if the control tokens among some ids are exactly those that a text holds, in their order."""
        if self._all.overlap:
            return False
        written = [self._id_of[form] for form in self._all.pattern.findall(rendered)]
        return [id for id in ids if id in self._contents] == written

    def encode(self, rendered: str, hidden: Hidden) -> tuple[int, ...]:
        """Token ids of what a template made of hidden messages: of what was hidden in them come no control tokens."""
        twin, names, ids = self._twin
        text = hidden.uncover(self._all.pattern.sub(lambda found: names[found.group()], rendered))
        encoding = twin.encode(text, add_special_tokens=False)
        found: list[int] = []
        for token, id in zip(encoding.tokens, encoding.ids, strict=True):
            if id in ids:
                found.append(ids[id])
            elif self._is_vocabulary_of_its_own(token, id):
                found += self._spelled(token)
            else:
                found.append(id)
        return tuple(found)

    @cached_property
    def _twin(self) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int | None, int]]:
        """The tokenizer with other, secret names for the control tokens: names by content, and ids by new id.

        It shares the vocabulary, and differs in nothing else: blanks around control tokens, normalisation and what a
        text begins with are treated as they were.
        """
        import tokenizers

        twin = tokenizers.Tokenizer(self._tokenizer.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(self._tokenizer, part)) is not None:
                setattr(twin, part, value)
        secret = secrets.token_hex(16)
        names: dict[str, str] = {}
        for id, token in self._added.items():
            # Its neighbours see the same characters.
            content = token.content
            names[content] = f"{content[0]}{id}x{secret}{content[-1]}" if id in self._contents else content
        # New ids follow the number of the vocabulary's, some of which may be larger.
        model, first = self._tokenizer.model, self._tokenizer.get_vocab_size(with_added_tokens=False)
        free = first
        while any(model.id_to_token(id) is not None for id in range(free, free + len(names))):
            free += 1
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        renamed = [
            tokenizers.AddedToken(names[token.content], **{flag: getattr(token, flag) for flag in flags})
            for _, token in sorted(self._added.items())
        ]
        twin.add_tokens([*(f"{secret}{number}" for number in range(free - first)), *renamed])
        ids = {twin.token_to_id(names[token.content]): id for id, token in self._added.items()}
        return twin, names, ids

    def _is_vocabulary_of_its_own(self, token: str, id: int) -> bool:
        """Return True for a control token that is in the trained vocabulary too, and not for an unknown character."""
        return self._contents.get(id) == token and token != getattr(self._tokenizer.model, "unk_token", None)

    def _spelled(self, piece: str) -> list[int]:
        """Token ids of a piece of the vocabulary, as the vocabulary has it without that piece."""
        found: list[int] = []
        for part in (piece[:1], piece[1:]) if len(piece) > 1 else ():
            for token in self._tokenizer.model.tokenize(part):
                whole = self._is_vocabulary_of_its_own(token.value, token.id)
                found += self._spelled(token.value) if whole else [token.id]
        return found


class _Forms:
    """Texts of control tokens, and pieces of them."""

    def __init__(self, contents: Iterable[str]) -> None:
        known = sorted(contents)
        self.pattern = re.compile(_longest_of(known) if known else r"(?!)")
        self._words = {words for form in known for words in _words_of(form)}
        self._longest = max(map(len, known), default=0)
        self._beginnings = {form[:length] for form in known for length in range(1, len(form))}
        self._ends = {form[length:] for form in known for length in range(1, len(form))}
        self.overlap = not self._beginnings.isdisjoint(self._ends)
        """True if the end of one can be the beginning of another."""

    def completes(self, text: str) -> bool:
        """Return True if a text is one of them or some words of one: a template could write the rest around it."""
        return text.strip() in self._words

    def begun_by(self, text: str) -> int:
        """Length of the longest end of a text that begins one of them."""
        return next((length for length in self._lengths(text) if text[-length:] in self._beginnings), 0)

    def ended_by(self, text: str) -> int:
        """Length of the longest beginning of a text that ends one of them."""
        return next((length for length in self._lengths(text) if text[:length] in self._ends), 0)

    def _lengths(self, text: str) -> range:
        return range(min(len(text), self._longest - 1), 0, -1)


class _Hiding:
    """Puts private characters in place of those that control tokens need, one for one."""

    def __init__(self, strict: _Forms, special: _Forms, heads: str, table: Mapping[str, str]) -> None:
        self._strict = strict
        self._special = special
        self._heads = {head: table[head] for head in heads}
        self._table = str.maketrans(dict(table))

    def value(self, value: object, *, by_model: bool) -> object:
        """Hide in all strings of a value; `by_model`: the model wrote them."""
        if isinstance(value, str):
            return self._text(value, by_model=by_model)
        if isinstance(value, Mapping):
            return {
                self._name(name): self._name(entry)
                if name in _LOOKED_UP and isinstance(entry, str)
                else self.value(entry, by_model=by_model and name != "tool_calls")
                for name, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return type(value)([self.value(entry, by_model=by_model) for entry in value])
        return value

    def _name(self, name: object) -> object:
        """Hide in a word that templates know, so that it is not hidden for lying within a control token."""
        return self._mark(self._ends(name, self._strict)) if isinstance(name, str) else name

    def _text(self, text: str, *, by_model: bool) -> str:
        forms = self._special if by_model else self._strict
        if forms.completes(text):
            return text.translate(self._table)
        if by_model:
            return self._ends(forms.pattern.sub(lambda found: found.group().translate(self._table), text), forms)
        return self._mark(self._ends(text, forms))

    def _mark(self, text: str) -> str:
        for head, private in self._heads.items():
            text = text.replace(head, private)
        return text

    def _ends(self, text: str, forms: _Forms) -> str:
        """Hide ends of a text that what stands around it could complete; templates may strip blanks."""
        if length := forms.ended_by(bare := text.lstrip()):
            blanks = len(text) - len(bare)
            text = text[:blanks] + bare[:length].translate(self._table) + bare[length:]
        if length := forms.begun_by(bare := text.rstrip()):
            rest = len(bare) - length
            text = text[:rest] + bare[rest:].translate(self._table) + text[len(bare) :]
        return text


def _strings(parts: Iterable[object]) -> tuple[list[str], list[str]]:
    """All strings in nested lists and objects: texts, and names, which are keys and what templates compare."""
    texts: list[str] = []
    names: list[str] = []
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
    """Regular expression for the longest of some texts; their number makes hardly any difference to its speed."""
    by_first: dict[str, list[str]] = {}
    is_end = False
    for form in forms:
        is_end = is_end or not form
        if form:
            by_first.setdefault(form[0], []).append(form[1:])
    branches = [re.escape(first) + _longest_of(rest) for first, rest in by_first.items()]
    if not branches:
        return ""
    return branches[0] if len(branches) == 1 and not is_end else f"(?:{'|'.join(branches)})" + "?" * is_end


def _words_of(form: str) -> Iterable[str]:
    """All parts of a control token that cut no word of it in two."""
    inner = (cut for cut in range(1, len(form)) if not (form[cut - 1].isalnum() and form[cut].isalnum()))
    return (form[begin:end] for begin, end in itertools.combinations([0, *inner, len(form)], 2))


def _is_answer(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _is_control(token: tokenizers.AddedToken) -> bool:
    """Return True for special tokens, and for others that look like tags: not for blanks and words."""
    content = token.content.strip(" \t\r\n▁")
    if not content or token.special:
        return bool(content)
    return not (content[0].isalnum() or content[-1].isalnum()) and any(map(str.isalnum, content))


def _head(content: str) -> str:
    """The first character by which a control token differs from words."""
    marks = (letter for letter in content if not (letter.isalnum() or letter.isspace() or letter in "_▁"))
    return next(marks, content[0])
