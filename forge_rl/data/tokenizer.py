"""The tokenizer: the only place where text becomes tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from forge_rl.errors import ModelError
from forge_rl.types import Message

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
                f"cannot load a tokenizer from {folder}: {cause}", mend="name a folder that holds a tokenizer"
            ) from error
        if self._hf.chat_template is None:
            raise ModelError(
                f"the model in {folder} has no chat template, so messages cannot be shown to it",
                mend="take an instruction-tuned model, or put a chat_template.jinja into the folder",
            )

    def __repr__(self) -> str:
        return f"Tokenizer({str(self.folder)!r}, vocab_size={self.vocab_size}, stop_ids={self.stop_ids})"

    def render(
        self,
        messages: Sequence[Message],
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

    def extend(self, ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """A finished turn and new messages, up to where the model is to answer again.

        Starts with `ids` as they are: what the engine produced is never tokenised again, so turns join by exact prefix.

        Args:
            ids: everything up to and with the model's answer. When it does not end with a stop token (it was cut by a
                token limit), the template's own end of turn is added.
            messages: what came after it, such as a tool's output or a user's reply.

        Raises:
            ModelError: the template refuses these messages, or drops the answer before them.
        """
        shown = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}, *messages]
        _, found, after = self._text(shown, add_generation_prompt=True, tools=None).partition(_ANSWER)
        if not found:
            raise ModelError(
                f"the chat template of {self.folder} drops an earlier answer, so a conversation cannot go on",
                mend="take a model whose template keeps all turns",
            )
        delta = self._encode(after)
        end = next((index for index, token in enumerate(delta) if token in self.stop_ids), None)
        if end is not None:
            # Up to `end` is what the template puts behind an answer; a stopped answer has that already.
            delta = delta[end + 1 :] if ids and ids[-1] in self.stop_ids else delta[end:]
        return (*ids, *delta)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids, by default without special tokens such as the end of a turn."""
        return self._hf.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

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

    def _text(
        self,
        messages: Sequence[Message],
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
        except TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise ModelError(
                f"the chat template of {self.folder} refuses messages with the roles {roles}: {error}",
                mend="change the messages, or the model's chat_template.jinja",
            ) from error

    def _encode(self, text: str) -> tuple[int, ...]:
        # The template writes all special tokens itself; adding them here would give a second BOS.
        return tuple(self._hf(text, add_special_tokens=False)["input_ids"])

    def _setting(self, file: str, key: str) -> object:
        path = self.folder / file
        if not path.is_file():
            return None
        settings = json.loads(path.read_text())
        return settings.get(key, settings.get("text_config", {}).get(key))
