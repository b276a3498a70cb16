"""Probes of a run: short texts that trainer and engines score at each version, to attest it by its effect."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.packing.pack import pack
from forge_rl.services.generator import Generator
from forge_rl.services.trainer import Trainer
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Batch, Episode, Group, Task, Turn
from forge_rl.weights.effects import ProbedVersion, VersionEffects

TEXTS = (
    "The answer is 42, since 6 * 7 = 42. To check this, divide 42 by 7, which gives 6 again, as it should.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / 2",
    "Once there was a small boat that had never seen the sea. One morning the river rose, and it drifted away.",
    "Question: what is the capital of France, and which river flows through it? Answer: Paris, on the Seine.",
    "Let x be a real number with x^2 - 5x + 6 = 0. Factor it as (x - 2)(x - 3), so x is either 2 or 3.",
    '{"name": "search", "arguments": {"query": "weather in Oslo", "limit": 3}} returned 3 results, the first of 12 C.',
    "Water boils at 100 degrees at sea level, and at about 90 degrees 3,000 metres above it, as the air is thinner.",
    "SELECT name, COUNT(*) FROM orders WHERE total > 10 GROUP BY name ORDER BY 2 DESC LIMIT 5; -- five names",
)
"""Texts to score; any text shows a change of the weights."""
_TOKENS = 16
"""Scored tokens of a text. All texts are one request, as on a CPU another one costs more than 100 tokens: it reads all
weights again."""


class VersionProbes:
    """Has engines answer the probes of the trainer's latest version while a batch is generated.

        probes = VersionProbes(trainer, generator, tokenizer, effects, count=4)
        await probes.attest()  # while the engines decode

    Args:
        trainer: gets the probes, which it scores at each publish.
        count: number of texts, at most `len(TEXTS)`, which are scored as one.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        trainer: Trainer,
        generator: Generator,
        tokenizer: Tokenizer,
        effects: VersionEffects,
        *,
        count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        start = tokenizer.render([{"role": "user", "content": "go"}])[:1]
        ids = [token for text in TEXTS[:count] for token in tokenizer.encode(text)[:_TOKENS]]
        # Besides the start token, an engine needs room for the one token that it decodes; a row leaves out the last
        # token.
        longest = min(generator.max_model_len - 2, trainer.layout.longest)
        self._ids = np.array([*start, *ids[:longest]], np.int32)
        batch = Batch(groups=(_group(self._ids),), version=0)
        # The advantage is a dummy, so the group must not be spared for it.
        trainer.probe = lambda layout: pack(batch, torch.ones(1, 1), layout, drop_uniform=False)
        self._trainer = trainer
        self._generator = generator
        self._effects = effects
        self._clock = clock
        self._adapter_effects: dict[str, VersionEffects] = {}
        self._attested: dict[str, ProbedVersion] = {}
        """Version attested last, by the adapter's name; "" is the policy."""
        self._loads = trainer.loads
        self._metrics: dict[str, float] = {}
        self._seconds = 0.0

    async def attest(self) -> None:
        """Compare every engine with the trainer, once for each version of the policy and of each adapter by name.

        Raises:
            AttestationError: an engine computes with other weights than the version it was asked to load.
        """
        # After a rollback, version numbers are used again, for other weights.
        if self._trainer.loads != self._loads:
            self._loads = self._trainer.loads
            self._effects.forget()
            self._adapter_effects.clear()
        probed = self._trainer.probed
        if probed is not None and self._generator.version == probed.version:
            await self._compare(probed, lambda: self._trainer.probed if self._is_loaded(probed) else None)
        # A copy, as adapters may be published while an engine answers.
        for name, adapter_probed in list(self._trainer.adapters_probed.items()):
            await self._compare(adapter_probed, partial(self._adapter_probed, name), adapter=name)

    def _is_loaded(self, probed: ProbedVersion) -> bool:
        return self._generator.version == probed.version

    def _adapter_probed(self, name: str) -> ProbedVersion | None:
        return self._trainer.adapters_probed.get(name)

    async def _compare(
        self, probed: ProbedVersion, latest: Callable[[], ProbedVersion | None], *, adapter: str = ""
    ) -> None:
        """Compare every engine with what the trainer scored with the policy or an adapter, once for each version.

        Args:
            latest: returns the version probed last, which an engine may load before it answers; None if there is none,
                as after a rollback.
        """
        if probed is self._attested.get(adapter) or latest() is not probed:
            return
        if not np.isfinite(probed.logprobs).all():  # a policy that is NaN fails elsewhere
            return
        effects = self._effects
        if adapter:
            effects = self._adapter_effects.setdefault(adapter, self._effects.of(f"the adapter {adapter!r:.80}"))
        began = self._clock()
        answers = await self._generator.score_on_each(self._ids, adapter=adapter)
        self._seconds += self._clock() - began
        if latest() is not probed:
            return
        # From here on, no other version can have answered: a load since the request would have changed `latest`.
        gaps = [
            effects.attest(f"engine {index}", incarnation, probed, logprobs)
            for (index, incarnation), logprobs in answers.items()
        ]
        # Without an answer, such as while all engines restart, the version is asked for again.
        if gaps:
            self._attested[adapter] = probed
            name = f"weights/probe_gap/{adapter}" if adapter else "weights/probe_gap"
            self._metrics[name] = max(gaps)

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics since the last call: the largest gap of an engine; the trainer's seconds, for which the step
        waits; and the seconds until all engines had answered, alongside their other requests."""
        metrics, self._metrics = self._metrics, {}
        metrics |= {"weights/probe_s": self._trainer.probe_s, "weights/probe_answer_s": self._seconds}
        self._seconds = self._trainer.probe_s = 0.0
        return metrics


def _group(ids: npt.NDArray[np.int32]) -> Group:
    """Make a group of one episode that scores all tokens but the first."""
    task = Task(id="probes", source="probes", messages=({"role": "user", "content": "go"},))
    zeros = np.zeros(len(ids) - 1)
    turn = Turn(prompt_ids=ids[:1], token_ids=ids[1:], logprobs=zeros, versions=zeros.astype(np.int32), text="")
    return Group(task=task, episodes=(Episode(task=task, turns=(turn,)),))
