"""Replaces the engine client of vLLM's server: decodes on a backend and applies sessions' rules. Imports vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

from forge_rl.errors import ServiceError
from forge_rl.gateway.backend import Backend
from forge_rl.gateway.call import CALL, Call
from forge_rl.gateway.chat import ChatMessage, Prompt, extend_digest
from forge_rl.gateway.completion import Added, Completion
from forge_rl.gateway.constraints import ConstraintChecker
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.gateway_config import AgentSampling
from forge_rl.gateway.sessions import Session
from forge_rl.runtime.tasks import task_group
from forge_rl.services.completion import GATHER_S
from forge_rl.token_arrays import Chunk
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Sampling

_PLAIN = SamplingParams()
_EXTRA = (
    *("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
    *("stop_token_ids", "ignore_eos", "min_tokens", "bad_words", "allowed_token_ids", "structured_outputs"),
)
"""Sampling settings of vLLM without a field in `Sampling`; they go into `extra`."""


class EngineClient:
    """Decodes requests of vLLM's server on a backend, and records sessions' turns.

    It implements the part of vLLM's EngineClient that the server uses.

    Args:
        backend: decodes completions.
        tokenizer: the model's tokenizer.
        model_config: the attributes of vLLM's ModelConfig that the server reads.
        renderer: the attributes of vLLM's renderer that the server reads.
        agent_sampling: treatment of agents' sampling settings in sessions, see `GatewayConfig`.
        constraints: checks constraints on completions.
        replaced: called with the name of each setting that the session's sampling replaces.
    """

    errored = False
    vllm_config = input_processor = None

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        model_config: SimpleNamespace,
        renderer: SimpleNamespace,
        agent_sampling: AgentSampling,
        constraints: ConstraintChecker,
        replaced: Callable[[str], None],
    ) -> None:
        self.model_config = model_config
        self.renderer = renderer
        self._backend = backend
        self._tokenizer = tokenizer
        self._agent_sampling = agent_sampling
        self._constraints = constraints
        self._replaced = replaced

    def check_admission(self, count: int) -> None:
        """Admit every request: the guard has already checked the limits."""

    def generate(
        self, prompt: Mapping[str, Any], params: SamplingParams, request_id: str, **_: object
    ) -> AsyncGenerator[RequestOutput, None]:
        """Decode the completions of a prompt; yields vLLM's outputs, streamed or whole."""
        call = CALL.get()
        stream = self._generate(prompt["forge_rl"], prompt.get("prompt"), params, request_id, call)
        call.streams.append(stream)
        return stream

    async def _generate(
        self, prompt: Prompt, text: str | None, params: SamplingParams, request_id: str, call: Call
    ) -> AsyncGenerator[RequestOutput, None]:
        def output(outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
            of_prompt = _of_prompt(completions[0], self._tokenizer)
            return RequestOutput(request_id, text, prompt_ids, of_prompt, outputs, finished)

        call.prompts.append(prompt)
        prompt_ids = prompt.token_ids.tolist()
        completions = [self._completion(prompt, params, place, call) for place in range(params.n)]
        call.completions += completions
        forced = completions[0].sampling.extra.get("structured_outputs")
        if isinstance(forced, Mapping):
            await self._check_constraint(forced, "" if call.session is None else call.session.key)
        came: asyncio.Queue[RequestOutput | None] = asyncio.Queue()

        def show(added: CompletionOutput) -> None:
            came.put_nowait(output([added], all(each.finish for each in completions)))

        async def decode_all() -> None:
            async with task_group() as group:
                for completion in completions:
                    group.create_task(self._decode(completion, call, show if streamed else None))

        streamed = params.output_kind == RequestOutputKind.DELTA
        decoding = asyncio.ensure_future(decode_all())
        decoding.add_done_callback(lambda _: came.put_nowait(None))
        try:
            while (found := await came.get()) is not None:
                yield found
            await decoding
            if not streamed:
                yield output([_whole(completion) for completion in completions], finished=True)
        except (Exception, asyncio.CancelledError) as error:
            call.fail(error)
            raise
        finally:
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)

    async def _decode(
        self, completion: Completion, call: Call, show: Callable[[CompletionOutput], None] | None
    ) -> None:
        """Decode one completion; call `show` with each chunk's output, or gather chunks if it is None.

        All completions of the request are recorded when the last one ends, before the client can see that.
        """

        def observe(chunk: Chunk) -> bool:
            call.started = True
            added = completion.add(chunk)
            if completion.finish and call.whole:
                self._record(call)
            if show is not None:
                show(_added(completion, added))
            return bool(completion.finish)

        key = call.session.key if call.session is not None else None
        ids, sampling = completion.prompt.token_ids, completion.sampling
        with call.on_engine():
            await self._backend.decode(ids, sampling, observe, session=key, gather_s=0.0 if show else GATHER_S)
        if not completion.finish:
            raise ServiceError("the backend returned before the completion's end", service="generator", call="decode")

    async def _check_constraint(self, constraint: Mapping[str, Any], caller: str) -> None:
        """Raise ApiError if an engine cannot decode under a constraint.

        `caller` is the session's key; "" outside of sessions.
        """
        if "whitespace_pattern" in constraint:
            raise ApiError(400, "whitespace_pattern is not supported", param="structured_outputs")
        for name, given in constraint.items():
            match name, given:
                case "regex", str():
                    await self._constraints.check("regex", given, caller)
                case "choice", list():
                    self._constraints.check_size(sum(map(len, given)))  # writing them as a grammar is slow
                    await self._constraints.check("ebnf", choice_as_grammar(given), caller)
                case "grammar", str():
                    await self._constraints.check("lark" if grammar_is_likely_lark(given) else "ebnf", given, caller)
                case "json", _:
                    await self._constraints.check(
                        "json", given if isinstance(given, str) else json.dumps(given), caller
                    )
                case "structural_tag", str():
                    await self._constraints.check("tag", given, caller)

    def _completion(self, prompt: Prompt, params: SamplingParams, place: int, call: Call) -> Completion:
        return Completion(
            place,
            prompt,
            self._sampling(prompt, params, place, call.session),
            self._tokenizer,
            skip_special=params.skip_special_tokens,
            keeps_stop=params.include_stop_str_in_output,
            logprobs=params.logprobs,
        )

    def _sampling(self, prompt: Prompt, params: SamplingParams, place: int, session: Session | None) -> Sampling:
        """Return the sampling of a completion: outside of sessions, as requested.

        In sessions, `agent_sampling` decides between the run's settings and the request's; logprobs under other
        settings are another distribution's. A session with temperature 0 is an evaluation, and always greedy.
        """
        tokens, temperature = params.max_tokens, params.temperature
        stop = tuple(params.stop or ())
        seed = None if params.seed is None else (params.seed + place) % (1 << 63)
        of_prompt = {} if params.prompt_logprobs is None or place else {"prompt_logprobs": params.prompt_logprobs}
        extra = of_prompt | {
            name: value for name in _EXTRA if _changes(value := getattr(params, name), getattr(_PLAIN, name))
        }
        if params.structured_outputs is not None:
            extra["structured_outputs"] = _as_json(params.structured_outputs)
        if session is not None:
            own = session.sampling
            tokens, seed = min(tokens, own.max_tokens), session.seed_for(prompt.token_ids)
            stop = (*stop, *own.stop)
            if self._agent_sampling == "replaced" or own.temperature == 0:
                asked = prompt.asked_temperature
                for name in (*(("temperature",) if asked not in (None, own.temperature) else ()), *extra):
                    self._replaced(name)
                temperature, extra = own.temperature, {}
            elif prompt.asked_temperature is None:
                temperature = own.temperature
        # A greedy completion has no behaviour logprobs; report the most likely token's.
        top = 0 if params.logprobs is None else max(params.logprobs, 1 if temperature == 0 else 0)
        return Sampling(
            max_tokens=tokens,
            temperature=temperature,
            seed=seed,
            stop=tuple(dict.fromkeys(stop)),
            top_logprobs=top,
            extra=extra,
        )

    def _record(self, call: Call) -> None:
        session = call.session
        if session is None or session.closed:
            return
        for completion in call.completions:
            prompt = completion.prompt
            own = session.sampling.temperature == completion.sampling.temperature and not completion.sampling.extra
            session.record(
                completion.turn(trained=own or self._agent_sampling == "trained"),
                digest=extend_digest(prompt.digest, _message(completion)) if prompt.digest else None,
                text=prompt.text + completion.full_text if prompt.text is not None else None,
            )


def _changes(value: Any, plain: Any) -> bool:
    """Return whether a setting differs from its default; some have several neutral values."""
    return value != plain and (value or plain) not in (None, {}, [], -1)


def _of_prompt(completion: Completion, tokenizer: Tokenizer) -> list[dict[int, Logprob] | None] | None:
    """Return the prompt's logprobs in vLLM's format; None if not requested."""
    if not completion.of_prompt:
        return None
    return [
        {
            token: Logprob(logprob, rank=rank, decoded_token=tokenizer.decode([token], skip_special=False))
            for token, logprob, rank in position
        }
        or None
        for position in completion.of_prompt
    ]


def _added(completion: Completion, added: Added) -> CompletionOutput:
    return CompletionOutput(
        index=completion.index,
        text=added.text,
        token_ids=added.token_ids,
        cumulative_logprob=None,
        logprobs=added.logprobs,
        finish_reason=completion.finish or None,
        stop_reason=completion.stop_text or None,
    )


def _whole(completion: Completion) -> CompletionOutput:
    return _added(completion, Added(text=completion.text, token_ids=completion.ids, logprobs=completion.logprobs))


def _message(completion: Completion) -> ChatMessage:
    """Return a completion as the message that the client receives and sends back."""
    reads = completion.prompt.reads
    content, calls = (completion.text, ()) if reads is None else reads(completion.text, completion.ids)
    return ChatMessage(role="assistant", content=content, calls=tuple(calls))


def _as_json(value: Any) -> dict[str, object]:
    """Return the public fields that are set in vLLM's constraint."""
    public = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
    return {name: each for name, each in public.items() if each not in (None, False) and not name.startswith("_")}
