"""The tokenizer: the only place where text becomes tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.errors import ModelError
from forge_rl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ANSWER = "ANSWER-0b7e5c"
"""Stands for an answer of the model where its place in a rendered conversation is looked for."""


class Tokenizer:
    """Chat messages to token ids and back, by the chat template of a model.

    Args:
        folder: model folder in Hugging Face's layout.

    Raises:
        ModelError: the folder holds no tokenizer, or it has no chat template.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.folder = folder
        try:
            self._hf = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(
                f"cannot load a tokenizer from {folder}: {cause}", hint="name a folder that holds a tokenizer"
            ) from error
        if self._hf.chat_template is None:
            raise ModelError(
                f"the model in {folder} has no chat template, so messages cannot be shown to it",
                hint="take an instruction-tuned model, or put a chat_template.jinja into the folder",
            )

    def __repr__(self) -> str:
        return f"Tokenizer({str(self.folder)!r}, vocab_size={self.vocab_size}, stop_ids={self.stop_ids})"

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation, by default up to where the model is to answer.

        Args:
            messages: the conversation.
            add_generation_prompt: end with the opening of an assistant's turn.
            tools: JSON schemas of the tools that the model may call, for templates that show them.

        Raises:
            ModelError: the template refuses these messages.
        """
        return self._encode(self._text(messages, add_generation_prompt=add_generation_prompt, tools=tools))

    def extend(
        self,
        ids: Sequence[int],
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        calls: Sequence[Mapping[str, object]] = (),
    ) -> tuple[int, ...]:
        """A finished turn and new messages, up to where the model is to answer again.

        Starts with `ids` as they are: what the engine produced is never tokenised again, so turns join by exact prefix.

        Args:
            ids: everything up to and with the model's answer. When it does not end with a stop token (it was cut by a
                token limit), the template's own end of turn is added.
            messages: what came after it, such as a tool's output or a user's reply.
            tools: as in render.
            calls: names of the answer's tool calls with their ids, {"id": ..., "function": {"name": ...}}, for
                templates that want to see a call before its output.

        Raises:
            ModelError: the template refuses these messages, or drops the answer before them.
        """
        after = self._after_calls(messages, tools, calls) if calls else None
        if after is None:
            answer = {"role": "assistant", "content": _ANSWER}
            after = self._after({"role": "user", "content": "?"}, answer, *messages, tools=tools)
        if after is None:
            raise ModelError(
                f"the chat template of {self.folder} drops an earlier answer, so a conversation cannot go on",
                hint="take a model whose template keeps all turns",
            )
        delta = self._encode(after)
        end = next((index for index, token in enumerate(delta) if token in self.stop_ids), None)
        if end is not None:
            # Up to `end` is what the template puts behind an answer; a stopped answer has that already.
            delta = delta[end + 1 :] if ids and ids[-1] in self.stop_ids else delta[end:]
        return (*ids, *delta)

    def encode(self, text: str, *, add_special: bool = False) -> tuple[int, ...]:
        """Token ids of a bare text; special tokens that the model wants around one, such as BOS, only if asked for."""
        return tuple(self._hf(text, add_special_tokens=add_special)["input_ids"])

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids, by default without special tokens such as the end of a turn."""
        return self._hf.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def text_stream(self, prompt_ids: Sequence[int], *, skip_special: bool = True) -> TextStream:
        """Turns the tokens of one answer to that prompt into text as they come."""
        return TextStream(self._hf, prompt_ids, skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for: of a character that is split over tokens, its own part."""
        piece = self._hf.convert_ids_to_tokens(token)
        if piece is None:  # the model has more logits than the tokenizer has tokens
            return b""
        if token not in self._added and self._byte_level and all(letter in self._byte_of for letter in piece):
            return bytes(self._byte_of[letter] for letter in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return self.decode([token], skip_special=False).encode()

    @property
    def hf(self) -> PreTrainedTokenizerFast:
        """The tokenizer of transformers, for parsers that want its vocabulary."""
        return self._hf

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the chat template shows the model its tools, and the calls that it made."""
        probe = "probe_5e1c"
        call = {"id": "call00001", "type": "function", "function": {"name": probe, "arguments": {}}}
        tool = {"type": "function", "function": {"name": probe, "description": "", "parameters": {"type": "object"}}}
        user: Message = {"role": "user", "content": "?"}
        try:
            tools_shown = probe in self._text([user], add_generation_prompt=True, tools=[tool])
            called = [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
            return tools_shown and probe in self._text(called, add_generation_prompt=False, tools=None)
        except ModelError:
            return False

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the union of what generation config, config and tokenizer name, ascending."""
        named = [self._setting("generation_config.json", "eos_token_id"), self._setting("config.json", "eos_token_id")]
        found = {self._hf.eos_token_id}
        for value in named:
            found |= set(value) if isinstance(value, list) else {value}
        return tuple(sorted(token for token in found if isinstance(token, int)))

    @cached_property
    def vocab_size(self) -> int:
        """V: the number of logits of the model, which may exceed the number of known tokens."""
        size = self._setting("config.json", "vocab_size")
        return size if isinstance(size, int) else len(self._hf)

    @property
    def pad_id(self) -> int:
        """Fills the ends of rows. It may equal a stop token: never make a mask by comparing with it."""
        if self._hf.pad_token_id is not None:
            return self._hf.pad_token_id
        return self.stop_ids[0] if self.stop_ids else 0

    def _after_calls(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        calls: Sequence[Mapping[str, object]],
    ) -> str | None:
        """What the template puts behind an answer that ends with tool calls; None if that cannot be told."""
        # The last call's argument marks the place. What the template puts behind it inside the answer is cut off with
        # the end of turn, so there must be one.
        function = calls[-1]["function"]
        assert isinstance(function, Mapping)
        marked = {**calls[-1], "function": {**function, "arguments": {"at": _ANSWER}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], marked]}
        try:
            after = self._after({"role": "user", "content": "?"}, answer, *messages, tools=tools)
        except ModelError:
            return None
        if after is None:
            return None
        ends = [at for token in self.stop_ids if (at := after.find(self._hf.convert_ids_to_tokens(token) or "\0")) >= 0]
        return after[min(ends) :] if ends else None

    def _after(self, *messages: Mapping[str, object], tools: Sequence[Mapping[str, object]] | None) -> str | None:
        """What the template puts behind the marked answer; None if it drops the answer."""
        _, found, after = self._text(messages, add_generation_prompt=True, tools=tools).partition(_ANSWER)
        return after if found else None

    def _text(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None,
    ) -> str:
        from jinja2 import TemplateError

        try:
            return self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (TemplateError, TypeError) as error:  # TypeError: it joined to a text what is none
            roles = [message.get("role") for message in messages]
            raise ModelError(
                f"the chat template of {self.folder} refuses messages with the roles {roles}: {error}",
                hint="change the messages, or the model's chat_template.jinja",
            ) from error

    def _encode(self, text: str) -> tuple[int, ...]:
        # The template writes all special tokens itself; adding them here would give a second BOS.
        return self.encode(text)

    @cached_property
    def _added(self) -> frozenset[int]:
        """Tokens beside the trained vocabulary, which stand for themselves."""
        return frozenset(self._hf.added_tokens_decoder)

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in str(self._hf.backend_tokenizer.decoder)

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Byte by the letter that byte-level vocabularies write for it: printable ones are themselves (GPT-2)."""
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [byte for byte in range(256) if byte not in plain]
        return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(rest)}

    def _setting(self, file: str, key: str) -> object:
        path = self.folder / file
        if not path.is_file():
            return None
        settings = json.loads(path.read_text())
        return settings.get(key, settings.get("text_config", {}).get(key))


class TextStream:
    """Text of one answer, token by token: a character that is split over tokens comes with its last one."""

    def __init__(self, hf: PreTrainedTokenizerFast, prompt_ids: Sequence[int], skip_special: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = hf.backend_tokenizer
        self._fresh = lambda ids: DecodeStream(ids=ids, skip_special_tokens=skip_special)
        # Whether a word begins with a blank depends on what was there before.
        self._stream = self._fresh(list(prompt_ids[-8:]))

    def add(self, token: int) -> str:
        """What a token adds to the text."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:
            # Bytes that form no character can make it lose its place (vLLM's issue 17448).
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            self._stream = self._fresh([])
            return self._stream.step(self._tokenizer, token) or ""
