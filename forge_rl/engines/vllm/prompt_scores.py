"""Prompt logprobs at a temperature: vLLM's own are those of the unscaled logits, whatever a request's temperature.

Of the k most likely tokens alone they cannot be rescaled, as the normalisation takes all of the vocabulary. So the
logits are divided before the softmax, by what a request says in its extra_args. Tested with vLLM 0.32.0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from forge_rl.engines.vllm.internals import check_names

TEMPERATURE = "forge_rl_prompt_temperature"
"""Name of the temperature in the extra_args of a request."""


def scale_prompt_logits(runner: Any) -> None:
    """Have a worker's model runner, of either version, scale the logits of prompts that are scored."""
    if hasattr(runner, "prompt_logprobs_worker"):
        if runner.prompt_logprobs_worker is not None:  # None on all but the last pipeline stage
            _ByRow(runner.prompt_logprobs_worker)
    else:
        _ByRequest(runner)


def _temperature(sampling_params: Any) -> float:
    return float((getattr(sampling_params, "extra_args", None) or {}).get(TEMPERATURE, 1.0))


class _ByRequest:
    """Of the first model runner, which scores one request after another: those of each temperature on their own."""

    def __init__(self, runner: Any) -> None:
        check_names(runner, ("_get_prompt_logprobs_dict", "num_prompt_logprobs", "requests", "sampler"))
        self._runner = runner
        self._score = runner._get_prompt_logprobs_dict
        runner._get_prompt_logprobs_dict = self

    def __call__(self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        runner, asked = self._runner, self._runner.num_prompt_logprobs
        by_temperature: dict[float, dict[str, int]] = defaultdict(dict)
        for request, count in asked.items():
            by_temperature[_temperature(runner.requests[request].sampling_params)][request] = count
        if by_temperature.keys() <= {1.0}:
            result: dict[str, Any] = self._score(hidden_states, num_scheduled_tokens)
            return result
        found: dict[str, Any] = {}
        compute: Callable[[torch.Tensor], torch.Tensor] = runner.sampler.compute_logprobs
        try:
            for temperature, part in by_temperature.items():
                runner.num_prompt_logprobs = part
                runner.sampler.compute_logprobs = lambda logits, by=temperature: compute(logits / by)
                found |= self._score(hidden_states, num_scheduled_tokens)
        finally:
            del runner.sampler.compute_logprobs  # the class has the original
            left = {request for part in by_temperature.values() for request in part}
            for request in asked.keys() - left:  # complete: vLLM removed them from its part
                del asked[request]
            runner.num_prompt_logprobs = asked
        return found


class _ByRow:
    """Of the second model runner, which scores the rows of all requests in chunks."""

    def __init__(self, worker: Any) -> None:
        check_names(worker, ("add_request", "compute_prompt_logprobs", "max_num_reqs"))
        self._temperatures = np.ones(worker.max_num_reqs, np.float32)
        """By the index of a request."""
        self._add, self._score = worker.add_request, worker.compute_prompt_logprobs
        worker.add_request, worker.compute_prompt_logprobs = self.add, self.score

    def add(self, request: str, index: int, sampling_params: Any) -> None:
        self._temperatures[index] = _temperature(sampling_params)
        self._add(request, index, sampling_params)

    def score(
        self,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        hidden_states: torch.Tensor,
        batch: Any,
        *others: Any,
    ) -> dict[str, Any]:
        of_requests = self._temperatures[batch.idx_mapping_np]
        if (of_requests != 1).any():
            of_rows = torch.ones(len(hidden_states), device=hidden_states.device)
            for start, end, own in zip(
                batch.query_start_loc_np, batch.query_start_loc_np[1:], of_requests, strict=False
            ):
                of_rows[int(start) : int(end)] = float(own)
            logits_of = _scaled(logits_of, of_rows)
        result: dict[str, Any] = self._score(logits_of, hidden_states, batch, *others)
        return result


def _scaled(logits_of: Callable[[torch.Tensor], torch.Tensor], of_rows: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return `logits_of`, which is called with consecutive rows, with the logits of each row divided by its
    temperature."""
    at = 0

    def scaled(hidden_states: torch.Tensor) -> torch.Tensor:
        nonlocal at
        own = of_rows[at : at + len(hidden_states), None]
        at += len(hidden_states)
        return logits_of(hidden_states) / own

    return scaled
