"""All uses of vLLM's private names, so that a vLLM upgrade changes one file. Tested with vLLM 0.32.0."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from forge_rl.errors import ForgeError

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

TRIED_ON = "0.32.0"
_OF_ENGINE = (
    "engine_core.resources.engine_manager.processes",
    "engine_core.resources.coordinator",
    "engine_core.call_utility_all_async",
    "engine_core.pause_scheduler_async",
    "output_processor.external_req_ids",
    "output_processor.request_states",
)
_COPIED = ("sinks", "w13_weight", "w13_bias", "w2_weight", "w2_bias")
"""Parameters of gpt-oss that vLLM's loader copies into."""
PACKED = (".w13_weight", ".w2_weight")
"""Suffixes of expert weights. A kernel may reorder these without changing their shape."""
WRAPPED = ".base_layer."
"""Part of the names of weights in modules that may have adapters; loaders report the names without it."""
_OF_LAYER = ("can_load", "load_numel", "load_numel_total", "loaded_weights", "restore_metadata")


def check_names(owner: Any, names: tuple[str, ...]) -> None:
    """Raise ForgeError, with vLLM's version, if a private name is missing."""
    try:
        operator.attrgetter(*names)(owner)
    except AttributeError as error:
        raise ForgeError(
            f"vLLM {vllm.__version__} lacks a private name that forge_rl uses: {error}",
            hint=f"install vLLM {TRIED_ON}, or adapt forge_rl/engines/vllm/internals.py",
        ) from error


def engine_pids(llm: AsyncLLM) -> list[int]:
    """Return the ids of the engine's processes that are direct children of this process; workers may be children of
    those."""
    check_names(llm, _OF_ENGINE)
    # The coordinator of data parallelism is a process of its own.
    resources = llm.engine_core.resources
    coordinator = [resources.coordinator.proc] if resources.coordinator is not None else []
    return [process.pid for process in (*resources.engine_manager.processes, *coordinator)]


def start_following(arguments: EngineArgs) -> tuple[object, list[int]]:
    """Start this host's workers of an engine that another host schedules, and wait until the workers of all hosts have
    met.

    Returns:
        What keeps them alive, and their process ids.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor: Any = MultiprocExecutor(arguments.create_engine_config(headless=True), monitor_workers=False)
    check_names(executor, ("workers",))
    return executor, [worker.proc.pid for worker in executor.workers]


async def call_workers(llm: AsyncLLM, method: str, *args: object) -> list[Any]:
    """Call a method on all workers of all data-parallel ranks; AsyncLLM.collective_rpc only returns the answers of the
    first rank."""
    rank_answers = await llm.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
    return [answer for answers in rank_answers for answer in answers]


async def stop_decoding(llm: AsyncLLM, *, clear_cache: bool) -> None:
    """Stop at a token boundary and keep all requests.

    AsyncLLM.pause_generation does the same, then sleeps for 20 ms so that all outputs are delivered.
    """
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)


async def answer_between_steps(llm: AsyncLLM) -> None:
    """Return once all engine processes have answered, as they do between steps."""
    await llm.engine_core.call_utility_all_async("is_scheduler_paused")


def version_starts(llm: AsyncLLM, request: str, output: CompletionOutput) -> list[tuple[str, int]]:
    """Return each version of a completion with the index of its first token.

    vLLM reports versions only at the end of a completion; before that, they are read from its request state. They match
    this output because nothing is awaited between its delivery and this call.
    """
    if output.finish_reason is not None:
        return [(span.version, span.start) for span in output.weight_versions or ()]
    # vLLM appends a suffix of its own to each request's id.
    (internal,) = llm.output_processor.external_req_ids[request]
    starts: list[tuple[str, int]] = llm.output_processor.request_states[internal].weight_version_starts
    return starts


def inspect_models_here() -> None:
    """Make vLLM inspect model classes in this process, which imports them anyway. Idempotent.

    vLLM starts a process for it, whose imports take 10 s of CPU time when an engine first starts with a class.
    """
    from vllm.model_executor.models import registry

    inspection: Any = registry
    check_names(inspection, ("_run_in_subprocess",))
    inspection._run_in_subprocess = lambda inspect: inspect()


def leave_tokens_undecoded() -> None:
    """Keep vLLM from decoding text for tokens with flat logprobs, which took a third of its time per token.

    Only forge_rl's requests have flat logprobs, and their text is decoded elsewhere.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor

    check_names(LogprobsProcessor, ("from_new_request",))
    if isinstance(vars(LogprobsProcessor)["from_new_request"], staticmethod):
        return  # done before
    original: Any = LogprobsProcessor.from_new_request

    def from_new_request(tokenizer: Any, request: Any) -> LogprobsProcessor:
        flat = request.sampling_params is not None and request.sampling_params.flat_logprobs
        processor: LogprobsProcessor = original(None if flat else tokenizer, request)
        return processor

    LogprobsProcessor.from_new_request = staticmethod(from_new_request)


def hand_over_in_pieces() -> None:
    """Make the cores of engines in this process join the outputs of requests; see `OutputPieces`. Idempotent."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore

    from forge_rl.engines.vllm.pieces import OutputPieces

    core: Any = EngineCore
    check_names(core, ("_attach_weight_version", "set_weight_version"))
    # Patched already: each process calls this, and a fork inherits the patch.
    if hasattr(core._attach_weight_version, "__wrapped__"):
        return
    attach, set_version = core._attach_weight_version, core.set_weight_version

    def pieces_of(engine: Any) -> dict[int, OutputPieces]:
        pieces: dict[int, OutputPieces] = vars(engine).setdefault("_forge_rl_pieces", {})
        return pieces

    @functools.wraps(attach)
    def attach_and_join(self: Any, outputs: dict[int, Any]) -> None:  # the end of each step
        attach(self, outputs)
        for client, step in outputs.items():
            pieces = pieces_of(self).setdefault(client, OutputPieces())
            step.outputs = pieces.join(step.outputs, self.scheduler.requests)

    @functools.wraps(set_version)
    def flush_and_set(self: Any, weight_version: str) -> None:
        for client, pieces in pieces_of(self).items():
            if outputs := pieces.flush():  # the version of a message is that of all its tokens
                message = EngineCoreOutputs(outputs=outputs, weight_version=self._weight_version)
                self.output_queue.put_nowait((client, message))
        set_version(self, weight_version)

    core._attach_weight_version, core.set_weight_version = attach_and_join, flush_and_set


def draft_counts(output: CompletionOutput) -> tuple[int, int, int]:
    """Return an ended completion's counts of drafted tokens, of accepted tokens, and of steps that verified a draft;
    zeros without speculation."""
    metrics = output.spec_decode_metrics
    if metrics is None:
        return 0, 0, 0
    # histogram[n] is the number of steps that accepted n tokens.
    accepted = sum(accepted * steps for accepted, steps in enumerate(metrics.histogram))
    return metrics.num_draft_tokens, accepted, sum(metrics.histogram)


def draft_to_the_end(runner: Any) -> None:
    """Leave it to the drafter to stay within the context.

    Once one request nears the end of its context, vLLM makes all requests of the batch verify zeros.
    """
    batch = ("input_batch.req_ids", "input_batch.num_prompt_tokens")
    check_names(runner, ("drafter", "effective_drafter_max_model_len", *batch))
    runner.effective_drafter_max_model_len = 1 << 30


def accept_no_drafts() -> None:
    """Let requests use top-k or top-p in a step without drafts. vLLM verifies such a step as well, and its kernels fail
    on zero rows, which ends the engine. Idempotent."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def apply(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        return apply_top_k_top_p(logits, k, p) if len(logits) else logits

    rejection_sampler.apply_top_k_top_p = apply


def ngram_proposer(vllm_config: Any, max_tokens: int) -> Any:
    """Return vLLM's n-gram proposer, which looks for earlier occurrences of the last 2 to 8 tokens in the same
    request."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer  # imports numba

    config = copy.copy(vllm_config)
    config.speculative_config = copy.copy(vllm_config.speculative_config)
    config.speculative_config.prompt_lookup_min, config.speculative_config.prompt_lookup_max = 2, 8
    config.speculative_config.num_speculative_tokens = max_tokens
    return NgramProposer(config)


def config_of_draft_model(vllm_config: Any, folder: str) -> Any:
    """Return vLLM's settings for a second model in an engine's process, with its layers kept apart.

    Raises:
        ValueError: vLLM does not serve the model.
    """
    from vllm.config import CompilationMode, ModelConfig

    served, config = vllm_config.model_config, copy.copy(vllm_config)
    check_names(config.compilation_config, ("static_forward_context", "static_all_moe_layers"))
    config.model_config = ModelConfig(
        model=folder,
        tokenizer=folder,
        trust_remote_code=False,
        config_format="hf",
        dtype=served.dtype,
        enforce_eager=True,
    )
    # The draft model is neither quantised nor sped up by another draft model.
    config.quant_config = config.speculative_config = None
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.mode = CompilationMode.NONE
    # vLLM registers a model's layers here, so the draft model needs containers of its own.
    config.compilation_config.static_forward_context, config.compilation_config.static_all_moe_layers = {}, []
    return config


def allow_another_update(worker: Any) -> None:
    """Let a worker begin a weight update after an unfinished one."""
    check_names(worker, ("_weight_update_active",))
    worker._weight_update_active = False


def begin_reload(model: torch.nn.Module) -> None:
    """Make the model's loaders collect each layer's weights until the layer is complete."""
    layer: Any
    for layer in model.modules():
        if getattr(layer, "_cpu_skip_gemm_dispatch", False) and not layer.weight.numel():
            # On a CPU with AMX, latent attention packs a copy of kv_b_proj and drops the weight. A reload needs one to
            # load into; it is dropped again once packed.
            old_weight = get_layerwise_info(layer).restore_metadata[0]["weight"]
            layer.weight = torch.nn.Parameter(torch.empty_like(old_weight, device="cpu"), requires_grad=False)
    for parameter in model.parameters():
        # vLLM tells loaders apart by name, which those of MiniMax M2's norms, partial functions, do not have.
        if isinstance(loader := getattr(parameter, "weight_loader", None), functools.partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]
    initialize_layerwise_reload(model)
    check_names(get_layerwise_info(model), _OF_LAYER)


def accept_stacks(layer: Any, stack_of: Callable[[torch.Tensor, int], torch.Tensor | None]) -> None:
    """Make the loaders of a layer's experts accept stacks; do nothing for other layers.

    Args:
        layer: a layer of the model, once a reload has begun.
        stack_of: returns the stack, `[experts, ...]`, that begins with an expert, by the expert's values, `[...]`, and
            number; None for values that are loaded alone.
    """
    if not isinstance(layer, RoutedExperts) or not get_layerwise_info(layer).can_load():
        return
    check_names(layer, ("expert_map_manager.expert_map",))
    for suffix in PACKED:
        name = suffix.removeprefix(".")
        parameter: Any = layer._parameters.get(name)
        original: Any = getattr(parameter, "weight_loader", None)
        while getattr(original, "__name__", "") in ("online_process_loader", "load_stack"):
            original = original.__wrapped__  # an earlier reload has wrapped it, too
        # Only vLLM's plain loader, of parameters that are a matrix for each expert: others keep theirs.
        if getattr(original, "__func__", None) is RoutedExperts.weight_loader and parameter.ndim == 3:
            parameter.weight_loader = _stack_loader(layer, original)
            parameter.weight_loader = _stack_collector(make_online_process_loader(layer, name), stack_of)


def _stack_loader(layer: Any, original: Any) -> Any:
    """Return a loader that takes one expert, as `original` does, or a stack, and copies this worker's experts."""

    @functools.wraps(original)
    def load_stack(
        param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int, return_success: bool = False
    ) -> bool | None:
        if loaded_weight.ndim != param.ndim:
            success: bool | None = original(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
            return success
        is_local = False
        numbers, expert_map = range(expert_id, expert_id + len(loaded_weight)), layer.expert_map_manager.expert_map
        places = list(numbers) if expert_map is None else expert_map[expert_id : numbers.stop].tolist()
        # A slice of the map beyond its end would silently be shorter, and the last experts dropped.
        if len(places) < len(numbers):
            raise ValueError(f"the layer has {expert_id + len(places)} experts, and the version {numbers.stop} or more")
        # Runs of experts that are consecutive both in the stack and on this worker: one copy for each, -1 for other
        # workers' experts.
        for _, run in itertools.groupby(enumerate(places), lambda item: item[1] - item[0] if item[1] >= 0 else None):
            (first, place), *rest = run
            if place >= 0:
                count, is_local = 1 + len(rest), True
                part, values = param.data.narrow(0, place, count), loaded_weight.narrow(0, first, count)
                original(part, values, weight_name, shard_id, numbers[first], return_success)
        return is_local if return_success else None

    load_stack.__name__ = "load_stack"
    return load_stack


def _stack_collector(collect: Any, stack_of: Callable[[torch.Tensor, int], torch.Tensor | None]) -> Any:
    """Return a loader that collects, for a reload, the stack that a tensor begins, or the tensor alone."""

    @functools.wraps(collect)
    def online_process_loader(
        param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int, return_success: bool = False
    ) -> bool | None:
        stack = stack_of(loaded_weight, expert_id)
        values = loaded_weight if stack is None else stack
        result: bool | None = collect(param, values, weight_name, shard_id, expert_id, return_success)
        return result

    online_process_loader.__name__ = "online_process_loader"  # vLLM recognises collecting loaders by this name
    return online_process_loader


def aliases(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Map the second names of parameters during a reload to the names under which their values arrive.

    vLLM also registers the biases that choose experts with the experts. A reload moves AFMoE's biases aside under their
    first name only, and copies the new values into the same memory at its end.

    Args:
        before: the parameters before the reload, each by its first name.
    """
    # Empty parameters have no memory, and their address, 0, says nothing.
    first_names = {(values.data_ptr(), values.shape): name for name, values in before.items() if values.numel()}
    return {
        name: first_names[place]
        for name, parameter in model.named_parameters()
        if name not in before
        and not parameter.is_meta
        and (place := (parameter.data_ptr(), parameter.shape)) in first_names
    }


def was_untied(model_config: Any) -> bool:
    """Return True if config.json ties the output projection to the embedding, but the files hold one nevertheless.

    vLLM's own tie_word_embeddings is then False, even if the two were equal and vLLM tied them again.
    """
    check_names(model_config, ("word_embeddings_untied_by_checkpoint",))
    return bool(model_config.word_embeddings_untied_by_checkpoint)


def finish_reload(model: Any, model_config: Any, *, tied: bool) -> None:
    """Write the collected weights to the parameters and restore the loaders.

    Args:
        tied: the embedding is also the output projection.
    """
    finalize_layerwise_reload(model, model_config)
    if not tied or not hasattr(model, "lm_head"):
        return
    check_names(model, ("lm_head.tie_weights", "model.embed_tokens"))
    model.lm_head = model.lm_head.tie_weights(model.model.embed_tokens)
    if next(model.parameters()).device.type == "cpu":
        # vLLM reloads the embedding but not the output projection tied to it, which on CPU uses a repacked copy of the
        # old weights.
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def abandon_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Reset the model so that another reload can begin; its weights then belong to no version."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            # vLLM puts the old tensors back in a layer that has received nothing. One that has received some of its
            # weights, it would process with whatever the rest of its memory holds.
            info.load_numel = 0
            info.loaded_weights.clear()
    finalize_layerwise_reload(model, model_config)


def inert_modules(runner: Any, number: int) -> list[str]:
    """Return the modules whose adapter vLLM loads but never applies; vLLM does not report them."""
    check_names(runner, ("lora_manager._adapter_manager.modules", "lora_manager._adapter_manager.get_adapter"))
    manager = runner.lora_manager._adapter_manager
    return sorted(manager.get_adapter(number).loras.keys() - manager.modules.keys())


def partly_loaded(model: torch.nn.Module, *, tied: bool) -> Iterator[str]:
    """Yield the names of linear layers that lack some of their weights, and of other layers that lack all of them.

    Attention is excluded, as no model folder has its scales, and so is an output projection tied to the embedding.
    Embeddings may be padded, so partly filled ones count as complete.
    """
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        # vLLM counts the elements that a layer has received of all that its parameters have.
        missing = info.can_load() and info.load_numel < (info.load_numel_total or 0)
        if not missing or is_deferred_attention_layer(layer) or (tied and name == "lm_head"):
            continue
        # Layers without any weights loaded are listed if they have parameters of their own; containers have none.
        if isinstance(layer, LinearBase) if info.load_numel else any(True for _ in layer.parameters(recurse=False)):
            yield f"{name}.".replace(WRAPPED, ".").removesuffix(".")


@contextlib.contextmanager
def collecting(model: torch.nn.Module) -> Iterator[None]:
    """Make a reload also collect weights that gpt-oss's loader copies directly into parameters."""
    if type(model).__name__ != "GptOssForCausalLM":
        yield
        return
    places: dict[int, torch.nn.Parameter] = {}
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if name in _COPIED and parameter.is_meta and get_layerwise_info(layer).can_load():
                parameter.weight_loader = default_weight_loader  # type: ignore[attr-defined]
                parameter.weight_loader = make_online_process_loader(layer, name)  # type: ignore[attr-defined]
                # Meta tensors have no address; their storage objects identify them.
                places[parameter.untyped_storage()._cdata] = parameter
    with _CollectCopies(places):
        yield


class _CollectCopies(TorchDispatchMode):
    """Redirects copies into parameters on the meta device to the parameters' loaders; the copies would otherwise be
    lost."""

    def __init__(self, places: Mapping[int, torch.nn.Parameter]) -> None:
        super().__init__()
        self._places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            parameter = self._places.get(args[0].untyped_storage()._cdata)
            if parameter is not None and args[0].shape == parameter.shape:
                parameter.weight_loader(parameter, args[1])  # type: ignore[attr-defined]
                return args[0]
        return func(*args, **(kwargs or {}))


def copy_held(
    model: torch.nn.Module, passing: Mapping[str, torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Copy tensors that are about to be freed, if loaders of incomplete layers still hold them."""
    freed_storages = {_storage(tensor) for tensor in passing.values()}

    def owned(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return copy(value) if _storage(value) in freed_storages else value
        if isinstance(value, tuple):
            return tuple(owned(item) for item in value)
        return {key: owned(item) for key, item in value.items()} if isinstance(value, dict) else value

    for layer in model.modules():
        for _, call in get_layerwise_info(layer).loaded_weights:
            # Collected calls are replayed once the layer is complete, perhaps after the bucket is gone.
            call.arguments.update({name: owned(value) for name, value in call.arguments.items()})


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """Device and address of a tensor's storage; the address is 0 on meta."""
    return tensor.device, tensor.untyped_storage().data_ptr()
