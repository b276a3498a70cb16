"""Completions that one engine begins and another one ends; and chunks that are garbage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from forge_rl.errors import PoisonError, ReplicaError
from forge_rl.services.completion import ResumableCompletion, validate_chunk
from forge_rl.token_arrays import Chunk
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Sampling
from tests.fake_engine import GARBAGE, Unpickable
from tests.tiny import bundled_tokenizer

GOOD = Chunk(token_ids=(7,), logprobs=(-0.5,), versions=(1,), text="x")
SAMPLING = Sampling(max_tokens=8)
DIED = ReplicaError("gone", service="generator", replica=0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return bundled_tokenizer()


def add(completion: ResumableCompletion, part: Chunk) -> Chunk:
    """Add an engine's chunk; returns it as it is in the whole completion."""
    completion.add(part)
    return completion._chunks[-1]


def chunk(ids: Sequence[int], text: str = "", finish: Literal["", "stop", "length"] = "") -> Chunk:
    count = len(ids)
    return replace(
        GOOD, token_ids=tuple(ids), logprobs=(-0.5,) * count, versions=(1,) * count, text=text, finish=finish
    )


def test_a_completion_of_one_engine_is_what_the_engine_sent(tokenizer: Tokenizer) -> None:
    completion = ResumableCompletion((1, 2), Sampling(max_tokens=8, seed=3, stop=("c",)), tokenizer)
    assert completion.rest.seed == 3
    assert completion.rest.stop == ("c",)
    parts = [chunk((5,), "a"), chunk((6, 7), "b", "stop")]
    assert [add(completion, part) for part in parts] == parts
    turn = completion.turn()
    assert (*turn.prompt_ids, *turn.token_ids) == (1, 2, 5, 6, 7)
    assert (turn.text, turn.truncated) == ("ab", False)


def test_a_resumed_completions_experts_are_those_of_the_last_engine(tokenizer: Tokenizer) -> None:
    completion = ResumableCompletion((1, 2), SAMPLING, tokenizer)
    add(completion, chunk((5, 6)))
    completion.fail_over(DIED)
    rows = np.arange(5, dtype=np.uint8).reshape(5, 1, 1)  # it was shown four tokens, and drew two
    add(completion, replace(chunk((7, 8), finish="length"), routed=rows))
    turn = completion.turn()
    assert turn.routed is not None
    assert len(turn.routed) == len(turn.context) - 1
    assert validate_chunk(replace(GOOD, routed=rows), SAMPLING, num_drawn=0, vocab_size=9, versions=[1])


def test_what_came_of_an_engine_that_dies_is_kept(tokenizer: Tokenizer) -> None:
    reasons: list[str] = []
    completion = ResumableCompletion((1, 2), SAMPLING, tokenizer, observe=lambda part: reasons.append(part.finish))
    prompts = []
    for token in (4, 5):
        prompts.append(tuple(completion.shown.tolist()))
        completion.add(chunk((token,)))
        completion.fail_over(DIED)
    prompts.append(tuple(completion.shown.tolist()))
    completion.add(chunk((6,)))
    assert not completion.finish
    completion.add(chunk((7,), finish="length"))
    assert completion.turn().context.tolist() == [1, 2, 4, 5, 6, 7]
    assert prompts == [(1, 2), (1, 2, 4), (1, 2, 4, 5)]
    assert reasons == ["", "", "", "length"]


def test_whoever_is_given_the_chunks_may_end_the_completion(tokenizer: Tokenizer) -> None:
    chunks: list[Chunk] = []

    def observe(part: Chunk) -> bool:
        chunks.append(part)
        return len(chunks) == 2

    completion = ResumableCompletion((1, 2), SAMPLING, tokenizer, observe=observe)
    is_ended = [completion.add(part) for part in (chunk((5,), "a"), chunk((6, 7), "b"))]
    assert is_ended == [False, True], "whether the engine must stop"
    turn = completion.turn()
    assert (turn.text, turn.truncated, completion.finish) == ("ab", False, "stop")


def test_a_completion_is_given_up_after_three_deaths_without_tokens(tokenizer: Tokenizer) -> None:
    completion = ResumableCompletion((1, 2), SAMPLING, tokenizer)
    completion.fail_over(DIED)
    completion.fail_over(DIED)
    completion.add(chunk((5,)))
    completion.fail_over(DIED)
    completion.fail_over(DIED)
    assert completion.suspect
    never_asked = ReplicaError("it does not serve", service="generator", replica=0)
    never_asked.blamed = False
    completion.fail_over(never_asked)
    with pytest.raises(PoisonError, match=r"2 prompt tokens killed 5 engines.*gone"):
        completion.fail_over(DIED)


def test_a_completion_is_given_up_after_killing_twelve_engines(tokenizer: Tokenizer) -> None:
    completion = ResumableCompletion((1, 2), SAMPLING, tokenizer)
    for _ in range(11):
        completion.add(chunk((5,)))
        completion.fail_over(DIED)
        assert not completion.suspect
    completion.add(chunk((5,)))
    with pytest.raises(PoisonError, match="killed 12 engines"):
        completion.fail_over(DIED)


def test_what_may_have_hung_an_engine_is_shown_to_no_other(tokenizer: Tokenizer) -> None:
    hung = ReplicaError("hung: its process was stopped", service="generator", replica=0)
    constrained = replace(SAMPLING, extra={"structured_outputs": {"regex": "a"}})
    ResumableCompletion((1, 2), constrained, tokenizer).fail_over(DIED)
    ResumableCompletion((1, 2), SAMPLING, tokenizer).fail_over(hung)
    with pytest.raises(ReplicaError, match="hung"):
        ResumableCompletion((1, 2), constrained, tokenizer).fail_over(hung)


@pytest.mark.parametrize("place", range(1, 8))
def test_a_character_that_two_engines_decoded_is_whole(tokenizer: Tokenizer, place: int) -> None:
    text = "où 🦜🦜 et"
    ids = tokenizer.encode(text)
    assert len(ids) > 8
    begun = tokenizer.text_stream((1,))
    completion = ResumableCompletion((1,), Sampling(max_tokens=64, seed=3), tokenizer)
    pieces = [add(completion, chunk((token,), begun.add(token))).text for token in ids[:place]]
    completion.fail_over(DIED)
    assert tuple(completion.shown) == (1, *ids[:place])
    assert completion.rest.max_tokens == 64 - place
    assert completion.rest.seed == 3, "engines draw by the seed and the place, which has moved on"
    pieces += [add(completion, chunk((token,), "garbled")).text for token in ids[place:-1]]
    pieces.append(add(completion, chunk(ids[-1:], "garbled", "length")).text)
    assert "".join(pieces) == completion.turn().text == text
    assert tuple(completion.turn().token_ids) == ids
    assert completion.turn().truncated


@pytest.mark.parametrize("place", range(1, 7))
def test_a_stop_text_that_two_engines_decoded_ends_the_completion(tokenizer: Tokenizer, place: int) -> None:
    ids = [token for letter in "one<|END|>two" for token in tokenizer.encode(letter)]
    assert len(ids) == 13
    completion = ResumableCompletion((1,), Sampling(max_tokens=64, stop=("D|>", "<|END|>", "two")), tokenizer)
    # The engine holds back what may be a part of a stop text, as vLLM does.
    completion.add(chunk(ids[: 4 + place - 1], "one<|END|>"[: max(0, 4 + place - 1 - 6)]))
    completion.fail_over(DIED)
    assert completion.rest.stop == ()
    assert completion.add(chunk(ids[4 + place - 1 : -1], "garbled")), "the engine must be told to stop"
    assert completion.finish == "stop"
    assert completion.turn().text == "one"
    assert completion.turn().token_ids.tolist() == ids[:10]
    assert len(completion.turn().logprobs) == len(completion.turn().versions) == 10


def test_what_may_become_a_stop_text_is_held_back(tokenizer: Tokenizer) -> None:
    ids = [token for letter in "ab<|c" for token in tokenizer.encode(letter)]
    completion = ResumableCompletion((1,), Sampling(max_tokens=64, stop=("<|>",)), tokenizer)
    completion.add(chunk(ids[:1], ""))
    completion.fail_over(DIED)
    texts = [add(completion, chunk((token,))).text for token in ids[1:-1]]
    texts.append(add(completion, chunk(ids[-1:], finish="stop")).text)
    assert texts == ["", "a", "b", "<|c"]


def test_a_good_chunk_is_valid() -> None:
    def of(part: Chunk, sampling: Sampling = SAMPLING, drawn: int = 0) -> str:
        return validate_chunk(part, sampling, num_drawn=drawn, vocab_size=49152, versions=[1, 2])

    assert of(GOOD) == ""
    assert of(replace(GOOD, versions=(2,), finish="stop"), drawn=7) == ""
    assert of(replace(GOOD, logprobs=(1e-7,))) == "", "rounding"
    greedy = replace(SAMPLING, temperature=0)
    assert of(replace(GOOD, logprobs=(float("nan"),)), greedy) == ""
    sampling = replace(SAMPLING, top_logprobs=1)
    assert of(replace(GOOD, top=(((3, -0.1),),)), sampling) == ""
    assert "alternatives for 0" in of(GOOD, sampling)
    assert of(GOOD, drawn=8) == "9 tokens came, and 8 were requested"
    assert of(replace(GOOD, versions=(3,))) == "a token is of version 3, where the engine serves 1 or 2"


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_named(kind: str) -> None:
    fields, message = GARBAGE[kind]
    if isinstance(fields, Unpickable):
        return
    garbage = fields if kind == "no chunk" else replace(GOOD, **fields)
    assert re.search(message, validate_chunk(garbage, SAMPLING, num_drawn=0, vocab_size=49152, versions=[1]))
