"""Balance, memory and time of a layer's experts on expert-parallel ranks, as the load gets more uneven.

python -m benchmarks.expert_parallel --json out.json

The experts of one layer, forward and backward, on tokens whose experts are drawn: each expert of the first rank is N
times as likely as each other one, at a skew of N. Both ways run in turns on the same tokens: plain (torchtitan's expert
parallelism, each rank computes its own experts) and least_loaded (overloaded ranks lend experts). Times are the
slowest rank's. Peaks are the highest rank's: its weights, and all other tensors that live at once.
`bias` is DeepSeek-V3's way: the heaviest rank after a number of steps of 0.001 of the biases in the choice, on the same
scores; it computes other experts than the scores alone would choose, so that nothing else of it is compared.

Before timing, outputs and gradients of both ways are compared in float64. `deviation` is the largest difference over
the largest value, of outputs, gradients of inputs, scores and weights.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.utils import set_spmd_backend

from benchmarks.ranks import run_ranks
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, check_repeats, median, run_benchmark, without_nan
from forge_rl.engines.families.family import Experts
from forge_rl.engines.titan.least_loaded import LeastLoadedExperts
from forge_rl.engines.titan.moe import moe_config
from forge_rl.engines.titan.parallel import BACKEND
from forge_rl.engines.titan.plan import LiveBytes
from forge_rl.errors import check_flags

_WAYS = ("plain", "least_loaded")
_STEP = 0.001


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Compare plain and least-loaded expert parallelism."""

    ranks: tuple[int, ...] = (2, 4)
    skews: tuple[int, ...] = (1, 2, 5, 10, 30)
    repeats: int = 7
    """Timed passes of each way, after one that warms up."""
    tokens: int = 8192
    """Tokens of each rank."""
    dim: int = 256
    hidden_dim: int = 512
    experts: int = 8
    top_k: int = 2
    bias_updates: int = 200
    """Steps of the biases."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"tokens": 1, "dim": 1, "hidden_dim": 1, "top_k": 1, "bias_updates": 0})
        check_repeats(self.repeats)
        if not self.ranks or not self.skews or any(ranks < 2 or self.experts % ranks for ranks in self.ranks):
            raise BenchmarkError("--ranks must be 2 or more, and divide --experts", hint="set --ranks and --experts")


@dataclass(frozen=True, kw_only=True)
class _Case:
    ranks: int
    skew: int
    config: Config


def measure(config: Config, report: Report) -> None:
    """Compare and time both ways for all ranks and skews."""
    heaviest, deviations = [], []
    for ranks in config.ranks:
        cases = [_Case(ranks=ranks, skew=skew, config=config) for skew in config.skews]
        by_rank = run_ranks(_run, ranks, cases)
        for case, rank_results in zip(cases, zip(*by_rank, strict=True), strict=True):
            row = _together(list(rank_results))
            report.rows.append({"ranks": ranks, "skew": case.skew, **row})
            heaviest.append(row["heaviest_least_loaded"])
            deviations.append(row["deviation"])
            name = f"{ranks}_skew_{case.skew}"
            report.results |= {f"{key}_{name}": value for key, value in row.items()}
    rows = {(row["ranks"], row["skew"]): row for row in report.rows}
    report.results["heaviest_over_mean"] = max(heaviest)
    report.results["worst_deviation"] = max(deviations)
    for name, case_key, key in (
        ("peak_over_plain_30", (4, 30), "peak_over_plain"),
        ("speedup_30", (2, 30), "speedup"),
        ("speedup_balanced", (2, 1), "speedup"),
    ):
        if case_key in rows:
            report.results[name] = float(str(rows[case_key][key]))
    if "speedup_balanced" in report.results:
        report.results["slowdown_balanced"] = 1 / report.results.pop("speedup_balanced")


def _together(rank_results: list[dict[str, Any]]) -> dict[str, float]:
    """Merge the ranks' measurements of a case."""
    seconds = {
        way: [
            max(step_seconds) for step_seconds in zip(*(result["seconds"][way] for result in rank_results), strict=True)
        ]
        for way in _WAYS
    }
    peaks = {way: max(result["peak"][way] for result in rank_results) for way in _WAYS}
    ratios = [plain / ours for plain, ours in zip(seconds["plain"], seconds["least_loaded"], strict=True)]
    return {
        "heaviest_plain": rank_results[0]["heaviest"][0],
        "heaviest_least_loaded": rank_results[0]["heaviest"][1],
        "heaviest_bias": rank_results[0]["bias"],
        "seconds_plain": median(seconds["plain"]),
        "seconds_least_loaded": median(seconds["least_loaded"]),
        "speedup": median(ratios),
        "peak_mib_plain": peaks["plain"] / 2**20,
        "peak_mib_least_loaded": peaks["least_loaded"] / 2**20,
        "peak_over_plain": peaks["least_loaded"] / peaks["plain"],
        "deviation": max(result["deviation"] for result in rank_results),
    }


def _run(rank: int, cases: list[_Case]) -> list[dict[str, Any]]:
    set_spmd_backend(BACKEND)
    return [_case(rank, case) for case in cases]


def _case(rank: int, case: _Case) -> dict[str, Any]:
    """Compare, measure and time one case on this rank."""
    config = case.config
    # Compared in float64 on few tokens, where any difference is a mistake and not rounding.
    exact = _Layer(case, rank, torch.float64, tokens=256)
    results = [exact.run(lends=way == "least_loaded") for way in _WAYS]
    deviation = max(
        without_nan(float((a - b).abs().max() / a.abs().max().clamp(min=1e-300))) for a, b in zip(*results, strict=True)
    )

    layer = _Layer(case, rank, torch.float32, tokens=config.tokens)
    peak = dict[str, int]()
    for way in _WAYS:
        with LiveBytes() as live:
            layer.run(lends=way == "least_loaded")
        peak[way] = live.peak + layer.weight_bytes
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    for _ in range(config.repeats):
        for way in _WAYS:
            # Ranks start together, or the slowest one's time would include waiting for its peers.
            dist.barrier()
            start = time.perf_counter()
            layer.run(lends=way == "least_loaded")
            seconds[way].append(time.perf_counter() - start)
    return {
        "deviation": deviation,
        "peak": peak,
        "seconds": seconds,
        "heaviest": layer.experts.heaviest,
        "bias": _biased(layer.preferences, case),
    }


class _Layer:
    """A layer's experts on one rank, with its tokens and their choices."""

    def __init__(self, case: _Case, rank: int, dtype: torch.dtype, *, tokens: int) -> None:
        config = case.config
        self._mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("ep",))
        kind = Experts(
            layers=(0,), count=config.experts, top_k=config.top_k, hidden_dim=config.hidden_dim, normalized=True
        )
        self.experts: LeastLoadedExperts = moe_config(kind, config.dim).routed_experts.build()
        generator = torch.Generator().manual_seed(0)
        local_experts = slice(rank * config.experts // case.ranks, (rank + 1) * config.experts // case.ranks)
        inner = self.experts.inner_experts
        for name, parameter in list(inner.named_parameters()):
            weight = torch.randn(parameter.shape, generator=generator, dtype=dtype) * config.dim**-0.5
            setattr(inner, name, torch.nn.Parameter(weight[local_experts].clone()))
        self.weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in inner.parameters())
        self.experts.token_dispatcher.wire_meshes(ep_mesh=self._mesh)
        generator.manual_seed(rank + 1)
        shares = torch.ones(config.experts)
        shares[: config.experts // case.ranks] = case.skew
        # With Gumbel noise, the top k are k draws without replacement, in proportion to the shares.
        noise = -torch.log(-torch.log(torch.rand(tokens, config.experts, generator=generator).clamp(1e-9, 1 - 1e-7)))
        self.preferences = shares.log() + noise
        self._chosen = self.preferences.topk(config.top_k).indices
        self._x = torch.randn(1, tokens, config.dim, generator=generator, dtype=dtype).requires_grad_()
        self._scores = torch.rand(1, tokens, config.top_k, generator=generator, dtype=dtype).requires_grad_()
        self._counts = torch.bincount(self._chosen.flatten(), minlength=config.experts)

    def run(self, *, lends: bool) -> tuple[torch.Tensor, ...]:
        """Run forward and backward; returns the output, and the gradients of inputs, scores and weights."""
        self.experts.lends = lends
        out = self.experts(self._x, self._scores, self._chosen[None], self._counts)
        inputs = (self._x, self._scores, *self.experts.inner_experts.parameters())
        return out.detach(), *torch.autograd.grad(out.square().sum(), inputs)


def _biased(preferences: torch.Tensor, case: _Case) -> float:
    """Return the heaviest rank's rows over the mean once biases have moved."""
    config = case.config
    scores = preferences.sigmoid()
    bias = torch.zeros(config.experts)
    for _ in range(config.bias_updates):
        load = _load(scores + bias, config)
        # DeepSeek-V3's rule: a fixed step up for experts below the mean load, and down for those above.
        bias += _STEP * (load.double().mean() - load).sign().float()
    totals = _load(scores + bias, config).view(case.ranks, -1).sum(dim=1).double()
    return float(totals.max() / totals.mean())


def _load(scores: torch.Tensor, config: Config) -> torch.Tensor:
    """Count each expert's tokens over all ranks."""
    load = torch.bincount(scores.topk(config.top_k).indices.flatten(), minlength=config.experts)
    dist.all_reduce(load)
    return load


if __name__ == "__main__":
    run_benchmark("expert_parallel", Config, measure)
