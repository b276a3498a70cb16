"""Gateway overhead with a real engine, concurrent streams, and how long heavy requests block others.

python -m benchmarks.gateway --json out.json

The first part has one engine answer the same prompts, requested alternately in the controller and over HTTP by a
client process. The second puts a staged backend behind the gateway, which emits a token now and then, and holds a
thousand streams. The third sends the heaviest requests that each endpoint accepts, and polls /health meanwhile.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from benchmarks.heavy_requests import heavy_requests
from benchmarks.http_load import Streamed, post_watching_health, stream_all
from benchmarks.real_engines import serving
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, check_repeats, median, run_benchmark
from forge_rl.errors import check_flags
from forge_rl.gateway import Gateway, GatewayConfig, GeneratorBackend
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.runtime.processes import responsive_loop
from forge_rl.services.completion import Observer
from forge_rl.services.generator import Generator
from forge_rl.system.tasks import task_group
from forge_rl.token_arrays import Chunk, TokenIds
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Sampling

_DEADLINE_S = 600.0
_SENDS = 3
"""Number of times each heavy request is sent."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure the gateway's overhead, concurrent streams, and the effect of heavy requests on others."""

    model: str = "smollm2-135m"
    """Bundled model name, local folder, or Hugging Face id."""
    requests: int = 32
    """Concurrent requests."""
    new_tokens: int = 64
    """Maximum tokens per answer."""
    repeats: int = 7
    """Pairs of measurements."""
    warm_up: int = 1
    """Warm-up pairs, not counted."""
    streams: int = 1000
    """Concurrent streams to hold."""
    stream_tokens: int = 20
    """Tokens per stream."""
    interval_s: float = 1.0
    """Seconds between two tokens of a stream."""
    context_tokens: int = 131_072
    """Context length of the model for heavy requests: the longer it is, the more is accepted."""
    smoke: bool = False
    """One pair, short streams: shows that everything runs, and measures nothing."""

    def __post_init__(self) -> None:
        counts = ("context_tokens", "requests", "new_tokens", "warm_up", "streams", "stream_tokens")
        check_flags(self, "--", minimum=dict.fromkeys(counts, 1) | {"interval_s": 0})
        if not self.smoke:
            check_repeats(self.repeats)


class StagedBackend:
    """Answers slowly, repeating one token.

    Args:
        token: id of the token.
        interval_s: seconds between two tokens.
        max_model_len: the model's context length.
    """

    model = "staged"

    def __init__(self, token: int, interval_s: float, max_model_len: int = 4096) -> None:
        self.max_model_len = max_model_len
        self._token = token
        self._interval_s = interval_s

    async def decode(
        self, prompt_ids: TokenIds, sampling: Sampling, observe: Observer, *, session: str | None, gather_s: float
    ) -> None:
        for left in reversed(range(sampling.max_tokens)):
            chunk = Chunk(
                token_ids=(self._token,),
                logprobs=(-1.0,),
                versions=(0,),
                text="",
                finish="" if left else "length",
                top=(tuple((rank, -1.0) for rank in range(sampling.top_logprobs)),) if sampling.top_logprobs else (),
            )
            if observe(chunk):
                return
            await asyncio.sleep(self._interval_s)


def measure(config: Config, report: Report) -> None:
    """Run all three measurements."""
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    # Created before the engines, and by spawn, as threads do not survive a fork.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as client:
        asyncio.run(_measure_streams(config, report, client))
        asyncio.run(_measure_health(config, report, client))
        asyncio.run(_measure_overhead(config, report, client))


async def _measure_streams(config: Config, report: Report, client: ProcessPoolExecutor) -> None:
    tokenizer = Tokenizer(resolve_model(config.model, default_cache()))
    (token, *_) = tokenizer.encode("and")
    tokens = min(3, config.stream_tokens) if config.smoke else config.stream_tokens
    body = {"model": "staged", "messages": [_question(0)], "max_tokens": tokens}
    backend = StagedBackend(token, config.interval_s)
    async with Gateway(GatewayConfig(), backend, tokenizer, open_to_all=True) as gateway:
        streamed = await _streamed(client, gateway.base_url, [body] * config.streams)
    report.rows.append({"side": "streams", "warm_up": False, **vars(streamed)})
    # Held streams were open at the same time and finished with all their tokens.
    is_complete = streamed.complete == config.streams and streamed.tokens == config.streams * tokens
    if not is_complete:
        raise BenchmarkError(
            f"only {streamed.complete} of {config.streams} streams finished, with {streamed.tokens} tokens"
        )
    report.results["streams_held"] = streamed.most_open


async def _measure_health(config: Config, report: Report, client: ProcessPoolExecutor) -> None:
    """Poll /health while the heaviest accepted requests are served, one at a time."""
    tokenizer = Tokenizer(resolve_model(config.model, default_cache()))
    backend = StagedBackend(tokenizer.encode("and")[0], 0.0, config.context_tokens)
    worst: list[list[float]] = []
    sends = 1 if config.smoke else _SENDS
    with responsive_loop():  # as in a run and in apps.gateway
        async with Gateway(GatewayConfig(), backend, tokenizer, open_to_all=True) as gateway:
            for name, path, body in heavy_requests(backend.model, GatewayConfig().max_body_bytes, smoke=config.smoke):
                work = partial(post_watching_health, gateway.base_url, path, body, _DEADLINE_S)
                answers = [await asyncio.get_running_loop().run_in_executor(client, work) for _ in range(sends)]
                worst.append([answer.worst_health_ms for answer in answers])
                report.rows += [
                    {"side": "health", "warm_up": False, "request": name, **vars(answer)} for answer in answers
                ]
                slowest = max(answers, key=lambda answer: answer.worst_health_ms)
                print(
                    f"{name}: status {slowest.status}, {slowest.seconds:.2f} s, {slowest.worst_health_ms:.0f} ms",
                    flush=True,
                )
                if slowest.status >= 500:
                    raise BenchmarkError(f"the gateway failed at {name}: status {slowest.status}")
    # The overall maximum, and the maximum of the medians per request: a busy machine raises the first.
    report.results["worst_health_ms"] = max(map(max, worst))
    report.results["worst_median_health_ms"] = max(map(median, worst))


async def _measure_overhead(config: Config, report: Report, client: ProcessPoolExecutor) -> None:
    pairs = [False, True] if config.smoke else [False] * config.warm_up + [True] * config.repeats
    model = resolve_model(config.model, default_cache())
    tokenizer = Tokenizer(model)
    engine = Generator.Config(dtype="bfloat16", max_num_seqs=config.requests)
    async with (
        serving(engine, model) as generator,
        Gateway(GatewayConfig(), GeneratorBackend(generator, model.name), tokenizer, open_to_all=True) as gateway,
    ):
        rates: dict[str, list[float]] = {"bare": [], "http": []}
        for number, counts in enumerate(pairs):
            # The order alternates, so that a machine that slows down favours neither.
            for side in ("bare", "http") if number % 2 else ("http", "bare"):
                if side == "bare":
                    seconds, tokens = await _askserving(config, generator, tokenizer)
                else:
                    streamed = await _streamed(client, gateway.base_url, _bodies(config, gateway.model))
                    if streamed.complete != config.requests:
                        raise BenchmarkError(f"{streamed.complete} of {config.requests} answers came over HTTP")
                    seconds, tokens = streamed.seconds, streamed.tokens
                report.rows.append({"side": side, "warm_up": not counts, "seconds": seconds, "tokens": tokens})
                print(f"{side}: {tokens} tokens in {seconds:.2f} s", flush=True)
                if counts:
                    rates[side].append(tokens / seconds)
    report.measure("bare_tokens_per_s", rates["bare"])
    report.measure("http_tokens_per_s", rates["http"])
    report.results["overhead_share"] = 1 - median(rates["http"]) / median(rates["bare"])


async def _askserving(config: Config, generator: Generator, tokenizer: Tokenizer) -> tuple[float, int]:
    """Return seconds and tokens of the same requests without the gateway, which also get each token at once."""
    prompts = [tokenizer.render([_question(index)]) for index in range(config.requests)]
    began = time.perf_counter()
    async with task_group() as group:
        answers = [
            group.create_task(generator.generate(ids, Sampling(max_tokens=config.new_tokens, seed=index), gather_s=0.0))
            for index, ids in enumerate(prompts)
        ]
    return time.perf_counter() - began, sum(len(answer.result().token_ids) for answer in answers)


async def _streamed(client: ProcessPoolExecutor, base_url: str, bodies: Sequence[dict[str, object]]) -> Streamed:
    work = partial(stream_all, f"{base_url}/chat/completions", bodies, _DEADLINE_S)
    return await asyncio.get_running_loop().run_in_executor(client, work)


def _bodies(config: Config, model: str) -> list[dict[str, object]]:
    return [
        {"model": model, "messages": [_question(index)], "max_tokens": config.new_tokens, "seed": index}
        for index in range(config.requests)
    ]


def _question(index: int) -> dict[str, str]:
    return {"role": "user", "content": f"Tell me a long story about {index + 2} friends in the mountains."}


if __name__ == "__main__":
    run_benchmark("gateway", Config, measure)
