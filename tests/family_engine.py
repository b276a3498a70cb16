"""A vLLM engine on a small model of a family, whose logprobs are compared with transformers'.

python -m tests.family_engine FOLDER OTHER SCRATCH DTYPE: starts on FOLDER, then loads OTHER's weights as a version.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file

from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.factory import start_decode_engine
from forge_rl.engines.platform import resolve_dtype
from forge_rl.engines.protocol import DecodeEngine, DecodeSettings, Dtype
from forge_rl.errors import AttestationError
from forge_rl.models.adapter_products import merged_weight
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Sampling
from forge_rl.weights.manifest import factor_names
from tests.engine_adapters import load, published
from tests.engine_conformance import Decoder, Stream, expected, fetch, publish


class Weights(torch.nn.Module):
    """Weights of a folder under the names that they have there, without layers that predict further tokens."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        beyond = f"model.layers.{read_architecture(folder).layers}."
        tensors = load_file(folder / "model.safetensors")
        self._weights = {name: values for name, values in tensors.items() if not name.startswith(beyond)}

    def named_parameters(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        return iter((name, torch.nn.Parameter(values)) for name, values in self._weights.items())


async def gaps_to(engine: DecodeEngine, dtype: Dtype, *folders: Path) -> list[float]:
    """Distance of the engine's logprobs from those of transformers in float32, on each folder.

    In float32 the largest distance, over 1e-3. In bfloat16, where a token may go to other experts, the mean distance,
    over that of transformers in bfloat16.
    """
    from transformers import AutoModelForCausalLM

    turns = [
        await Stream(engine, Sampling(max_tokens=24, seed=seed), [5 + seed, 17, 3, 31, 8] * 3).turn()
        for seed in range(3)
    ]
    gaps = []
    for folder in folders:
        by_dtype = {}
        for dtype_name in {"float32", dtype}:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=resolve_dtype(cast(Dtype, dtype_name)), attn_implementation="eager"
            )
            by_dtype[dtype_name] = torch.cat([expected(model, turn) for turn in turns])
        logprobs = torch.cat([torch.tensor(turn.logprobs) for turn in turns])
        gap = (logprobs - by_dtype["float32"]).abs()
        rounding = float((by_dtype[dtype] - by_dtype["float32"]).abs().mean())
        gaps.append(float(gap.max()) / 1e-3 if dtype == "float32" else float(gap.mean()) / rounding)
    return gaps


async def expert_mistakes(engine: DecodeEngine, weights: dict[str, torch.Tensor], scratch: Path) -> dict[str, str]:
    """Load a version with an adapter of each expert, and then versions in which one expert's has a mistake; return the
    engine's error by "TENSOR, MISTAKE", "" if it took the version. Empty for models without experts."""
    names = [name for name in weights if ".experts." in name and "_proj" in name and "bias" not in name]
    if not names:
        return {}
    scale, factors = 1.5, dict[str, tuple[torch.Tensor, torch.Tensor]]()
    for name in names:
        *stack, rows, columns = weights[name].shape
        factors[name] = (0.1 * torch.randn(*stack, 2, columns), torch.randn(*stack, rows, 2))
    merged = {name: merged_weight(weights[name], *factors[name], scale) for name in names}
    stored = weights | {f: v for n in names for f, v in zip(factor_names(n), factors[n], strict=True)}
    scales = dict.fromkeys(names, scale)
    decoder = Decoder(engine, scratch, cast(Tokenizer, None), lambda: 0, torch.nn.Module(), version=1)
    await load(decoder, published(decoder, stored, merged, scales))
    errors = dict[str, str]()
    for name in (names[0], names[-1]):
        a, b = factors[name]
        zeros, neighbour = b.clone(), b.clone()
        if b.ndim == 3:
            zeros[-1], neighbour[0] = 0.0, b[1]
        else:
            zeros, neighbour = torch.zeros_like(b), factors[names[names.index(name) - 3]][1]
        for mistake, wrong in (("lost", zeros), ("another expert's", neighbour)):
            wrong_names = dict(zip(factor_names(name), (a, wrong), strict=True))
            errors[f"{name}, {mistake}"] = ""
            try:
                await load(decoder, published(decoder, stored | wrong_names, merged, scales))
            except AttestationError as raised:
                errors[f"{name}, {mistake}"] = raised.message
    return errors


async def main(folder: Path, other: Path, scratch: Path, dtype: Dtype) -> None:
    settings = DecodeSettings(dtype=dtype, max_model_len=256, kv_cache_gib=0.25)
    engine = await start_decode_engine(folder, settings, seed=0)
    try:
        (started,) = await gaps_to(engine, dtype, folder)
        (scratch / "versions").mkdir(parents=True)
        manifest = publish(Weights(other), scratch / "versions", 1, bucket_bytes=64 << 20, dtype=resolve_dtype(dtype))
        report = await engine.load(manifest, fetch(manifest, scratch, -1), reader="the engine")
        changed, loaded = await gaps_to(engine, dtype, folder, other)
        weights = load_file(other / "model.safetensors") if dtype == "float32" else {}
        errors = await expert_mistakes(engine, weights, scratch)
    finally:
        engine.close()
    gaps_found = {"started": started, "loaded": loaded, "changed": changed}
    report_values = {"version": report.version, "in_place": report.in_place, "expert_mistakes": errors}
    print(json.dumps(gaps_found | report_values))


if __name__ == "__main__":
    asyncio.run(main(*map(Path, sys.argv[1:4]), cast(Dtype, sys.argv[4])))
