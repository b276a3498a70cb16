"""LoRA: what adapters save and cost, how exact they are, and whether mistakes with them are noticed.

python -m benchmarks.adapters --json out.json

Memory and time are of updates of SmolLM2-135M in float32, each in a process of its own. `update_over_peft` is the ratio
to transformers with peft on the same episodes, in turn. `worst_deviation` is the largest difference of a gradient from
peft's, in float64, over all families with adapters. For `mutations_missed`, a real engine gets adapters with one
mistake each: some in the bytes of a version, where the comparison of bytes must name the tensor, others in the adapter
that it serves afterwards, where the logprobs of probes must betray it; the latter also with versions of all weights.
`probes_cpu_share` is the share of a version's probes in the CPU time of a step of full training in float32,
`probes_cpu_share_bfloat16` in bfloat16.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.adapter_updates import (
    adapters_peak,
    adapters_seconds,
    published_share,
    update_peak,
    update_seconds,
)
from benchmarks.ranks import run_ranks
from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.lora_config import LoRAConfig, adapter_parameters
from forge_rl.engines.platform import init_distributed
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model

_LLAMA: dict[str, object] = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e5}
_QWEN3: dict[str, object] = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 128}
_SIZES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
_MODELS: dict[str, tuple[dict[str, object], tuple[int, ...], int, bool]] = {
    "SmolLM2-135M": (_LLAMA, (576, 1536, 30, 9, 3), 49152, True),
    "SmolLM2-360M": (_LLAMA, (960, 2560, 32, 15, 5), 49152, True),
    "Qwen3-0.6B": (_QWEN3, (1024, 3072, 28, 16, 8), 151936, True),
    "SmolLM2-1.7B": (_LLAMA, (2048, 8192, 24, 32, 32), 49152, True),
    "Qwen3-1.7B": (_QWEN3, (2048, 6144, 28, 16, 8), 151936, True),
    "Llama-3.1-8B": (_LLAMA, (4096, 14336, 32, 32, 8), 128256, False),
    "Qwen3-8B": (_QWEN3, (4096, 12288, 36, 32, 8), 151936, False),
}
"""Family, sizes, vocabulary and whether embedding and head are tied, as the models' config.json have them."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure adapters."""

    model: str = "smollm2-135m"
    """Bundled model name, folder, or hub id, of which updates are measured."""
    rank: int = 16
    """Rank of the adapters, on all linear layers."""
    adapters: int = 4
    """Number of adapters over one base."""
    groups: int = 4
    """Groups of a batch, of 8 episodes each."""
    prompt_tokens: int = 48
    """Tokens of a prompt, which the episodes of a group share."""
    answer_tokens: int = 16
    """Tokens of an answer."""
    repeats: int = LEAST_REPEATS
    """Repeats of each measurement of time."""
    families: tuple[str, ...] = ("llama", "qwen3", "qwen2", "qwen3_moe", "gpt_oss", "deepseek_v3")
    """Families whose gradients are compared with peft's."""
    engine: bool = True
    """Whether a real engine is given wrong adapters, too, and the cost of probes is measured in a run."""
    bytes_only: bool = False
    """Only count the bytes of versions of published models, which takes a second."""

    def __post_init__(self) -> None:
        for name in ("rank", "groups", "prompt_tokens", "answer_tokens", "repeats"):
            if getattr(self, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise BenchmarkError(f"{flag} is {getattr(self, name)}", hint=f"set {flag} to 1 or more")
        if self.adapters < 2:
            raise BenchmarkError(f"--adapters is {self.adapters}", hint="set --adapters to 2 or more")


def measure(config: Config, report: Report) -> None:
    """Count bytes, measure in child processes, then compare gradients, then make mistakes."""
    _count_bytes(config, report)
    if config.bytes_only:
        return
    folder = resolve_model(config.model, default_cache()).resolve()
    lora = LoRAConfig(rank=config.rank)
    shape = {
        "groups": config.groups,
        "group_size": 8,
        "prompt": config.prompt_tokens,
        "answer": config.answer_tokens,
    }
    # Each in a process of its own: memory that one has freed would hide the next one's peak.
    adapted, full = (run_ranks(update_peak, 1, folder, setting, shape)[0] for setting in (lora, LoRAConfig()))
    report.rows.append({"peak_bytes_lora": adapted, "peak_bytes_full": full})
    report.results["lora_memory_over_full"] = adapted / full
    (report.results["publish_bytes_share"],) = run_ranks(published_share, 1, folder, lora)
    (pairs,) = run_ranks(update_seconds, 1, folder, lora, shape, config.repeats)
    report.rows += [{"update_s": ours, "peft_update_s": peer} for ours, peer in pairs]
    report.measure("update_s", [ours for ours, _ in pairs])
    report.measure("peft_update_s", [peer for _, peer in pairs])
    report.measure("update_over_peft", [ours / peer for ours, peer in pairs])
    count = config.adapters
    peaks = {n: run_ranks(adapters_peak, 1, folder, lora, shape, n)[0] for n in (1, count)}
    report.rows.append({f"peak_bytes_of_{n}": peak for n, peak in peaks.items()})
    report.results[f"memory_{count}_over_1"] = peaks[count] / peaks[1]
    (pairs,) = run_ranks(adapters_seconds, 1, folder, lora, shape, count, config.repeats)
    report.rows += [{f"{count}_adapters_s": several_s, "1_adapter_s": single_s} for several_s, single_s in pairs]
    report.measure(f"tokens_{count}_over_1", [single_s / several_s for several_s, single_s in pairs])
    _compare_gradients(config, report)
    if config.engine:
        _make_mistakes(report)
        _measure_probes(config, report)


def _count_bytes(config: Config, report: Report) -> None:
    """Count the bytes of adapters, in bfloat16, and of their models in both dtypes of engines."""
    for name, (family, sizes, vocab, tied) in _MODELS.items():
        values = family | dict(zip(_SIZES, sizes, strict=True)) | {"vocab_size": vocab, "tie_word_embeddings": tied}
        with tempfile.TemporaryDirectory(prefix="adapters-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 8192}))
            architecture = read_architecture(Path(folder))
        for rank in (8, 16, 32):
            count = adapter_parameters(architecture, LoRAConfig(rank=rank))
            share = count / architecture.weights
            # Adapters are published in bfloat16, so against float32 weights their share is half.
            shares = {"bytes_share_bfloat16": share, "bytes_share_float32": share / 2}
            report.rows.append({"model": name, "rank": rank, "adapter_parameters": count, **shares})


def _compare_gradients(config: Config, report: Report) -> None:
    """Compare gradients of each family with peft's, in float64."""
    from tests.lora_engines import SPARSE, WHOLE, gradient_deviation

    init_distributed(0, 1, "127.0.0.1", 0)
    worst = 0.0
    for family in config.families:
        configs = [LoRAConfig(rank=3, alpha=5.0, rslora=rslora) for rslora in (False, True)]
        for lora in [*configs, WHOLE] if family in SPARSE else configs:
            with tempfile.TemporaryDirectory(prefix="adapters-") as name:
                deviation, largest = gradient_deviation(Path(name), family, lora)
            row = {"family": family, "targets": " ".join(lora.targets), "rslora": lora.rslora}
            report.rows.append(row | {"deviation": deviation, "largest": largest})
            worst = max(worst, deviation)
    torch.distributed.destroy_process_group()
    report.results["worst_deviation"] = worst


def _make_mistakes(report: Report) -> None:
    """Give a real engine wrong adapters, and count those that nobody noticed."""
    from tests.served_host import MistakeHost, hosted

    adapter_limits = {"max_loras": 3, "max_lora_rank": 8}
    errors: dict[str, str] = {}
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory(prefix="adapters-") as name:
        context = hosted(MistakeHost, Path(name), adapter_limits)
        check = runner.run(context.__aenter__())
        try:
            for kind in ("value", "weights", "effect"):
                errors |= {f"{kind}: {mistake}": error for mistake, error in json.loads(check(kind)).items()}
        finally:
            runner.run(context.__aexit__(None, None, None))
    report.rows += [{"mistake": mistake, "error": error[:300]} for mistake, error in errors.items()]
    report.results["mutations"] = float(len(errors))
    report.results["mutations_missed"] = float(sum(not error for error in errors.values()))


def _measure_probes(config: Config, report: Report) -> None:
    """Take steps of runs that train all weights, and measure the share of probes in their CPU time: in float32, with
    one text, and in bfloat16, with three."""
    for dtype, suffix in (("float32", ""), ("bfloat16", "_bfloat16")):
        with tempfile.TemporaryDirectory(prefix="adapters-") as name:
            flags = {"model": config.model, "out": f"{name}/run", "steps": 2 + LEAST_REPEATS, "display": "none"}
            flags |= {"schedule.kind": "synchronous"}  # nothing else decodes between the steps
            flags |= {"trainer.dtype": dtype, "generator.dtype": dtype}
            flags |= dict.fromkeys(("evaluation.tasks", "evaluation.every", "checkpoint-every"), 0)
            words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
            command = [sys.executable, "-m", "benchmarks.peers.probe_cost", *words]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise BenchmarkError(f"the run with probes exited with {done.returncode}: {done.stdout[-2000:]}")
        seconds = json.loads(lines[-1])
        report.rows += [{f"cpu_s_{part}{suffix}": value} for part, values in seconds.items() for value in values]
        for part, values in seconds.items():
            report.measure(f"cpu_s_{part}{suffix}", values)
        probes = report.results[f"cpu_s_trainer{suffix}"] + report.results[f"cpu_s_engine{suffix}"]
        report.results[f"probes_cpu_share{suffix}"] = probes / report.results[f"cpu_s_step{suffix}"]


if __name__ == "__main__":
    run_benchmark("adapters", Config, measure)
