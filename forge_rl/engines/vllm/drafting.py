"""Drafts tokens for vLLM's speculative decoding; runs in vLLM's workers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy.typing as npt

from forge_rl.engines.speculation import DraftSwitch, Speculation
from forge_rl.engines.vllm import internals
from forge_rl.engines.vllm.cpu_draft_model import DraftModel
from forge_rl.engines.vllm.cpu_rejection import run_without_kernels
from forge_rl.engines.vllm.suffixes import AnswerIndex

_INDEX_TOKENS = 1 << 20
"""Tokens in a worker's index of answers: 52 MiB."""


def speculative_config(settings: Speculation) -> dict[str, object]:
    """Return vLLM's speculative_config for an engine whose workers have a `Drafter`."""
    return {
        "method": "custom_class",
        "model": f"{Drafter.__module__}.{Drafter.__name__}",
        "num_speculative_tokens": settings.max_tokens,
        # Drafter makes drafts for fewer; without a schedule, vLLM pads the first step of a cached prompt with tokens
        # that are always rejected.
        "num_speculative_tokens_per_batch_size": [(1, 1, settings.max_tokens)],
    }


class Drafter:
    """vLLM's proposer of its method "custom_class": switched by `DraftSwitch`.

    Drafts are only proposals: a drafted token is accepted if the request samples the same token in its place, so
    completions are the same as without drafts; see `sampling.py`.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._runner: Any = None
        self._model: DraftModel | None = None
        internals.accept_no_drafts()
        if vllm_config.device_config.device_type == "cpu":
            run_without_kernels()

    def load_model(self, model: object) -> None:
        """Load nothing; vLLM calls this on CPU."""

    def bind(self, runner: Any, settings: Speculation) -> None:
        """Start drafting for a worker's model runner."""
        internals.draft_to_the_end(runner)
        self._runner = runner
        self._most = settings.max_tokens
        self._max_model_len = self._config.model_config.max_model_len
        self._switch = DraftSwitch(settings, time.perf_counter)
        self._drafted: dict[str, int] = {}
        """Length of each request's last draft."""
        self._answers = AnswerIndex(_INDEX_TOKENS) if settings.kind == "suffix" else None
        self._ngram = internals.ngram_proposer(self._config, settings.max_tokens) if settings.kind == "ngram" else None
        if settings.kind == "draft":
            self._model = DraftModel(self._config, Path(settings.model), requests=settings.max_running)

    def release(self) -> None:
        """Free the pages of the draft model's keys and values on CPU."""
        if self._model is not None:
            self._model.release()

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[Any],
        token_ids_cpu: npt.NDArray[Any],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return a draft for each request of the batch, perhaps an empty one.

        Args:
            sampled_token_ids: new tokens of each request; none while its prompt is computed.
            num_tokens_no_spec: `[R]`, tokens of each request.
            token_ids_cpu: `[R, max_model_len] int32`, the tokens.
        """
        count = len(sampled_token_ids)
        # Before `bind`, nothing is drafted.
        if self._runner is None:
            return [[] for _ in range(count)]
        requests: list[str] = self._runner.input_batch.req_ids
        drafted = [self._drafted.get(requests[row], 0) for row in range(count)]
        # Each verified step samples one token more than it accepts.
        accepted = [
            min(num_drafted, len(sampled) - 1)
            for num_drafted, sampled in zip(drafted, sampled_token_ids, strict=True)
            if sampled
        ]
        self._switch.note(sum(drafted), sum(accepted))
        drafts: list[list[int]] = [[] for _ in range(count)]
        may_draft = self._switch.allows(requests, sum(map(len, sampled_token_ids)))
        if self._ngram is not None:
            if may_draft:
                drafts = self._ngram.propose(self._most, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        elif self._answers is not None:
            prompts = self._runner.input_batch.num_prompt_tokens
            for row, sampled in enumerate(sampled_token_ids):
                if sampled:
                    tokens = token_ids_cpu[row, : num_tokens_no_spec[row]]
                    # Indexed also while drafts are off, so that they have something to draw on once they are on.
                    self._answers.follow(requests[row], tokens, int(prompts[row]))
                    # `draft_to_the_end` has switched off vLLM's own limit.
                    max_tokens = min(self._most, self._max_model_len - 1 - len(tokens))
                    if may_draft and max_tokens > 0:
                        drafts[row] = self._answers.draft(requests[row], max_tokens)
        elif self._model is not None and may_draft:
            texts = {
                row: token_ids_cpu[row, : num_tokens_no_spec[row]]
                for row, sampled in enumerate(sampled_token_ids)
                if sampled
            }
            max_tokens = {row: min(self._most, self._max_model_len - 1 - len(tokens)) for row, tokens in texts.items()}
            model_drafts = self._model.draft(
                [requests[row] for row in texts], list(texts.values()), list(max_tokens.values())
            )
            for row, draft in zip(texts, model_drafts, strict=True):
                drafts[row] = draft
        self._drafted = {requests[row]: len(draft) for row, draft in enumerate(drafts) if draft}
        return drafts
