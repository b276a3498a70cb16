"""Temperatures of scored prompts in vLLM's second model runner, which only runs on GPUs: its interface, played here.

The first runner is in test_engine_conformance, with a real engine.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from forge_rl.engines.vllm.prompt_scores import TEMPERATURE, scale_prompt_logits


class Worker:
    """Computes logprobs of all rows in chunks of two, as vLLM's PromptLogprobsWorker does in larger ones."""

    max_num_reqs = 4

    def __init__(self) -> None:
        self.added: list[str] = []

    def add_request(self, request: str, index: int, sampling_params: Any) -> None:
        self.added.append(request)

    def compute_prompt_logprobs(self, logits_of: Any, hidden: torch.Tensor, batch: Any, *others: Any) -> dict[str, Any]:
        assert others == ("ids", "counts", "lengths")
        chunks = [logits_of(hidden[start : start + 2]).log_softmax(-1) for start in range(0, batch.num_tokens, 2)]
        return {"all": torch.cat(chunks)}


def test_rows_of_each_request_are_scaled_by_its_temperature():
    worker = Worker()
    scale_prompt_logits(SimpleNamespace(prompt_logprobs_worker=worker))
    for index, (name, extra) in enumerate({"a": {TEMPERATURE: 0.5}, "b": None, "c": {"other": 3}}.items()):
        worker.add_request(name, index, SimpleNamespace(extra_args=extra))
    assert worker.added == ["a", "b", "c"]
    hidden = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))  # the last row is padding
    # the batch has c, with 3 rows, before a, with 3
    batch = SimpleNamespace(idx_mapping_np=np.array([2, 0]), query_start_loc_np=np.array([0, 3, 6]), num_tokens=6)
    logprobs = worker.compute_prompt_logprobs(lambda rows: rows, hidden, batch, "ids", "counts", "lengths")["all"]
    expected = torch.cat([hidden[:3], 2 * hidden[3:6]]).log_softmax(-1)
    torch.testing.assert_close(logprobs, expected)
    worker.add_request("d", 0, SimpleNamespace(extra_args=None))  # takes the place of a, which has ended
    logprobs = worker.compute_prompt_logprobs(lambda rows: rows, hidden, batch, "ids", "counts", "lengths")["all"]
    torch.testing.assert_close(logprobs, hidden[:6].log_softmax(-1))


def test_a_stage_of_a_pipeline_without_a_sampler_is_left_alone():
    scale_prompt_logits(SimpleNamespace(prompt_logprobs_worker=None))
