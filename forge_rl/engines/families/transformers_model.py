"""Builds transformers' model of a folder without loading its weights, to train it or to inspect its parts."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from forge_rl.errors import ForgeError, ModelError
from forge_rl.weights.names import ROUTER_BIASES


def inspected_model(folder: Path) -> Any:
    """Return transformers' model of a folder as `causal_model` builds it, kept for callers that only look at its parts.

    Raises:
        ModelError: transformers cannot build the model.
    """
    return _inspected_model(folder, (folder / "config.json").stat().st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _inspected_model(folder: Path, modified_ns: int) -> Any:
    return causal_model(folder)


def causal_model(folder: Path, *, tied: bool | None = None, implementation: str = "eager") -> Any:
    """Build transformers' model of a folder with its weights on the meta device and its buffers in memory.

    Weights have torch's default dtype. Buffers that are in the files become untrained weights, except biases that
    choose experts: these are float32 buffers, which no pass casts.

    Args:
        tied: whether embedding and head are one weight; by default as config.json says.
        implementation: name of the attention function.

    Raises:
        ModelError: transformers cannot build the model.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(folder / "config.json")
    if tied is not None:
        config.tie_word_embeddings = tied
    try:
        with _weights_on_meta():
            causal = AutoModelForCausalLM.from_config(
                config, attn_implementation=implementation, dtype=torch.get_default_dtype(), trust_remote_code=False
            )
    except ForgeError:
        raise
    except Exception as error:
        raise _unreadable(folder / "config.json", error) from error
    for parameter in causal.parameters():  # routers may ask for float32
        parameter.data = parameter.to(torch.get_default_dtype())
    if torch.get_default_dtype() == torch.float64:
        causal.set_experts_implementation("eager")  # torch's product of groups has no float64
    # The move to meta has made two weights of the tied one.
    if config.tie_word_embeddings:
        causal.lm_head.weight = causal.get_input_embeddings().weight
    for module in causal.modules():
        # Buffers in the files are published and saved with the weights; buffers that are computed stay buffers.
        for name in [name for name in module._buffers if name not in module._non_persistent_buffers_set]:
            buffer = module._buffers.pop(name)
            if buffer is not None:
                module.register_parameter(name, nn.Parameter(buffer.to("meta"), requires_grad=False))
        for name in [name for name in module._parameters if name.endswith(ROUTER_BIASES)]:
            bias = cast(nn.Parameter, module._parameters.pop(name))
            module.register_buffer(name, torch.zeros(bias.shape, dtype=torch.float32))
    return causal


def load_config(path: Path) -> Any:
    """Load a config of a type that transformers knows; the model's own code is never run."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path.parent, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ModelError:
    # A config that its class does not accept has the reason in the cause.
    cause = next(iter(str(error.__cause__ or error).strip().splitlines()), type(error).__name__)
    return ModelError(
        f"transformers cannot build the model that {path} describes: {cause:.300}",
        hint="download or export the model again",
    )


@contextlib.contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Put the weights of modules that this thread makes on the meta device, and their buffers in memory."""
    original, thread = nn.Module.register_parameter, threading.get_ident()

    def register_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # The patch is the whole process's, and another thread may be making modules of its own.
        if parameter is not None and threading.get_ident() == thread:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        original(module, name, parameter)

    # Not `torch.device("meta")`, under which buffers, such as RoPE's frequencies, would have no values either.
    nn.Module.register_parameter = register_parameter  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
