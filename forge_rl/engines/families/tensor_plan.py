"""Finds the parts of a model on transformers' code that ranks can share: matrices, by transformers' own
`base_model_tp_plan`, and experts. Checked before anything starts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

COLUMNS = ("colwise", "colwise_gather_output")
"""Styles of linear layers whose outputs are split; the second gathers them."""
ROWS = ("rowwise", "rowwise_split_input")
"""Styles of linear layers whose inputs are split: by the layer before, or by the second itself."""
SUMMED = "replicated_with_grad_allreduce"
"""Style of weights that each rank applies to its own heads, so their gradient is a sum over ranks."""
EXPERTS = "moe_tp_experts"
"""Style of a module with stacked experts. Each rank computes whole experts, because published files hold each expert
separately."""
TENSOR_COMPARED = frozenset(
    (
        *(
            "ernie4_5",
            "ernie4_5_moe",
            "gemma2",
            "gemma3_text",
            "gemma4_text",
            "glm4",
            "glm4_moe",
            "granite",
            "llama",
            "minimax_m2",
        ),
        *("ministral", "ministral3", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen3", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3"),
    )
)
"""Model types whose tensor-parallel ranks were compared with a single process; see docs/running/models.md."""


def module_styles(causal: Any) -> Mapping[str, str]:
    """Return the style of each module of a decoder that tensor-parallel ranks share, by name in the decoder.

    Embedding and head are not included: ranks can share the vocabulary of any model.

    Raises:
        LookupError: transformers states no plan, or one with parts that the trainer does not have; says which.
    """
    plan = getattr(causal.config, "base_model_tp_plan", None)
    if not plan:
        raise LookupError("transformers states no tensor parallelism of it")
    modules = {_pattern(name): module for name, module in causal.model.named_modules()}
    # Parts of a module that is shared as a whole, by experts, are not split again.
    stacks = tuple(f"{pattern}." for pattern, style in plan.items() if style == EXPERTS)
    used_styles = {
        pattern: style
        for pattern, style in plan.items()
        if not pattern.startswith(stacks) and not style.startswith("embedding")
    }
    for pattern, style in used_styles.items():
        module = modules.get(pattern)
        if module is None and pattern not in {_pattern(name) for name, _ in causal.model.named_parameters()}:
            continue  # a plan may name what only other models of its type have
        if style in (*COLUMNS, *ROWS):
            # Exactly nn.Linear, as a subclass may compute something else; or one with an adapter.
            is_known = type(module) is nn.Linear or hasattr(module, "lora_A")
        elif style == EXPERTS:  # transformers marks experts that can leave out those of other ranks
            is_known = hasattr(module, "_is_expert_parallel")
        else:
            is_known = style == SUMMED and module is not None
        if not is_known:
            kind = "a weight" if module is None else f"a {type(module).__name__}"
            raise LookupError(
                f"transformers' plan splits {pattern!r} as {style!r}, which the trainer cannot do to {kind}"
            )
    styles = {name: used_styles.get(_pattern(name)) for name, _ in causal.model.named_modules()}
    return {name: style for name, style in styles.items() if style is not None}


def expert_modules(causal: Any) -> Mapping[str, nn.Module]:
    """Return the modules with a model's stacked experts, by name in the decoder.

    transformers marks modules that can compute a subset of the experts: they take tokens, experts and weights.
    """
    return {name: module for name, module in causal.model.named_modules() if hasattr(module, "_is_expert_parallel")}


def stacked_projections(experts: Any) -> tuple[str, ...]:
    """Return the names of a module's stacked matrices, up-projection first, each [experts, outputs, inputs] or with the
    last two dims swapped. Empty unless transformers' grouped matrix products compute the experts."""
    names = ("gate_up_proj" if getattr(experts, "has_gate", False) else "up_proj", "down_proj")
    stacks = [experts._parameters.get(name) for name in names]
    is_known = hasattr(experts, "is_transposed") and all(stack is not None and stack.ndim == 3 for stack in stacks)
    return names if is_known else ()


def expert_routers(causal: Any) -> dict[int, nn.Module]:
    """Return the routers of a model's experts by layer, as transformers built them. Empty if they differ in the number
    of experts, if a layer has several, or if they do not choose by `topk`, which router replay needs."""
    routers = dict[int, nn.Module]()
    for layer, block in enumerate(causal.model.layers):
        choosing = {
            name: module
            for name, module in block.named_modules()
            if all(type(getattr(module, count, None)) is int for count in ("top_k", "num_experts"))
        }
        # A router may be inside a module that holds the same counts: the innermost one chooses.
        innermost = [
            module for name, module in choosing.items() if not any(other.startswith(f"{name}.") for other in choosing)
        ]
        if len(innermost) > 1:
            return {}
        if innermost:
            routers[layer] = innermost[0]
    shapes = {(router.num_experts, router.top_k) for router in routers.values()}
    # Router replay replaces `topk` while a router runs, so it must call it by this name.
    choose_by_topk = all(
        "topk" in inspect.unwrap(type(router).forward).__code__.co_names for router in routers.values()
    )
    return routers if len(shapes) == 1 and choose_by_topk else {}


def uneven_part(causal: Any, ranks: int) -> str | None:
    """Return the part that a number of tensor-parallel ranks does not divide, such as "heads (2)"; None if it divides
    all.

    Raises:
        LookupError: as `module_styles`.
    """
    for name, style in module_styles(causal).items():
        module: Any = causal.model.get_submodule(name)
        count, unit = 0, "features"
        if style == EXPERTS:
            count, unit = module.num_experts, "experts"
        elif style in COLUMNS:
            count = module.out_features
            width = getattr(causal.model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
            # Attention's projections are split between heads, never within one.
            if style == "colwise" and isinstance(width, int) and count % width == 0:
                count, unit = count // width, "heads"
        elif style in ROWS:
            count = module.in_features
        if count % ranks:
            return f"{unit} of {name} ({count})"
    return None


def _pattern(name: str) -> str:
    """Replace the layer's number in a name by "*"."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
