"""Makes choices that can be decoded out of what a request asks for: the rules that all APIs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.gateway.backend import Backend
from forge_rl.gateway.chat import Prompt, PromptBuilder
from forge_rl.gateway.choices import Choice
from forge_rl.gateway.config import GatewayConfig
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.sessions import Session
from forge_rl.gateway.tools import ToolParser
from forge_rl.types import Sampling


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """Sampling parameters that a request asks for; None leaves one to the gateway."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Report each token's logprob, and so many of the likeliest; None reports nothing."""
    parallel_calls: bool = True
    prompt_param: str = "messages"
    """Name of the prompt in errors."""


class RequestBuilder:
    """Makes choices out of prompts and sampling requests.

    Args:
        backend: decodes them.
        tokenizer: the model's tokenizer.
        config: the gateway's config.
    """

    def __init__(self, backend: Backend, tokenizer: Tokenizer, config: GatewayConfig) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.prompt_builder = PromptBuilder(tokenizer, config.tool_parser)
        self.parser = ToolParser(config.tool_parser, tokenizer)
        self.models = tuple(dict.fromkeys((backend.model, *config.aliases)))

    def check_model(self, name: str) -> str:
        """Return the name if the model goes by it.

        Raises:
            ApiError: it does not.
        """
        if name not in self.models:
            raise ApiError(
                404,
                f"The model `{name}` does not exist; there is {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )
        return name

    async def choices(
        self,
        prompts: Sequence[Prompt],
        count: int,
        requested: SamplingRequest,
        session: Session | None,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> tuple[Choice, ...]:
        """Make so many choices for each prompt.

        Raises:
            ApiError: the sampling that is requested cannot be had.
        """
        if tools:
            await self.parser.load()
        found: list[Choice] = []
        size = self.tokenizer.vocab_size
        for prompt in prompts:
            if not len(prompt.token_ids):
                raise ApiError(400, "the prompt is empty", param=requested.prompt_param)
            if prompt.token_ids.min() < 0 or prompt.token_ids.max() >= size:
                raise ApiError(400, f"token ids go from 0 to {size - 1}", param=requested.prompt_param)
            sampling = self._sampling(prompt, requested, session)
            for place in range(count):
                if session is not None:
                    sampling = replace(sampling, seed=session.seed_for(prompt.token_ids))
                elif requested.seed is not None:
                    sampling = replace(sampling, seed=(requested.seed + place) % (1 << 63))
                reader = self.parser.reader(tools, prompt.token_ids.tolist()) if tools else None
                parallel, logprobs = requested.parallel_calls, requested.logprobs
                choice = Choice(len(found), prompt, sampling, self.tokenizer, reader, parallel, logprobs)
                found.append(choice)
        return tuple(found)

    def _sampling(self, prompt: Prompt, requested: SamplingRequest, session: Session | None) -> Sampling:
        limit, used = self.backend.max_model_tokens, len(prompt.token_ids)
        room = limit - used
        tokens = requested.max_tokens if requested.max_tokens is not None else room
        if session is not None:
            tokens = min(tokens, session.sampling.max_tokens, room)
        if room < 1 or tokens > room:
            tokens, param = max(tokens, requested.max_tokens or 1), requested.prompt_param
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested {used + tokens} tokens "
                f"({used} in the {param}, {tokens} in the completion). Please reduce the length of the {param} or "
                "completion.",
                param=param,
                code="context_length_exceeded",
            )
        temperature = _temperature(requested.temperature, session)
        # A greedy completion has no behaviour logprobs; what can be reported is that of the likeliest token.
        top = 0 if requested.logprobs is None else max(requested.logprobs, 1 if temperature == 0 else 0)
        stop = tuple(dict.fromkeys((*requested.stop, *(session.sampling.stop if session is not None else ()))))
        return Sampling(max_tokens=tokens, temperature=temperature, stop=stop, top_logprobs=top)


def _temperature(wanted: float | None, session: Session | None) -> float:
    """Choose the temperature: that of training, as recorded logprobs at another one would be another distribution's.

    Greedy completions have no logprobs and are not trained. A greedy session is evaluated: whatever is wanted, all of
    it is greedy.
    """
    if session is None:
        return 1.0 if wanted is None else wanted
    own = session.sampling.temperature
    if wanted is None or own == 0:
        return own
    if wanted in (own, 0):
        return wanted
    raise ApiError(
        400,
        f"temperature {wanted:g} is not the {own:g} that this session is trained at: the behaviour logprobs would be "
        "another distribution's. Leave temperature out, or set it to 0 for completions that are not trained",
        param="temperature",
        code="unsupported_value",
    )
