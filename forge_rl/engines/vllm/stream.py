"""One answer of vLLM's, as it is decoded: each step's tokens with their logprobs and the version that produced them."""

from __future__ import annotations

import contextlib
import math
import uuid
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Literal

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind

from forge_rl.errors import ConfigError
from forge_rl.types import Chunk, Sampling

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM


async def decode(llm: AsyncLLM, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
    """Decode one answer; when this generator is closed, vLLM drops the request.

    Raises:
        ConfigError: vLLM does not take such a request.
        RuntimeError: vLLM ended it without an answer.
    """
    request = uuid.uuid4().hex
    prompt = {"type": "token", "prompt_token_ids": list(prompt_ids)}
    sent = 0
    try:
        async with contextlib.aclosing(llm.generate(prompt, _parameters(sampling), request_id=request)) as outputs:
            async for output in outputs:
                (answer,) = output.outputs
                if answer.finish_reason not in (None, "stop", "length"):
                    raise RuntimeError(f"vLLM ended a request with {answer.finish_reason!r}")
                starts = _version_starts(llm, request, answer)
                count = len(answer.token_ids)
                chunk = _chunk(answer, sampling, _versions(starts, sent, sent + count))
                sent += count
                yield chunk
    except VLLMValidationError as error:
        raise ConfigError(
            f"vLLM does not take the request: {error}", hint="change the prompt or the sampling"
        ) from error


def _parameters(sampling: Sampling) -> SamplingParams:
    logprobs = None if sampling.temperature == 0 and not sampling.top_logprobs else sampling.top_logprobs
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        stop=list(sampling.stop),
        logprobs=logprobs,
        output_kind=RequestOutputKind.DELTA,
    )


def _version_starts(llm: AsyncLLM, request: str, answer: CompletionOutput) -> list[tuple[str, int]]:
    """Each version of an answer with the number of its first token.

    vLLM tells them with the end of an answer only. Until then they are where it keeps them: nothing is awaited between
    its handing out an output and this look, so they are those of this output's tokens.
    """
    if answer.finish_reason is not None:
        return [(span.version, span.start) for span in answer.weight_versions or ()]
    (internal,) = llm.output_processor.external_req_ids[request]
    return llm.output_processor.request_states[internal].weight_version_starts


def _versions(starts: list[tuple[str, int]], first: int, end: int) -> tuple[int, ...]:
    """Of the tokens from `first` up to `end`; -1 where the engine had loaded none."""
    places = [start for _, start in starts]
    spans = [bisect_right(places, token) - 1 for token in range(first, end)]
    return tuple(int(starts[span][0]) if span >= 0 and starts[span][0].isdecimal() else -1 for span in spans)


def _chunk(answer: CompletionOutput, sampling: Sampling, versions: tuple[int, ...]) -> Chunk:
    ids = tuple(answer.token_ids)
    steps = (
        []
        if answer.logprobs is None
        else [{token: entry.logprob for token, entry in step.items()} for step in answer.logprobs]
    )
    if sampling.temperature == 0:
        logprobs = (math.nan,) * len(ids)
    else:
        logprobs = tuple(step[token] for step, token in zip(steps, ids, strict=True))
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    if sampling.top_logprobs:
        likeliest = (sorted(step.items(), key=lambda pair: -pair[1]) for step in steps)
        top = tuple(tuple(pairs[: sampling.top_logprobs]) for pairs in likeliest)
    finish: Literal["", "stop", "length"] = ""
    if answer.finish_reason is not None:
        finish = "length" if answer.finish_reason == "length" else "stop"
    return Chunk(token_ids=ids, logprobs=logprobs, versions=versions, text=answer.text, finish=finish, top=top)
