"""Replaces the engine client of vLLM's server: decodes on a backend, and applies sessions' rules."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from forge_rl.errors import ServiceError
from forge_rl.gateway import vllm_internals as vllm
from forge_rl.gateway.chat import ChatMessage, Prompt, extend_digest
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.request_state import REQUEST, CompletionChoice, CompletionDelta, RequestState
from forge_rl.gateway.shared import GatewayContext
from forge_rl.services.completion import GATHER_S
from forge_rl.system.seeds import derive_seed
from forge_rl.system.tasks import task_group
from forge_rl.token_arrays import Chunk
from forge_rl.types import Sampling

_PLAIN = vllm.SamplingParams()
_EXTRA = (
    *("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
    *("stop_token_ids", "ignore_eos", "min_tokens", "bad_words", "allowed_token_ids", "structured_outputs"),
)
"""Sampling settings of vLLM without a field in `Sampling`; they go into `extra`."""


class EngineClient:
    """Decodes requests of vLLM's server on a backend, and records sessions' turns.

    It implements the part of vLLM's EngineClient that the server uses.

    Args:
        shared: the gateway's parts.
        model_config: the attributes of vLLM's ModelConfig that the server reads.
        renderer: the attributes of vLLM's renderer that the server reads.
    """

    # Attributes that vLLM's handlers read of a client.
    errored = False
    vllm_config = input_processor = None

    def __init__(self, shared: GatewayContext, model_config: SimpleNamespace, renderer: SimpleNamespace) -> None:
        self.model_config = model_config
        self.renderer = renderer
        self._shared = shared
        self._tokenizer = shared.tokenizer
        self._agent_sampling = shared.config.agent_sampling

    def check_admission(self, count: int) -> None:
        """Admit every request: the guard has already checked the limits."""

    async def generate(
        self, prompt: Mapping[str, Any], params: Any, request_id: str, **_: object
    ) -> AsyncGenerator[Any, None]:
        """Decode the completions of a prompt; yields vLLM's RequestOutputs, streamed or whole."""
        state, built_prompt = REQUEST.get(), prompt["forge_rl"]
        try:
            choices = [self._choice(built_prompt, params, index, state) for index in range(params.n)]
            state.choices += choices
            # All completions of a prompt have one constraint.
            constraint = choices[0].sampling.extra.get("structured_outputs")
            if isinstance(constraint, Mapping):
                await self._check_constraint(constraint, "" if state.session is None else state.session.key)
            prompt_ids, output_queue = built_prompt.token_ids.tolist(), asyncio.Queue[Any]()

            def output(outputs: list[Any]) -> Any:
                is_finished = all(choice.finish for choice in choices)
                of_prompt = self._of_prompt(choices[0])
                return vllm.RequestOutput(request_id, prompt.get("prompt"), prompt_ids, of_prompt, outputs, is_finished)

            def show(choice: CompletionChoice, added: CompletionDelta) -> None:
                output_queue.put_nowait(output([_output(choice, added)]))

            async def decode() -> None:
                async with task_group() as group:
                    for choice in choices:
                        group.create_task(self._decode(choice, state, show if streamed else None))

            streamed = params.output_kind == vllm.RequestOutputKind.DELTA
            decode_task = asyncio.ensure_future(decode())
            # Wakes the loop below however decoding ends.
            decode_task.add_done_callback(lambda _: output_queue.put_nowait(None))
            state.decoding.append(decode_task)
            while (request_output := await output_queue.get()) is not None:
                yield request_output
            # Raises what decoding raised; after a success it returns at once.
            await decode_task
            if not streamed:
                yield output([_output(choice, choice.all()) for choice in choices])
        except (Exception, asyncio.CancelledError) as error:
            # vLLM's handler turns errors into text; the server raises the one recorded here instead.
            state.fail(error)
            raise

    async def _decode(
        self,
        choice: CompletionChoice,
        state: RequestState,
        show: Callable[[CompletionChoice, CompletionDelta], None] | None,
    ) -> None:
        """Decode one completion; call `show` with what each chunk adds, or gather chunks if it is None.

        All completions of the request are recorded when the last one ends, before the client can see that.
        """

        def observe(chunk: Chunk) -> bool:
            state.started = True
            added = choice.add(chunk)
            if choice.finish and state.whole:
                self._record(state)
            if show is not None:
                show(choice, added)
            return bool(choice.finish)

        await self._shared.backend.decode(
            choice.prompt.token_ids,
            choice.sampling,
            observe,
            session=state.session.key if state.session is not None else None,
            gather_s=0.0 if show else GATHER_S,
        )
        if not choice.finish:
            raise ServiceError("the backend returned before the completion's end", service="generator", call="decode")

    async def _check_constraint(self, constraint: Mapping[str, Any], caller: str) -> None:
        """Raise ApiError if an engine cannot decode under a constraint.

        `caller` is the session's key; "" outside of sessions.
        """
        if "whitespace_pattern" in constraint:
            raise ApiError(400, "whitespace_pattern is not supported", param="structured_outputs")
        for name, value in constraint.items():
            match name, value:
                case "regex", str():
                    await self._shared.constraints.check("regex", value, caller)
                case "choice", list():
                    self._shared.constraints.check_size(sum(map(len, value)))  # writing them as a grammar is slow
                    await self._shared.constraints.check("ebnf", vllm.choice_as_grammar(value), caller)
                case "grammar", str():
                    await self._shared.constraints.check(
                        "lark" if vllm.grammar_is_likely_lark(value) else "ebnf", value, caller
                    )
                case "json", _:
                    await self._shared.constraints.check(
                        "json", value if isinstance(value, str) else json.dumps(value), caller
                    )
                case "structural_tag", str():
                    await self._shared.constraints.check("tag", value, caller)

    def _choice(self, prompt: Prompt, params: Any, index: int, state: RequestState) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            prompt=prompt,
            sampling=self._sampling(prompt, params, index, state),
            tokenizer=self._tokenizer,
            skip_special=params.skip_special_tokens,
            keeps_stop=params.include_stop_str_in_output,
            top=params.logprobs,
        )

    def _sampling(self, prompt: Prompt, params: Any, index: int, state: RequestState) -> Sampling:
        """Return the sampling of a completion: outside of sessions, as requested.

        In sessions, `agent_sampling` decides between the run's settings and the request's; logprobs under other
        settings are another distribution's. A session with temperature 0 is an evaluation, and always greedy.
        """
        session, tokens, temperature = state.session, params.max_tokens, params.temperature
        stop = tuple(params.stop or ())
        seed = params.seed
        # With one seed, all completions of a prompt would be equal.
        if seed is not None and index:
            seed = derive_seed(seed, "choice", index)
        # One completion asks for the prompt's logprobs, on behalf of all.
        of_prompt = {} if params.prompt_logprobs is None or index else {"prompt_logprobs": params.prompt_logprobs}
        extra = of_prompt | {
            name: value for name in _EXTRA if _changes(value := getattr(params, name), getattr(_PLAIN, name))
        }
        if params.structured_outputs is not None:
            extra["structured_outputs"] = _as_json(params.structured_outputs)
        if session is not None:
            session_sampling = session.sampling
            tokens, seed = min(tokens, session_sampling.max_tokens), session.seed_for(prompt.token_ids)
            # An agent's own stop strings are honoured in every mode: they shorten a turn, and change no logprob.
            stop = (*stop, *session_sampling.stop)
            if self._agent_sampling == "replaced" or session_sampling.temperature == 0:
                requested_temperature = prompt.asked_temperature
                for name in (
                    *(("temperature",) if requested_temperature not in (None, session_sampling.temperature) else ()),
                    *extra,
                ):
                    self._shared.replaced(name)
                temperature, extra = session_sampling.temperature, {}
            elif prompt.asked_temperature is None:
                temperature = session_sampling.temperature
        # A greedy completion has no behaviour logprobs; report the most likely token's.
        top = 0 if params.logprobs is None else max(params.logprobs, 1 if temperature == 0 else 0)
        return Sampling(
            max_tokens=tokens,
            temperature=temperature,
            seed=seed,
            stop=tuple(dict.fromkeys(stop)),
            top_logprobs=top,
            adapter=state.adapter,
            extra=extra,
        )

    def _record(self, state: RequestState) -> None:
        session = state.session
        if session is None or session.closed:
            return
        for choice in state.choices:
            prompt = choice.prompt
            # Logprobs under other settings are another distribution's than the one that training assumes.
            has_session_sampling = (
                session.sampling.temperature == choice.sampling.temperature and not choice.sampling.extra
            )
            answer = _message(choice) if prompt.digest else None
            session.record(
                choice.turn(
                    trained=has_session_sampling or self._agent_sampling == "trained",
                    agent=state.agent,
                    calls=answer.calls if answer is not None else (),
                ),
                digest=extend_digest(prompt.digest, answer) if answer is not None else None,
                text=prompt.text + choice.full_text if prompt.text is not None else None,
            )

    def _of_prompt(self, choice: CompletionChoice) -> list[dict[int, Any] | None] | None:
        """Return the prompt's logprobs in vLLM's format; None if not requested."""
        return [
            {
                token: vllm.Logprob(logprob, rank, self._tokenizer.decode([token], skip_special=False))
                for token, logprob, rank in position
            }
            or None
            for position in choice.of_prompt
        ] or None


def _changes(value: Any, default: Any) -> bool:
    """Return whether a setting differs from its default; some have several neutral values."""
    return value != default and (value or default) not in (None, {}, [], -1)


def _output(choice: CompletionChoice, added: CompletionDelta) -> Any:
    return vllm.CompletionOutput(
        index=choice.index,
        text=added.text,
        token_ids=added.token_ids,
        cumulative_logprob=None,
        logprobs=added.logprobs,
        finish_reason=choice.finish or None,
        stop_reason=choice.stop_text or None,
    )


def _message(choice: CompletionChoice) -> ChatMessage:
    """Return a completion as the message that the client receives and sends back."""
    reads = choice.prompt.reads
    content, calls = (choice.text, ()) if reads is None else reads(choice.text, choice.ids)
    return ChatMessage(role="assistant", content=content, calls=tuple(calls))


def _as_json(value: Any) -> dict[str, object]:
    """Return the public fields that are set in vLLM's constraint."""
    public_fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return {
        name: setting
        for name, setting in public_fields.items()
        if setting not in (None, False) and not name.startswith("_")
    }
