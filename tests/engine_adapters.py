"""The checks of adapters that every decode engine must pass; those that serve none refuse them."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from forge_rl.errors import AttestationError, ConfigError, ForgeError, WeightsError
from forge_rl.models.adapter_products import merged_weight
from forge_rl.weights import segment
from forge_rl.weights.fingerprints import Move, fingerprint, move
from forge_rl.weights.manifest import LoadReport, Manifest, ShardReport, TensorSpec, complete, draft, factor_names
from forge_rl.weights.slices import TensorSlice

if TYPE_CHECKING:
    from tests.engine_conformance import Decoder

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(
    model: torch.nn.Module, folder: Path, *, rank: int = 4, seed: int = 0, **settings: object
) -> torch.nn.Module:
    """Write an adapter of peft's own into a folder; returns peft's model with it, on a copy of a model."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(**{"r": rank, "lora_alpha": 3 * rank, "target_modules": TARGETS, **settings})  # type: ignore[arg-type]
    model = get_peft_model(copy.deepcopy(model), config)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    model.save_pretrained(str(folder))
    return model


async def adapters_sample_as_peft_computes(decoder: Decoder) -> None:
    from tests.engine_conformance import LONG_PROMPT, completion, gaps

    base = next(iter((await decoder.load_next()).values()))
    folders = [decoder.folder / f"adapter-{number}" for number in range(3)]
    models = {"": base}
    if not decoder.serves_adapters:
        adapted(base, folders[0])
        with pytest.raises(ConfigError, match="adapters"):
            await decoder.engine.load_adapter("a", folders[0])
        with pytest.raises(ConfigError, match="adapter"):
            await decoder.complete(completion(0, adapter="a"))
        return
    for name, folder, rank, rslora in zip("abc", folders, (4, 8, 1), (False, True, False), strict=True):
        models[name] = adapted(base, folder, rank=rank, seed=rank, use_rslora=rslora)
        await decoder.engine.load_adapter(name, folder)
    # More adapters than a step takes, whose prompts are in the prefix cache.
    for _ in range(2):
        streams = {name: decoder.stream(completion(3, max_tokens=24, adapter=name), LONG_PROMPT) for name in models}
        for name, stream in streams.items():
            assert gaps(models[name], await stream.turn()).max() < 1e-4, name
    with torch.no_grad():
        ids = torch.tensor(LONG_PROMPT[:20])
        by_peft = models["b"](ids[None]).logits[0].log_softmax(-1)[9:-1].gather(1, ids[10:, None])[:, 0]
    scores = await decoder.engine.score(ids[:10], ids[10:], adapter="b")
    assert (torch.tensor(scores.logprobs) - by_peft).abs().max() < 1e-4
    # They act on whatever the engine loads.
    new_base = next(iter((await decoder.load_next()).values()))
    new_model = adapted(new_base, decoder.folder / "again", rank=4, seed=4)
    assert gaps(new_model, await decoder.complete(completion(5, max_tokens=24, adapter="a"), LONG_PROMPT)).max() < 1e-4
    for name in "abc":
        await decoder.engine.drop_adapter(name)
    with pytest.raises(ConfigError, match="no adapter 'a'"):
        await decoder.complete(completion(0, adapter="a"))


async def an_adapter_is_replaced_while_requests_sample_with_it(decoder: Decoder) -> None:
    from tests.engine_conformance import completion, gaps

    if not decoder.serves_adapters:
        return
    base = next(iter((await decoder.load_next()).values()))
    old = adapted(base, decoder.folder / "old", seed=1)
    await decoder.engine.load_adapter("a", decoder.folder / "old")
    before = [decoder.stream(completion(seed, adapter="a")) for seed in range(3)]
    await decoder.complete(completion(9, max_tokens=8, adapter="a"))
    new = adapted(base, decoder.folder / "new", seed=2)
    await decoder.engine.load_adapter("a", decoder.folder / "new")
    assert not any(stream.ended for stream in before)
    after = await decoder.complete(completion(0, max_tokens=24, adapter="a"))
    assert gaps(new, after).max() < 1e-4
    for stream in before:
        assert gaps(old, await stream.turn()).max() < 1e-4
    dropped = decoder.stream(completion(4, adapter="a"))
    await decoder.complete(completion(9, max_tokens=8, adapter="a"))
    await decoder.engine.drop_adapter("a")
    assert gaps(new, await dropped.turn()).max() < 1e-4


async def an_adapter_that_cannot_be_served_is_refused_by_name(decoder: Decoder) -> None:
    from safetensors.torch import load_file, save_file

    from tests.engine_conformance import completion

    if not decoder.serves_adapters:
        return
    base = next(iter((await decoder.load_next()).values()))
    folder = decoder.folder / "refused"
    adapted(base, folder, rank=16)
    with pytest.raises(ConfigError, match="rank 16, and the engine serves at most 8"):
        await decoder.engine.load_adapter("a", folder)
    adapted(base, folder, rank=4)
    weights = folder / "adapter_model.safetensors"
    good = load_file(weights)
    name = next(iter(good))
    for values, message in (
        ({**good, name: good[name][:, :-1].contiguous()}, "shapes"),
        ({**good, name: good[name] * torch.nan}, "not finite"),
        ({key.replace("layers.1", "layers.7"): value for key, value in good.items()}, "layers.7"),
        ({f"base_model.model.lm_head.{name.rpartition('.lora')[2]}": good[name]}, ""),
    ):
        save_file(values, weights)
        with pytest.raises(ForgeError, match=message):
            await decoder.engine.load_adapter("a", folder)
    with pytest.raises(ConfigError, match="no adapter 'a'"):
        await decoder.complete(completion(0, adapter="a"))
    assert len((await decoder.complete(completion(0, max_tokens=4))).token_ids) == 4


def published(
    decoder: Decoder, stored: dict[str, torch.Tensor], merged: dict[str, torch.Tensor], scales: dict[str, float]
) -> Manifest:
    """The next version in the folder's files: what is stored, and the sums that a trainer attests."""
    decoder.version += 1
    specs = [
        TensorSpec(name=name, shape=tuple(values.shape), adapter_scale=scales.get(name))
        for name, values in sorted(stored.items(), key=lambda item: "lora_" not in item[0])
    ]
    drafted = draft(specs, version=decoder.version, dtype=torch.float32)
    refs = {
        bucket.key: segment.create(decoder.folder / bucket.key.replace("/", "-"), bucket.bytes)
        for bucket in drafted.buckets
    }
    memory = {key: segment.writable(ref) for key, ref in refs.items()}
    reports, sums = list[ShardReport](), list[ShardReport]()
    for entry in drafted.tensors:
        place, whole = entry.of(memory[entry.bucket]), TensorSlice.whole(entry.shape)
        (value,) = move([Move(place, stored[entry.name].detach(), entry.shape, whole)])
        reports.append(ShardReport(name=entry.name, tensor_slice=whole, fingerprint=value))
        if entry.name in scales:
            value = fingerprint(merged[entry.name], entry.shape)
            sums.append(ShardReport(name=entry.name, tensor_slice=whole, fingerprint=value))
    buckets = tuple(replace(bucket, segment=refs[bucket.key]) for bucket in drafted.buckets)
    return complete(replace(drafted, buckets=buckets), [reports], sums)


async def load(decoder: Decoder, manifest: Manifest) -> LoadReport:
    """Load a version, whose files are gone afterwards."""
    try:
        return await decoder.load(manifest)
    finally:
        for bucket in manifest.buckets:
            assert bucket.segment is not None
            os.unlink(bucket.segment.path)


def mutations(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, old: tuple[torch.Tensor, torch.Tensor], scale: float
) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]]:
    """What may arrive in place of W, A, B and the scale, by the mistake."""
    half, order = len(b) // 2, torch.arange(len(a) - 1, -1, -1)
    return {
        "the slot is empty": (weight, a, torch.zeros_like(b), scale),
        "A is empty": (weight, torch.zeros_like(a), b, scale),
        "stale": (weight, *old, scale),
        "A is stale": (weight, old[0], b, scale),
        "B is stale": (weight, a, old[1], scale),
        "the base is pushed instead": (weight, a, b, 0.0),
        "merged twice": (merged_weight(weight, a, b, scale), a, b, scale),
        "the scale is forgotten": (weight, a, b, 1.0),
        "alpha of another run": (weight, a, b, 2 * scale),
        "the scale of rsLoRA": (weight, a, b, scale * len(a) ** 0.5),
        "subtracted": (weight, a, b, -scale),
        "one rank's slice of B is lost": (weight, a, torch.cat([b[:half], torch.zeros_like(b[half:])]), scale),
        "one rank's slice of B is another's": (weight, a, torch.cat([b[half:], b[:half]]), scale),
        "one rank's slice of A is lost": (weight, torch.cat([a[:, :32], torch.zeros_like(a[:, 32:])], dim=1), b, scale),
        "a rank of A is lost": (weight, torch.cat([a[:-1], torch.zeros_like(a[-1:])]), b, scale),
        "the ranks of A are in another order": (weight, a[order], b, scale),
        "A is rounded": (weight, a.bfloat16().float(), b, scale),
        "one element differs in its last bit": (weight, a, _with_last_bit(b), scale),
    }


def _with_last_bit(values: torch.Tensor) -> torch.Tensor:
    changed = values.clone()
    changed.view(torch.int32)[values.abs().argmax() // values.shape[1], values.abs().argmax() % values.shape[1]] ^= 1
    return changed


async def errors_of_mistakes(decoder: Decoder) -> dict[str, str]:
    """Make each of the `mutations` in two weights of a version; the engine's error by "WEIGHT, MISTAKE", "" if it took
    the version."""
    from tests.engine_conformance import changed

    weights = {name: weight.detach().clone() for name, weight in changed(decoder.base).named_parameters()}
    names = [name for name in weights if name.rpartition(".")[0].rpartition(".")[2] in TARGETS]
    drawn = [
        {n: (0.1 * torch.randn(4, weights[n].shape[1]), torch.randn(weights[n].shape[0], 4)) for n in names}
        for _ in range(2)
    ]
    (factors, old), scale = drawn, 1.5
    merged = {name: merged_weight(weights[name], *factors[name], scale) for name in names}
    stored = weights | {f: v for n in names for f, v in zip(factor_names(n), factors[n], strict=True)}
    errors = dict[str, str]()
    for name in (names[0], names[-1]):
        for mistake, (weight, a, b, factor) in mutations(weights[name], *factors[name], old[name], scale).items():
            wrong = {**stored, name: weight, **dict(zip(factor_names(name), (a, b), strict=True))}
            errors[f"{name}, {mistake}"] = ""
            try:
                await load(decoder, published(decoder, wrong, merged, {**dict.fromkeys(names, scale), name: factor}))
            except AttestationError as raised:
                errors[f"{name}, {mistake}"] = raised.message
    return errors


async def a_version_of_adapters_is_attested_as_the_sum_and_mistakes_are_named(decoder: Decoder) -> None:
    from tests.engine_conformance import changed, completion, gaps

    model, scale = changed(decoder.base), 1.5
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    adapted_names = [name for name in weights if name.rpartition(".")[0].rpartition(".")[2] in TARGETS]
    factors = {
        name: (0.1 * torch.randn(4, weights[name].shape[1]), torch.randn(weights[name].shape[0], 4))
        for name in adapted_names
    }
    old = {name: (0.1 * torch.randn_like(a), torch.randn_like(b)) for name, (a, b) in factors.items()}
    merged = {name: merged_weight(weights[name], *factors[name], scale) for name in adapted_names}
    scales = dict.fromkeys(adapted_names, scale)
    stored = weights | {
        factor: values
        for name in adapted_names
        for factor, values in zip(factor_names(name), factors[name], strict=True)
    }
    report = await load(decoder, published(decoder, stored, merged, scales))
    assert report.fingerprints.keys() == stored.keys()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(merged.get(name, weights[name]))
    assert gaps(model, await decoder.complete(completion(0, max_tokens=24))).max() < 1e-4
    for name in (adapted_names[0], adapted_names[-1]):
        other = adapted_names[len(adapted_names) // 2]
        swapped = {
            **stored,
            **dict(zip(factor_names(name), old[name], strict=True)),
            **dict(zip(factor_names(other), old[other], strict=True)),
        }
        with pytest.raises(AttestationError, match="2 of"):
            await load(decoder, published(decoder, swapped, merged, scales))
    errors = await errors_of_mistakes(decoder)
    assert len(errors) >= 30
    for mistake, error in errors.items():
        assert error.endswith(f"tensors differ: {mistake.partition(', ')[0]}"), (mistake, error)
    late = published(decoder, stored, merged, scales)
    with pytest.raises(WeightsError, match="came after it"):
        await load(decoder, replace(late, tensors=tuple(e for e in late.tensors if "lora_" not in e.name)))
    await load(decoder, published(decoder, stored, merged, scales))
    assert gaps(model, await decoder.complete(completion(0, max_tokens=24))).max() < 1e-4


ADAPTER_CHECKS = (
    a_version_of_adapters_is_attested_as_the_sum_and_mistakes_are_named,
    adapters_sample_as_peft_computes,
    an_adapter_is_replaced_while_requests_sample_with_it,
    an_adapter_that_cannot_be_served_is_refused_by_name,
)
