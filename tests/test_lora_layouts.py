"""Adapters in every layout: each trains them as one process does, and goes on from a checkpoint of another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import layouts
from benchmarks.ranks import run_ranks
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.models.adapter_products import merged_weight
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import combine_shards, draft, factor_names
from tests.fakes import make_model, packed, random_batch
from tests.test_layouts import UPDATES, relays

LORA = LoRAConfig(rank=3, alpha=6.0, publish="merged")
WHOLE = replace(LORA, rank=4, targets=("all-linear", "experts", "lm_head"))
"""Adapters of linear layers, experts, at half their rank, and the head."""
FAMILIES = "llama", "qwen3_moe", "gpt_oss", "deepseek_v3"


def adapted_cases(families: tuple[str, ...], *, ranks: int) -> list[layouts.Case]:
    """Layouts of so many ranks that adapters work in."""
    cases = [case for case in layouts.cases(families) if case.ranks == ranks and "PP" not in case.name]
    return [replace(case, degrees=(*case.degrees, ("lora", lora_of(case)), ("lora_seed", 5))) for case in cases]


def lora_of(case: layouts.Case) -> LoRAConfig:
    """Return the most adapters that a layout can have: tensor-parallel ranks alone split each expert."""
    degrees = dict(case.degrees)
    splits_experts = "tensor_parallel_degree" in degrees and "expert_parallel_degree" not in degrees
    return WHOLE if layouts.is_mixture(case.family) and not splits_experts else LORA


def alone(case: layouts.Case) -> layouts.Case:
    names = "router_replay", "lora", "lora_seed"
    degrees = tuple((name, value) for name, value in case.degrees if name in names)
    return layouts.Case(family=case.family, name="one process", ranks=1, degrees=degrees)


def check(folder: Path, cases: list[layouts.Case]) -> None:
    layouts.make_models(folder, FAMILIES)
    singles = [alone(case) for case in cases]
    unique = list(dict.fromkeys(singles))
    expected = dict(zip(unique, layouts.train(folder, unique, UPDATES), strict=True))
    deviations = {}
    for case, single, trained in zip(cases, singles, layouts.train(folder, cases, UPDATES), strict=True):
        deviation = layouts.compare(trained, expected[single])
        moved = {name for name, start in trained.start.items() if not start.equal(trained.weights[name])}
        assert moved
        lora = dict(case.degrees)["lora"]
        assert all("_proj" in name or name == "lm_head.weight" for name in moved), "only adapted weights change"
        for target, part in (("experts", ".experts."), ("lm_head", "lm_head")):
            assert any(part in name for name in moved) == (target in lora.targets), (case.name, target)  # type: ignore[attr-defined]
        deviations[case.family, case.name] = max(deviation.worst, deviation.of_way)
    assert {case: worst for case, worst in deviations.items() if worst >= 1e-10} == {}


def test_layouts_of_two_ranks_train_adapters_as_one_process(tmp_path: Path):
    check(tmp_path, adapted_cases(("llama",), ranks=2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("families", "ranks"),
    [
        (("gpt_oss", "qwen3_moe"), 2),
        pytest.param(("deepseek_v3",), 2, marks=pytest.mark.nightly),
        pytest.param(("llama", "qwen3_moe"), 4, marks=pytest.mark.nightly),
    ],
)
def test_more_layouts_train_adapters_as_one_process(families: tuple[str, ...], ranks: int, tmp_path: Path):
    check(tmp_path, adapted_cases(families, ranks=ranks))


def train_in_bfloat16(rank: int, folder: Path, settings: list[TrainSettings]) -> list[layouts.Shards]:
    """Take two updates in each layout of two ranks, with a base in bfloat16; return what would be published."""
    from forge_rl.engines.titan.train import TitanEngine

    published = []
    for layout in settings:
        engine = TitanEngine(folder, layout)
        shares = 2 // layout.peers
        for seed in range(2):
            batch = packed(random_batch(seed, vocab=43), shares=shares)
            minibatches = [replace(part, rows=part.rows[rank % shares :: shares]) for part in batch.minibatches]
            request = StepRequest(loss=ClippedSurrogate(), total_updates=2, version=0)
            (update,) = engine.train_batch(minibatches, request).metrics
            assert update is not None
        published.append(layouts.shards_of(engine))
    return published


def test_ranks_that_shard_a_base_in_bfloat16_publish_its_sums(tmp_path: Path):
    start = make_model(tmp_path).state_dict()
    optimizer = OptimizerConfig(lr=1e-2)
    options: list[dict[str, object]] = [{}, {"tensor_parallel_degree": 2}, {"activation_checkpointing": "full"}]
    lora = LoRAConfig(rank=3, targets=("q_proj", "o_proj", "down_proj"), publish="merged")
    settings = [TrainSettings(dtype="bfloat16", seq_len=64, lora=lora, optimizer=optimizer, **o) for o in options]  # type: ignore[arg-type]
    by_rank = run_ranks(train_in_bfloat16, 2, tmp_path, settings)
    case = layouts.Case(family="llama", name="bfloat16", ranks=2)
    versions = [layouts.assemble(case, shards) for shards in zip(*by_rank, strict=True)]
    for name, values in start.items():
        changes = [version[name].float() - values.bfloat16().float() for version in versions if name in version]
        assert len(changes) == 3
        is_adapted = name.endswith(("q_proj.weight", "o_proj.weight", "down_proj.weight"))
        assert all(bool(change.any()) == is_adapted for change in changes), name
        if is_adapted:
            first, *other_changes = changes
            assert all(float((first - other).norm() / first.norm()) < 0.5 for other in other_changes), name


def publish_adapters(rank: int, folder: Path, settings: list[TrainSettings]) -> list[tuple[Any, Any, list[Any]]]:
    """Return what each layout would publish, with the fingerprints of the merged slices, and what its passes compute
    with adapters before and after they are rounded; adapters are random."""
    from forge_rl.engines.titan.lora import adapted_modules_of
    from forge_rl.engines.titan.shards import ADAPTERS, slice_of, values_of
    from forge_rl.engines.titan.train import TitanEngine
    from forge_rl.engines.titan.update import Update

    published = []
    for layout in settings:
        engine, shares = TitanEngine(folder, layout), 2 // layout.peers
        (minibatch,) = packed(random_batch(0, vocab=43), shares=shares).minibatches
        minibatch = replace(minibatch, rows=minibatch.rows[rank % shares :: shares])
        modules = [module for _, module in adapted_modules_of(engine.model)]
        for number, module in enumerate(modules):
            full_weights = torch.randn(module.lora_B.shape, generator=torch.Generator().manual_seed(number))
            values_of(module.lora_B).copy_(slice_of(module.lora_B).of(full_weights))
        shards = layouts.shards_of(engine)
        reports, passes = engine.merged_reports(draft(engine.specs(), version=0, dtype=torch.float32)), []
        for _ in range(2):
            scores = engine.logprobs(minibatch.rows, temperature=1.0)
            engine.forward_backward(Update(minibatch=minibatch, loss=ClippedSurrogate()))
            factors = [getattr(module, kind) for module in modules for kind in ADAPTERS]
            passes.append([*scores, *(values_of(factor.grad).clone() for factor in factors)])
            engine.model.zero_grad()
            for factor in factors:
                values_of(factor).copy_(values_of(factor).bfloat16())
        published.append((shards, reports, passes))
    return published


def test_ranks_attest_the_sums_that_engines_compute_of_whole_adapters(tmp_path: Path):
    make_model(tmp_path)
    lora = LoRAConfig(rank=5)
    degrees: list[dict[str, int]] = [{}, {"tensor_parallel_degree": 2}]
    settings = [TrainSettings(dtype="float32", seq_len=64, lora=lora, **degree) for degree in degrees]  # type: ignore[arg-type]
    by_rank = run_ranks(publish_adapters, 2, tmp_path, settings)
    case = layouts.Case(family="llama", name="adapters", ranks=2)
    for ranks in zip(*by_rank, strict=True):
        weights = layouts.assemble(case, [shards for shards, _, _ in ranks])
        merged = combine_shards((report for _, reports, _ in ranks for report in reports), version=0)
        assert len(merged) == 14
        for name, value in merged.items():
            a, b = (weights[factor] for factor in factor_names(name))
            engine_weight = merged_weight(weights[name], a, b, lora.scale)
            assert fingerprint(engine_weight, engine_weight.shape) == value, name
        for _, _, (before, after) in ranks:
            assert all(map(torch.equal, before, after)), "passes round as versions do"


@pytest.mark.long
def test_adapters_go_on_in_another_layout(tmp_path: Path):
    layouts.make_models(tmp_path, FAMILIES)
    named = {(case.family, case.name): case for case in adapted_cases(("llama", "qwen3_moe"), ranks=2)}
    places = [(("llama", "FSDP"), ("llama", "TP")), (("qwen3_moe", "FSDP"), ("qwen3_moe", "EP"))]
    pairs = [(named[first], named[second]) for first, second in (*places, places[1][::-1])]
    expected = layouts.train(tmp_path, [alone(first) for first, _ in pairs], UPDATES)
    by_rank = run_ranks(relays, 2, tmp_path, pairs)
    for index, (_, then) in enumerate(pairs):
        weights = layouts.assemble(then, [parts[index] for parts in by_rank])
        assert max(float((weights[name] - end).abs().max()) for name, end in expected[index].weights.items()) < 1e-10
