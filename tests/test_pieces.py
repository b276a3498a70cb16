"""Outputs that leave the engine's core in pieces have each token once, in order, with its logprob."""

from __future__ import annotations

import random
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from forge_rl.engines.vllm.internals import hand_over_in_pieces
from forge_rl.engines.vllm.pieces import OutputPieces


def output(name: str, *ids: int, **more: Any) -> EngineCoreOutput:
    logprobs = LogprobsLists(
        np.array([[token] for token in ids], np.int32),
        np.array([[-token / 8] for token in ids], np.float32),
        np.array([token % 7 for token in ids], np.int32),
    )
    return EngineCoreOutput(request_id=name, new_token_ids=list(ids), new_logprobs=logprobs, **more)


def requests(**intervals: int | None) -> dict[str, Any]:
    return {
        name: SimpleNamespace(sampling_params=SamplingParams(stream_interval=interval))
        for name, interval in intervals.items()
    }


def ids_of(outputs: list[EngineCoreOutput]) -> list[list[int]]:
    for piece in outputs:
        assert piece.new_logprobs is not None
        assert piece.new_logprobs.logprob_token_ids.tolist() == [[token] for token in piece.new_token_ids]
        assert piece.new_logprobs.logprobs.tolist() == [[-token / 8] for token in piece.new_token_ids]
        assert piece.new_logprobs.sampled_token_ranks.tolist() == [token % 7 for token in piece.new_token_ids]
    return [piece.new_token_ids for piece in outputs]


def test_the_first_token_goes_out_at_once_then_pieces_then_the_end() -> None:
    pieces, running = OutputPieces(), requests(a=3)
    pieces_sent = [ids_of(pieces.join([output("a", token)], running)) for token in range(1, 7)]
    assert pieces_sent == [[[1]], [], [], [[2, 3, 4]], [], []]
    (last,) = pieces.join([output("a", 7, finish_reason=FinishReason.LENGTH)], {})
    assert ids_of([last]) == [[5, 6, 7]]
    assert last.finish_reason == FinishReason.LENGTH


def test_an_output_with_more_than_tokens_does_not_wait() -> None:
    pieces, running = OutputPieces(), requests(a=8)
    pieces.join([output("a", 1, prefill_stats=PrefillStats())], running)
    assert pieces.join([output("a", 2)], running) == []
    (piece,) = pieces.join([output("a", 3, prefill_stats=PrefillStats())], running)
    assert ids_of([piece]) == [[2, 3]]
    assert piece.prefill_stats is not None


def test_requests_without_an_interval_or_with_stop_strings_are_left_alone() -> None:
    pieces, running = OutputPieces(), requests(a=None, b=1)
    running["c"] = SimpleNamespace(sampling_params=SamplingParams(stream_interval=8, stop=["x"], detokenize=True))
    for token in range(1, 5):
        step = [output(name, token) for name in "abc"]
        assert pieces.join(step, running) == step


def test_a_flush_returns_all_that_waits_once() -> None:
    pieces, running = OutputPieces(), requests(a=8, b=8)
    for token in range(1, 4):
        pieces.join([output("a", token), output("b", token + 10)], running)
    assert ids_of(pieces.flush()) == [[2, 3], [12, 13]]
    assert pieces.flush() == []
    assert pieces.join([output("a", 4)], running) == []


def test_tokens_of_aborted_requests_are_dropped() -> None:
    pieces = OutputPieces()
    running = requests(a=8, b=8, c=8)
    for token in (1, 2):
        pieces.join([output(name, token) for name in "abc"], running)
    assert pieces.join([output("a", 3)], requests(a=8)) == []
    assert ids_of(pieces.flush()) == [[2, 3]]


@pytest.mark.parametrize("seed", range(20))
def test_each_token_goes_out_once_and_in_order(seed: int) -> None:
    draws, pieces = random.Random(seed), OutputPieces()
    running = requests(**{f"r{index}": draws.choice([None, 1, 2, 5, 32]) for index in range(6)})
    lengths = {name: draws.randint(1, 80) for name in running}
    counts = dict.fromkeys(running, 0)
    tokens_sent: dict[str, list[int]] = {name: [] for name in running}
    while running:
        step = []
        for name in [name for name in list(running) if draws.random() < 0.8]:
            count = min(draws.choice([1, 1, 3]), lengths[name] - counts[name])
            tokens = range(counts[name], counts[name] + count)
            counts[name] += count
            is_last = counts[name] == lengths[name]
            step.append(output(name, *tokens, finish_reason=FinishReason.STOP if is_last else None))
            if is_last:
                del running[name]
        outputs = pieces.join(step, running)
        if draws.random() < 0.1:
            outputs += pieces.flush()
        ids_of(outputs)
        for piece in outputs:
            tokens_sent[piece.request_id] += piece.new_token_ids
    assert tokens_sent == {name: list(range(length)) for name, length in lengths.items()}


def test_what_waits_goes_out_before_the_version_changes_and_with_its_own() -> None:
    hand_over_in_pieces()
    queue: SimpleQueue[tuple[int, EngineCoreOutputs]] = SimpleQueue()
    core: Any = SimpleNamespace(
        scheduler=SimpleNamespace(requests=requests(a=8)),
        _weight_version="4",
        output_queue=SimpleNamespace(put_nowait=queue.put),
    )
    for token in (1, 2, 3):
        step = {0: EngineCoreOutputs(outputs=[output("a", token)])}
        EngineCore._attach_weight_version(core, step)
        assert step[0].weight_version == "4"
        assert ids_of(step[0].outputs) == ([[1]] if token == 1 else [])
    EngineCore.set_weight_version(core, "5")
    client, message = queue.get_nowait()
    assert (client, ids_of(message.outputs), message.weight_version) == (0, [[2, 3]], "4")
    assert core._weight_version == "5"
    EngineCore.set_weight_version(core, "6")
    assert queue.empty(), "nothing waits any more"
