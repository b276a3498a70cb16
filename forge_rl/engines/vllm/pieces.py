"""Tokens leave the engine's core in pieces: the outputs of a request are joined until it wants them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

_others = operator.attrgetter(
    *("new_prompt_logprobs_tensors", "pooling_output", "finish_reason", "stop_reason", "events", "kv_transfer_params"),
    *("ec_transfer_params", "trace_headers", "prefill_stats", "routed_experts", "mm_cache_miss_hashes"),
    *("new_sampling_mask", "spec_decode_metrics", "prompt_token_id_logprobs"),
)
"""What an output may have beside tokens and their logprobs."""


class OutputPieces:
    """Joins the outputs of requests that want them every few tokens (`stream_interval`).

    vLLM's front end, in another process, would keep these tokens until there are enough of them. That they arrive
    together changes nothing for its clients, and saves what it costs to send, read and process a message for each
    token. The first token, the last ones, and outputs with anything but tokens and logprobs go out at once. So do those
    of requests with stop strings, for which the front end looks in each token.

        pieces = OutputPieces()
        outputs = pieces.join(outputs, scheduler.requests)
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[EngineCoreOutput]] = {}
        """Outputs of requests whose first tokens have gone out, by request."""

    def join(self, outputs: Sequence[EngineCoreOutput], requests: Mapping[str, Any]) -> list[EngineCoreOutput]:
        """Return what goes out after a step.

        Args:
            outputs: the step's.
            requests: the scheduler's requests that have not ended, by id.
        """
        if len(self._waiting) > len(requests) + len(outputs):  # some were aborted, and nobody wants their tokens
            self._waiting = {name: parts for name, parts in self._waiting.items() if name in requests}
        return [piece for output in outputs if (piece := self._add(output, requests)) is not None]

    def flush(self) -> list[EngineCoreOutput]:
        """Return all that waits."""
        pieces = [_joined(parts) for parts in self._waiting.values() if parts]
        self._waiting = {name: [] for name in self._waiting}
        return pieces

    def _add(self, output: EngineCoreOutput, requests: Mapping[str, Any]) -> EngineCoreOutput | None:
        name = output.request_id
        parts = self._waiting.get(name)
        if output.finish_reason is not None:
            self._waiting.pop(name, None)
            return _joined([*parts, output]) if parts else output
        request = requests.get(name)
        interval = 1 if request is None else _interval(request.sampling_params)
        if parts is None:
            if interval > 1:
                self._waiting[name] = []
            return output
        parts.append(output)
        is_plain = not output.num_nans_in_logits and all(value is None for value in _others(output))
        if is_plain and sum(len(part.new_token_ids) for part in parts) < interval:
            return None
        self._waiting[name] = []
        return _joined(parts)


def _interval(parameters: Any) -> int:
    """Return after how many tokens the front end hands over a request's."""
    if parameters is None or parameters.stop:
        return 1
    return parameters.stream_interval or 1


def _joined(parts: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Return the last output with the tokens and logprobs of all."""
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
