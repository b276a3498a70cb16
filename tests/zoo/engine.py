"""vLLM engines on folders of the zoo, all in one process: python -m tests.zoo.engine FOLDER...

Each folder holds `model`, as the run starts from it, `1.safetensors` and `2.safetensors`, which the trainer publishes,
and `saved/model`, which it saves after the second.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file

from forge_rl.engines.platform import resolve_dtype
from forge_rl.engines.protocol import DecodeSettings, Dtype
from forge_rl.weights.transports.protocol import TensorBucket
from tests.engine_conformance import publish
from tests.zoo.folders import transformers_config

IDS = [(number * 37 + 11) % 250 for number in range(48)]
PROMPTS = [[(number * 37 + 11 * index + 5) % 250 for number in range(8 + index % 3)] for index in range(64)]
"""Prompts of greedy and of sampled completions."""


COMPLETIONS = "completions.json"
"""File of an engine's completions, in the folder that was tried."""


class Published(torch.nn.Module):
    """Weights by the names under which they are published."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._weights = load_file(path)

    def named_parameters(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        return iter((name, torch.nn.Parameter(values)) for name, values in self._weights.items())


class Engine:
    """vLLM with the arguments of a run's engines, in this process."""

    def __init__(self, folder: Path, dtype: Dtype) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        from forge_rl.engines.vllm import register
        from forge_rl.engines.vllm.arguments import engine_arguments

        register()
        # vLLM looks through the names of all modules, and those of this one cannot be listed.
        sys.modules.pop("llvmlite.binding.ffi", None)
        settings = DecodeSettings(dtype=dtype, max_model_len=128, kv_cache_gib=0.05)
        self._llm = LLMEngine.from_engine_args(engine_arguments(folder, settings, 0), enable_multiprocessing=False)
        self._llm.collective_rpc("init_weight_transfer_engine", args=({},))

    def logprobs(self) -> torch.Tensor:
        """Logprobs of IDS from the second on, by the engine."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._llm.add_request("1", {"type": "token", "prompt_token_ids": IDS}, sampling)
        outputs: list[Any] = []
        while self._llm.has_unfinished_requests():
            outputs += [output for output in self._llm.step() if output.finished]
        positions = outputs[-1].prompt_logprobs
        return torch.tensor([positions[place][token].logprob for place, token in enumerate(IDS) if place])

    def completions(self, *, greedy: bool) -> list[dict[str, Any]]:
        """Complete PROMPTS; each completion has all token ids, and the logprobs of those that it added."""
        from vllm import SamplingParams

        requests = {}
        for index, ids in enumerate(PROMPTS):
            sampling = SamplingParams(
                temperature=0.0 if greedy else 1.0,
                seed=None if greedy else index,
                max_tokens=8,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            self._llm.add_request(str(index), {"type": "token", "prompt_token_ids": ids}, sampling)
        while self._llm.has_unfinished_requests():
            requests |= {output.request_id: output.outputs[0] for output in self._llm.step() if output.finished}
        completions = []
        for index, ids in enumerate(PROMPTS):
            output = requests[str(index)]
            logprobs = [place[token].logprob for token, place in zip(output.token_ids, output.logprobs, strict=True)]
            completions.append({"ids": ids + list(output.token_ids), "logprobs": logprobs, "greedy": greedy})
        return completions

    def load(self, path: Path, scratch: Path, version: int, dtype: Dtype) -> None:
        """Load and attest a version."""
        from forge_rl.engines.vllm.engine import _joined

        manifest = publish(Published(path), scratch, version, bucket_bytes=1 << 20, dtype=resolve_dtype(dtype))
        self._answers("start_load")
        for bucket in manifest.buckets:
            assert bucket.segment is not None
            from forge_rl.weights.segment import SegmentBucket

            part: TensorBucket = SegmentBucket(segment=bucket.segment, entries=manifest.entries[bucket.key])
            self._answers("load_bucket", version, pickle.dumps(part))
        manifest.attest(_joined(self._answers("finish_load")).fingerprints, "the engine")
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.engine_core.shutdown()
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()

    def _answers(self, method: str, *args: object) -> list[Any]:
        answers = [pickle.loads(answer) for answer in self._llm.collective_rpc(f"forge_rl_{method}", args=args)]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


Expected = dict[str, torch.Tensor]
"""transformers' logprobs of IDS from the second on, by dtype."""


def expected_logprobs(folder: Path, dtype: Dtype) -> Expected:
    """Compute logprobs with transformers, in float32 and the engine's dtype.

    It must be done before the first engine starts: vLLM serves some models by transformers' classes, which it changes.
    """
    from transformers import AutoModelForCausalLM

    by_dtype = {}
    for name in {"float32", dtype}:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=transformers_config(folder),
            dtype=resolve_dtype(cast(Dtype, name)),
            attn_implementation="eager",
        ).eval()
        with torch.no_grad():
            logprobs = model(torch.tensor([IDS])).logits[0].float().log_softmax(-1)
        by_dtype[name] = logprobs[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    return by_dtype


def gap(measured: torch.Tensor, expected: Expected, dtype: Dtype) -> float:
    """Distance of logprobs from those of transformers, in units of what rounding explains."""
    distances = (measured - expected["float32"]).abs()
    if dtype == "float32":
        return float(distances.max()) / 1e-3
    return float(distances.mean() / (expected[dtype] - expected["float32"]).abs().mean()) / 2


def completions_gap(folder: Path) -> float:
    """Distance of the logprobs of an engine's completions from those of transformers, see `gap`; a greedy token's is
    also that of the most probable one.

    It must not run in the engine's process, see `expected_logprobs`.
    """
    from transformers import AutoModelForCausalLM

    saved, dtype = folder / "saved" / "model", dtype_of(folder)
    completions = json.loads((folder / COMPLETIONS).read_text())
    expected: dict[str, list[torch.Tensor]] = {"float32": [], dtype: []}
    for name in expected:
        model = AutoModelForCausalLM.from_pretrained(
            saved,
            config=transformers_config(saved),
            dtype=resolve_dtype(cast(Dtype, name)),
            attn_implementation="eager",
        ).eval()
        for completion in completions:
            ids, count = torch.tensor(completion["ids"]), len(completion["logprobs"])
            with torch.no_grad():
                scores = model(ids[None]).logits[0, -count - 1 : -1].float().log_softmax(-1)
            logprobs = scores.gather(1, ids[-count:, None])[:, 0]
            expected[name].append(scores.max(-1).values if completion["greedy"] else logprobs)
    measured = torch.tensor([value for completion in completions for value in completion["logprobs"]])
    return gap(measured, {name: torch.cat(values) for name, values in expected.items()}, dtype)


def dtype_of(folder: Path) -> Dtype:
    """vLLM's latent attention has no float32 on CPUs with AMX, and its Gated DeltaNet has none on any."""
    model_type = json.loads((folder / "model" / "config.json").read_text())["model_type"]
    return "bfloat16" if model_type in ("deepseek_v3", "kimi_k2", "qwen3_next") else "float32"


def try_folder(folder: Path, expected: tuple[Expected, Expected]) -> dict[str, float]:
    """Try a folder; each gap should be below 1, but the one between the first and the last version far above.

    Args:
        expected: of the first and of the saved model.
    """
    model, saved, scratch = folder / "model", folder / "saved" / "model", folder / "versions"
    dtype, (at_first, at_last) = dtype_of(folder), expected
    scratch.mkdir()
    measured: dict[str, float] = {}
    engine = Engine(model, dtype)
    measured["started"] = gap(first := engine.logprobs(), at_first, dtype)
    for version in (1, 2):
        engine.load(folder / f"{version}.safetensors", scratch, version, dtype)
    measured["loaded"] = gap(engine.logprobs(), at_last, dtype)
    measured["changed"] = gap(first, at_last, dtype)
    completions = [*engine.completions(greedy=True), *engine.completions(greedy=False)]
    (folder / COMPLETIONS).write_text(json.dumps(completions))
    engine.close()
    engine = Engine(saved, dtype)
    measured["restarted"] = gap(engine.logprobs(), at_last, dtype)
    engine.close()
    return measured


def main(folders: list[Path]) -> None:
    """Try folders one after the other, and print a line for each, also for one that vLLM does not serve."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    expected: dict[Path, tuple[Expected, Expected]] = {}
    for folder in folders:
        models = folder / "model", folder / "saved" / "model"
        first, last = (expected_logprobs(model, dtype_of(folder)) for model in models)
        expected[folder] = first, last
    for folder in folders:
        try:
            measured: dict[str, Any] = {**try_folder(folder, expected[folder])}
        except Exception as error:
            traceback.print_exc()
            measured = {"failed": f"{type(error).__name__}: {error}"[:300]}
            cleanup_dist_env_and_memory()
        print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
    sys.stdout.flush()
    os._exit(0)
