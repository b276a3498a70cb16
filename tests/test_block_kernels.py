"""The GPU's kernels of a decoder layer, run by Triton's interpreter on CPU, against float64."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import rms_norm, silu
from torchtitan.models.gpt_oss.moe import swiglu as gpt_oss_swiglu

from forge_rl.algorithms.logprobs import Scoring, token_scores
from forge_rl.engines.titan import (
    block_kernels,
    cpu_feed_forward,
    cpu_norm,
    expert_choice,
    expert_products,
    expert_rows,
    fused_block,
    fused_head,
    fused_products,
    kernel_checks,
    least_loaded,
    moe,
    products,
    rope,
    routing,
)
from forge_rl.engines.titan import model as model_module
from forge_rl.engines.titan.block_kernels import add_norm, norm_rope, swiglu
from forge_rl.engines.titan.expert_rows import clamped_swiglu, places_of, spread_rows, weighted_sum
from forge_rl.engines.titan.gradient_sums import GradientSum, SumPlace
from forge_rl.engines.titan.master_weights import MasterWeights
from forge_rl.engines.titan.products import joint_linear
from forge_rl.system.kernels import failures
from tests.fakes import make_model
from tests.test_kernel_checks import small_architecture

EPS = 1e-6


def compare(ours: Callable[..., Any], exact: Callable[..., Any], *values: torch.Tensor) -> None:
    """Compare results and gradients in float32 with those in float64."""
    inputs = [value.clone().requires_grad_() for value in values]
    wide = [value.double().requires_grad_() for value in values]
    results, expected = ours(*inputs), exact(*wide)
    results, expected = ((x,) if isinstance(x, torch.Tensor) else x for x in (results, expected))
    grads = [torch.randn_like(result) for result in results]
    torch.autograd.backward(results, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    for result, expected_value in zip([*results, *gradients(inputs)], [*expected, *gradients(wide)], strict=True):
        torch.testing.assert_close(result.double(), expected_value, rtol=1e-5, atol=1e-5)


def gradients(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    grads = [tensor.grad for tensor in tensors]
    assert None not in grads
    return grads  # type: ignore[return-value]


def rotated(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    cos, sin = cache.double().split(x.shape[-1], dim=-1)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def check_kernels() -> None:
    """Check each kernel, with sizes that are no powers of two, and more tokens than programs."""
    x, delta, weight = 3 * torch.randn(1, 7, 48), torch.randn(1, 7, 48), torch.randn(48)
    compare(
        lambda x, delta, weight: add_norm(x, delta, weight, EPS),
        lambda x, delta, weight: (x + delta, rms_norm(x + delta, (48,), weight, EPS)),
        *(x, delta, weight),
    )
    compare(
        lambda x, weight: add_norm(x, None, weight, EPS),
        lambda x, weight: (x * 1, rms_norm(x, (48,), weight, EPS)),
        *(x, weight),
    )
    compare(lambda x, w: add_norm(x, None, w, EPS)[1], lambda x, w: rms_norm(x, (48,), w, EPS), x, weight)
    angles = torch.randn(7, 12)
    cache = torch.cat([angles.cos(), angles.cos(), angles.sin(), angles.sin()], dim=1)[None, :, None]
    heads, head_weight = torch.randn(1, 7, 3, 24), torch.randn(24)
    compare(
        lambda x, weight: norm_rope(x, weight, cache, EPS),
        lambda x, weight: rotated(rms_norm(x, (24,), weight, EPS), cache),
        *(heads, head_weight),
    )
    compare(lambda x: norm_rope(x, None, cache, EPS), lambda x: rotated(x, cache), heads)
    compare(swiglu, lambda a, b: silu(a) * b, 3 * torch.randn(5, 1001), torch.randn(5, 1001))
    places = places_of(torch.tensor([[2, 0], [1, 2], [0, 1], [3, 2], [2, 1]]))
    compare(
        lambda x: spread_rows(x, places),
        lambda x: x[places.flatten().argsort() // 2],
        torch.randn(5, 48),
    )
    compare(
        lambda rows, scores: weighted_sum(rows, scores, places),
        lambda rows, scores: (rows[places] * scores[..., None]).sum(dim=1),
        *(torch.randn(10, 48), torch.randn(5, 2)),
    )
    compare(
        lambda hidden: clamped_swiglu(hidden, 2.0),
        lambda hidden: gpt_oss_swiglu(hidden, limit=2.0),
        3 * torch.randn(7, 2 * 700),
    )
    compare(
        joint_linear,
        lambda x, a, b: (x @ a.t(), x @ b.t()),
        *(torch.randn(1, 5, 8), torch.randn(6, 8), torch.randn(4, 8)),
    )


def check_products() -> None:
    """Check products with what follows them inside, of several tiles that are not full."""
    tile = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16}
    with mock.patch.object(fused_products, "_TILE", tile), mock.patch.object(fused_products, "_SPLITS", 3):
        compare(
            products.gated_network,
            lambda x, weight, down: (silu(x @ weight[:50].t()) * (x @ weight[50:].t())) @ down.t(),
            *(torch.randn(1, 37, 40), torch.randn(100, 40) / 4, torch.randn(24, 50) / 4),
        )
        with mock.patch.object(fused_head, "_CHUNK_BYTES", 37 * 256 * 4):
            check_scores(torch.randint(300, (37,)))
            check_scores(torch.randint(300, (37, 3)))


def check_expert_products() -> None:
    """Check the layers of experts of which some have no rows, and gradients of parts of columns, with tiles that are
    not full."""
    ends = torch.tensor([5, 5, 40, 41, 41], dtype=torch.int32)
    row_experts = torch.searchsorted(ends, torch.arange(41), right=True)
    tile = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16}
    x, weight, bias = torch.randn(41, 40) / 6, torch.randn(5, 52, 40), torch.randn(5, 52)
    with (
        mock.patch.object(expert_products, "_TILE", tile),
        mock.patch.object(expert_products, "_COLUMNS", {"ROWS": 16, "BLOCK": 32}),
        mock.patch.object(expert_products, "has_kernels", return_value=True),
        mock.patch.object(expert_products, "_has_gradient_kernel", return_value=True),
    ):
        compare(
            lambda x, weight, bias: expert_products.expert_bias(
                expert_products.expert_linear(x, weight, ends), bias, ends
            ),
            lambda x, weight, bias: torch.einsum("ri,roi->ro", x, weight[row_experts]) + bias[row_experts],
            *(x, weight, bias),
        )
        compare(
            lambda x, weight: expert_products.joint_swiglu(expert_products.expert_linear(x, weight, ends)),
            lambda x, weight: (
                silu(torch.einsum("ri,roi->ro", x, weight[row_experts, :26]))
                * torch.einsum("ri,roi->ro", x, weight[row_experts, 26:])
            ),
            *(x, weight),
        )
        masters = [torch.nn.Parameter(values) for values in weight.split([30, 22], dim=1)]
        joint = torch.nn.Parameter(weight.clone())
        joint.sum_place = SumPlace(GradientSum(masters), None)  # type: ignore[attr-defined]
        for _ in range(2):  # the second pass adds to the sum
            expert_products.expert_linear(x, joint, ends).square().sum().backward()
    assert joint.grad is None
    exact = weight.double().requires_grad_()
    torch.einsum("ri,roi->ro", x.double(), exact[row_experts]).square().sum().backward()
    torch.testing.assert_close(torch.cat(gradients(masters), dim=1).double(), 2 * exact.grad, rtol=1e-5, atol=1e-5)
    # Rows that are not contiguous; Triton's interpreter multiplies float16, and not bfloat16.
    values = [torch.randn(41, 80).half()[:, ::2] / 6, weight[:, :48].half(), bias[:, :48].half()]
    narrow = [value.requires_grad_() for value in values]
    wide = [value.detach().double().requires_grad_() for value in narrow]
    with (
        mock.patch.object(expert_products, "_TILE", tile),
        mock.patch.object(expert_products, "has_kernels", return_value=True),
    ):
        linear = expert_products.expert_linear(narrow[0], narrow[1], ends)
        result = expert_products.expert_bias(linear, narrow[2], ends)
        result.backward(grad := torch.randn(48, 41).half().t())
    exact_result = torch.einsum("ri,roi->ro", wide[0], wide[1][row_experts]) + wide[2][row_experts]
    exact_result.backward(grad.double())
    for value, exact_value in zip([result, *gradients(narrow)], [exact_result, *gradients(wide)], strict=True):
        assert float((value.double() - exact_value).abs().max() / exact_value.abs().max()) < 2e-3
    behind, copy = torch.ones(50, 52), torch.ones(50, 52)  # nine rows that belong to no expert
    with mock.patch.object(expert_products, "has_kernels", return_value=True):
        expert_products.expert_bias(behind, bias, ends, 2)
    torch.testing.assert_close(behind[:41], copy[:41] + bias[row_experts] / 2)
    assert torch.equal(behind[41:], copy[41:])


def check_choices() -> None:
    """Check the choice of experts by both kinds of scores, biases, ties, and values that are not finite."""
    logits = 3 * torch.randn(7, 12)
    biases: tuple[torch.Tensor | None, ...] = (None, torch.randn(12), torch.randn(7, 12))
    for is_sigmoid, normalises, bias in itertools.product((False, True), (False, True), biases):
        rule = expert_choice.ChoiceRule(3, is_sigmoid, normalises, 2.5)

        def weights(logits: torch.Tensor, rule: Any = rule, bias: torch.Tensor | None = bias) -> torch.Tensor:
            scores = logits.sigmoid() if rule.is_sigmoid else logits.softmax(-1)
            expert_ids = (scores if bias is None else scores + bias).topk(3).indices
            assert torch.equal(expert_choice.chosen_experts(logits.detach().float(), bias, rule)[1], expert_ids)
            top_scores = scores.gather(1, expert_ids)
            return 2.5 * (top_scores / top_scores.sum(-1, keepdim=True) if rule.normalises else top_scores)

        compare(
            lambda logits, rule=rule, bias=bias: expert_choice.chosen_experts(logits, bias, rule)[0], weights, logits
        )
    rule = expert_choice.ChoiceRule(3, True, False, 1.0)
    _, expert_ids = expert_choice.chosen_experts(torch.zeros(1, 12), None, rule)
    assert expert_ids.tolist() == [[0, 1, 2]]
    bias = torch.full((12,), -torch.inf)
    bias[5] = torch.nan
    _, expert_ids = expert_choice.chosen_experts(torch.full((1, 12), torch.nan), bias, rule)
    assert len(set(expert_ids[0].tolist())) == 3
    assert max(expert_ids[0].tolist()) < 12
    _, expert_ids = expert_choice.chosen_experts(torch.zeros(1, 12), bias, rule)
    assert expert_ids.tolist() == [[5, 0, 1]]
    assert expert_choice.chosen_experts(torch.zeros(0, 12), None, rule)[1].shape == (0, 3)


def check_scores(targets: torch.Tensor) -> None:
    """Check scores without logits, whose gradients come in two parts; the second backward pass adds to a sum."""
    scoring = Scoring(temperature=0.7, entropy_gradient=True, squares=True)
    hidden, weight = torch.randn(37, 40) / 6, torch.randn(300, 40)
    weight[200] *= 20  # sure tokens, so that others have hardly any probability
    compare(
        lambda hidden, weight: fused_head.score_in_products(hidden, weight, targets, scoring)[:2],
        lambda hidden, weight: token_scores(hidden @ weight.t(), targets, scoring)[:2],
        *(hidden, weight),
    )
    expected = token_scores(hidden.double() @ weight.double().t(), targets, scoring).squares
    squares = fused_head.score_in_products(hidden, weight, targets, scoring).squares
    assert squares is not None
    torch.testing.assert_close(squares.double(), expected, rtol=1e-5, atol=1e-5)
    master = torch.nn.Parameter(weight)
    copy = torch.nn.Parameter(weight.clone())
    copy.sum_place = SumPlace(GradientSum([master]), 0)  # type: ignore[attr-defined]
    for _ in range(2):
        fused_head.score_in_products(hidden, copy, targets, scoring).logprobs.sum().backward()
    assert copy.grad is None
    assert master.grad is not None
    exact = weight.double().requires_grad_()
    token_scores(hidden.double() @ exact.t(), targets, scoring).logprobs.sum().backward()
    torch.testing.assert_close(master.grad.double(), 2 * exact.grad, rtol=1e-5, atol=1e-4)


def check_model(kind: str) -> None:
    """Compare a whole model's logits and gradients with and without the kernels."""
    from forge_rl.engines.architecture import read_architecture
    from forge_rl.engines.protocol import TrainSettings
    from forge_rl.engines.titan.cpu_attention import TreeMask
    from forge_rl.engines.titan.loading import load_weights
    from forge_rl.engines.titan.model import build_model

    with TemporaryDirectory() as scratch:
        make_model(Path(scratch), kind)
        architecture = read_architecture(Path(scratch))
        model = build_model(architecture, TrainSettings(dtype="float32", seq_len=16))
        with torch.no_grad():
            model.init_states()
        load_weights(model, Path(scratch), tied=model.enable_weight_tying)
    ids, positions = torch.arange(16)[None] % 40, torch.arange(16)[None]
    until = torch.full((16,), 16, dtype=torch.int32)
    mask = (TreeMask(first=0, until=until, queries=16, branched=False, positions=positions[0]),)

    def trained(masters: MasterWeights | None = None, *, adds: bool = False, rows: int = 1) -> list[torch.Tensor]:
        if not adds:
            model.zero_grad()
        for _ in range(rows):
            logits = model(ids, positions, mask)
            logits.log_softmax(-1)[0, :, 3].sum().backward()
        if masters is not None:
            masters.release()
        return [logits, *gradients(list(model.parameters()))]

    plain = trained()
    modules = fused_block, cpu_norm, cpu_feed_forward, rope, model_module, least_loaded, moe, expert_products, routing
    eager_kernels = set[str]()
    for module in modules:
        mock.patch.object(module, "has_kernels", side_effect=lambda x, kernel: kernel not in eager_kernels).start()
    with (
        mock.patch.object(block_kernels, "swiglu_values", wraps=block_kernels.swiglu_values) as kernel,
        mock.patch.object(expert_rows, "_sum_rows", wraps=expert_rows._sum_rows) as sums,
        mock.patch.object(routing, "chosen_experts", wraps=routing.chosen_experts) as choices,
    ):
        fused = trained()
    layers, mixtures = architecture.layers, len(architecture.experts.layers) if architecture.experts else 0
    counts = kernel.call_count, sums.call_count, choices.call_count
    assert counts == (layers, 2 * mixtures, mixtures), "the kernels ran"
    model.masters = masters = MasterWeights(model, torch.float32)
    with (
        mock.patch.object(fused_block, "rotated_product", wraps=products.rotated_product) as queries,
        mock.patch.object(cpu_feed_forward, "gated_product", wraps=products.gated_product) as gates,
        mock.patch.object(moe, "joint_swiglu", wraps=moe.joint_swiglu) as expert_gates,
        mock.patch.object(expert_products, "_has_gradient_kernel", return_value=True),
        mock.patch.object(expert_products, "_TILE", {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16}),
    ):
        twice = [trained(masters)[0], *trained(masters, adds=True)[1:]]
    assert (queries.call_count, gates.call_count) == (2 * layers, 2 * (layers - mixtures)), "joint products ran"
    assert expert_gates.call_count == 2 * mixtures
    # Only some of a layer's norms then write parts of the sum that all share.
    for name in ("norms", "rope") if kind == "qwen3" else ():
        eager_kernels |= {name}
        for gradient, expected in zip(trained(masters, rows=2)[1:], plain[1:], strict=True):
            torch.testing.assert_close(gradient, 2 * expected, rtol=1e-4, atol=2e-4)
        eager_kernels.clear()
    mock.patch.stopall()
    for value, joint, expected in zip(fused, twice, plain, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(joint, expected if expected is plain[0] else 2 * expected, rtol=1e-4, atol=2e-4)


def check_kernels_at_start() -> None:
    """The trainer's check of right kernels turns off none."""
    for dtype in (torch.float32, torch.float16):
        kernel_checks.check_kernels(small_architecture(), dtype, torch.device("cpu"))
    assert set(failures()) <= {"attention"}, failures()  # it has no form for a CPU


def test_the_kernels_agree_with_float64_and_models_with_their_plain_forms():
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when Triton is imported
    done = subprocess.run([sys.executable, "-m", "tests.test_block_kernels"], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


if __name__ == "__main__":
    torch.manual_seed(0)
    check_products()
    check_expert_products()
    check_choices()
    with mock.patch.object(block_kernels, "_PROGRAMS", 3):
        check_kernels()
        for kind in ("qwen3", "llama", "qwen3_moe"):
            check_model(kind)
        with mock.patch.object(kernel_checks, "_TOKENS", 12):
            check_kernels_at_start()
