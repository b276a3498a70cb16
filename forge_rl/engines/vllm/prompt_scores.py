"""Computes prompt logprobs at a temperature, which vLLM ignores for them.

Logprobs of the k most likely tokens cannot be rescaled afterwards, because they are normalised over the whole
vocabulary. So the logits are divided before the softmax, by the temperature in a request's extra_args. Tested with vLLM
0.32.0.
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
    """Make a worker's model runner, of either version, scale the logits of scored prompts."""
    if hasattr(runner, "prompt_logprobs_worker"):
        if runner.prompt_logprobs_worker is not None:  # None on all but the last pipeline stage
            _RowHook(runner.prompt_logprobs_worker)
    else:
        _RequestHook(runner)


def _temperature(sampling_params: Any) -> float:
    return float((getattr(sampling_params, "extra_args", None) or {}).get(TEMPERATURE, 1.0))


class _RequestHook:
    """Hook for the first model runner, which scores request by request: one call for each temperature."""

    def __init__(self, runner: Any) -> None:
        check_names(runner, ("_get_prompt_logprobs_dict", "num_prompt_logprobs", "requests", "sampler"))
        self._runner = runner
        self._score = runner._get_prompt_logprobs_dict
        runner._get_prompt_logprobs_dict = self

    def __call__(self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        runner, num_prompt_logprobs = self._runner, self._runner.num_prompt_logprobs
        by_temperature: dict[float, dict[str, int]] = defaultdict(dict)
        for request, count in num_prompt_logprobs.items():
            by_temperature[_temperature(runner.requests[request].sampling_params)][request] = count
        if by_temperature.keys() <= {1.0}:
            result: dict[str, Any] = self._score(hidden_states, num_scheduled_tokens)
            return result
        logprobs: dict[str, Any] = {}
        compute: Callable[[torch.Tensor], torch.Tensor] = runner.sampler.compute_logprobs
        try:
            # The runner scores every request listed here and divides all logits alike: show it one temperature's
            # requests at a time.
            for temperature, counts in by_temperature.items():
                runner.num_prompt_logprobs = counts
                runner.sampler.compute_logprobs = lambda logits, divisor=temperature: compute(logits / divisor)
                logprobs |= self._score(hidden_states, num_scheduled_tokens)
        finally:
            del runner.sampler.compute_logprobs  # the class has the original
            remaining = {request for part in by_temperature.values() for request in part}
            for request in num_prompt_logprobs.keys() - remaining:  # complete: vLLM removed them from its part
                del num_prompt_logprobs[request]
            runner.num_prompt_logprobs = num_prompt_logprobs
        return logprobs


class _RowHook:
    """Hook for the second model runner, which scores the rows of all requests in chunks."""

    def __init__(self, worker: Any) -> None:
        check_names(worker, ("add_request", "compute_prompt_logprobs", "max_num_reqs"))
        self._temperatures = np.ones(worker.max_num_reqs, np.float32)
        """Temperatures by request index."""
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
        *args: Any,
    ) -> dict[str, Any]:
        # Slots are reused by later requests; `add` sets each one again.
        request_temperatures = self._temperatures[batch.idx_mapping_np]
        if (request_temperatures != 1).any():
            row_temperatures = torch.ones(len(hidden_states), device=hidden_states.device)
            for start, end, temperature in zip(
                batch.query_start_loc_np, batch.query_start_loc_np[1:], request_temperatures, strict=False
            ):
                row_temperatures[int(start) : int(end)] = float(temperature)
            logits_of = _scaled(logits_of, row_temperatures)
        result: dict[str, Any] = self._score(logits_of, hidden_states, batch, *args)
        return result


def _scaled(
    logits_of: Callable[[torch.Tensor], torch.Tensor], row_temperatures: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """Wrap `logits_of`, which is called with consecutive rows, to divide each row's logits by its temperature."""
    # vLLM asks for logits in chunks of consecutive rows, without saying which.
    position = 0

    def scaled(hidden_states: torch.Tensor) -> torch.Tensor:
        nonlocal position
        temperatures = row_temperatures[position : position + len(hidden_states), None]
        position += len(hidden_states)
        return logits_of(hidden_states) / temperatures

    return scaled
