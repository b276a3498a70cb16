"""Versions of a LoRA run: what is published, attested and merged, and the products that it takes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.titan.shards import ADAPTERS
from forge_rl.errors import WeightsError
from forge_rl.models.adapter_products import AdapterProduct, merged_weight, merged_weights
from forge_rl.models.adapters import Adapter
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import ShardReport, complete, draft, factor_names
from forge_rl.weights.slices import TensorSlice
from tests.lora_engines import SPARSE, WHOLE, check_rounding, named_factors, saved, trained_engine

pytestmark = pytest.mark.usefixtures("process_group")


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


@pytest.mark.parametrize("rank", [1, 5, 64])
def test_products_of_adapters_have_the_same_bits_in_any_order_and_part(rank: int):
    generator = torch.Generator().manual_seed(rank)
    weight, a, b = (torch.randn(size, generator=generator) for size in ((70, 48), (rank, 48), (70, rank)))
    for values in (weight, weight.bfloat16()):
        merged, order = merged_weight(values, a, b, 0.7), torch.randperm(rank, generator=generator)
        exact = values.double() + 0.7 * (b.double() @ a.double())
        rounding = rank * float(a.abs().max() * b.abs().max()) / 2**23
        error = (merged.double() - exact).abs() - exact.abs() * torch.finfo(values.dtype).eps
        assert float(error.max()) < rounding
        assert merged_weight(values, a[order], b[:, order], 0.7).equal(merged)
        product = AdapterProduct(a, b, 0.7)
        parts = [
            torch.cat([product.added_to(part, 14 * row, 16 * column) for column, part in enumerate(row_parts)], dim=1)
            for row, row_parts in enumerate(rows.split(16, dim=1) for rows in values.split(14))
        ]
        assert torch.cat(parts).equal(merged)


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
