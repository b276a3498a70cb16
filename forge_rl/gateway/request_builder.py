"""From what a request asks for to choices that can be decoded: the rules that all APIs share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.gateway.backend import Backend
from forge_rl.gateway.chat import Composer, Prompt
from forge_rl.gateway.choices import Choice
from forge_rl.gateway.config import GatewayConfig
from forge_rl.gateway.errors import ApiError, context_length
from forge_rl.gateway.sessions import Session
from forge_rl.gateway.tools import ToolParser
from forge_rl.types import Sampling


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """How a request wants its answers drawn; None leaves it to us."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Tell each token's, and so many of the likeliest."""
    parallel_calls: bool = True
    prompt_param: str = "messages"
    """What errors call the prompt."""


class RequestBuilder:
    """Makes choices from wishes.

    Args:
        backend: decodes them.
        tokenizer: of the model.
        config: of the gateway.
        now: seconds since 1970, for what responses say of their time.
    """

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, config: GatewayConfig, now: Callable[[], float] = time.time
    ) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.composer = Composer(tokenizer, config.tool_parser)
        self.parser = ToolParser(config.tool_parser, tokenizer)
        self.models = tuple(dict.fromkeys((backend.model, *config.aliases)))
        self.now = now

    def check_model(self, name: str) -> str:
        """The name, if it is one of ours.

        Raises:
            ApiError: it is not.
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
        wish: SamplingRequest,
        session: Session | None,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> tuple[Choice, ...]:
        """So many answers to each prompt, to be decoded.

        Raises:
            ApiError: a wish that cannot be fulfilled.
        """
        if tools:
            await self.parser.load()
        found: list[Choice] = []
        for prompt in prompts:
            self._check_ids(prompt, wish)
            sampling = self._sampling(prompt, wish, session)
            for place in range(count):
                if session is not None:
                    sampling = replace(sampling, seed=session.seed_for(prompt.token_ids))
                elif wish.seed is not None:
                    sampling = replace(sampling, seed=(wish.seed + place) % (1 << 63))
                reader = self.parser.reader(tools, prompt.token_ids) if tools else None
                found.append(
                    Choice(
                        len(found),
                        prompt,
                        sampling,
                        self.tokenizer,
                        reader=reader,
                        parallel_calls=wish.parallel_calls,
                        logprobs=wish.logprobs,
                    )
                )
        return tuple(found)

    def _sampling(self, prompt: Prompt, wish: SamplingRequest, session: Session | None) -> Sampling:
        limit, used = self.backend.max_model_tokens, len(prompt.token_ids)
        room = limit - used
        tokens = wish.max_tokens if wish.max_tokens is not None else room
        if session is not None:
            tokens = min(tokens, session.sampling.max_tokens, room)
        if room < 1 or tokens > room:
            raise context_length(used, max(tokens, wish.max_tokens or 1), limit, wish.prompt_param)
        temperature = _temperature(wish.temperature, session)
        # A greedy answer has no behaviour logprobs; what can be told of its tokens is that of the likeliest one.
        top = 0 if wish.logprobs is None else max(wish.logprobs, 1 if temperature == 0 else 0)
        stop = tuple(dict.fromkeys((*wish.stop, *(session.sampling.stop if session is not None else ()))))
        return Sampling(max_tokens=tokens, temperature=temperature, stop=stop, top_logprobs=top)

    def _check_ids(self, prompt: Prompt, wish: SamplingRequest) -> None:
        if not prompt.token_ids:
            raise ApiError(400, "the prompt is empty", param=wish.prompt_param)
        if not all(0 <= token < self.tokenizer.vocab_size for token in prompt.token_ids):
            raise ApiError(400, f"token ids go from 0 to {self.tokenizer.vocab_size - 1}", param=wish.prompt_param)


def _temperature(wanted: float | None, session: Session | None) -> float:
    """An episode's answers are drawn as it is trained: at another temperature the recorded logprobs would be those of
    another distribution. Greedy answers have none and are not trained; what a greedy session does is only evaluated.
    """
    if session is None:
        return 1.0 if wanted is None else wanted
    own = session.sampling.temperature
    if wanted is None or own == 0 or wanted in (own, 0):
        return own if wanted is None else wanted
    raise ApiError(
        400,
        f"temperature {wanted:g} is not the {own:g} that this session is trained at: the behaviour logprobs would be "
        "another distribution's. Leave temperature out, or set it to 0 for answers that are not trained",
        param="temperature",
        code="unsupported_value",
    )
