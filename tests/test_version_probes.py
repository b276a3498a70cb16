"""Probes of a run: of the policy and of adapters by name, on a trainer and engines that only have numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from forge_rl.errors import AttestationError
from forge_rl.packing.rows import Layout
from forge_rl.rollout.version_probes import VersionProbes
from forge_rl.weights.effects import Logprobs, ProbedVersion, VersionEffects

TOKENS = 16


class Engines:
    """Two engines, which answer with what they were given last, by adapter."""

    version, max_model_len = 0, 64

    def __init__(self) -> None:
        self.held: dict[str, Logprobs] = {}
        self.asked: list[str] = []

    async def score_on_each(self, ids: Any, *, adapter: str = "") -> dict[tuple[int, int], Logprobs]:
        assert len(ids) - 1 == TOKENS
        self.asked.append(adapter)
        return {(index, 0): self.held[adapter].copy() for index in range(2)}


class Run:
    """Publishes drawn logprobs of the policy and of adapters, and probes them."""

    def __init__(self) -> None:
        self.drawn = np.random.default_rng(0)
        self.engines = Engines()
        self.trainer = SimpleNamespace(
            probe=None, probed=None, adapters_probed={}, loads=1, probe_s=0.0, layout=Layout(seq_len=TOKENS)
        )
        tokenizer: Any = SimpleNamespace(render=lambda messages: [1, 2], encode=lambda text: range(3, 43))
        effects = VersionEffects(engines="float32", trainer="float32")
        # Three texts are longer than a row, which has room for the first alone.
        self.probes = VersionProbes(cast(Any, self.trainer), cast(Any, self.engines), tokenizer, effects, count=3)

    def publish(self, version: int, adapter: str = "", *, arrives: bool = True) -> None:
        probed = ProbedVersion(version=version, logprobs=-5 * self.drawn.random(TOKENS))
        if adapter:
            self.trainer.adapters_probed[adapter] = probed
        else:
            self.trainer.probed, self.engines.version = probed, version
        if arrives:
            self.engines.held[adapter] = probed.logprobs


async def test_each_version_of_the_policy_and_of_each_adapter_is_probed_once() -> None:
    run = Run()
    run.publish(0)
    run.publish(0, "math")
    run.publish(0, "code")
    await run.probes.attest()
    assert run.engines.asked == ["", "math", "code"]
    await run.probes.attest()
    assert len(run.engines.asked) == 3, "nothing is new"
    run.publish(1, "code")
    await run.probes.attest()
    assert run.engines.asked[3:] == ["code"]
    gaps = {"weights/probe_gap": 0.0, "weights/probe_gap/math": 0.0, "weights/probe_gap/code": 0.0}
    assert run.probes.pop_metrics().items() >= gaps.items()


@pytest.mark.parametrize("adapter", ["math", "code"])
async def test_an_adapter_that_did_not_arrive_is_named_also_if_it_is_another_one_s(adapter: str) -> None:
    run = Run()
    for version in range(2):
        for name in ("math", "code"):
            run.publish(version, name)
        await run.probes.attest()
    run.publish(2, adapter, arrives=False)
    if adapter == "code":
        run.engines.held["code"] = run.engines.held["math"]
    with pytest.raises(AttestationError, match=f"engine 0 .* version 2, .* the adapter '{adapter}'"):
        await run.probes.attest()


async def test_a_version_is_probed_again_until_an_engine_has_answered() -> None:
    run, answer = Run(), Engines.score_on_each

    class Restarting(Engines):
        async def score_on_each(self, ids: Any, *, adapter: str = "") -> dict[tuple[int, int], Logprobs]:
            await answer(self, ids, adapter=adapter)
            return {}

    run.publish(0, "math")
    run.engines.__class__ = Restarting
    await run.probes.attest()
    run.engines.__class__ = Engines
    await run.probes.attest()
    await run.probes.attest()
    assert run.engines.asked == ["math"] * 2
    assert run.probes.pop_metrics()["weights/probe_gap/math"] == 0.0


async def test_numbers_of_versions_are_used_again_after_a_rollback() -> None:
    run = Run()
    for version in range(3):
        run.publish(version, "math")
        await run.probes.attest()
    run.trainer.adapters_probed, run.trainer.loads = {}, 2
    run.publish(1, "math")
    await run.probes.attest()
    assert run.engines.asked == ["math"] * 4


async def test_a_rollback_while_an_engine_answers_fails_no_adapter() -> None:
    run, answer = Run(), Engines.score_on_each

    class RolledBack(Engines):
        async def score_on_each(self, ids: Any, *, adapter: str = "") -> dict[tuple[int, int], Logprobs]:
            run.trainer.adapters_probed = {}
            self.held[adapter] = -5 * run.drawn.random(TOKENS)
            return await answer(self, ids, adapter=adapter)

    for name in ("math", "code"):
        run.publish(0, name)
    run.engines.__class__ = RolledBack
    await run.probes.attest()
    assert run.engines.asked == ["math"], "of the earlier history, nothing is compared"
    assert "weights/probe_gap/math" not in run.probes.pop_metrics()


def test_the_probes_fit_into_a_row_of_the_trainer() -> None:
    run = Run()
    packed = run.trainer.probe(run.trainer.layout)
    (row,) = packed.rows
    assert (len(row), int(row.mask.sum())) == (TOKENS, TOKENS)
