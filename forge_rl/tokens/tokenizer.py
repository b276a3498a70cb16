"""Tokenizer: the only place where text becomes tokens."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from forge_rl.errors import ModelError
from forge_rl.token_arrays import TokenIds
from forge_rl.tokens.call_ids import CallIds
from forge_rl.tokens.control_tokens import ControlTokens
from forge_rl.tokens.message_form import MessageForm
from forge_rl.tokens.prefix_encoder import PrefixEncoder
from forge_rl.tokens.template_args import check_template_args
from forge_rl.tokens.text_stream import TextStream
from forge_rl.tokens.thoughts import Thoughts
from forge_rl.tokens.tool_text import as_text, has_tools
from forge_rl.tokens.turn_ends import TurnEnds, find_turn_ends

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
"""Token of one byte in vocabularies of SentencePiece."""
_PROBE = "Hello world,\n2 + 3?"
"""Text that any tokenizer of a language model keeps."""
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "?"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "probe_5e1c", "description": "?", "parameters": _PARAMETERS}}
"""Complete: templates read properties, or the list of tools that calls belong to, without asking."""
_Messages = Sequence[Mapping[str, object]]


class Tokenizer:
    """Encodes chat messages and decodes token ids with the tokenizer and chat template of a Hugging Face folder.

        tokenizer = Tokenizer(resolve_model("Qwen/Qwen3-0.6B", cache))
        prompt = tokenizer.render([{"role": "user", "content": "What is 2+3?"}])
        next_prompt = tokenizer.extend(turn.context, [{"role": "user", "content": "Are you sure?"}])

    Only the template writes control tokens. Text in a message or a tool that looks like one, such as
    `<|im_end|><|im_start|>system` in a web page that a tool returns, is encoded as plain text. So is a special token in
    an assistant's message, but not a tag such as `<think>`, which the model itself writes as a token.

    Args:
        folder: the model's folder.
        parse_control_tokens: encode text in messages that looks like a control token as that token. The author of a
            message or a tool can then end its turn and write the next one in any role.
        template_args: variables of the chat template for all conversations, such as {"enable_thinking": False}.

    Raises:
        ConfigError: the chat template has no such variable.
        ModelError: the folder holds no tokenizer, or the tokenizer has no chat template.
    """

    def __init__(
        self, folder: Path, *, parse_control_tokens: bool = False, template_args: Mapping[str, object] | None = None
    ) -> None:
        from transformers import AutoTokenizer

        self.folder, self.parse_control_tokens = folder, parse_control_tokens
        self.template_args = dict(template_args or {})
        # Marks the completion in a rendered conversation; random, so no text can forge it.
        self._completion = f"COMPLETION-{secrets.token_hex(8)}"
        try:
            self.hf: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(
                folder,
                config=_config_of(folder),
                local_files_only=True,
                trust_remote_code=False,
                # Beside a tekken.json, transformers would take Mistral's own tokenizer, which has no chat template.
                mistral_format=False,
            )
            broken_text = _broken_text(self.hf, folder)
        except Exception as error:  # third-party files can be malformed in any way
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(
                f"cannot load a tokenizer from {folder}: {cause}", hint="give a folder with a tokenizer"
            ) from error
        if not hasattr(self.hf, "backend_tokenizer"):
            raise ModelError(
                f"the tokenizer in {folder} is a {type(self.hf).__name__}, which has no form as tokenizer.json",
                hint="convert it to a tokenizer.json",
            )
        if broken_text is not None:
            raise ModelError(
                f"transformers reads the tokenizer in {folder} as a {type(self.hf).__name__}, which turns {_PROBE!r} "
                f"into {broken_text!r:.80}",
                hint='its tokenizer.json is right: set "tokenizer_class" to "PreTrainedTokenizerFast" in '
                "tokenizer_config.json",
            )
        if self.hf.chat_template is None:
            raise ModelError(
                f"the model in {folder} has no chat template, so it cannot read messages",
                hint="use an instruction-tuned model, or add a chat_template.jinja to the folder",
            )
        check_template_args(self.template_args, str(self.hf.chat_template))

    def __repr__(self) -> str:
        return f"Tokenizer({str(self.folder)!r}, vocab_size={self.vocab_size}, stop_ids={self.stop_ids})"

    def pieces(self) -> list[bytes]:
        """Return the bytes that each token id stands for, which need not be whole characters."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        decoder = getattr(getattr(self.hf, "backend_tokenizer", None), "decoder", None)
        is_bytes = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        letters = {letter: byte for byte, letter in bytes_to_unicode().items()} if is_bytes else {}
        added_tokens = self.hf.added_tokens_decoder

        def piece(token: int, text: str) -> bytes:
            if token not in added_tokens and letters and all(letter in letters for letter in text):
                return bytes(letters[letter] for letter in text)
            if token not in added_tokens and (byte := _BYTE_PIECE.fullmatch(text)):
                return bytes([int(byte[1], 16)])
            return (text if letters else text.replace("\u2581", " ")).encode("utf-8", "replace")

        texts = {token: text for text, token in self.hf.get_vocab().items()}
        return [piece(token, texts.get(token, "")) for token in range(max(texts) + 1)]

    def render(
        self,
        messages: _Messages,
        *,
        add_generation_prompt: bool = True,
        tools: _Messages | None = None,
        settings: Mapping[str, object] | None = None,
        encoder: PrefixEncoder | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation, by default up to where the completion begins.

        Args:
            add_generation_prompt: end with the opening of an assistant's turn.
            tools: JSON schemas of the tools that the model may call; passed as text to templates without tools.
            settings: other variables of the template, which override `template_args`; never user text.
            encoder: of `prefix_encoder`; spares encoding what the conversation rendered before had too.

        Raises:
            ModelError: the template refuses these messages, or they hold a lone surrogate.
        """
        if not has_tools(messages, tools or ()) or self.shows_tools:
            messages = self.call_ids.renamed(self.message_form.with_arguments(messages))
        else:
            messages, tools = as_text(messages, tools or (), in_question=not self.takes_system), None

        def text(messages: _Messages, tools: _Messages) -> str:
            return self.text(messages, add_generation_prompt=add_generation_prompt, tools=tools, settings=settings)

        ids = self._encode_rendered(text, messages, tools or (), encoder=encoder)
        assert ids is not None
        return ids

    def prefix_encoder(self) -> PrefixEncoder:
        """Return an encoder for conversations that are rendered one after another and begin alike."""
        return PrefixEncoder(self.hf.backend_tokenizer, self.encode)

    def extend(
        self,
        ids: TokenIds,
        messages: _Messages,
        *,
        tools: _Messages | None = None,
        calls: _Messages = (),
        settings: Mapping[str, object] | None = None,
    ) -> npt.NDArray[np.int32]:
        """Append new messages, such as a tool's output, to a finished turn, up to where the next completion begins.

        The result starts with `ids` unchanged: the engine's output is never retokenised, so each turn is an exact
        prefix of the next. Only a stop token that is not the one that the template writes there, such as gpt-oss's
        <|return|>, makes way for the template's, so that histories have one end a turn, as in training.

        Args:
            ids: all tokens up to and including the completion. If they do not end with a stop token (the completion
                was truncated at a token limit), the template's end of turn is added.
            calls: names and ids of the completion's tool calls, {"id": ..., "function": {"name": ...}}, for templates
                that require a call before its output.
            settings: other variables of the template, as for `render`.

        Raises:
            ModelError: the template refuses these messages, they hold a lone surrogate, or the template drops the
                completion before them.
        """
        tools = tools or ()
        if (calls or has_tools(messages, tools)) and not self.shows_tools:
            messages, tools, calls = as_text(messages, ()), (), ()
        elif calls:
            turn, *messages = self.call_ids.renamed([{"role": "assistant", "tool_calls": calls}, *messages])
            calls = cast(_Messages, turn["tool_calls"])
        else:
            messages = self.call_ids.renamed(messages)
        render = partial(self._after_completion, settings=settings)
        # With the calls if the template can show them, as some refuse a tool's output that no call asked for.
        delta = self._encode_rendered(render, messages, tools, calls) if calls else None
        if delta is None:
            if any(message.get("role") == "tool" for message in messages) and self._drops_outputs:
                raise ModelError(
                    f"the chat template of {self.folder} leaves out a tool's output unless the call before it is known "
                    "and ends with a stop token",
                    hint="name the token that ends calls in the eos_token_id of generation_config.json",
                )
            delta = self._encode_rendered(render, messages, tools, ())
        if delta is None:
            raise ModelError(
                f"the chat template of {self.folder} drops earlier completions, so a conversation cannot continue",
                hint="use a model whose template keeps all turns",
            )
        end = next((index for index, token in enumerate(delta) if token in self._closing_ids), None)
        if end is not None:
            # `delta` up to and including `end` closes the completion; one that stopped with that token contains it.
            has_stopped = len(ids) > 0 and ids[-1] in self.stop_ids
            if has_stopped and ids[-1] == delta[end]:
                delta = delta[end + 1 :]
            else:
                ids, delta = ids[:-1] if has_stopped else ids, delta[end:]
        return np.concatenate([np.asarray(ids, np.int32), np.asarray(delta, np.int32)])

    def encode(self, text: str, *, add_special: bool = False) -> tuple[int, ...]:
        """Return the token ids of raw text; `add_special` adds the BOS etc., which templates write themselves.

        Text that looks like a control token becomes one: the author of raw text also writes the template's part.

        Raises:
            ModelError: the text holds a lone surrogate, or becomes a token that the model has no embedding of.
        """
        if not text.isascii() and (lone := _LONE_SURROGATE.search(text)):
            raise ModelError(
                f"the text has a lone surrogate, U+{ord(lone.group()):04X}, which stands for no character",
                hint="decode the text with errors='replace'",
            )
        ids = tuple(self.hf(text, add_special_tokens=add_special)["input_ids"])
        if ids and max(ids) >= self.vocab_size:
            raise ModelError(
                f"{self.hf.convert_ids_to_tokens(max(ids))!r:.80} is token {max(ids)} of the tokenizer in "
                f"{self.folder}, and the model has embeddings of {self.vocab_size} tokens",
                hint="use the model's own tokenizer, or resize its embeddings and save it again",
            )
        return ids

    def decode(self, ids: TokenIds, skip_special: bool = True) -> str:
        """Return the text of token ids, by default without special tokens such as the end of a turn."""
        text: str = self.hf.decode(
            np.asarray(ids).tolist(), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text

    def tagged(self, ids: TokenIds) -> str:
        """Return the text of token ids with the special tokens that a model writes within its turn, such as the tags
        of tool calls in Mistral's and DeepSeek's formats, and without those that frame turns."""
        ids = np.asarray(ids)
        is_shown = ~np.isin(ids, np.asarray(self.hf.all_special_ids)) | np.isin(ids, self._tag_ids)
        return self.decode(ids[is_shown], skip_special=False)

    def tagged_text(self, ids: TokenIds, text: str) -> str:
        """Return the `tagged` text of a completion.

        Args:
            text: the completion without special tokens; a stop string may have cut it.
        """
        if self.thoughts.is_harmony or not np.isin(np.asarray(ids), self._tag_ids).any():
            return text
        tagged, plain = self.tagged(ids), self.decode(ids)
        # Cut at the same distance from the end as the plain text was by a stop string.
        return tagged[: len(tagged) - len(plain) + len(text)] if plain.startswith(text) else tagged

    def text_stream(self, prompt_ids: TokenIds, *, skip_special: bool = True) -> TextStream:
        """Return a decoder of one completion of the prompt, token by token."""
        return TextStream(self.hf, prompt_ids, skip_special)

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes, which may be part of a character that is split over tokens."""
        piece = self.hf.convert_ids_to_tokens(token)
        if piece is None:  # the model has more logits than the tokenizer has tokens
            return b""
        if token not in self._added and all(letter in self._byte_of for letter in piece):
            return bytes(self._byte_of[letter] for letter in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return self.decode([token], skip_special=False).encode()

    @cached_property
    def shows_tools(self) -> bool:
        """True if the chat template renders tools and tool calls."""
        try:
            shown_text = self.text([{"role": "user", "content": "?"}], add_generation_prompt=True, tools=[_TOOL])
        except ModelError:
            return False
        return "probe_5e1c" in shown_text and self.call_ids.form is not None

    @cached_property
    def call_ids(self) -> CallIds:
        """Writes ids of calls as the chat template takes them."""
        return CallIds(partial(self.text, add_generation_prompt=False, tools=[_TOOL]))

    @cached_property
    def takes_system(self) -> bool:
        """True if the chat template renders system messages, which Gemma 2's refuses."""
        probe = "probe_3b9d"
        messages = [{"role": "system", "content": probe}, {"role": "user", "content": "?"}]
        try:
            return probe in self.text(messages, add_generation_prompt=True)
        except ModelError:
            return False

    @cached_property
    def _drops_outputs(self) -> bool:
        """True if the chat template leaves out a tool's output that follows no call, as Gemma 4's does."""
        probe = "probe_6f4a"
        output = {"role": "tool", "content": probe, "tool_call_id": self.call_ids.new("probe", 0), "name": "probe"}
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}, output]
        try:
            return probe not in self.text(messages, add_generation_prompt=True)
        except ModelError:  # it refuses it instead
            return False

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a completion, by the model's settings or its chat template."""
        stop_id = self.added_stop
        return tuple(sorted({*self.configured_stop_ids, *(() if stop_id is None else (stop_id,))}))

    @cached_property
    def configured_stop_ids(self) -> tuple[int, ...]:
        """Union of the ids that generation config, config and tokenizer name, ascending."""
        tokens = {self.hf.eos_token_id}
        for file in ("generation_config.json", "config.json"):
            value = self._setting(file, "eos_token_id")
            tokens |= set(value) if isinstance(value, list) else {value}
        return tuple(sorted(token for token in tokens if isinstance(token, int)))

    @cached_property
    def turn_ends(self) -> TurnEnds:
        """Tokens with which the chat template ends the assistant's turns."""
        return find_turn_ends(partial(self.text, add_generation_prompt=False), self.encode, self.control.ids)

    @property
    def added_stop(self) -> int | None:
        """The template's end of a turn if no setting of the model names it, as of some base models."""
        return None if self.turn_ends.trained in self.configured_stop_ids else self.turn_ends.trained

    @cached_property
    def message_form(self) -> MessageForm:
        """Writes messages as the chat template reads them."""
        return MessageForm(partial(self.text, add_generation_prompt=False), self.thoughts.tags)

    @cached_property
    def thoughts(self) -> Thoughts:
        """Tells thoughts from answers in completions."""
        return Thoughts(self.hf, self.stop_ids)

    @cached_property
    def _tag_ids(self) -> npt.NDArray[np.int64]:
        """Special tokens that do not frame turns: the template writes none of them around plain messages."""
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "."}
        framing = {self.hf.bos_token_id, self.hf.eos_token_id, self.hf.pad_token_id, self.hf.unk_token_id}
        framing |= {self.pad_id, *self.stop_ids}
        for messages in (
            [question, answer, question],
            [{"role": "system", "content": "."}, question, answer, question],
        ):
            with contextlib.suppress(ModelError):  # some templates take no system message
                framing |= set(self.render(messages))
        tags = {self.hf.convert_tokens_to_ids(tag) for tag in self.thoughts.tags}
        return np.asarray(sorted(set(self.hf.all_special_ids) - (framing - tags)), np.int64)

    @cached_property
    def pad_id(self) -> int | None:
        """Token id that the model's config declares as padding."""
        value = self._setting("config.json", "pad_token_id")
        return value if isinstance(value, int) else None

    @cached_property
    def vocab_size(self) -> int:
        """Number of the model's logits, V, which may exceed the tokenizer's number of tokens."""
        size = self._setting("config.json", "vocab_size")
        return size if isinstance(size, int) else 1 + max(self.hf.get_vocab().values())  # ids may have gaps

    @cached_property
    def model_type(self) -> str:
        """Model family as named in config.json; "" if there is none."""
        return str(self._setting("config.json", "model_type") or "")

    def _encode_rendered(
        self, render: Callable[..., str | None], *inputs: _Messages, encoder: PrefixEncoder | None = None
    ) -> tuple[int, ...] | None:
        """Return the token ids of rendered messages and tools, with control tokens only from the template; None if
        `render` returns None."""
        parts = tuple(map(list, inputs))
        text = render(*parts)
        if text is None:
            return None
        ids = self.encode(text) if encoder is None else encoder(text)
        if self.parse_control_tokens or not self.control.may_occur(parts, text):
            return ids
        # The slow path, a second rendering, is taken only if text in a message could read as a control token.
        hidden = self.control.hide(parts, text)
        rendered = text if hidden.parts == parts else render(*hidden.parts)
        if rendered is None:
            return None
        return ids if self.control.only_those_of(rendered, ids) else self.control.encode(rendered, hidden)

    def _after_completion(
        self, messages: _Messages, tools: _Messages, calls: _Messages, *, settings: Mapping[str, object] | None
    ) -> str | None:
        """Return the rendered text after a completion with these tool calls; None if the template drops the completion,
        or does not render the end of one with calls."""
        completion: dict[str, object] = {"role": "assistant", "content": self._completion}
        if calls:
            # The marker is the last call's argument. The rest of the completion after it is cut off by searching for
            # the end of turn, so there must be one.
            function = calls[-1]["function"]
            assert isinstance(function, Mapping)
            marked_call = {**calls[-1], "function": {**function, "arguments": {"at": self._completion}}}
            completion |= {"content": "", "tool_calls": [*calls[:-1], marked_call]}
        conversation: _Messages = [{"role": "user", "content": "?"}, completion, *messages]
        try:
            text = self.text(conversation, add_generation_prompt=True, tools=tools, settings=settings)
        except ModelError:
            if calls:
                return None
            raise
        _, marker, rest_text = text.partition(self._completion)
        if not calls:
            return rest_text if marker else None
        names = map(self.hf.convert_ids_to_tokens, self._closing_ids)
        ends = [place for name in names if (place := rest_text.find(name or "\0")) >= 0]
        return rest_text[min(ends) :] if ends else None

    def text(
        self,
        messages: _Messages,
        *,
        add_generation_prompt: bool,
        tools: _Messages | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> str:
        """Return the text that the chat template renders; arguments as for `render`.

        Raises:
            ModelError: the template refuses these messages.
        """
        try:
            text: str = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.template_args | dict(settings or {}),
            )
            return text
        except Exception as error:  # templates can raise anything, for example for values that are not JSON
            roles = [message.get("role") for message in messages]
            raise ModelError(
                f"the chat template of {self.folder} refuses messages with the roles {roles}: {error}",
                hint="change the messages, or the model's chat_template.jinja",
            ) from error

    @cached_property
    def control(self) -> ControlTokens:
        """Control tokens of the vocabulary."""
        return ControlTokens(self.hf.backend_tokenizer)

    @cached_property
    def _closing_ids(self) -> tuple[int, ...]:
        """Ids of tokens that end the assistant's turns in a history."""
        return tuple(token for token in (*self.stop_ids, self.turn_ends.inner) if token is not None)

    @cached_property
    def _added(self) -> frozenset[int]:
        """Ids of tokens added to the trained vocabulary, whose text is literal."""
        return frozenset(self.hf.added_tokens_decoder)

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Byte for each character of a byte-level vocabulary (GPT-2); empty for other vocabularies."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_level = "ByteLevel" in str(self.hf.backend_tokenizer.decoder)
        return {letter: byte for byte, letter in bytes_to_unicode().items()} if byte_level else {}

    def _setting(self, file: str, key: str) -> object:
        path = self.folder / file
        if not path.is_file():
            return None
        settings = json.loads(path.read_text())
        return settings.get(key, settings.get("text_config", {}).get(key))


def _broken_text(hf: PreTrainedTokenizerFast, folder: Path) -> str | None:
    """Return what transformers' class of the tokenizer makes of a text that its tokenizer.json keeps; None if it keeps
    it, too.

    `resolve_model` corrects the class; transformers ignores tokenizer_class for some types of models.
    """
    import tokenizers

    path, backend = folder / "tokenizer.json", getattr(hf, "backend_tokenizer", None)
    if backend is None or not path.is_file() or (text := _round_trip(backend)) == _PROBE:
        return None
    return text if _round_trip(tokenizers.Tokenizer.from_file(str(path))) == _PROBE else None


def _round_trip(tokenizer: tokenizers.Tokenizer) -> str:
    ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    return tokenizer.decode(ids, skip_special_tokens=False)


def _config_of(folder: Path) -> Any:
    """Return an empty config for a model of a type that transformers does not know, such as Kimi K2, else None.

    transformers would read config.json to choose a tokenizer's class, and fail at what such a model adds to it.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    path = folder / "config.json"
    model_type = json.loads(path.read_text()).get("model_type") if path.exists() else None
    return PreTrainedConfig() if isinstance(model_type, str) and model_type not in CONFIG_MAPPING else None
