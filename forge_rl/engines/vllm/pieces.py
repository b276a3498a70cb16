"""Joins a request's outputs in the engine's core, so that tokens leave it in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput


class _OutputPiece:
    """Waiting outputs of a request."""

    __slots__ = ("interval", "missing", "parts")

    def __init__(self, interval: int) -> None:
        self.interval = interval
        """Tokens of a whole piece."""
        self.missing = interval
        """Tokens until it is whole."""
        self.parts: list[EngineCoreOutput] = []

    def take(self) -> list[EngineCoreOutput]:
        """Return the parts, and begin the next piece."""
        parts, self.parts, self.missing = self.parts, [], self.interval
        return parts


class OutputPieces:
    """Joins the outputs of requests that want them every few tokens (`stream_interval`).

    vLLM's front end, in another process, would hold these tokens back until there are enough of them. Sending them
    together changes nothing for its clients, and saves the cost of sending, reading and processing a message for each
    token. The first token, the last ones, and outputs with more than tokens and logprobs go out at once. So do outputs
    of requests with stop strings, which the front end looks for in each token.

        pieces = OutputPieces()
        outputs = pieces.join(outputs, scheduler.requests)
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _OutputPiece] = {}
        """Pieces by request, for requests whose first token has gone out."""

    def join(self, outputs: Sequence[EngineCoreOutput], requests: Mapping[str, Any]) -> list[EngineCoreOutput]:
        """Return the outputs to send after a step.

        Args:
            outputs: the step's.
            requests: the scheduler's requests that have not ended, by id.
        """
        if len(self._waiting) > len(requests) + len(outputs):  # some were aborted, and nobody wants their tokens
            self._waiting = {name: piece for name, piece in self._waiting.items() if name in requests}
        return [piece for output in outputs if (piece := self._add(output, requests)) is not None]

    def flush(self) -> list[EngineCoreOutput]:
        """Return all waiting outputs."""
        return [_joined(piece.take()) for piece in self._waiting.values() if piece.parts]

    def _add(self, output: EngineCoreOutput, requests: Mapping[str, Any]) -> EngineCoreOutput | None:
        piece = self._waiting.get(output.request_id)
        # The first token: it goes out at once, and the request is remembered if it wants pieces from here on.
        if piece is None:
            request = requests.get(output.request_id)
            if request is not None and (interval := _interval(request.sampling_params)) > 1:
                self._waiting[output.request_id] = _OutputPiece(interval)
            return output
        piece.parts.append(output)
        piece.missing -= len(output.new_token_ids)
        # Anything besides tokens and logprobs goes out at once, with what has waited.
        if piece.missing > 0 and _is_plain(output):
            return None
        if output.finish_reason is not None:
            del self._waiting[output.request_id]
        return _joined(piece.take())


def _is_plain(output: EngineCoreOutput) -> bool:
    """Return whether an output has nothing but tokens and their logprobs. The fields are listed one by one for speed:
    this runs for each token."""
    return (
        output.finish_reason is None
        and output.prefill_stats is None
        and output.new_prompt_logprobs_tensors is None
        and output.stop_reason is None
        and output.events is None
        and output.pooling_output is None
        and output.kv_transfer_params is None
        and output.ec_transfer_params is None
        and output.trace_headers is None
        and output.routed_experts is None
        and output.mm_cache_miss_hashes is None
        and output.new_sampling_mask is None
        and output.spec_decode_metrics is None
        and output.prompt_token_id_logprobs is None
        and not output.num_nans_in_logits
    )


def _interval(parameters: Any) -> int:
    """Return the number of tokens after which the front end hands over a request's output."""
    if parameters is None or parameters.stop:
        return 1
    return parameters.stream_interval or 1


def _joined(parts: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Return the last output, with the tokens and logprobs of all parts."""
    # Earlier parts are plain, so the last one has whatever else there is.
    *_, last = parts
    if len(parts) > 1:
        logprobs = [part.new_logprobs for part in parts if part.new_logprobs is not None]
        last.new_token_ids = [token for part in parts for token in part.new_token_ids]
        if logprobs:
            last.new_logprobs = LogprobsLists(
                np.concatenate([part.logprob_token_ids for part in logprobs]),
                np.concatenate([part.logprobs for part in logprobs]),
                np.concatenate([part.sampled_token_ranks for part in logprobs]),
            )
    return last
