"""Texts that begin alike are encoded from their last common special token on, to the ids of the whole text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from forge_rl.data.examples import conversation_episodes
from forge_rl.tokens.prefix_encoder import PrefixEncoder, shared_length
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Task

PIECES = ("a", "b", " ", "\n", "ab", "<|end|>", "<|end|>\n", "<|start|>", "<|end", "|>", "<t>", "A")


def tokenizer_of(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer of letters, in which the position of a text may matter, with special tokens that begin alike."""
    letters = ["<unk>", "▁", *"ab|<>endstrAx", "\n", " ", "ab", "▁a", "▁b"]
    vocabulary = {letter: index for index, letter in enumerate(dict.fromkeys(letters))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b"), ("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    if kind == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    if kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if kind == "lowercase":
        tokenizer.normalizer = normalizers.Lowercase()
    forms = ["<|end|>", "<|start|>", *(["<|end|>\n<|start|>"] if kind == "long" else [])]
    strips = kind == "strips"
    tokenizer.add_special_tokens([AddedToken(form, lstrip=strips, rstrip=strips, normalized=False) for form in forms])
    tokenizer.add_tokens([AddedToken("<t>", normalized=True), AddedToken("  ", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("kind", ["plain", "first", "prepend", "lowercase", "long", "strips"])
def test_ids_are_those_of_the_whole_text(kind: str) -> None:
    tokenizer, draws = tokenizer_of(kind), random.Random(0)
    num_letters = [0, 0]

    def encode(text: str) -> tuple[int, ...]:
        num_letters[0] += len(text)
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    encoder, text = PrefixEncoder(tokenizer, encode), ""
    for _ in range(3000):
        # It goes on, or from an earlier place, as a conversation whose template rewrites what was last.
        text = text[: draws.choice([len(text), len(text), draws.randrange(len(text) + 1)])]
        text = text[-2000:] + "".join(draws.choices(PIECES, k=draws.randrange(12)))
        ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        assert encoder(text) == ids, text
        num_letters[1] += len(text)
    assert (num_letters[0] == num_letters[1]) == (kind == "strips"), (
        "only blanks beside special tokens need whole texts"
    )


@pytest.mark.parametrize(
    ("first", "second", "length"), [("", "a", 0), ("ab", "ab", 2), ("abc", "abd", 2), ((1, 2, 3), (1, 9, 3), 1)]
)
def test_a_common_prefix_is_measured(first: str | tuple[int, ...], second: str | tuple[int, ...], length: int) -> None:
    assert shared_length(first, second) == shared_length(second, first) == length


def test_a_conversation_encodes_each_message_a_fixed_number_of_times(
    small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, encode = Tokenizer(small_tokenizer), Tokenizer.encode
    tokens = [0]

    def counted(self: Tokenizer, text: str, *, add_special: bool = False) -> tuple[int, ...]:
        ids = encode(self, text, add_special=add_special)
        tokens[0] += len(ids)
        return ids

    monkeypatch.setattr(Tokenizer, "encode", counted)
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": f"number {index} is said"} for index in range(120)]
    task = Task(id="0", source="a", messages=(messages[0],), truth={"completion": messages[1:]})
    tokens[0] = 0
    (episode,) = conversation_episodes(task, tokenizer)
    num_encoded = tokens[0]
    for place, turn in enumerate(episode.turns):
        assert tuple(turn.prompt_ids.tolist()) == tokenizer.render(messages[: 2 * place + 1])
    assert num_encoded < 6 * len(tokenizer.render(messages)), "60 times, if each turn encoded all before it"
