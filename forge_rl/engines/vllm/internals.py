"""All use of vLLM's private names, so that another version of vLLM changes one file. Tried on vLLM 0.32.0."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from forge_rl.errors import ForgeError

if TYPE_CHECKING:
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
"""Ends of the names of experts' weights, which a kernel may order otherwise without a change of their shape."""
_OF_LAYER = ("can_load", "load_numel", "load_numel_total", "loaded_weights", "restore_metadata")


def check_names(owner: Any, names: tuple[str, ...]) -> None:
    """Raise ForgeError, with vLLM's version, if a private name has gone."""
    try:
        operator.attrgetter(*names)(owner)
    except AttributeError as error:
        raise ForgeError(
            f"vLLM {vllm.__version__} lacks an inner name that forge_rl uses: {error}",
            hint=f"install vLLM {TRIED_ON}, or adapt forge_rl/engines/vllm/internals.py",
        ) from error


def engine_pids(llm: AsyncLLM) -> list[int]:
    """Ids of the engine's own processes right below this one; workers may be below those."""
    check_names(llm, _OF_ENGINE)
    resources = llm.engine_core.resources
    coordinator = [resources.coordinator.proc] if resources.coordinator is not None else []
    return [process.pid for process in (*resources.engine_manager.processes, *coordinator)]


def unlink_shared_memory(worker: int) -> None:
    """Remove the names of what a CPU worker's all-reduce shares with the others, once all have mapped it: vLLM would
    leave them when it is killed."""
    for line in Path(f"/proc/{worker}/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("vllm_dist_") and path.parent == Path("/dev/shm"):
            path.unlink(missing_ok=True)


async def call_workers(llm: AsyncLLM, method: str, *args: object) -> list[Any]:
    """Call a method of all workers, of all data-parallel ranks: AsyncLLM.collective_rpc returns what the first rank's
    answer."""
    found = await llm.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
    return [answer for workers in found for answer in workers]


async def stop_decoding(llm: AsyncLLM, *, clear_cache: bool) -> None:
    """Stop at a token boundary and keep all requests.

    AsyncLLM.pause_generation does this, and then sleeps for 20 ms so that all outputs have been handed out.
    """
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)


async def answer_between_steps(llm: AsyncLLM) -> None:
    """Return once all engine processes have answered, which they do between two steps."""
    await llm.engine_core.call_utility_all_async("is_scheduler_paused")


def version_starts(llm: AsyncLLM, request: str, output: CompletionOutput) -> list[tuple[str, int]]:
    """Each version of a completion with the number of its first token.

    vLLM tells them with the end of a completion only. Until then they are where it keeps them: nothing is awaited
    between its handing out an output and this look, so they are those of this output's tokens.
    """
    if output.finish_reason is not None:
        return [(span.version, span.start) for span in output.weight_versions or ()]
    (internal,) = llm.output_processor.external_req_ids[request]
    starts: list[tuple[str, int]] = llm.output_processor.request_states[internal].weight_version_starts
    return starts


def allow_another_update(worker: Any) -> None:
    """Let a worker begin a weight update after one that it did not finish."""
    check_names(worker, ("_weight_update_active",))
    worker._weight_update_active = False


def release_kv_cache(worker: Any) -> None:
    """Give back what keys and values take of a CPU's memory, which vLLM's own sleep and discard cannot; they are zeros
    then, as when the engine had started."""
    check_names(worker, ("model_runner.kv_caches",))
    release(worker.model_runner.kv_caches)


def begin_reload(model: torch.nn.Module) -> None:
    """Have the model's loaders collect the weights of a layer until they are complete."""
    layer: Any
    for layer in model.modules():
        if getattr(layer, "_cpu_skip_gemm_dispatch", False) and not layer.weight.numel():
            # Latent attention on a CPU with AMX packs a copy of kv_b_proj and drops the weight, which vLLM would then
            # load anew into nothing; it is dropped again when that has been packed.
            was = get_layerwise_info(layer).restore_metadata[0]["weight"]
            layer.weight = torch.nn.Parameter(torch.empty_like(was, device="cpu"), requires_grad=False)
    initialize_layerwise_reload(model)
    check_names(get_layerwise_info(model), _OF_LAYER)


def finish_reload(model: Any, model_config: Any) -> None:
    """Put what was collected into the parameters, and the loaders back as they were."""
    finalize_layerwise_reload(model, model_config)
    if model_config.hf_config.tie_word_embeddings and next(model.parameters()).device.type == "cpu":
        # vLLM reloads the embedding but not the output projection that is tied to it, and on CPU that one computes
        # with a repacked copy of the old weights.
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def abandon_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Put the model into a state in which a reload can begin; its weights are of no version."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    finalize_layerwise_reload(model, model_config)


def partly_loaded(model: torch.nn.Module, *, tied: bool) -> Iterator[str]:
    """Names of linear layers that have some of their weights and not all, and of layers that have none.

    Embeddings may be padded, attention may have scales that no folder has, and an output projection that is tied to the
    embedding has no weights of its own.
    """
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        missing = info.can_load() and info.load_numel < (info.load_numel_total or 0)
        if not missing or is_deferred_attention_layer(layer) or (tied and name == "lm_head"):
            continue
        if isinstance(layer, LinearBase) if info.load_numel else any(True for _ in layer.parameters(recurse=False)):
            yield name


@contextlib.contextmanager
def collecting(model: torch.nn.Module) -> Iterator[None]:
    """Have a reload also collect what gpt-oss's loader copies straight into parameters, past their weight loaders."""
    if type(model).__name__ != "GptOssForCausalLM":
        yield
        return
    places: dict[int, torch.nn.Parameter] = {}
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if name in _COPIED and parameter.is_meta and get_layerwise_info(layer).can_load():
                parameter.weight_loader = default_weight_loader  # type: ignore[attr-defined]
                parameter.weight_loader = make_online_process_loader(layer, name)  # type: ignore[attr-defined]
                places[parameter.untyped_storage()._cdata] = parameter
    with _CollectCopies(places):
        yield


class _CollectCopies(TorchDispatchMode):
    """Hands copies into parameters on the meta device, which would be lost, to the parameters' loaders."""

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
    """Copy what the model's loaders still hold of tensors that are about to go, for layers that are not complete."""
    going = {_storage(tensor) for tensor in passing.values()}

    def owned(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return copy(value) if _storage(value) in going else value
        if isinstance(value, tuple):
            return tuple(owned(item) for item in value)
        return {key: owned(item) for key, item in value.items()} if isinstance(value, dict) else value

    for layer in model.modules():
        for _, call in get_layerwise_info(layer).loaded_weights:
            call.arguments.update({name: owned(value) for name, value in call.arguments.items()})


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """Device and address of the bytes behind a tensor; a meta tensor's address is 0."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def release(tensors: Iterable[torch.Tensor]) -> None:
    """Give back the pages that lie wholly within contiguous tensors: they read as zeros and come back when written."""
    libc = ctypes.CDLL(None, use_errno=True)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    for address, storage in storages.items():
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first and libc.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(mmap.MADV_DONTNEED)
        ):
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: {end - first} bytes of the KV cache cannot be given back")
