"""Models without a native family: read from config.json by transformers, whose own code trains them.

Models that cannot be trained on packed rows are refused here, based on config.json and their structure, before anything
starts.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from forge_rl.engines.families.family import Architecture, Experts, Family
from forge_rl.engines.families.tensor_plan import expert_modules, expert_routers, stacked_projections
from forge_rl.engines.families.transformers_model import inspected_model, load_config
from forge_rl.errors import ModelError
from forge_rl.models.hf_folder import HEAD, stored_bytes, tensor_files
from forge_rl.models.quantized import refusal
from forge_rl.weights.names import ROUTER_BIASES, SameNames

_LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers for which `titan.general_attention` makes masks."""
_RECURRENT_KINDS = ("linear_attention", "conv")
"""Kinds of layers whose state `titan.general_state` restarts."""
_TOKEN_KINDS = ("mlp", "moe")
"""Kinds of layers that process each token alone."""
_MIXERS = ("linear_attn", "mamba", "conv", "mixer")
"""Names of the module that holds the state in transformers' layers of these kinds."""
ROW_MIXERS = frozenset(
    (
        *("GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"),
        *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        *("Lfm2ShortConv", "Lfm2MoeShortConv"),
    )
)
"""transformers' mixers in which tokens meet only in `causal_conv1d_fn`, `torch_chunk_gated_delta_rule` and
`mamba2_chunk_scan`."""
COMPARED = frozenset(
    (
        *("afmoe", "apertus", "arcee", "cohere", "cohere2", "cwm", "deepseek_v2", "diffllama", "ernie4_5"),
        *("ernie4_5_moe", "exaone4", "flex_olmo", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4"),
        *("glm4_moe", "glm4_moe_lite", "granite", "granitemoehybrid", "hunyuan_v1_dense", "hyperclovax"),
        *("jetmoe", "lfm2", "lfm2_moe", "llama", "llama4_text", "minimax_m2", "ministral", "ministral3"),
        *("mistral", "mixtral", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "phi3"),
        *("phimoe", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next"),
        *("seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma"),
    )
)
"""Model types whose packed rows were compared with transformers run on one episode at a time; see
docs/running/models.md."""
_SUPPORTED = "the trainer takes decoders of full, sliding-window, chunked and linear attention, and short convolutions"


def read_general(path: Path, values: Mapping[str, Any]) -> Architecture:
    """Read the dimensions of a model that transformers' code trains.

    Args:
        path: config.json, for messages.
        values: its content.

    Raises:
        ModelError: transformers does not know the model, or it has parts that cannot be trained on packed rows.
    """
    from transformers import AutoModelForCausalLM

    model_type = values.get("model_type")
    _check_kind(path, values)
    config = load_config(path)
    _check_layers(path, config, AutoModelForCausalLM._model_mapping[type(config)])
    shapes = weight_shapes(path.parent)
    heads = _largest(config, "num_attention_heads") or _whole(path, config, "num_attention_heads")
    dim, layers = _whole(path, config, "hidden_size"), _whole(path, config, "num_hidden_layers")
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    # Without `layer_types`, a window is every layer's.
    window_layers = [
        index for index in range(layers) if layer_types is None or layer_types[index] == "sliding_attention"
    ]
    rope = getattr(config, "rope_parameters", None) or {}
    if not isinstance(rope.get("rope_type"), str):  # none, or one for each kind of layer
        rope = {"rope_type": "default"}
    if isinstance(original := getattr(config, "original_max_position_embeddings", None), int):
        rope = {"original_max_position_embeddings": original, **rope}
    # A family of this folder alone: its names depend on what the files hold.
    family = Family(
        model_type=str(model_type),
        read=_unused,
        names=file_names(path.parent),
        layer=_unused,
        set_sharding=_unused,
        general=True,
    )
    return Architecture(
        family=family,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=_largest(config, "num_key_value_heads") or heads,
        head_dim=_largest(config, "head_dim") or dim // heads,
        hidden_dim=_whole(path, config, "intermediate_size"),
        vocab=_whole(path, config, "vocab_size"),
        norm_eps=float(getattr(config, "rms_norm_eps", 1e-6) or 1e-6),
        max_positions=_whole(path, config, "max_position_embeddings"),
        rope=rope,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        window=window if window and window_layers else None,
        window_layers=tuple(window_layers) if window else (),
        experts=_experts(path.parent),
        weight_count=sum(shape.numel() for shape in shapes.values()),
        folder=path.parent,
    )


def weight_shapes(folder: Path) -> Mapping[str, torch.Size]:
    """Return the shapes of a model's weights by name, as transformers' code has them; a tied head is left out.

    Raises:
        ModelError: the model's parts are not where the trainer expects them.
    """
    path = folder / "config.json"
    return _weight_shapes(folder, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _weight_shapes(folder: Path, modified_ns: int) -> Mapping[str, torch.Size]:
    path = folder / "config.json"
    causal = inspected_model(folder)
    head = getattr(causal, "lm_head", None)
    problem = ""
    if not isinstance(getattr(getattr(causal, "model", None), "layers", None), nn.ModuleList):
        problem = "has no model.layers"
    elif not isinstance(causal.get_input_embeddings(), nn.Embedding):
        problem = "has no embedding"
    elif not isinstance(head, nn.Linear) or head.bias is not None:
        problem = "has no lm_head without bias"
    else:
        try:
            recurrent_mixers(causal)
        except LookupError as error:
            problem = str(error.args[0])
    if problem:
        raise ModelError(
            f"{path}: transformers' {type(causal).__name__} {problem}",
            hint="use a model of another architecture",
        )
    tied = causal.config.tie_word_embeddings
    # These are buffers, see `causal_model`, and published like weights.
    biases = ((name, buffer) for name, buffer in causal.named_buffers() if name.endswith(ROUTER_BIASES))
    weights = itertools.chain(causal.named_parameters(), biases)
    # A tied head is the embedding, which is published once.
    return {name: weight.shape for name, weight in weights if not (tied and name == HEAD)}


def _experts(folder: Path) -> Experts | None:
    """Return the dimensions of a model's experts; None without experts whose routers are known."""
    causal = inspected_model(folder)
    routers: dict[int, Any] = expert_routers(causal)
    if not routers:
        return None
    router, config = next(iter(routers.values())), causal.config
    sizes = (getattr(config, name, None) for name in ("moe_intermediate_size", "intermediate_size"))
    return Experts(
        layers=tuple(routers),
        count=router.num_experts,
        top_k=router.top_k,
        hidden_dim=next((size for size in sizes if type(size) is int), config.hidden_size),
        normalized=bool(getattr(config, "norm_topk_prob", False)),
    )


class LinearModule(NamedTuple):
    """A linear layer in one of a decoder's layers that can have an adapter."""

    name: str
    """Its name in the layer."""
    file_name: str
    """Its name in the folder's files."""
    inputs: int
    outputs: int


def linear_modules(folder: Path) -> Iterator[LinearModule]:
    """Yield the linear layers of a model's blocks, except routers, experts, layers with the name of a part of experts,
    and Mamba 2's output.

    peft takes a name such as gate_proj for stacked experts, even in a dense block. Mamba 2's fused kernels multiply by
    the weight itself and would ignore an adapter of it.
    """
    causal, names = inspected_model(folder), file_names(folder)
    blocks = [dict(layer.named_children()) for layer in causal.model.layers]
    sparse_children = [(name, child) for block in blocks for name, child in block.items() if _has_experts(child)]
    sparse_names = {name for name, _ in sparse_children}
    sparse_leaves = {
        name.rpartition(".")[2]
        for _, child in sparse_children
        for name, module in child.named_modules()
        if isinstance(module, nn.Linear)
    }
    for index, block in enumerate(blocks):
        for child_name, child in block.items():
            is_mixer = hasattr(child, "layer_idx") and not _has_experts(child)  # as of attention, never of an MLP
            if child_name in sparse_names and not is_mixer:
                continue
            for name, module in child.named_modules(prefix=child_name):
                leaf = name.rpartition(".")[2]
                is_bypassed = leaf == "out_proj" and "mamba" in type(child).__name__.lower()
                if type(module) is nn.Linear and leaf not in sparse_leaves and not is_bypassed:
                    file_name = names.to_hf(f"model.layers.{index}.{name}.weight").removesuffix(".weight")
                    in_layer = file_name.partition("layers.")[2].partition(".")[2]
                    yield LinearModule(name, in_layer, module.in_features, module.out_features)


def expert_features(folder: Path) -> int:
    """Return the sum of the inputs and outputs of all matrices of a model's experts; 0 unless all can have adapters."""
    experts = expert_modules(inspected_model(folder)).values()
    if not all(stacked_projections(module) for module in experts):
        return 0
    stacks = [getattr(module, name) for module in experts for name in stacked_projections(module)]
    return sum(stack.shape[0] * (stack.shape[1] + stack.shape[2]) for stack in stacks)


def has_experts(folder: Path) -> bool:
    """Return whether a layer of a model has experts, even if their routers are of an unknown kind."""
    return any(_has_experts(layer) for layer in inspected_model(folder).model.layers)


def _has_experts(child: nn.Module) -> bool:
    """Return whether a part of a layer chooses or holds experts."""
    return any(
        "router" in type(module).__name__.lower() or type(getattr(module, "num_experts", None)) is int
        for module in child.modules()
    )


def file_names(folder: Path) -> SameNames:
    """Return the names of a model's weights in the folder's files, by transformers' table of conversions and the files.

    Raises:
        ModelError: the files hold something that only a conversion of values could load.
    """
    stored_names = set(tensor_files(folder)) if stored_bytes(folder) else set[str]()
    return _file_names(folder, frozenset(stored_names), (folder / "config.json").stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _file_names(folder: Path, stored_names: frozenset[str], modified_ns: int) -> SameNames:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    conversions = get_model_conversion_mapping(inspected_model(folder), add_legacy=False)
    merges = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    renames = [conversion for conversion in conversions if not isinstance(conversion, WeightConverter)]

    def in_files(name: str) -> str:
        """Undo the renamings if the result is in the files; a stack is looked up under its first expert's name."""
        original = name
        # One renaming after the other, until the files have the result: several may act on one name.
        for rename in renames:
            for source, target in zip(rename.source_patterns, rename.target_patterns, strict=False):
                if name.format(0) not in stored_names:
                    name = name.replace(target, source.replace("\\.", "."))  # patterns may escape dots
        return name if name.format(0) in stored_names else original

    renamed, stacks = dict[str, str](), dict[str, tuple[str, ...]]()
    for name in weight_shapes(folder):
        # The same name in the files, or no files to compare with.
        if not stored_names or name in stored_names:
            continue
        merge = next((merge for merge in merges if merge.target_patterns[0] in name), None)
        if merge is None:
            renamed[name] = in_files(name)
            continue
        dims = [(type(operation), getattr(operation, "dim", None)) for operation in merge.operations]
        # Stacking experts, and concatenating equal parts of their outputs, can be undone by views. Nothing else can.
        if dims not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            raise ModelError(
                f"{folder}: transformers computes {name!r} from what the files hold, and the trainer cannot convert it "
                "back",
                hint=f"use a model of another architecture: {_SUPPORTED}",
            )
        sources = (source.replace("*", "{}") for source in merge.source_patterns)
        stacks[name] = tuple(in_files(name.replace(merge.target_patterns[0], source)) for source in sources)
    return SameNames(
        renamed={name: file_name for name, file_name in renamed.items() if name != file_name}, stacks=stacks
    )


def _check_kind(path: Path, values: Mapping[str, Any]) -> None:
    """Raise ModelError unless transformers itself has a causal language model of this type."""
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = values.get("model_type")
    if "vision_config" in values or "audio_config" in values:
        text_config = values.get("text_config")
        text_type = text_config.get("model_type") if isinstance(text_config, dict) else None
        hint = "use a text model of the same family, if there is one"
        if isinstance(text_type, str) and text_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            hint = f"use its text model, a {text_type!r:.80}, in a folder of its own, as docs/running/models.md says"
        raise ModelError(
            f"{path} has model_type {model_type!r:.80}: the model also takes images or sound, and only text models are "
            "supported",
            hint=hint,
        )
    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        note = ", and its own code (auto_map) is never run" if values.get("auto_map") else ""
        raise ModelError(
            f"{path} has model_type {model_type!r:.80}, which transformers {__version__} has no causal language model "
            f"for{note}",
            hint="use a model that transformers has itself, or a newer transformers",
        )
    if values.get("quantization_config"):
        unsupported = refusal(values["quantization_config"], model_type) or "quantised weights"
        raise ModelError(
            f"{path} asks for {unsupported}, which the trainer cannot read",
            hint="use the model's bfloat16 files: usually the same name without AWQ, GPTQ, FP8 or 4bit",
        )


def _check_layers(path: Path, config: Any, model: Any) -> None:
    """Raise ModelError if a model has layers that cannot be trained on packed rows."""
    problem = ""
    kinds = getattr(config, "layer_types", None) or ()
    if other_kinds := sorted(set(map(str, kinds)).difference(_LAYER_KINDS, _RECURRENT_KINDS, _TOKEN_KINDS)):
        problem = f"has layers of {', '.join(other_kinds)}, which might carry a state from one episode into the next"
    elif getattr(model, "_is_stateful", False) and not kinds:
        problem = "has recurrent layers, whose state would carry over from one episode into the next"
    elif not _has_interface(model):
        problem = "does without transformers' attention interface"
    elif getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        problem = "is not a decoder"
    elif "dynamic" in _rope_types(config):
        problem = "has RoPE of type 'dynamic', whose angles depend on the longest episode of a row"
    if problem:
        raise ModelError(
            f"{path}: a {config.model_type!r} {problem}", hint=f"use a model of another architecture: {_SUPPORTED}"
        )


def _has_interface(model: Any) -> bool:
    """Return whether a model calls the attention function named in its config.

    transformers marks most models that do, but none with a recurrent state, for which inference servers need more.
    """
    return getattr(model, "_supports_attention_backend", False) or hasattr(
        sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS"
    )


def _largest(config: Any, name: str) -> int | None:
    """Return the largest value of a key over all layers: in Gemma 4 layers differ, and its config has no common
    value."""
    try:
        return cast("int | None", getattr(config, name, None))
    except Exception:  # of a class of transformers that is no AttributeError
        return max(int(getattr(config.per_layer_config[layer], name)) for layer in range(config.num_hidden_layers))


def recurrent_mixers(causal: Any) -> list[nn.Module]:
    """Return the modules that hold the states of a model's layers, as transformers built them.

    Raises:
        LookupError: the module with a layer's state has none of the known names.
    """
    kinds = getattr(causal.config, "layer_types", None) or ()
    mixers = []
    for layer, kind in zip(causal.model.layers, kinds, strict=False):
        if kind in _RECURRENT_KINDS:
            names = [name for name in _MIXERS if isinstance(getattr(layer, name, None), nn.Module)]
            if not names:
                raise LookupError(f"has layers of {kind} whose state is in none of {', '.join(_MIXERS)}")
            mixers.append(getattr(layer, names[0]))
    return mixers


def has_states(folder: Path, *, convolutions: bool = True) -> bool:
    """Return whether a model has layers with a state: linear attention, state spaces or short convolutions.

    Args:
        convolutions: whether the last inputs of a convolution count as a state.
    """
    try:
        config = load_config(folder / "config.json")
    except ModelError:
        return False
    kinds = _RECURRENT_KINDS if convolutions else _RECURRENT_KINDS[:1]
    return any(kind in kinds for kind in getattr(config, "layer_types", None) or ())


def sees_whole_rows(folder: Path) -> bool:
    """Return whether each layer of a model processes whole rows, rather than one episode at a time."""
    return all(type(mixer).__name__ in ROW_MIXERS for mixer in recurrent_mixers(inspected_model(folder)))


def takes(function: Callable[..., Any] | None, name: str) -> bool:
    """Return whether the implementation that transformers chose for a function takes an argument of this name."""
    if not inspect.isfunction(function):
        return False
    return name in inspect.getclosurevars(function).nonlocals.get("applicable_params", ())


def row_mixing_problem(folder: Path) -> str:
    """Say why rows of several adapters cannot be computed as one in a model without a native family; "" if they can.

    Every linear layer must see whole rows, and no token may meet another row's token, not even with a weight of 0: that
    would pass on a NaN.
    """
    causal = inspected_model(folder)
    if getattr(causal.config, "attn_logit_softcapping", None) or "chunked_attention" in (
        getattr(causal.config, "layer_types", None) or ()
    ):
        return "its softcapped or chunked attention computes all scores of a row at once"
    if any(_has_experts(layer) for layer in causal.model.layers):
        return "its experts multiply tokens of all rows together"
    if not sees_whole_rows(folder):
        return "its layers with a state see one episode at a time"
    for mixer in recurrent_mixers(causal):
        names = inspect.unwrap(type(mixer).forward).__globals__
        for function, argument in (("torch_chunk_gated_delta_rule", "cu_seqlens"), ("mamba2_chunk_scan", "seq_idx")):
            if takes(names.get(function), argument):
                return "its layers with a state run in kernels (of fla or mamba_ssm) that compute a row as one sequence"
    return ""


def _rope_types(config: Any) -> set[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return {str(part["rope_type"]) for part in parts if "rope_type" in part}


def _whole(path: Path, config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if type(value) is not int or not 0 < value < 2**31:
        raise ModelError(
            f"{path}: {name} is {value!r:.80}, not a whole number above 0", hint="download or export the model again"
        )
    return value


def _unused(*_: Any, **__: Any) -> Any:
    raise AssertionError("only native families have it")
