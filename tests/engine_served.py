"""The checks of an engine that serves versions as adapters; mistakes are caught by their effect, on a real engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_rl.engines.vllm.adapters import EngineAdapters, VersionFactors
from forge_rl.errors import AttestationError, WeightsError
from forge_rl.models.adapter_products import merged_weight
from forge_rl.weights.effects import ProbedVersion, VersionEffects
from forge_rl.weights.manifest import LoadReport, Manifest, factor_names
from tests.engine_adapters import TARGETS, load, published

if TYPE_CHECKING:
    from tests.engine_conformance import Decoder, Stream

SCALE, RANK = 1.5, 4
Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


def weights_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in decoder.base.named_parameters()}


def drawn(decoder: Decoder, b_std: float = 0.1) -> Factors:
    """Factors of all linear layers."""
    weights = weights_of(decoder)
    names = [name for name in weights if name.rpartition(".")[0].rpartition(".")[2] in TARGETS]
    return {
        name: (0.1 * torch.randn(RANK, weights[name].shape[1]), b_std * torch.randn(len(weights[name]), RANK))
        for name in names
    }


def moved(factors: Factors, by: float = 0.3) -> Factors:
    """The factors after an update."""
    return {name: tuple(f + by * f.std() * torch.randn_like(f) for f in pair) for name, pair in factors.items()}  # type: ignore[misc]


async def load_factors(decoder: Decoder, factors: Factors) -> tuple[LoadReport, torch.nn.Module]:
    """Publish and load a version; returns the engine's report, and the model that it is."""
    weights = weights_of(decoder)
    merged = {name: merged_weight(weights[name], *pair, SCALE) for name, pair in factors.items()}
    names = {name: dict(zip(factor_names(name), pair, strict=True)) for name, pair in factors.items()}
    stored = weights | {key: values for pair in names.values() for key, values in pair.items()}
    model = copy.deepcopy(decoder.base)
    model.load_state_dict(weights | merged, strict=False)
    return await load(decoder, published(decoder, stored, merged, dict.fromkeys(factors, SCALE))), model


async def started(decoder: Decoder, seed: int) -> Stream:
    """A request that a paused engine has taken."""
    from tests.engine_conformance import LONG_PROMPT, completion

    before = decoder.unfinished()
    stream = decoder.stream(completion(seed), LONG_PROMPT)
    for _ in range(10_000):
        if decoder.unfinished() > before:
            break
        await asyncio.sleep(0.01)
    return stream


async def requests_keep_the_version_that_they_began_with(decoder: Decoder) -> None:
    from tests.engine_conformance import LONG_PROMPT, check_logprobs, completion

    factors = drawn(decoder)
    await load_factors(decoder, {name: (a, torch.zeros_like(b)) for name, (a, b) in factors.items()})
    streams, models = [], {}
    await decoder.pause()
    for number in range(4):  # more versions than are kept
        report, model = await load_factors(decoder, factors)
        assert report.served_versions == min(number + 2, 3)
        assert report.version == decoder.version
        models[decoder.version] = model
        streams.append((decoder.version, await started(decoder, number)))
        factors = moved(factors)
    await decoder.engine.hold(paused=False, asleep=True)
    await decoder.engine.hold(paused=False, asleep=False)
    for version, stream in streams:
        check_logprobs(await stream.turn(), {version: models[version]})
    turn = await decoder.complete(completion(5, max_tokens=24), LONG_PROMPT)
    check_logprobs(turn, {decoder.version: models[decoder.version]})


async def another_base_is_loaded_once_no_request_needs_the_old_one(decoder: Decoder) -> None:
    from tests.engine_conformance import check_logprobs, completion

    await load_factors(decoder, drawn(decoder))
    await decoder.pause()
    stream = await started(decoder, 1)
    with pytest.raises(WeightsError, match="while requests sample"):
        await decoder.load_next()
    await load_factors(decoder, drawn(decoder))
    await decoder.resume()
    await stream.turn()
    (version, plain), *_ = (await decoder.load_next()).items()
    check_logprobs(await decoder.complete(completion(2, max_tokens=24)), {version: plain})
    _, model = await load_factors(decoder, drawn(decoder))
    check_logprobs(await decoder.complete(completion(3, max_tokens=24)), {decoder.version: model})


def expected(model: torch.nn.Module, texts: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        logprobs = model(texts).logits.double().log_softmax(-1)
    return logprobs[:, :-1].gather(2, texts[:, 1:, None]).flatten().numpy()


async def answered(decoder: Decoder, texts: torch.Tensor) -> np.ndarray:
    scores = await asyncio.gather(*(decoder.engine.score(text[:1], text[1:]) for text in texts.numpy()))
    return np.concatenate([np.asarray(score.logprobs, np.float64) for score in scores])


Change = Callable[[Factors, Factors], Factors]


def _each(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], part: str = "") -> Change:
    return lambda new, old: {n: change(*pair) if part in n else pair for n, pair in new.items()}


def _without_rank(b: torch.Tensor) -> torch.Tensor:
    return torch.cat([b[: len(b) // 2], torch.zeros_like(b[len(b) // 2 :])])


SERVED_MISTAKES: dict[str, Change] = {
    "the slot is empty": _each(lambda a, b: (a, torch.zeros_like(b))),
    "A is empty": _each(lambda a, b: (torch.zeros_like(a), b)),
    "stale": lambda new, old: old,
    "A is stale": lambda new, old: {n: (old[n][0], pair[1]) for n, pair in new.items()},
    "B is stale": lambda new, old: {n: (pair[0], old[n][1]) for n, pair in new.items()},
    "A and B are swapped": _each(lambda a, b: (b.T.contiguous(), a.T.contiguous()), "o_proj"),
    "the scale is forgotten": _each(lambda a, b: (a, b / SCALE)),
    "alpha of another run": _each(lambda a, b: (a, 2 * b)),
    "the scale of rsLoRA": _each(lambda a, b: (a, b * RANK**0.5)),
    "the scale is applied twice": _each(lambda a, b: (a, b * SCALE)),
    "subtracted": _each(lambda a, b: (a, -b)),
    "one layer is missing": _each(lambda a, b: (a, torch.zeros_like(b)), "layers.1."),
    "one module is missing": _each(lambda a, b: (a, torch.zeros_like(b)), "v_proj"),
    "one matrix is missing": _each(lambda a, b: (a, torch.zeros_like(b)), "layers.0.mlp.down_proj"),
    "one rank's slice of B is lost": _each(lambda a, b: (a, _without_rank(b))),
    "one rank's slice of A is lost": _each(lambda a, b: (torch.cat([a[:, :32], 0 * a[:, 32:]], 1), b)),
    "the ranks of A are in another order": _each(lambda a, b: (a.flip(0), b)),
    "a layer's adapter is another layer's": lambda new, old: {n: new[n.replace("layers.0.", "layers.1.")] for n in new},
}
"""What an engine may serve in place of the factors that it read and attested, by the mistake."""


async def mistakes_in_serving_are_caught_by_their_effect(decoder: Decoder) -> None:
    errors = await errors_of_served_mistakes(decoder)
    assert len(errors) == len(SERVED_MISTAKES) + 3
    assert not [mistake for mistake, error in errors.items() if not error]
    assert "like version" in errors["stale"]
    assert "adapters of q_proj" in errors["stale"]


async def effect_error(decoder: Decoder, effects: VersionEffects, model: torch.nn.Module, texts: torch.Tensor) -> str:
    """The error of an engine whose answers are not those of the model; "" if they are."""
    probed = ProbedVersion(version=decoder.version, logprobs=expected(model, texts))
    try:
        effects.attest("engine 0", 0, probed, await answered(decoder, texts))
    except AttestationError as error:
        return error.message
    return ""


Weights = dict[str, torch.Tensor]


def _stale(part: str) -> Callable[[Weights, Weights], Weights]:
    return lambda new, old: {name: old[name] if part in name else values for name, values in new.items()}


def _half_stale(new: Weights, old: Weights) -> Weights:
    """One of two tensor-parallel ranks missed the version."""
    return {
        name: torch.cat([values[: len(values) // 2], old[name][len(values) // 2 :]]) if "_proj" in name else values
        for name, values in new.items()
    }


WEIGHT_MISTAKES: dict[str, Callable[[Weights, Weights], Weights]] = {
    "stale": lambda new, old: old,
    "one layer is stale": _stale("layers.1."),
    "one module is stale": _stale("v_proj"),
    "one matrix is stale": _stale("layers.0.mlp.down_proj"),
    "embeddings are stale": _stale("embed_tokens"),
    "norms are stale": _stale("norm"),
    "one rank's slices are stale": _half_stale,
    "layers are in another order": lambda new, old: {name: new[name.replace("layers.0.", "layers.1.")] for name in new},
    "rounded to bfloat16": lambda new, old: {name: values.bfloat16().float() for name, values in new.items()},
    "a module is empty": lambda new, old: {n: torch.zeros_like(v) if "o_proj" in n else v for n, v in new.items()},
}
"""What an engine may compute with in place of a version of all weights, by the mistake."""


async def mistakes_with_weights_are_caught_by_their_effect(decoder: Decoder) -> None:
    errors = await errors_of_weight_mistakes(decoder)
    assert errors.keys() == WEIGHT_MISTAKES.keys()
    assert not [mistake for mistake, error in errors.items() if not error]
    assert "like version" in errors["stale"]


async def errors_of_weight_mistakes(decoder: Decoder) -> dict[str, str]:
    """Make each mistake in the engine at the third version of all weights; returns the error by mistake, "" if there
    was none."""
    texts, model = torch.randint(3, 40000, (1, 17)), copy.deepcopy(decoder.base)
    errors = dict[str, str]()
    for mistake, change in WEIGHT_MISTAKES.items():
        effects = VersionEffects(engines="float32", trainer="float32")
        versions = [weights_of(decoder)]
        for _ in range(2):
            versions.append({n: v * (1 + 0.02 * torch.randn_like(v)) for n, v in versions[-1].items()})
        loaded = [*versions[:2], change(versions[2], versions[1])]
        for weights, engine_weights in zip(versions, loaded, strict=True):
            assert not errors.get(mistake), mistake
            await load(decoder, published(decoder, engine_weights, {}, {}))
            model.load_state_dict(weights, strict=False)
            errors[mistake] = await effect_error(decoder, effects, model, texts)
    return errors


async def errors_of_served_mistakes(decoder: Decoder) -> dict[str, str]:
    """Make each mistake in the engine at the third version; returns the error by mistake, "" if there was none."""
    texts = torch.randint(3, 40000, (1, 17))
    adapters: Any = decoder.engine._adapters  # type: ignore[attr-defined]
    errors = dict[str, str]()

    async def attest(effects: VersionEffects, model: torch.nn.Module) -> str:
        return await effect_error(decoder, effects, model, texts)

    async def third(mistake: str, act: Callable[[Factors, Factors, VersionEffects], Awaitable[str]]) -> None:
        effects = VersionEffects(engines="float32", trainer="float32", changed="adapters of q_proj v_proj")
        first = drawn(decoder)
        versions = [{name: (a, torch.zeros_like(b)) for name, (a, b) in first.items()}, first]
        for factors in versions:
            _, model = await load_factors(decoder, factors)
            assert not await attest(effects, model), mistake
        errors[mistake] = await act(moved(first), first, effects)

    for mistake, change in SERVED_MISTAKES.items():

        async def act(new: Factors, old: Factors, effects: VersionEffects, change: Change = change) -> str:
            async def load_version(manifest: Manifest, factors: VersionFactors) -> None:
                for name, pair in change(new, old).items():
                    copies = [factor.clone() for factor in pair]  # a file holds no tensor twice
                    factors.tensors |= dict(zip(factor_names(name), copies, strict=True))
                await EngineAdapters.load_version(adapters, manifest, factors)

            adapters.load_version = load_version
            try:
                _, model = await load_factors(decoder, new)
            finally:
                del adapters.load_version
            return await attest(effects, model)

        await third(mistake, act)

    async def base(new: Factors, old: Factors, effects: VersionEffects) -> str:
        _, model = await load_factors(decoder, new)
        versions, adapters._versions = adapters._versions, []
        try:
            return await attest(effects, model)
        finally:
            adapters._versions = versions

    async def other(new: Factors, old: Factors, effects: VersionEffects) -> str:
        """The request names the adapter of another of the loaded ones."""
        _, model = await load_factors(decoder, new)
        adapters._versions.reverse()
        try:
            return await attest(effects, model)
        finally:
            adapters._versions.reverse()

    async def freed(new: Factors, old: Factors, effects: VersionEffects) -> str:
        """Sleep frees the adapters' memory, and they come back as zeros."""
        _, model = await load_factors(decoder, new)
        await decoder.engine.hold(paused=False, asleep=True)
        path = Path(adapters._versions[-1].folder) / "adapter_model.safetensors"
        save_file({name: torch.zeros_like(values) for name, values in load_file(path).items()}, path)
        await decoder.engine._all_workers("forget_adapters")  # type: ignore[attr-defined]
        await decoder.engine.hold(paused=False, asleep=False)
        return await attest(effects, model)

    await third("the base answers in place of the adapter", base)
    await third("the wrong adapter of two", other)
    await third("sleep and wake without a load", freed)
    return errors


SERVED = {
    check.__name__: check
    for check in (
        requests_keep_the_version_that_they_began_with,
        another_base_is_loaded_once_no_request_needs_the_old_one,
        mistakes_in_serving_are_caught_by_their_effect,
        mistakes_with_weights_are_caught_by_their_effect,
    )
}
