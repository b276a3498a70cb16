"""CPU time for a token in the process that holds vLLM's front end, beside vLLM's own settings, without a model.

python -m benchmarks.front_end --json out.json

Outputs of an engine's core, one token with its logprob for each request and step, are encoded as the core does, then
decoded and processed as AsyncLLM does, and taken by their requests. `us_a_token` is with forge_rl's settings (outputs
joined in the core, handed over every 32 tokens, logprobs not decoded to text) and includes making its chunks, by number
of requests, and the largest of these; `vllm_us_a_token` is with vLLM's, each token handed over. Both decode the text.
The two alternate, the heap is frozen in both. `core_us_a_token` is the core's time for joining and encoding.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark
from forge_rl.engines.vllm.internals import leave_tokens_undecoded
from forge_rl.engines.vllm.pieces import OutputPieces
from forge_rl.engines.vllm.requests import joined_chunk
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.types import Sampling

_INTERVAL = 32
_PROMPT_TOKENS = 40


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure the front end of an engine."""

    requests: tuple[int, ...] = (256, 2048)
    """Numbers of concurrent requests."""
    steps: int = 97
    """Tokens of each request."""
    repeats: int = LEAST_REPEATS
    """Number of repetitions, each of both settings."""
    smoke: bool = False
    """One repetition of few requests: checks that everything runs; measures nothing."""

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.requests or min(self.requests) < 1:
            raise BenchmarkError(f"--steps is {self.steps}, --requests {self.requests}", hint="set them to 1 or more")
        if not self.smoke:
            check_repeats(self.repeats)


class _Cost(NamedTuple):
    """Seconds of CPU."""

    core: float
    front_end: float


class _Running(NamedTuple):
    """A request as the scheduler has it."""

    sampling_params: SamplingParams


def measure(config: Config, report: Report) -> None:
    """Alternate forge_rl's settings and vLLM's."""
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    leave_tokens_undecoded()
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m", default_cache()))
    gc.collect()
    # Collections would otherwise walk all of vLLM in the middle of a measurement.
    gc.freeze()
    largest: list[float] = []
    for num_requests in config.requests:
        microseconds: dict[str, list[float]] = {}
        for repeat in range(1 if config.smoke else config.repeats + 1):
            for prefix, joins in (("", True), ("vllm_", False)):
                cost = _step_through(tokenizer, num_requests, config.steps, joins=joins)
                scale = 1e6 / (num_requests * config.steps)
                row = {f"{prefix}us_a_token": cost.front_end * scale, f"{prefix}core_us_a_token": cost.core * scale}
                is_warm_up = repeat == 0 and not config.smoke
                report.rows.append({"requests": num_requests, "warm_up": is_warm_up, **row})
                if not is_warm_up:
                    for name, value in row.items():
                        microseconds.setdefault(name, []).append(value)
        for name, values in microseconds.items():
            print(f"{num_requests} requests: {name} {report.measure(f'{name}_{num_requests}', values):.1f}", flush=True)
        largest.append(report.results[f"us_a_token_{num_requests}"])
    report.results["us_a_token"] = max(largest)


def _step_through(tokenizer: Any, num_requests: int, steps: int, *, joins: bool) -> _Cost:
    """Process all steps of some requests, and return the cost; with `joins` as forge_rl does."""
    parameters = SamplingParams(
        temperature=1.0,
        max_tokens=steps,
        logprobs=0,
        flat_logprobs=joins,
        stream_interval=_INTERVAL if joins else 1,
        output_kind=RequestOutputKind.DELTA,
    )
    processor = OutputProcessor(tokenizer, log_stats=False)
    names = [f"r{number}" for number in range(num_requests)]
    queues = [_enter(processor, name, parameters) for name in names]
    running = {name: _Running(parameters) for name in names}
    encoder, decoder, pieces = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs), OutputPieces()
    gathered: list[list[Any]] = [[] for _ in names]
    sampling = Sampling(max_tokens=steps, temperature=1.0)
    ids = np.random.default_rng(0).integers(1000, 20000, (steps, num_requests))
    core_s = front_end_s = 0.0
    num_tokens = 0
    for step in range(steps):
        # Made outside of the timed parts: in an engine, the model's runner makes them.
        outputs = [_output(name, int(ids[step, index])) for index, name in enumerate(names)]
        begin = time.process_time()
        message = encoder.encode(EngineCoreOutputs(outputs=pieces.join(outputs, running) if joins else outputs))
        core_s += time.process_time() - begin
        begin = time.process_time()
        processor.process_outputs(decoder.decode(message).outputs, 1.0, None, weight_version="0")
        for parts, queue in zip(gathered, queues, strict=True):
            if (output := queue.get_nowait()) is None:
                continue
            num_tokens += len(output.outputs[0].token_ids)
            if joins:
                parts.append(output.outputs[0])
                joined_chunk(parts, sampling, [("0", 0)], 0)
                parts.clear()
        front_end_s += time.process_time() - begin
    if num_tokens < num_requests * (1 + (steps - 1) // _INTERVAL * _INTERVAL):
        raise BenchmarkError(f"only {num_tokens} of {num_requests * steps} tokens were handed over")
    return _Cost(core_s, front_end_s)


def _enter(processor: OutputProcessor, name: str, parameters: SamplingParams) -> RequestOutputCollector:
    """Add a request, and return the queue that its outputs are put into."""
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(range(1000, 1000 + _PROMPT_TOKENS)),
        mm_features=None,
        sampling_params=parameters,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    request.external_req_id = name
    queue = RequestOutputCollector(RequestOutputKind.DELTA, name)
    processor.add_request(request, None, None, 0, queue)
    return queue


def _output(name: str, token: int) -> EngineCoreOutput:
    logprobs = LogprobsLists(
        np.array([[token]], np.int32), np.array([[-1.5]], np.float32), np.array([3], np.int32), None
    )
    return EngineCoreOutput(request_id=name, new_token_ids=[token], new_logprobs=logprobs)


if __name__ == "__main__":
    run_benchmark("front_end", Config, measure)
