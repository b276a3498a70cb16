"""LoRA against peft: the same first values, gradients and merged weights; what is published, saved and resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from apps.merge import Config as MergeConfig
from apps.merge import merge
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.degrees import check_model
from forge_rl.engines.factory import plan_training
from forge_rl.engines.lora_config import LoRAConfig, adapter_parameters
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.engines.titan import head
from forge_rl.engines.titan.adapter_engine import TitanAdapters
from forge_rl.engines.titan.factor_pairs import factor_pairs
from forge_rl.engines.titan.index import INDEX
from forge_rl.engines.titan.lora import without_adapters
from forge_rl.engines.titan.shards import ADAPTERS
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.engines.titan.update import Update
from forge_rl.errors import CheckpointError, ConfigError, ModelError, WeightsError
from forge_rl.flags.command_line import parse
from forge_rl.metrics import reduce
from forge_rl.models import expert_stacks
from forge_rl.models.adapter_products import AdapterProduct, merged_weight, merged_weights
from forge_rl.models.adapters import Adapter
from forge_rl.models.resolve import resolve_model
from forge_rl.run.lora_settings import check_served_versions, lora_lines
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import ShardReport, complete, draft, factor_names
from forge_rl.weights.slices import TensorSlice
from recipes import grpo
from tests.fakes import make_model, packed, random_batch, train_batch
from tests.plain_trainer import PlainTrainer
from tests.test_titan_train import plain_steps

pytestmark = pytest.mark.usefixtures("process_group")

LOSS = ClippedSurrogate()
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen2": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "deepseek_v3": {},
}


def engine_of(
    folder: Path, lora: LoRAConfig, *, reference: bool = False, travels: bool = False, **settings: Any
) -> TitanEngine:
    """An engine that publishes merged weights, or adapters if these travel."""
    lora = replace(lora, publish="adapters" if travels else "merged")
    options = {"dtype": "float64", "seq_len": 64, "optimizer": OptimizerConfig(lr=1e-2, max_grad_norm=1e9), **settings}
    return TitanEngine(folder, TrainSettings(lora=lora, **options), reference=reference)


def named_factors(engine: TitanEngine) -> dict[str, torch.nn.Parameter]:
    """An engine's adapters by peft's names."""
    factors = {}
    for pair in factor_pairs(engine.model):
        stem = pair.name.removesuffix(".weight")
        if pair.prefix:
            stem = stem.rpartition(".")[0] + ("" if pair.prefix == "down_" else ".base_layer")
        for kind, parameter in zip(ADAPTERS, pair.parameters, strict=True):
            factors[f"base_model.model.{stem}.{kind}.default.weight"] = parameter
    return factors


def in_peft(name: str, values: torch.Tensor) -> torch.Tensor:
    """A factor, or its gradient, as peft has it: of stacked experts [experts * rank, inputs], [outputs, rank *
    experts]."""
    if values.ndim < 3:
        return values
    return values.flatten(0, 1) if "lora_A" in name else values.permute(1, 2, 0).flatten(1)


def with_peft(model: torch.nn.Module, engine: TitanEngine, lora: LoRAConfig) -> Any:
    """Give transformers' model peft's adapters on the modules that the engine has them on, with the engine's values."""
    factors = named_factors(engine)
    experts = {pair.name for pair in factor_pairs(engine.model) if pair.prefix}
    modules = {pair.name.removesuffix(".weight") for pair in factor_pairs(engine.model) if not pair.prefix}
    rank = {factor.shape[-2] for name, factor in factors.items() if factor.ndim == 3 and "lora_A" in name}
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        target_modules=sorted(modules),
        target_parameters=sorted(experts),
        rank_pattern={name: r for name in experts for r in rank},
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, config)
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained.keys() == factors.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(in_peft(name, factors[name]))
    return adapted


SPARSE = "qwen3_moe", "gpt_oss", "deepseek_v3"
WHOLE = LoRAConfig(rank=6, alpha=5.0, targets=("all-linear", "experts", "lm_head"))
"""Adapters of linear layers, experts, at half or a third of their rank, and the head."""


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *((family, LoRAConfig(rank=3, alpha=5.0)) for family in FAMILIES),
        ("qwen3", LoRAConfig(rank=3, alpha=5.0, rslora=True)),
        ("qwen3", LoRAConfig(rank=3, targets=("lm_head",))),
        *((family, WHOLE) for family in SPARSE),
        ("qwen3_moe", LoRAConfig(rank=1, rslora=True, targets=("experts",))),
    ],
)
def test_gradients_are_those_of_peft(family: str, lora: LoRAConfig, tmp_path: Path):
    deviation, largest = gradient_deviation(tmp_path, family, lora)
    assert largest > 1e-3
    assert deviation < 1e-9


def gradient_deviation(
    folder: Path, family: str, lora: LoRAConfig, change: Callable[[torch.nn.Module], None] = lambda _: None
) -> tuple[float, float]:
    """The largest difference of an adapter's gradient from peft's in float64, and peft's largest gradient.

    Args:
        change: changes the weights that peft's base has.
    """
    model = make_model(folder, family, **FAMILIES[family])
    change(model)
    engine = engine_of(folder, lora)
    with torch.no_grad():
        for parameter in named_factors(engine).values():
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    gradients: dict[str, torch.Tensor] = {}
    clip = engine._parallelism.clip

    def recorded(*arguments: Any) -> torch.Tensor:
        gradients.update({name: in_peft(name, p.grad).clone() for name, p in named_factors(engine).items()})
        assert [n for n, p in engine.model.named_parameters() if p.grad is not None and "lora_" not in n] == []
        return clip(*arguments)

    engine._parallelism.clip = recorded  # type: ignore[method-assign]
    batch = random_batch(0, vocab=43)
    plain = PlainTrainer(model, engine.model, OptimizerConfig(lr=1e-2))
    plain.model = with_peft(plain.model, engine, lora)
    plain._trained = [p for p in plain.model.parameters() if p.requires_grad]
    plain._optimizer = torch.optim.SGD(plain._trained, lr=0.0)
    plain._config = OptimizerConfig(lr=1e-2, max_grad_norm=1e9)
    train_batch(engine, packed(batch, seq_len=64), LOSS, total_updates=5)
    plain_steps(plain, batch)
    expected = {name: p.grad for name, p in plain.model.named_parameters() if p.requires_grad}
    assert gradients.keys() == expected.keys()
    deviation = max(float((gradients[name] - expected[name]).abs().max()) for name in expected)
    return deviation, max(float(values.abs().max()) for values in expected.values())


def trained_engine(folder: Path, lora: LoRAConfig, family: str = "llama", **settings: Any) -> TitanEngine:
    """An engine whose adapters have taken two updates."""
    make_model(folder, family, **FAMILIES[family])
    engine = engine_of(folder, lora, **settings)
    for seed in range(2):
        train_batch(engine, packed(random_batch(seed, vocab=43)), LOSS, total_updates=5)
    return engine


def saved(engine: TitanEngine, source: Path, folder: Path) -> Path:
    for part in ("training", "model"):
        (folder / part).mkdir(parents=True)
    engine.save(folder, source, version=2).result()
    return folder


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *((family, LoRAConfig(rank=3, alpha=5.0)) for family in ("llama", "qwen3", *SPARSE)),
        *((family, WHOLE) for family in SPARSE),
        ("qwen3_moe", replace(WHOLE, targets=("experts",), rslora=True)),
    ],
)
def test_peft_reads_what_is_saved_and_merges_what_is_published(family: str, lora: LoRAConfig, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    source = tmp_path / "hf"
    engine = trained_engine(source, lora, family, dtype="float32")
    folder = saved(engine, source, tmp_path / "step")
    assert not list((folder / "training").glob("*.safetensors"))
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    base = AutoModelForCausalLM.from_pretrained(source, **options)
    adapted = peft.PeftModel.from_pretrained(base, folder / "model").eval()
    (tmp_path / "merged").mkdir()
    Adapter.read(folder / "model").merge(source, tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **options)
    token_ids = torch.arange(12)[None] % 43
    with torch.no_grad():
        logits = adapted(token_ids).logits
        merged = adapted.merge_and_unload().eval()
        torch.testing.assert_close(ours(token_ids).logits, merged(token_ids).logits)
        torch.testing.assert_close(logits, merged(token_ids).logits, rtol=1e-4, atol=1e-4)
    files, start = (load_file(place / "model.safetensors") for place in (tmp_path / "merged", source))
    published = {shard.name: shard.values for shard in engine.local_shards()}
    changed = {name for name, values in start.items() if not values.equal(files[name])}
    expected = {spec.name for spec in engine.specs() if spec.changed}
    assert changed <= expected
    assert all(".experts.7." in name for name in expected - changed), "no token used that one"
    assert any(".experts." in name for name in changed) == ("experts" in lora.targets)
    assert ("lm_head.weight" in changed) == ("lm_head" in lora.targets)
    for name, values in files.items():
        torch.testing.assert_close(published[name], values)


@pytest.mark.parametrize(
    ("family", "lora", "dtype", "count"),
    [
        ("llama", LoRAConfig(rank=4), "float32", 14),
        ("qwen3", LoRAConfig(rank=4, targets=("all-linear", "lm_head")), "bfloat16", 15),
        ("qwen3_moe", WHOLE, "bfloat16", 8 + 2 * 4 * 3 + 1),
        ("gpt_oss", WHOLE, "float32", 8 + 2 * 2 + 1),
    ],
)
def test_a_version_of_adapters_is_the_base_and_adds_up_to_what_is_attested(
    family: str, lora: LoRAConfig, dtype: str, count: int, tmp_path: Path
):
    engine = trained_engine(tmp_path, lora, family, dtype=dtype, travels=True)
    specs, published = engine.specs(), {shard.name: shard.values for shard in engine.local_shards()}
    assert [spec.name for spec in specs if spec.changed] == [name for name in published if "lora_" in name]
    adapted = {spec.name for spec in specs if spec.adapter_scale is not None}
    assert len(adapted) == count
    scales = {spec.name: spec.adapter_scale for spec in specs if spec.name in adapted}
    start = load_file(tmp_path / "model.safetensors")
    assert all(values.equal(start[name].to(values.dtype)) for name, values in published.items() if name in start)
    drafted = draft(specs, version=3, dtype=getattr(torch, dtype))
    # The trainer attests the sums that readers compute of what they get.
    published = {entry.name: published[entry.name].to(entry.torch_dtype) for entry in drafted.tensors}
    assert {values.dtype for name, values in published.items() if "lora_" in name} == {torch.bfloat16}
    expected = {}
    for name in adapted:
        a, b = (published[factor] for factor in factor_names(name))
        merged = merged_weight(published[name], a, b, scales[name])
        assert not merged.equal(published[name])
        expected[name] = fingerprint(merged, merged.shape)
    assert {report.name: report.fingerprint for report in engine.merged_reports(drafted)} == expected
    later = draft(specs, version=4, dtype=getattr(torch, dtype), base=drafted)
    assert later.written_bytes == sum(values.nbytes for name, values in published.items() if "lora_" in name)
    with pytest.raises(WeightsError, match="did not add the adapter of"):
        complete(
            later,
            [
                [
                    ShardReport(name=n, tensor_slice=TensorSlice.whole(v.shape), fingerprint=0)
                    for n, v in published.items()
                    if "lora_" in n
                ]
            ],
        )


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", LoRAConfig(rank=4)),
        ("llama", LoRAConfig(rank=4, dtype="float32")),
        *((family, WHOLE) for family in SPARSE),
        ("qwen3", LoRAConfig(rank=4, targets=("lm_head",))),
        ("qwen3_moe", LoRAConfig(rank=4, targets=("experts",), dtype="float32")),
        ("qwen3", LoRAConfig(rank=4, targets=("lm_head",), dtype="float32")),
    ],
)
def test_passes_see_adapters_as_versions_have_them_and_their_gradients_are_not_rounded(
    family: str, lora: LoRAConfig, tmp_path: Path
):
    engine = trained_engine(tmp_path, lora, family, dtype="float32", travels=True)
    check_rounding(engine, named_factors(engine).values(), lora, vocab=43)


def check_rounding(
    engine: TitanEngine, parameters: Collection[torch.nn.Parameter], lora: LoRAConfig, *, vocab: int
) -> None:
    """Check that a float32 engine computes the same, in both passes, once its adapters' factors are rounded."""
    laid = packed(random_batch(3, vocab=vocab))

    def passes() -> list[torch.Tensor]:
        engine.forward_backward(Update(minibatch=laid.minibatches[0], loss=LOSS))
        gradients = [parameter.grad.clone() for parameter in parameters]  # type: ignore[union-attr]
        engine.model.zero_grad()
        return [*engine.logprobs(laid.rows, temperature=1.0), *gradients]

    results = passes()
    assert not all(values.equal(values.bfloat16().float()) for values in results[len(laid.rows) :])
    for parameter in parameters:
        rounded = parameter.data.bfloat16().float()
        assert not rounded.equal(parameter.data)
        parameter.data = rounded
    is_same = [torch.equal(*pair) for pair in zip(results, passes(), strict=True)]
    assert is_same == [lora.dtype == "bfloat16"] * len(results)


@pytest.mark.parametrize("rank", [1, 5, 64])
def test_products_of_adapters_have_the_same_bits_in_any_order_and_part(rank: int):
    generator = torch.Generator().manual_seed(rank)
    weight, a, b = (torch.randn(size, generator=generator) for size in ((70, 48), (rank, 48), (70, rank)))
    for values in (weight, weight.bfloat16()):
        whole, order = merged_weight(values, a, b, 0.7), torch.randperm(rank, generator=generator)
        exact = values.double() + 0.7 * (b.double() @ a.double())
        rounding = rank * float(a.abs().max() * b.abs().max()) / 2**23
        error = (whole.double() - exact).abs() - exact.abs() * torch.finfo(values.dtype).eps
        assert float(error.max()) < rounding
        assert merged_weight(values, a[order], b[:, order], 0.7).equal(whole)
        product = AdapterProduct(a, b, 0.7)
        parts = [
            torch.cat([product.added_to(part, 14 * row, 16 * column) for column, part in enumerate(row_parts)], dim=1)
            for row, row_parts in enumerate(rows.split(16, dim=1) for rows in values.split(14))
        ]
        assert torch.cat(parts).equal(whole)


class ProductCounts(TorchDispatchMode):
    """Counts products of float64 matrices, by whether they are batched."""

    def __init__(self) -> None:
        super().__init__()
        self.batched: Counter[bool] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default) and args[0].dtype == torch.float64:
            self.batched[args[0].ndim == 3 and len(args[0]) > 1] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_of_a_stack_are_one_and_have_the_bits_of_each_expert_s(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(size, generator=generator) for size in ((6, 20, 12), (6, 3, 12), (6, 20, 3)))
    magnitudes = torch.tensor([1e-30, 1e-3, 0.0, 1.0, 1e3, 1e30])[:, None, None]  # each expert is rounded by its own
    weight, a = weight.to(dtype), a * magnitudes
    with ProductCounts() as counts:
        merged_stack = merged_weight(weight, a, b, 0.7)
    assert counts.batched == {True: 1}
    exact = weight.double() + 0.7 * (b.double() @ a.double())
    eps = max(torch.finfo(dtype).eps, 2.0**-22)
    bounds = exact.abs() * eps + (3 * 0.7 * 2.0**-22) * (b.abs().amax() * a.abs().amax((1, 2), keepdim=True)).double()
    assert bool(((merged_stack.double() - exact).abs() <= bounds).all())
    merged_experts = [merged_weight(*expert, 0.7) for expert in zip(weight, a, b, strict=True)]
    sums = merged_weights(
        {str(index): values for index, values in enumerate(weight)},
        {str(index): (*pair, 0.7) for index, pair in enumerate(zip(a, b, strict=True))},
    )
    product = AdapterProduct(a, b, 0.7)
    parts = [product.added_to(weight[2:5, 4:9, 3:], 2, 4, 3), product.added_to(weight[5:, 4:9, 3:], 5, 4, 3)]
    for values in (torch.stack(merged_experts), torch.stack([sums[str(index)] for index in range(6)])):
        torch.testing.assert_close(values, merged_stack, rtol=1e-12 if dtype == torch.float64 else 0, atol=0)
    torch.testing.assert_close(
        torch.cat(parts), merged_stack[2:, 4:9, 3:], rtol=1e-12 if dtype == torch.float64 else 0, atol=0
    )


@pytest.mark.parametrize(("family", "batched"), [("qwen3_moe", 2 * 3), ("deepseek_v3", 2 * 3), ("gpt_oss", 2 * 2)])
def test_a_version_takes_one_product_for_a_layer_s_experts_and_projection(family: str, batched: int, tmp_path: Path):
    lora = LoRAConfig(rank=6, targets=("experts",))
    merged, travelling = (
        trained_engine(tmp_path / str(travels), lora, family, dtype="float32", travels=travels)
        for travels in (False, True)
    )
    drafted = draft(travelling.specs(), version=0, dtype=torch.float32)
    with ProductCounts() as counts:
        shards = {shard.name: shard.values for shard in merged.local_shards()}
    assert counts.batched == {True: batched}
    with ProductCounts() as counts:
        travelling.merged_reports(drafted)
    assert counts.batched == {True: batched}
    folder = saved(merged, tmp_path / "False", tmp_path / "step")
    (tmp_path / "files").mkdir()
    with ProductCounts() as counts:
        Adapter.read(folder / "model").merge(tmp_path / "False", tmp_path / "files")
    stacks = {values.shape for name, values in shards.items() if ".experts." in name}
    assert not counts.batched[False]
    assert counts.batched[True] <= batched
    assert len(stacks) <= counts.batched[True]
    for name, values in load_file(tmp_path / "files" / "model.safetensors").items():
        torch.testing.assert_close(values, shards[name])


def test_adapters_switched_off_are_the_model_that_training_started_from(tmp_path: Path):
    laid = packed(random_batch(0, vocab=43))
    make_model(tmp_path)
    start = engine_of(tmp_path, LoRAConfig()).logprobs(laid.rows, temperature=1.0)
    loss = ClippedSurrogate(kl_coef=0.3)
    engine, whole = (engine_of(tmp_path, LoRAConfig(rank=4 * on), reference=True) for on in (1, 0))
    assert engine._reference is None
    assert whole._reference is not None
    train_batch(engine, laid, loss, total_updates=5)
    with without_adapters(engine.model):
        off = engine.scorer.logprobs(engine.model, laid.rows, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(off, start, strict=True))
    references = engine._updates(laid.minibatches, loss, 1.0)[0].references
    assert all(torch.equal(reference, first) for reference, first in zip(references, start, strict=False))
    assert not torch.equal(engine.logprobs(laid.rows, temperature=1.0)[0], start[0])


@pytest.mark.parametrize(("family", "lora"), [("llama", LoRAConfig(rank=4, dropout=0.3)), ("qwen3_moe", WHOLE)])
def test_a_checkpoint_holds_adapters_alone_and_goes_on_from_them(family: str, lora: LoRAConfig, tmp_path: Path):
    engine = trained_engine(tmp_path / "hf", lora, family)
    folder = saved(engine, tmp_path / "hf", tmp_path / "step")
    state_keys = json.loads((folder / "training" / INDEX).read_text()).keys()
    counts = {"updates", "planned", "version", "steps"}
    assert {key.rpartition(".")[2][-6:] for key in state_keys - counts} == {"lora_A", "lora_B"}
    other = engine_of(tmp_path / "hf", lora)
    assert other.load_training_state(folder / "training") == 2
    laid = packed(random_batch(2, vocab=43))
    for each in (engine, other):
        train_batch(each, laid, LOSS, total_updates=5)
    ends = [{shard.name: shard.values.clone() for shard in each.local_shards()} for each in (engine, other)]
    assert all(torch.equal(values, ends[1][name]) for name, values in ends[0].items())
    other.reset(OptimizerConfig(lr=1e-2))
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(shard.values, weights[shard.name].double()) for shard in other.local_shards())
    with pytest.raises(CheckpointError, match="trained adapters, and this one does not"):
        engine_of(tmp_path / "hf", LoRAConfig()).load_training_state(folder / "training")
    with pytest.raises(CheckpointError, match="on other modules"):
        engine_of(tmp_path / "hf", LoRAConfig(rank=4, targets=("q_proj",))).load_training_state(folder / "training")


def test_dropout_is_in_updates_only_and_repeats_when_recomputed(tmp_path: Path):
    laid = packed(random_batch(0, vocab=43))
    make_model(tmp_path)
    ends = []
    for dropout, recomputed in ((0.0, "none"), (0.5, "none"), (0.5, "full")):
        engine = engine_of(tmp_path, LoRAConfig(rank=4, dropout=dropout), activation_checkpointing=recomputed)
        for _ in range(2):
            train_batch(engine, laid, LOSS, total_updates=5)
        ends.append(torch.cat(engine.logprobs(laid.rows, temperature=1.0)))
        assert torch.equal(ends[-1], torch.cat(engine.logprobs(laid.rows, temperature=1.0)))
    assert not torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[1], ends[2], rtol=1e-10, atol=1e-12)


def test_recorded_logprobs_are_of_the_model_without_dropout(tmp_path: Path):
    engine = trained_engine(tmp_path, LoRAConfig(rank=4, dropout=0.5))
    (minibatch, *_) = packed(random_batch(2, vocab=43)).minibatches
    expected = engine.logprobs(minibatch.rows, temperature=1.0)
    request = StepRequest(loss=LOSS, total_updates=5, version=0, scored_minibatches=1)
    recorded = engine.train_batch([minibatch], request).scores
    for row, scores, logprobs in zip(minibatch.rows, recorded, expected, strict=True):
        torch.testing.assert_close(scores[row.mask, 0], logprobs[row.mask], rtol=0, atol=1e-12)


def test_first_values_are_of_the_seed_and_peft_starts_as_far(tmp_path: Path):
    make_model(tmp_path)
    firsts = [
        torch.cat([values.flatten() for name, values in named_factors(engine).items() if "lora_A" in name])
        for seed in (0, 0, 1)
        for engine in [engine_of(tmp_path, LoRAConfig(rank=4, targets=("k_proj",)), lora_seed=seed)]
    ]
    assert torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[0], firsts[2])
    bound = 24**-0.5
    assert 0.9 * bound < float(firsts[0].detach().abs().max()) <= bound


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "tied",
            {"lora": LoRAConfig(rank=4, targets=("lm_head",))},
            "lm_head: the head of this 'llama' is the embedding",
        ),
        (
            "llama",
            {"lora": LoRAConfig(rank=4, targets=("embed_tokens",))},
            "embeddings and value heads have no adapters",
        ),
        ("llama", {"lora": LoRAConfig(rank=4, targets=("experts",))}, "a 'llama' has no experts"),
        ("qwen3_moe", {"lora": LoRAConfig(rank=4, targets=("experts",), dropout=0.1)}, "experts have no dropout"),
        (
            "qwen3_moe",
            {"lora": WHOLE, "tensor_parallel_degree": 2},
            "need whole experts, and tensor-parallel ranks split",
        ),
        ("llama", {"lora": LoRAConfig(rank=4, targets=("query",))}, "no such linear layer"),
        ("llama", {"lora": LoRAConfig(rank=4, targets=("all-linear", "q_proj"))}, "q_proj: all-linear includes it"),
        ("qwen3_moe", {"lora": LoRAConfig(rank=4, targets=("q_proj", "gate_proj"))}, "only attention has adapters"),
        ("gpt_oss", {"lora": LoRAConfig(rank=4, targets=("router",))}, "routers have no adapters"),
        ("llama", {"lora": LoRAConfig(rank=4), "pipeline_parallel_degree": 2}, "pipeline stages do not have"),
        ("llama", {"lora": LoRAConfig(rank=4), "frozen": ("model.norm.*",)}, "has no effect"),
        ("llama", {"lora": LoRAConfig(rank=4, dropout=0.1), "tensor_parallel_degree": 2}, "whole rows"),
    ],
)
def test_what_has_no_adapter_is_refused_by_name(family: str, settings: dict, message: str, tmp_path: Path):
    make_model(tmp_path, **({"tie_word_embeddings": True} if family == "tied" else {"family": family}))
    with pytest.raises(ConfigError, match=message) as error:
        check_model(TrainSettings(**settings), 2, read_architecture(tmp_path))
    assert "--" in str(error.value)


def test_adapters_have_ten_times_the_learning_rate_unless_set(tmp_path: Path):
    assert grpo.Config(lora=LoRAConfig(rank=4)).trainer.optimizer.lr == pytest.approx(3e-4)
    config = parse(grpo.Config, "grpo", ["--lora.rank", "16", "--lora.targets", "q_proj", "v_proj"])
    assert (config.trainer.lora.rank, config.trainer.lora.targets) == (16, ("q_proj", "v_proj"))
    assert replace(config, seed=3).trainer.lora_seed == 3
    assert replace(config, seed=3).trainer.optimizer.lr == pytest.approx(3e-4)
    named = parse(grpo.Config, "grpo", ["--lora.rank", "16", "--trainer.optimizer.lr", "1e-4"])
    assert named.trainer.optimizer.lr == 1e-4
    file = tmp_path / "run.toml"
    file.write_text("[lora]\nrank = 16\n[trainer.optimizer]\nlr = 3e-5\n")
    for words in (["--lora.rank", "16", "--trainer.optimizer.lr", "3e-5"], ["--config", str(file)]):
        same = parse(grpo.Config, "grpo", words)
        assert same.trainer.optimizer.lr == 3e-5, "as given, though it is the default"
        assert replace(same, seed=3).trainer.optimizer.lr == 3e-5
    assert grpo.Config().trainer.optimizer.lr == 3e-5
    with pytest.raises(ConfigError, match="value model"):
        lora_lines(config, values=True)


def test_a_plan_of_adapters_has_no_reference_and_few_moments(tmp_path: Path):
    make_tiny = make_model(tmp_path, hidden_size=64, intermediate_size=256)
    count = sum(parameter.numel() for parameter in make_tiny.parameters())
    whole = TrainSettings(dtype="float32", seq_len=64)
    adapted = replace(whole, lora=LoRAConfig(rank=2))
    before, after = (plan_training(tmp_path, settings, ranks=1, reference=True) for settings in (whole, adapted))
    adapters = after.gradients // 4
    assert 0 < adapters < count / 5
    assert after.weights == 4 * (count + adapters)
    assert (after.reference, after.optimizer) == (0, 8 * adapters)
    assert after.state < before.state / 3


@pytest.mark.parametrize(
    ("family", "lora"),
    [*((family, LoRAConfig(rank=3)) for family in FAMILIES), *((family, WHOLE) for family in SPARSE)],
)
def test_parameters_of_adapters_are_counted_before_there_are_any(family: str, lora: LoRAConfig, tmp_path: Path):
    make_model(tmp_path, family, **FAMILIES[family])
    factors = named_factors(engine_of(tmp_path, lora)).values()
    assert adapter_parameters(read_architecture(tmp_path), lora) == sum(factor.numel() for factor in factors) > 0


def test_a_bfloat16_base_is_rounded_only_once_when_merged(tmp_path: Path):
    engine = trained_engine(tmp_path, LoRAConfig(rank=4), dtype="bfloat16")
    dtypes = {name.endswith(ADAPTERS): parameter.dtype for name, parameter in engine.model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    start = load_file(tmp_path / "model.safetensors")
    factors = named_factors(engine)
    for shard in engine.local_shards():
        base = start[shard.name].bfloat16()
        module = f"base_model.model.{shard.name.removesuffix('.weight')}"
        if f"{module}.lora_A.default.weight" in factors:
            a, b = (factors[f"{module}.{kind}.default.weight"].detach().bfloat16() for kind in ADAPTERS)
            base = merged_weight(base, a, b, engine.model.adapters.lora.scale)
        assert torch.equal(shard.values, base), shard.name
    moved = engine.offload()
    assert engine.onload() == moved


def test_adapters_act_where_a_frozen_reference_scores_the_same_rows(tmp_path: Path):
    """Updates with a penalty are those of peft's model with its adapters switched off as the reference."""
    lora, loss = LoRAConfig(rank=3), ClippedSurrogate(kl_coef=0.3)
    model = make_model(tmp_path, "qwen3")
    engine = engine_of(tmp_path, lora, reference=True)
    plain = PlainTrainer(model, engine.model, OptimizerConfig(lr=1e-2, max_grad_norm=1e9))
    plain.model = with_peft(plain.model, engine, lora)
    plain._trained = [parameter for parameter in plain.model.parameters() if parameter.requires_grad]
    plain._optimizer = torch.optim.AdamW(plain._trained, betas=(0.9, 0.95), weight_decay=0.0)
    for seed in range(3):
        batch = random_batch(seed, vocab=43)
        metrics = reduce(train_batch(engine, packed(batch, seq_len=64), loss, total_updates=5))
        (expected,) = plain_steps(plain, batch, loss)
        assert {name: metrics[name] for name in ("loss", "grad_norm")} == pytest.approx(
            {name: expected[name] for name in ("loss", "grad_norm")}, rel=1e-9
        )
    trained = {name: parameter for name, parameter in plain.model.named_parameters() if parameter.requires_grad}
    for name, factor in named_factors(engine).items():
        torch.testing.assert_close(factor.detach(), trained[name].detach(), rtol=1e-8, atol=1e-10)


def test_an_adapter_is_a_model_as_long_as_its_base_is_unchanged(tmp_path: Path):
    source = tmp_path / "hf"
    engine = trained_engine(source, LoRAConfig(rank=3), dtype="float32")
    (source / "tokenizer.json").write_text("{}")
    step = saved(engine, source, tmp_path / "step")
    published = {shard.name: shard.values.clone() for shard in engine.local_shards()}
    resolved = resolve_model(str(step), tmp_path / "cache")
    out = tmp_path / "merged"
    assert merge(MergeConfig(adapter=step, out=out, cache=tmp_path / "cache")) == source
    for folder in (resolved, out):
        weights = load_file(folder / "model.safetensors")
        assert weights.keys() >= published.keys()
        for name, values in published.items():
            torch.testing.assert_close(weights[name], values)
    assert resolve_model(str(step), tmp_path / "cache") == resolved
    with pytest.raises(ModelError, match="exists"):
        merge(MergeConfig(adapter=step, out=out, cache=tmp_path / "cache"))
    with pytest.raises(ModelError, match="holds no adapter"):
        merge(MergeConfig(adapter=source, out=tmp_path / "other", cache=tmp_path / "cache"))
    tensors = load_file(source / "model.safetensors")
    save_file({name: values + 1 for name, values in tensors.items()}, source / "model.safetensors")
    with pytest.raises(ModelError, match=r"is not the model that .* adapts: model.safetensors changed"):
        resolve_model(str(step), tmp_path / "cache")
    config = json.loads((step / "model" / "adapter_config.json").read_text())
    (step / "model" / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ModelError, match="use_dora"):
        Adapter.read(step / "model")


@pytest.mark.parametrize("family", SPARSE)
def test_an_adapter_of_experts_that_peft_wrote_is_merged_as_peft_does(family: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    source, adapter = tmp_path / "hf", tmp_path / "adapter"
    make_model(source, family)
    engine = engine_of(source, WHOLE)
    for number, factor in enumerate(named_factors(engine).values()):
        torch.nn.init.normal_(factor, 0, 0.2, generator=torch.Generator().manual_seed(number))
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    adapted = with_peft(base, engine, WHOLE)
    adapted.save_pretrained(adapter)
    (tmp_path / "merged").mkdir()
    Adapter.read(adapter).merge(source, tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    tensors = load_file(adapter / "adapter_model.safetensors")
    copy = "base_model.model.lm_head.base_layer.weight"
    save_file(tensors | {copy: tensors[copy] + 1}, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"another lm_head\.weight than the base"):
        Adapter.read(adapter).merge(source, tmp_path / "other")
    expected = dict(adapted.merge_and_unload().named_parameters())
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_parameters": ["mlp.gate.weight"]}, "another rank or alpha"),
        ({"target_parameters": "experts.down_proj"}, "another rank or alpha"),
        ({"rank_pattern": {"experts.down_proj": 3}}, "another rank or alpha"),
        (
            {"target_parameters": ["experts.down_proj"], "rank_pattern": {"experts.down_proj": 3}},
            r"has two adapters of .*experts\.down_proj",
        ),
        ({"rank_pattern": {"experts.down_proj": 3, "experts.gate_up_proj": 2}}, "another rank or alpha"),
        ({"rank_pattern": {"experts.down_proj": 0, "experts.gate_up_proj": 0}}, "has r 6"),
        ({"rank_pattern": {"experts.down_proj": 5, "experts.gate_up_proj": 5}}, "not of rank 5"),
        ({"rank_pattern": {"experts.down_proj": 1, "experts.gate_up_proj": 1}}, "is of 12 experts .* lacks"),
        ({"target_parameters": None, "rank_pattern": {}}, "adapts 4 weights that .* lacks"),
    ],
)
def test_a_malformed_adapter_of_experts_is_refused(settings: dict[str, object], message: str, tmp_path: Path):
    source = tmp_path / "hf"
    folder = saved(trained_engine(source, WHOLE, "qwen3_moe"), source, tmp_path / "step") / "model"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"experts.down_proj": 3, "experts.gate_up_proj": 3}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    (tmp_path / "merged").mkdir()
    with pytest.raises(ModelError, match=message):
        Adapter.read(folder).merge(source, tmp_path / "merged")


def test_an_adapter_of_no_experts_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"factors of experts of shapes \(0, 8\) and \(4, 0\)"):
        expert_stacks.unflattened((torch.zeros(0, 8), torch.zeros(4, 0)), 2, tmp_path)


def test_an_adapted_head_is_scored_in_chunks_as_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Logits are held for a few tokens at a time, with the logprobs and gradients of one product."""
    make_model(tmp_path, "qwen3")
    lora, laid = LoRAConfig(rank=3, targets=("q_proj", "lm_head")), packed(random_batch(1, vocab=43))
    ends, sizes = [], []
    product = head._product

    def recorded(*arguments: Any) -> torch.Tensor:
        logits = product(*arguments)
        sizes.append(len(logits))
        return logits

    monkeypatch.setattr(head, "_product", recorded)
    for chunk_bytes in (head.HEAD_CHUNK_BYTES, 43 * 4 * 5):
        monkeypatch.setattr(head, "HEAD_CHUNK_BYTES", chunk_bytes)
        sizes.clear()
        engine = engine_of(tmp_path, lora)
        for _ in range(2):
            train_batch(engine, laid, ClippedSurrogate(entropy_coef=0.1), total_updates=5)
        largest = max(sizes)
        ends.append((engine.logprobs(laid.rows, temperature=0.7), named_factors(engine)))
    (logprobs, factors), (chunked_logprobs, chunked_factors) = ends
    assert largest == 5
    torch.testing.assert_close(torch.cat(chunked_logprobs), torch.cat(logprobs), rtol=1e-10, atol=1e-12)
    for name, values in factors.items():
        torch.testing.assert_close(chunked_factors[name], values, rtol=1e-9, atol=1e-12)
    with without_adapters(engine.model):
        off = torch.cat(engine.scorer.logprobs(engine.model, laid.rows, 0.7))
    assert not torch.allclose(off, torch.cat(chunked_logprobs))


@pytest.mark.parametrize(("family", "target"), [("qwen3_moe", "experts"), ("qwen3", "lm_head")])
def test_experts_and_heads_are_refused_where_several_share_a_base_or_engines_serve_them(
    family: str, target: str, tmp_path: Path
):
    folder = tmp_path / "hf"
    make_model(folder, family)
    lora = LoRAConfig(rank=4, targets=("q_proj", target))
    generator = GeneratorConfig(adapters="served", max_model_len=128, kv_cache_gib=0.1)
    config = grpo.Config(model=str(folder), out=tmp_path / "run", generator=generator, lora=lora)
    with pytest.raises(ConfigError, match=f"engines cannot serve an adapter of {target}"):
        check_served_versions(config, folder, read_architecture(folder))
    with pytest.raises(ConfigError, match=f"{target}: several adapters over one base"):
        TitanAdapters(engine_of(folder, lora), folder)
