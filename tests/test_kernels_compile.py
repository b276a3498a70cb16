"""Triton compiles our kernels for a GPU that is not at hand: its interpreter takes Python that its compiler refuses."""

import pytest
from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from forge_rl.algorithms import triton_scores
from forge_rl.engines.titan import (
    expert_products,
    fused_products,
    triton_blocks,
    triton_expert_products,
    triton_experts,
    triton_products,
)

HALF, FLOAT = "*bf16", "*fp32"
NORM = {"x": HALF, "weight": HALF, "inverses": FLOAT, "grad": HALF, "grad_x": HALF, "parts": FLOAT}
HEADS = {"x": HALF, "weight": HALF, "cache": FLOAT, "eps": "fp32"}
HEAD_GRADIENTS = dict.fromkeys(("grad", "other_grad", "copied_grad", "grad_x"), HALF)
NO_NORMS = {"weight": None, "other_weight": None, "NORMS": False}
LOGITS = {"hidden": HALF, "weight": HALF, "places": "*i64", "temperature": "fp32"}
TILE = fused_products._TILE
KERNELS = (
    (triton_scores.sums_kernel, {"logits": FLOAT, "out": FLOAT, "temperature": "fp32"}, {"SQUARES": True}),
    (
        triton_scores.gradient_kernel,
        {"logits": FLOAT, "grad": HALF, "statistics": FLOAT, "places": "*i64", "slopes": FLOAT, "temperature": "fp32"},
        {},
    ),
    (
        triton_blocks.add_norm_kernel,
        {"x": HALF, "delta": HALF, "weight": HALF, "total": HALF, "out": HALF, "inverses": FLOAT, "eps": "fp32"},
        {"ADDS": True},
    ),
    (triton_blocks.norm_gradient_kernel, NORM | {"residual": HALF}, {"ADDS": True}),
    (triton_blocks.norm_gradient_kernel, NORM, {"residual": None, "ADDS": False}),
    (
        triton_blocks.norm_rope_kernel,
        HEADS | {"other_weight": HALF, "out": HALF},
        {"NORMS": True, "OTHERS": True, "COPIES": True, "HEADS": 32, "HALF": 64, "COPIED": 1024},
    ),
    (
        triton_blocks.norm_rope_kernel,
        {"x": HALF, "cache": FLOAT, "out": HALF, "eps": "fp32"},
        NO_NORMS | {"OTHERS": False, "COPIES": False, "HEADS": 16, "HALF": 64, "COPIED": 1},
    ),
    (
        triton_blocks.norm_rope_gradient_kernel,
        HEADS | HEAD_GRADIENTS | {"other_weight": HALF, "x": HALF, "parts": FLOAT},
        {"NORMS": True, "OTHERS": True, "COPIES": True, "HEADS": 32, "HALF": 64, "COPIED": 1024},
    ),
    (
        triton_blocks.norm_rope_gradient_kernel,
        HEAD_GRADIENTS | {"cache": FLOAT, "eps": "fp32"},
        NO_NORMS | {"x": None, "parts": None, "OTHERS": True, "COPIES": True, "HEADS": 32, "HALF": 64, "COPIED": 1024},
    ),
    (triton_blocks.swiglu_kernel, {"a": HALF, "b": HALF, "out": HALF}, {}),
    (triton_blocks.swiglu_gradient_kernel, dict.fromkeys(("a", "b", "grad", "joint"), HALF), {}),
    (triton_blocks.sum_parts_kernel, {"parts": FLOAT, "out": FLOAT}, {"ADDS": True, "PARTS": 64}),
    (triton_blocks.sum_parts_kernel, {"parts": FLOAT, "out": HALF}, {"ADDS": False, "PARTS": 64}),
    (triton_experts.spread_kernel, {"x": HALF, "rows": HALF, "places": "*i64"}, {}),
    (
        triton_experts.sum_kernel,
        {"rows": HALF, "scores": FLOAT, "places": "*i64", "out": HALF},
        {"WEIGHS": True},
    ),
    (triton_experts.sum_kernel, {"rows": HALF, "places": "*i64", "out": HALF}, {"scores": None, "WEIGHS": False}),
    (
        triton_experts.sum_gradient_kernel,
        {"scores": FLOAT, "places": "*i64", "grad_scores": FLOAT} | dict.fromkeys(("rows", "grad", "grad_rows"), HALF),
        {},
    ),
    (triton_experts.clamped_swiglu_kernel, {"hidden": HALF, "out": HALF, "limit": "fp32"}, {}),
    (
        triton_experts.clamped_swiglu_gradient_kernel,
        {"hidden": HALF, "grad": HALF, "grad_hidden": HALF, "limit": "fp32"},
        {},
    ),
    *(
        (
            triton_experts.choice_kernel,
            {"logits": FLOAT, "weights": FLOAT, "expert_ids": "*i64", "scale": "fp32"} | bias,
            {"BIASED": bool(bias), "SIGMOID": not bias, "NORMALISES": bool(bias)} | ({} if bias else {"bias": None}),
        )
        for bias in ({"bias": FLOAT}, {})
    ),
    *(
        (
            triton_experts.choice_gradient_kernel,
            {"expert_ids": "*i64", "scale": "fp32"} | dict.fromkeys(("logits", "grad", "grad_logits"), FLOAT),
            {"SIGMOID": is_sigmoid, "NORMALISES": not is_sigmoid},
        )
        for is_sigmoid in (True, False)
    ),
    *(
        (
            triton_expert_products.expert_gradient_kernel,
            {"grad": HALF, "x": HALF, "ends": "*i32", "total": total},
            expert_products._TILE | {"ADDS": adds},
        )
        for total, adds in ((FLOAT, True), (HALF, False))
    ),
    (
        triton_expert_products.expert_bias_kernel,
        {"x": HALF, "bias": HALF, "ends": "*i32", "share": "fp32"},
        {"EXPERTS": 32},
    ),
    (triton_expert_products.expert_sums_kernel, {"grad": HALF, "ends": "*i32", "sums": FLOAT}, {"ROWS": 64}),
    (
        triton_products.linear_sums_kernel,
        LOGITS | {"sums": FLOAT, "target_logits": FLOAT},
        TILE | {"SQUARES": True},
    ),
    (triton_products.linear_gradient_kernel, LOGITS | {"statistics": FLOAT, "slopes": FLOAT, "grad": HALF}, TILE),
    (triton_products.gated_kernel, dict.fromkeys(("x", "weight", "joint", "hidden"), HALF), TILE),
    (triton_products.gated_gradient_kernel, dict.fromkeys(("grad", "weight", "joint", "joint_grad"), HALF), TILE),
)


@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    KERNELS,
    ids=[f"{kernel.__name__}-{len(types)}-{len(constants)}" for kernel, types, constants in KERNELS],
)
def test_the_kernels_compile_for_an_h100(kernel, types, constants):
    names = kernel.arg_names
    constants = constants | ({"BLOCK": 1024} if "BLOCK" in names else {})
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    # With fewer threads, products would spill registers, and ptxas take minutes.
    options = fused_products._OPTIONS if "BLOCK_K" in names else {}
    program = compiled(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32), options=options)
    assert ".target sm_90" in program.asm["ptx"]
    assert ("wgmma" in program.asm["ptx"]) == ("BLOCK_K" in names), "products use the tensor cores"
