"""The checks of adapters that every decode engine must pass; those that serve none refuse them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from forge_rl.errors import ConfigError, ForgeError

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


ADAPTER_CHECKS = (
    adapters_sample_as_peft_computes,
    an_adapter_is_replaced_while_requests_sample_with_it,
    an_adapter_that_cannot_be_served_is_refused_by_name,
)
