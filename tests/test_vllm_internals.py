"""vLLM's private names, of which one that is gone is named, and what it is started with."""

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_rl.engines.protocol import DecodeSettings
from forge_rl.errors import ForgeError
from tests.fakes import make_model

pytestmark = pytest.mark.processes  # importing vLLM takes as long as starting some


def test_a_private_name_that_is_gone_is_named() -> None:
    import vllm

    from forge_rl.engines.vllm.internals import check_names

    worker = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[]))
    check_names(worker, ("model_runner.kv_caches", "model_runner"))
    with pytest.raises(ForgeError, match=f"vLLM {vllm.__version__} lacks .*'kv_cache_pages'") as caught:
        check_names(worker, ("model_runner", "model_runner.kv_cache_pages"))
    assert "install vLLM 0.32.0" in caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA vLLM's own blocks are short")
def test_a_short_prompt_of_a_group_fills_a_block_that_its_episodes_share(tmp_path: Path) -> None:
    from forge_rl.engines.vllm.engine import _arguments

    make_model(tmp_path)
    size = _arguments(tmp_path, DecodeSettings(), 0).block_size
    assert size is not None
    assert size <= 42, "the tokens of a prompt of the demo"
    assert size % 32 == 0, "vLLM's fast kernels on CPU take no other"


def test_what_one_engine_compiled_serves_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_rl.engines.vllm import engine, register

    register()
    make_model(tmp_path)
    configs = []
    for pid in (7, 8):
        monkeypatch.setattr(engine.os, "getpid", lambda pid=pid: pid)
        arguments = engine._arguments(tmp_path, DecodeSettings(max_model_len=64), seed=pid)
        arguments.skip_tokenizer_init = True
        configs.append(arguments.create_engine_config())
    assert [config.additional_config.pid for config in configs] == [7, 8]
    assert configs[0].compute_hash() == configs[1].compute_hash(), "vLLM's compile cache has a folder for each hash"


def test_weights_that_can_be_loaded_again_are_dropped_in_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_rl.engines.vllm import engine

    calls: list[str] = []

    async def note(call: str, kwargs: dict[str, object] | None = None) -> None:
        calls.append(" ".join([call, *(str(value) for value in (kwargs or {}).values())]))

    async def stop(llm: object, *, clear_cache: bool) -> None:
        await note("stop")

    monkeypatch.setattr(engine, "device_type", lambda: "cuda")
    monkeypatch.setattr(engine, "stop_decoding", stop)
    monkeypatch.setattr(engine, "engine_pids", lambda llm: [])
    llm: Any = SimpleNamespace(collective_rpc=note, resume_generation=lambda: note("resume"))

    async def hold_made(made: engine.VLLMEngine, *, asleep: bool) -> tuple[bool, list[str]]:
        whole = await made.hold(paused=False, asleep=asleep)
        found = calls.copy()
        calls.clear()
        return whole, found

    async def check() -> None:
        made = engine.VLLMEngine(llm, DecodeSettings())
        hold = partial(hold_made, made)
        assert await hold(asleep=True) == (True, ["stop", "sleep 1"])
        assert await hold(asleep=False) == (True, ["wake_up ['weights', 'kv_cache']", "resume"])
        made._loaded = True
        assert await hold(asleep=True) == (False, ["stop", "sleep 2"])
        assert await hold(asleep=False) == (False, []), "there are no weights to decode with"
        await made._restore(["weights"])  # what a load begins with, and then it ends
        made._dropped = False
        assert await hold(asleep=False) == (True, ["wake_up ['weights']", "wake_up ['kv_cache']", "resume"])

    asyncio.run(check())


@pytest.mark.skipif(torch.cuda.is_available(), reason="only CPUs need it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_swiglu_on_a_cpu_give_what_vllms_own_give(dtype: torch.dtype):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.utils.torch_utils import set_default_torch_dtype

    from forge_rl.engines.vllm import cpu

    with set_current_vllm_config(VllmConfig()), set_default_torch_dtype(dtype):
        norm, narrow, swiglu = RMSNorm(64, eps=1e-5), RMSNorm(20, eps=1e-5), SiluAndMul()
    torch.manual_seed(0)
    norm.weight.data.uniform_(0.5, 1.5)
    x, residual, gates = (torch.randn(5, n, dtype=dtype) for n in (64, 64, 128))
    strided = torch.randn(5, 128, dtype=dtype)[:, ::2]
    whole = torch.randn(5, 64)
    few = torch.randn(5, 20, dtype=dtype)
    wanted = (
        *(norm.forward_native(x.clone()), *norm.forward_native(x.clone(), residual.clone())),
        *(norm.forward_native(strided), norm.forward_native(whole), narrow.forward_native(few)),
        swiglu.forward_native(gates),
    )
    cpu.patch(torch.nn.ModuleList([norm, narrow, swiglu]))
    found = (norm(x), *norm(x.clone(), residual.clone()), norm(strided), norm(whole), narrow(few), swiglu(gates))
    tolerance = 1e-6 if dtype == torch.float32 else 2**-6  # a bfloat16 of 4 is rounded by up to 2**-7
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert norm._forward_method.func is cpu._normalize
    assert swiglu._forward_method is cpu._silu_and_mul
