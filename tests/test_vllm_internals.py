"""vLLM's private names, of which one that is gone is named, and what it is started with."""

import asyncio
import contextlib
import gc
import json
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_rl.engines.protocol import DecodeSettings
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.services.request_limits import RequestLimit
from forge_rl.types import Sampling
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


def test_only_tokens_of_our_requests_have_no_text_of_their_own() -> None:
    from vllm import SamplingParams
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from forge_rl.engines.vllm.internals import leave_tokens_undecoded

    def tokenizer_of(**settings: Any) -> Any:
        request: Any = SimpleNamespace(sampling_params=SamplingParams(logprobs=0, **settings))
        return LogprobsProcessor.from_new_request(tokenizer=tokenizer, request=request).tokenizer

    tokenizer: Any = object()
    for _ in range(2):
        leave_tokens_undecoded()
    assert tokenizer_of(flat_logprobs=True) is None
    assert tokenizer_of() is tokenizer


def test_a_model_is_inspected_in_the_engines_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm.model_executor.models import registry

    from forge_rl.engines.vllm.internals import inspect_models_here

    def refuse(*args: object, **settings: object) -> None:
        raise AssertionError("vLLM starts a process")

    inspection: Any = registry
    monkeypatch.setattr(inspection, "_run_in_subprocess", inspection._run_in_subprocess)
    monkeypatch.setattr(inspection.subprocess, "run", refuse)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    inspect_models_here()
    model = registry.ModelRegistry.models["Gemma2ForCausalLM"]
    assert model.inspect_model_cls().architecture == "Gemma2ForCausalLM"


def test_joined_outputs_keep_their_most_likely_tokens() -> None:
    from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position
    from vllm.outputs import CompletionOutput, RequestOutput

    from forge_rl.engines.vllm.requests import joined_chunk

    def output(sampled: int) -> RequestOutput:
        logprobs, values = FlatLogprobs(), {7: -0.5, 9: -1.5, 5: -2.5, 2: -3.5}
        ids = [sampled, 7, 9, 5]
        append_logprobs_for_next_position(logprobs, ids, [values[id_] for id_ in ids], [None] * 4, 1, 3)
        completion = CompletionOutput(0, "", [sampled], None, logprobs)
        return RequestOutput("1", None, [1], None, [completion], finished=False)

    sampled, outputs = [9, 2, 7], [output(9), output(2), output(7)]
    apart = [request_output.outputs[0] for request_output in outputs]
    joined_output = output(9)
    for request_output in sampled[1:]:
        joined_output.add(output(request_output), aggregate=True)
    sampling = Sampling(max_tokens=9, top_logprobs=3)
    for completions in (apart, joined_output.outputs):
        chunk = joined_chunk(completions, sampling, [("1", 0)], 0)
        assert chunk.token_ids.tolist() == sampled
        assert chunk.logprobs.tolist() == [-1.5, -3.5, -0.5]
        assert chunk.top == (((7, -0.5), (9, -1.5), (5, -2.5)),) * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA vLLM's own blocks are short")
def test_a_short_prompt_of_a_group_fills_a_block_that_its_episodes_share(tmp_path: Path) -> None:
    from forge_rl.engines.vllm.arguments import engine_arguments

    make_model(tmp_path)
    size = engine_arguments(tmp_path, DecodeSettings(), 0).block_size
    assert size is not None
    assert size <= 42, "the tokens of a prompt of the demo"
    assert size % 32 == 0, "vLLM's fast kernels on CPU take no other"


def test_an_engine_reads_the_tokenizer_that_prompts_are_made_with(tmp_path: Path) -> None:
    from vllm.tokenizers.registry import resolve_tokenizer_args

    from forge_rl.engines.vllm.arguments import engine_arguments

    make_model(tmp_path)
    # Files of a clone of Mistral's, by which vLLM would choose its own tokenizer.
    for name in ("tekken.json", "consolidated.safetensors"):
        (tmp_path / name).write_text("{}")
    arguments = engine_arguments(tmp_path, DecodeSettings(), 0)
    assert resolve_tokenizer_args(tmp_path, tokenizer_mode="auto")[0] == "mistral"
    assert resolve_tokenizer_args(tmp_path, tokenizer_mode=arguments.tokenizer_mode)[0] == "hf"


def test_what_one_engine_compiled_serves_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_rl.engines.vllm import arguments as vllm_arguments
    from forge_rl.engines.vllm import register

    register()
    make_model(tmp_path)
    configs = []
    for pid in (7, 8):
        monkeypatch.setattr(vllm_arguments.os, "getpid", lambda pid=pid: pid)
        arguments = vllm_arguments.engine_arguments(tmp_path, DecodeSettings(max_model_len=64), seed=pid)
        arguments.skip_tokenizer_init = True
        configs.append(arguments.create_engine_config())
    assert [config.additional_config.pid for config in configs] == [7, 8]
    assert configs[0].compute_hash() == configs[1].compute_hash(), "vLLM's compile cache has a folder for each hash"


async def test_weights_that_can_be_loaded_again_are_dropped_in_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_rl.engines.vllm import engine
    from forge_rl.engines.vllm.cache_stats import CacheStats

    calls: list[str] = []

    async def note(call: str, kwargs: dict[str, object] | None = None) -> None:
        calls.append(" ".join([call, *(str(value) for value in (kwargs or {}).values())]))

    async def stop(llm: object, *, clear_cache: bool) -> None:
        await note("stop")

    monkeypatch.setattr(engine, "device_type", lambda: "cuda")
    monkeypatch.setattr(engine, "stop_decoding", stop)
    monkeypatch.setattr(engine, "engine_pids", lambda llm: [])
    llm: Any = SimpleNamespace(
        collective_rpc=note,
        resume_generation=lambda: note("resume"),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(model="model")),
    )

    async def hold_made(vllm_engine: engine.VLLMEngine, *, asleep: bool) -> tuple[bool, list[str]]:
        is_whole = await vllm_engine.hold(paused=False, asleep=asleep)
        step_calls = calls.copy()
        calls.clear()
        return is_whole, step_calls

    async def check() -> None:
        vllm_engine = engine.VLLMEngine(llm, DecodeSettings(), CacheStats())
        hold = partial(hold_made, vllm_engine)
        assert await hold(asleep=True) == (True, ["stop", "sleep 1"])
        assert await hold(asleep=False) == (True, ["wake_up ['weights', 'kv_cache']", "resume"])
        vllm_engine._loaded = True
        assert await hold(asleep=True) == (False, ["stop", "sleep 2"])
        assert await hold(asleep=False) == (False, []), "there are no weights to decode with"
        await vllm_engine._restore(["weights"])  # what a load begins with, and then it ends
        vllm_engine._dropped = False
        assert await hold(asleep=False) == (True, ["wake_up ['weights']", "wake_up ['kv_cache']", "resume"])

    await check()


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
    contiguous_input = torch.randn(5, 64)
    few = torch.randn(5, 20, dtype=dtype)
    expected = (
        *(norm.forward_native(x.clone()), *norm.forward_native(x.clone(), residual.clone())),
        *(norm.forward_native(strided), norm.forward_native(contiguous_input), narrow.forward_native(few)),
        swiglu.forward_native(gates),
    )
    cpu.patch(torch.nn.ModuleList([norm, narrow, swiglu]))
    results = (
        norm(x),
        *norm(x.clone(), residual.clone()),
        norm(strided),
        norm(contiguous_input),
        narrow(few),
        swiglu(gates),
    )
    tolerance = 1e-6 if dtype == torch.float32 else 2**-6  # a bfloat16 of 4 is rounded by up to 2**-7
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert norm._forward_method.func is cpu._normalize
    assert swiglu._forward_method is cpu._silu_and_mul


def test_a_step_tells_how_many_requests_a_full_cache_holds() -> None:
    from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats

    from forge_rl.engines.vllm.cache_stats import CacheStats

    stats = CacheStats()

    def step(usage: float, running: int, waiting: int, **finished: int) -> tuple[float, ...]:
        iteration = IterationStats()
        iteration.finished_requests = [
            SimpleNamespace(request_id=ids[name], num_preemptions=count) for name, count in finished.items()
        ]
        scheduler = SchedulerStats(kv_cache_usage=usage, num_running_reqs=running, num_waiting_reqs=waiting)
        stats.note(0, scheduler, iteration)
        return stats.pop()[:4]

    ids = {"old": stats.request_id()}
    assert step(0.4, 13, 51) == (0.4, 0, 51, 0), "others wait for their turn to be prefilled, not for room"
    assert step(0.97, 64, 0) == (0.97, 0, 0, 0)
    assert step(0.7, 63, 1) == (0.7, 0, 1, 63), "one was preempted, and has given back its blocks"
    assert step(0.7, 63, 1) == (0.7, 0, 1, 0)
    assert step(0.95, 61, 2, old=0) == (0.95, 0, 2, 62), "one more has run, and ended"
    stats.cleared()
    ids["new"] = stats.request_id()
    assert step(0.2, 13, 51) == (0.2, 0, 51, 0), "a load of weights clears a full cache"
    assert step(0.5, 62, 0, old=3, new=1) == (0.5, 2 + 1, 0, 0), "a load has preempted the older one once"
    prefixes = PrefixCacheStats(queries=100, hits=40, preempted_queries=50, preempted_hits=20)
    transfers = PrefixCacheStats(queries=60, hits=16, preempted_queries=30, preempted_hits=8)
    stats.note(0, SchedulerStats(prefix_cache_stats=prefixes, connector_prefix_cache_stats=transfers), None)
    use = stats.pop()
    assert (use.prompt_tokens, use.cached_tokens, use.prefilled_again) == (100, 40, 30)
    assert use.transferred_tokens == 24
    assert stats.pop()[4:] == (0, 0, 0, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA vLLM's blocks are shorter")
def test_vllm_preempts_fewer_requests_once_their_number_is_limited(tmp_path: Path) -> None:
    # vLLM's own scheduler with 63 blocks of 32 tokens; a request grows to 7 blocks.
    from forge_rl.engines.vllm.cache_stats import CacheStats

    stats, limit = CacheStats(), RequestLimit(32)
    scheduler = _Scheduled(tmp_path, blocks=64, max_num_seqs=32)

    def decode(count: int, tokens: int, *, limited: bool = True, clear_at: int = 0) -> int:
        """Decode requests of 13 tokens; returns how often they were preempted for lack of room."""
        preemptions = steps = 0
        waiting, running = count, 0
        while waiting or running:
            free = limit.limit - running if limited else waiting
            for _ in range(min(free, waiting)):
                scheduler.add(stats.request_id(), tokens)
                waiting, running = waiting - 1, running + 1
            steps += 1
            if steps == clear_at:
                scheduler.clear()
                stats.cleared()
            scheduler_stats, ended = scheduler.step()
            stats.note(0, scheduler_stats, SimpleNamespace(finished_requests=ended))
            running -= len(ended)
            for _ in range(max(len(ended), stats.fitting is not None)):
                use = stats.pop()
                preemptions += use.preemptions
                limit.note(use)
        return preemptions

    assert decode(32, 12, limited=False, clear_at=5) == 0, "a load of weights preempts all, for no lack of room"
    assert limit.limit == 32
    assert decode(32, 200, limited=False) > 25
    assert 9 <= limit.limit < 16, "9 always fit"
    assert decode(64, 200) < 10
    before = limit.limit
    assert decode(100, 8) == 0
    assert before + 3 < limit.limit < 32, "it grows again while there is room"


class _Scheduled:
    """vLLM's scheduler without a model: each step draws a token for each request that it schedules."""

    def __init__(self, folder: Path, *, blocks: int, max_num_seqs: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from forge_rl.engines.vllm import register
        from forge_rl.engines.vllm.arguments import engine_arguments

        register()
        make_model(folder)
        arguments = engine_arguments(folder, DecodeSettings(max_model_len=256, max_num_seqs=max_num_seqs), seed=0)
        arguments.skip_tokenizer_init = True
        config = arguments.create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        size = config.cache_config.block_size
        layer = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)]
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(size, sha256)
        self._scheduler = Scheduler(config, cache, StructuredOutputManager(config), block_size=size, log_stats=True)
        self._requests: dict[str, Any] = {}

    def add(self, name: str, tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        prompt = [len(self._requests)] * 13  # no two share a block
        self._requests[name] = Request(name, prompt, params, None, block_hasher=self._hasher)
        self._scheduler.add_request(self._requests[name])

    def clear(self) -> None:
        assert self._scheduler.reset_prefix_cache(reset_running_requests=True)

    def step(self) -> tuple[Any, list[SimpleNamespace]]:
        """Returns the scheduler's stats and, for each request that ended, its id and number of preemptions."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduled = self._scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        drawn = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, [[7] for _ in names])
        outputs = self._scheduler.update_from_output(scheduled, drawn)[0]
        ended = [
            request_output.request_id for request_output in outputs.outputs if request_output.finish_reason is not None
        ]
        return outputs.scheduler_stats, [
            SimpleNamespace(request_id=name, num_preemptions=self._requests[name].num_preemptions) for name in ended
        ]


@pytest.mark.parametrize(
    ("connector", "message"),
    [
        ({"kv_connector": "OffloadingConnector"}, "specify kv_role"),
        ({"kv_conector": "OffloadingConnector"}, "kv_conector: Unexpected keyword argument"),
        ({"kv_connector": "Nothing", "kv_role": "kv_both"}, "'Nothing' cannot be imported"),
        ({"kv_connector": "ExampleConnector", "kv_role": "kv_both"}, "ExampleConnector has no reset_cache"),
        ({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, ""),
    ],
)
@pytest.mark.parametrize("within", [False, True])
def test_a_kv_connector_that_cannot_forget_old_weights_is_refused(
    connector: dict[str, Any], message: str, within: bool
) -> None:
    from forge_rl.engines.vllm.kv_transfer import read_kv_transfer

    if within:
        parts = {"connectors": [{"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}, connector]}
        connector = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": parts}
    expected = pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext()
    with expected:
        config = read_kv_transfer(json.dumps(connector))
        assert config is not None
        assert config.kv_connector == connector["kv_connector"]


def test_a_served_engine_asks_for_the_key_on_every_route_but_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_rl.engines.vllm.served import ForgeRoutes

    reached: list[str] = []

    async def vllm_app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def ask(path: str, key: str = "", **scope: Any) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        await routes({"type": "http", "method": "POST", "path": path, "headers": headers, **scope}, None, send)  # type: ignore[arg-type]
        return messages

    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="VLLM_API_KEY is not set"):
        ForgeRoutes(vllm_app)
    monkeypatch.setenv("VLLM_API_KEY", "right")
    routes = ForgeRoutes(vllm_app)
    for path in ("/invocations", "/v1/completions", "/forge_rl/v1/claim"):
        assert asyncio.run(ask(path))[0]["status"] == 401
        assert asyncio.run(ask(path, "wrong"))[0]["status"] == 401
    assert asyncio.run(ask("/v1/realtime", type="websocket")) == [{"type": "websocket.close", "code": 1008}]
    assert reached == []
    asyncio.run(ask("/health"))
    asyncio.run(ask("/invocations", "right"))
    assert reached == ["/health", "/invocations"]


def test_vllm_reads_a_served_engines_command_as_a_runs_settings(tmp_path: Path) -> None:
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from forge_rl.engines.vllm.arguments import engine_arguments
    from forge_rl.engines.vllm.served import serve_command

    offload = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": "7"}
    settings = DecodeSettings(max_model_len=64, max_num_seqs=3, kv_transfer_config=json.dumps(offload))
    _, _, *command = serve_command(tmp_path, settings, host="127.0.0.1", port=8123, seed=5)
    read = make_arg_parser(FlexibleArgumentParser()).parse_args(command)
    assert (read.host, read.port, len(read.middleware)) == ("127.0.0.1", 8123, 1)
    parsed_arguments, expected = AsyncEngineArgs.from_cli_args(read), engine_arguments(tmp_path, settings, 5)
    different = {
        name for name, value in vars(expected).items() if (vars(parsed_arguments)[name] or None) != (value or None)
    }
    different.discard("mm_device_do_normalize")  # of images, with another default in vLLM's server
    assert different == {"additional_config", "disable_log_stats"}, "the owner, and the loggers"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_on_cpu_is_packed_once_a_load_and_computes_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from forge_rl.engines.vllm import cpu

    packings: list[torch.dtype] = []
    products: list[weakref.ref[Any]] = []

    def counted(layer: Any, weight: torch.Tensor, dtype: torch.dtype) -> Any:
        product = original(layer, weight, dtype)
        packings.append(dtype)
        products.append(weakref.ref(product))
        return product

    original = cpu._packed_product
    monkeypatch.setattr(cpu, "_packed_product", counted)
    head: Any = torch.nn.Module()
    head.quant_method = UnquantizedEmbeddingMethod()
    head.weight = torch.nn.Parameter(torch.randn(512, 64).to(dtype), requires_grad=False)
    embedding: Any = torch.nn.Module()
    embedding.quant_method, embedding.weight = UnquantizedEmbeddingMethod(), head.weight
    cpu.patch(torch.nn.ModuleList([head, embedding]))
    processor: Any = SimpleNamespace(head_dtype=torch.float32)
    hidden, bias = torch.randn(5, 64).to(dtype), torch.randn(512).to(dtype)
    for load in range(2):
        head.weight.data.copy_(torch.randn(512, 64).to(dtype))
        gc.disable()
        try:
            for layer in (head, embedding):
                layer.quant_method.process_weights_after_loading(layer)
            assert [product() for product in products] == [None] * load, "what was packed before is freed at once"
        finally:
            gc.enable()
        for rows in (1, 5):
            logits = LogitsProcessor._apply_head(processor, head, hidden[:rows], bias)
            expected = torch.nn.functional.linear(hidden[:rows].double(), head.weight.double(), bias.double())
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, expected.float())
        assert packings == [torch.float32] * (load + 1), "nor is the embedding packed"
    processor.head_dtype = None
    logits = LogitsProcessor._apply_head(processor, head, hidden, None)
    torch.testing.assert_close(logits, torch.nn.functional.linear(hidden, head.weight))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_are_chosen_by_biases_also_without_groups_on_cpu(scoring: str):
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    from forge_rl.engines.vllm.cpu import patch

    logits, bias = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)), torch.linspace(1, -1, 8)
    layer = torch.nn.Module()
    layer.router = CPURouter(top_k=2, global_num_experts=8, scoring_func=scoring, e_score_correction_bias=bias)  # type: ignore[assignment]
    patch(layer)
    weights, expert_ids = layer.router._compute_routing(logits, logits, None)  # type: ignore[operator, union-attr]
    scores = logits.softmax(dim=-1) if scoring == "softmax" else logits.sigmoid()
    expected = (scores + bias).topk(2, dim=-1).indices
    assert torch.equal(expert_ids.sort(dim=-1).values.long(), expected.sort(dim=-1).values)
    assert not torch.equal(expected.sort(dim=-1).values, scores.topk(2, dim=-1).indices.sort(dim=-1).values)
    unbiased = scores.gather(1, expert_ids.long())
    assert torch.allclose(weights, unbiased / unbiased.sum(dim=-1, keepdim=True))


def test_engines_are_told_how_queries_are_scaled_and_share_no_states_on_cpu(tmp_path: Path):
    from forge_rl.engines.vllm.arguments import engine_arguments

    def arguments(**config: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return engine_arguments(tmp_path, DecodeSettings(), 0)

    rope = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16, "rope_type": "yarn", "factor": 16.0}
    scaled, plain = arguments(model_type="ministral3", rope_parameters=rope), arguments(model_type="llama")
    assert scaled.hf_overrides["llama_4_scaling"] == {"beta": 0.1, "original_max_position_embeddings": 16}
    assert "llama_4_scaling" not in plain.hf_overrides
    for is_tuned in (True, False):  # else vLLM takes it from the longest request
        llama4 = arguments(model_type="llama4_text", attn_temperature_tuning=is_tuned)
        assert llama4.override_generation_config == {"attn_temperature_tuning": is_tuned}
    assert plain.override_generation_config == {}
    assert plain.enable_prefix_caching
    states = arguments(model_type="lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"])
    assert not states.enable_prefix_caching
