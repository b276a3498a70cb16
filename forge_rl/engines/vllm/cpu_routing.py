"""Captures which experts a CPU worker routes each request's tokens to.

vLLM returns them (enable_return_routed_experts) only from its second model runner, which needs Triton on CPUs. This
module uses vLLM's capturer and its hooks in the routers with the first runner. Tested with vLLM 0.32.0.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from forge_rl.engines.vllm.internals import check_names

_ENDED = 1024
"""Maximum number of ended requests whose experts are kept until taken."""


@dataclass
class _RoutedRequest:
    rows: npt.NDArray[Any]
    """Experts by position, `[max_model_len, layers, top_k]`; unwritten pages take no memory."""
    num_filled: int = 0
    """Number of positions filled."""


class RoutingCapture:
    """Records the experts of each request's tokens when a position is first computed.

    A request that is recomputed after a weight update keeps the experts that its tokens were sampled with. Positions
    from the prefix cache have the experts of the request that computed them.

    Args:
        worker: vLLM's worker, with its model loaded and its cache allocated.
    """

    def __init__(self, worker: Any) -> None:
        runner, config = worker.model_runner, worker.vllm_config
        check_names(runner, ("execute_model", "input_batch.block_table", "kv_cache_config.kv_cache_groups"))
        self._capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(runner.model, self._capturer)
        groups = runner.kv_cache_config.kv_cache_groups
        self._group = next(
            index for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)
        )
        self._block = groups[self._group].kv_cache_spec.block_size
        self._dtype = np.dtype(self._capturer.output_dtype_name)
        slots = runner.kv_cache_config.num_blocks * self._block
        self._by_slot = np.zeros((slots, *self._capturer.shape_per_token), self._dtype)
        self._most = config.model_config.max_model_len
        self._requests: dict[str, _RoutedRequest] = {}
        self._ended: OrderedDict[str, _RoutedRequest] = OrderedDict()
        self._execute, self._runner = runner.execute_model, runner
        runner.execute_model = self._execute_and_keep

    def take(self, request: str) -> npt.NDArray[Any] | None:
        """Remove and return an ended request's experts, `[tokens - 1, layers, top_k]`: the last token was sampled but
        never computed. None if this worker did not run the request."""
        for requests in (self._requests, self._ended):
            for name in requests:
                # vLLM appends a suffix of its own to a request's id.
                if name.startswith(request):
                    record = requests.pop(name)
                    return record.rows[: record.num_filled]
        return None

    def _execute_and_keep(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for name in scheduled.finished_req_ids:
            if name in self._requests:
                self._ended[name] = self._requests.pop(name)
                if len(self._ended) > _ENDED:
                    self._ended.popitem(last=False)
        result = self._execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            self._keep(scheduled.num_scheduled_tokens)
        return result

    def _keep(self, counts: dict[str, int]) -> None:
        batch = self._runner.input_batch
        captured = self._capturer.device_buffer[: sum(counts.values())].numpy().astype(self._dtype)
        tables = batch.block_table[self._group].get_numpy_array()
        offset = 0
        for index, name in enumerate(batch.req_ids):
            start, count = int(batch.num_computed_tokens_cpu[index]), counts[name]
            if (request := self._requests.get(name)) is None:
                rows = np.empty((self._most, *self._by_slot.shape[1:]), self._dtype)
                request = self._requests[name] = _RoutedRequest(rows)
            # From the first position not filled yet, which may lie before `start` if the prefix cache held the
            # positions in between.
            first, end = min(request.num_filled, start), start + count
            positions = np.arange(first, end)
            slots = tables[index][positions // self._block] * self._block + positions % self._block
            # By the cache's slots, so that later requests find the experts of blocks that they share.
            self._by_slot[slots[start - first :]] = captured[offset : offset + count]
            offset += count
            # Filled positions stay: a recomputed token keeps the experts that it was sampled with.
            if request.num_filled < end:
                request.rows[request.num_filled : end] = self._by_slot[slots[request.num_filled - first :]]
                request.num_filled = end
