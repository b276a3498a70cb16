"""No function has more than seven parameters, as what travels together is an object; replies of services have types."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_PARAMETERS = 7
FOLDERS = ("forge_rl", "recipes", "apps", "tools")

FIXED = {
    "forge_rl/engines/titan/general_attention.py attend": "transformers calls it, in place of its own",
    "forge_rl/engines/vllm/sampling.py verify": "vLLM calls it, in place of its own",
    "forge_rl/weights/kernels.py copy_rows": "numba compiles it, and takes arrays and numbers only",
    "forge_rl/weights/kernels.py cast_rows": "numba compiles it, and takes arrays and numbers only",
} | {
    f"forge_rl/{place}": "Triton compiles it, and takes pointers and numbers only"
    for place in (
        "algorithms/triton_scores.py gradient_kernel",
        "algorithms/triton_scores.py sums_kernel",
        "engines/titan/triton_blocks.py add_norm_kernel",
        "engines/titan/triton_blocks.py norm_gradient_kernel",
        "engines/titan/triton_blocks.py norm_rope_gradient_kernel",
        "engines/titan/triton_blocks.py norm_rope_kernel",
        "engines/titan/triton_blocks.py sum_parts_kernel",
        "engines/titan/triton_blocks.py swiglu_gradient_kernel",
        "engines/titan/triton_blocks.py swiglu_kernel",
        "engines/titan/triton_expert_products.py expert_bias_kernel",
        "engines/titan/triton_expert_products.py expert_gradient_kernel",
        "engines/titan/triton_experts.py choice_gradient_kernel",
        "engines/titan/triton_experts.py choice_kernel",
        "engines/titan/triton_experts.py sum_gradient_kernel",
        "engines/titan/triton_experts.py sum_kernel",
        "engines/titan/triton_products.py _tile",
        "engines/titan/triton_products.py gated_gradient_kernel",
        "engines/titan/triton_products.py gated_kernel",
        "engines/titan/triton_products.py linear_gradient_kernel",
        "engines/titan/triton_products.py linear_sums_kernel",
    )
}
"""Functions whose parameters are not ours to group, with the reason."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}{node.name}" if isinstance(node, ast.ClassDef | Function) else ""
        if isinstance(node, Function):
            yield name, node
        yield from functions(node, f"{name}." if name else prefix)


def parameters(function: Function) -> list[str]:
    """Names of the parameters without self, and without *args and **kwargs."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def functions_below(folder: str) -> Iterator[tuple[str, Function]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name, function in functions(ast.parse(path.read_text())):
            yield f"{path.relative_to(ROOT)} {name}", function


def test_no_function_has_more_than_seven_parameters():
    sizes = {place: len(parameters(function)) for path in FOLDERS for place, function in functions_below(path)}
    large = {place for place, size in sizes.items() if size > MAX_PARAMETERS}
    assert sorted(large - FIXED.keys()) == []
    assert sorted(FIXED.keys() - large) == [], "they are listed in vain"


def test_services_return_no_lists_of_anything():
    lists = ("list[Any]", "Sequence[Any]", "tuple[Any, ...]")
    returns = {place: ast.unparse(f.returns) for place, f in functions_below("forge_rl/services") if f.returns}
    assert [place for place, annotation in returns.items() if annotation in lists] == []
