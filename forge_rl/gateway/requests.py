"""Parameters that requests may set in each API, and their bounds; vLLM's models check the parameters' types."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pydantic_core
from pydantic import BaseModel, TypeAdapter, ValidationError

from forge_rl.gateway.errors import ApiError, invalid

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Surrogates as JSON escapes, or as bytes that are invalid UTF-8."""
_SEARCHED_BYTES = 1 << 16
"""Maximum bytes of a body searched for lone surrogates: all other requests wait meanwhile."""
_MOST_MESSAGES = 4096
_MOST_TOOLS = 512
_MOST_STOPS, _MOST_STOP_CHARACTERS = 16, 512
"""Maximum stop strings per request, and their length: each is searched for after every token."""
_MOST_COMPLETIONS = 128
_MOST_LOGPROBS = 512
"""Maximum logprobs per position over all completions of a request."""
_MOST_COUNT = 2**31 - 1
"""Largest max_tokens accepted; the model's context is the effective limit."""
_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("max_tokens", "min_tokens"), (0, _MOST_COUNT)),
    **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), (1, _MOST_COUNT)),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), (0, 20)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (-2, 2)),
    "n": (1, _MOST_COMPLETIONS),
    "top_p": (1e-6, 1),
    "top_k": (-1, _MOST_COUNT),
    "min_p": (0, 1),
    "repetition_penalty": (0.1, 10),
}
"""Minimum and maximum of each number. Beyond them logits become NaN, or steps slow for all requests."""
_COLDEST = 0.01
"""Minimum temperature, except for 0, which is greedy."""
_BIAS = 100.0
"""Maximum absolute bias on a token's logit."""
_LENGTHS: Mapping[str, tuple[int, int]] = {
    "logit_bias": (1024, 1 << 18),
    "stop_token_ids": (1024, 1 << 18),
    "allowed_token_ids": (1 << 18, 1 << 18),
    "bad_words": (128, 1024),
}
"""Maximum entries of each list of tokens or words, and maximum entries times completions, which each hold a copy. Each
token is compared with bad_words in Python."""
_MOST_WORD_CHARACTERS = 128
_TEMPLATE_WORD = re.compile(r"[A-Za-z0-9_.-]{0,64}")
"""Strings that a request may pass to a chat template; no control token has this form."""
_TEMPLATE_OWN = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "self", "raise_exception", "strftime_now", "range"),
        *("dict", "lipsum", "cycler", "joiner", "namespace", "loop", "caller", "varargs", "kwargs"),
    }
)
"""Arguments of the template renderer and names of its functions, which a request may not set."""
_SPECIAL_TOKENS = ("_token", "_special_tokens")
"""Suffixes of variables with special tokens: bos_token, eos_token, additional_special_tokens."""
_IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "stream_options", "prompt_cache_key"),
    *("prompt_cache_options", "prompt_cache_retention", "cache_control", "container", "inference_geo", "speed"),
    *("user_profile_id", "workspace_id", "diagnostics"),
)
"""Parameters without effect here."""
_NOT_THERE = "it is not implemented"
_UNSUPPORTED: Mapping[str, tuple[str, object]] = {
    "modalities": ("only text is supported", ["text"]),
    "audio": ("only text is supported", None),
    "functions": ("use tools", []),
    "function_call": ("use tools", "auto"),
    "best_of": ("use n", 1),
    "prediction": (_NOT_THERE, None),
    "web_search_options": (_NOT_THERE, None),
    "verbosity": (_NOT_THERE, "medium"),
    "moderation": (_NOT_THERE, None),
    "suffix": (_NOT_THERE, ""),
    "previous_response_id": ("responses are not stored; send the whole input", None),
    "conversation": ("responses are not stored; send the whole input", None),
    "background": ("responses are not stored", False),
    "prompt": (_NOT_THERE, None),
    "context_management": (_NOT_THERE, []),
    "mcp_servers": (_NOT_THERE, []),
    "output_format": (_NOT_THERE, {}),
}
"""Parameters that are refused, each with the reason and a value that is accepted, as it changes nothing."""


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A request within its bounds."""

    vllm: Any
    """vLLM's model of it, in which `text` and `stop` are placeholders."""
    text: Any
    """Its messages, prompts or input; vLLM's models would take long to check them."""
    stop: list[str]
    """Its stop strings; vLLM's models accept fewer."""
    num_completions: int
    """Number of completions requested."""


class Api:
    """One API's parameters.

    Args:
        model: vLLM's model of requests.
        text: parameter with the messages, prompts or input.
        served: other parameters that a request may set, apart from the model and whether to stream.
        hottest: maximum temperature.
    """

    def __init__(self, model: type[BaseModel], text: str, served: str, *, hottest: float = 2) -> None:
        self.text = text
        self._model = model
        self._served = frozenset(("model", "stream", text, *served.split()))
        constraint: Any = model.model_fields.get("structured_outputs")
        self._constraint = TypeAdapter[Any](Any if constraint is None else constraint.annotation)
        self._hottest = hottest

    def read(self, body: bytes) -> ParsedRequest:
        """Parse a request's body.

        Raises:
            ApiError: the body is not a JSON object, or a parameter is unsupported or exceeds a limit.
            ValidationError: a parameter has the wrong type. Further errors of vLLM's model pass through.
        """
        parameters = {name: value for name, value in _parse(body).items() if self._may_set(name, value)}
        if not parameters.get("tools"):  # some clients always send an empty list and a tool_choice
            parameters.pop("tools", None)
            if parameters.get("tool_choice") in ("auto", "none"):
                del parameters["tool_choice"]
        elif isinstance(parameters["tools"], list) and len(parameters["tools"]) > _MOST_TOOLS:
            raise _wrong("tools", f"a list of at most {_MOST_TOOLS} tools")
        text = self._read_text(parameters)
        stop = _read_stop(parameters)
        if constraint := parameters.get("structured_outputs"):  # a dataclass, which strict models take as it is
            try:
                parameters["structured_outputs"] = self._constraint.validate_python(constraint)
            except ValidationError as error:
                raise invalid(error, "structured_outputs") from None
        # Placeholders stand in for the text, whose validation by vLLM's models would take long.
        request = self._model.model_validate(
            {**parameters, self.text: "-" if self.text == "prompt" else []}, strict=True
        )
        # Only completions take a list of prompts; each gets `n` completions.
        num_completions = (len(text) if self.text == "prompt" else 1) * (getattr(request, "n", None) or 1)
        self._check(request, num_completions)
        return ParsedRequest(vllm=request, text=text, stop=stop, num_completions=num_completions)

    def _may_set(self, name: str, value: object) -> bool:
        """Return whether a parameter is set; False if it has no effect."""
        if value is None or name in self._served:
            return value is not None
        reason, neutral_value = _UNSUPPORTED.get(name, ("", None))
        if reason and value != neutral_value:
            raise ApiError(400, f"{name} is not supported: {reason}", param=name, code="unsupported_parameter")
        if not reason and name not in _IGNORED:
            raise ApiError(400, f"unknown parameter: {name}", param=name, code="unknown_parameter")
        return False

    def _read_text(self, parameters: dict[str, Any]) -> Any:
        """Remove the messages, prompts or input from a request, and return them; prompts as a list."""
        for name in ("model", self.text):
            if name not in parameters:
                raise ApiError(400, f"missing parameter: {name}", param=name, code="missing_required_parameter")
        name, text = self.text, parameters.pop(self.text)
        if name == "prompt":
            # [1, 2] is one prompt of token ids; ["a", "b"] and [[1], [2]] are two prompts.
            prompts = text if isinstance(text, list) and text and not isinstance(text[0], int) else [text]
            if not all(isinstance(prompt, str) or _all_of(int, prompt) for prompt in prompts):
                raise _wrong(name, "a text, a list of token ids, or a list of these")
            return prompts
        if name == "input" and isinstance(text, str):
            return text
        if not _all_of(dict, text) or not 0 < len(text) <= _MOST_MESSAGES:
            raise _wrong(name, f"a list of at least one and at most {_MOST_MESSAGES} objects")
        return text

    def _check(self, request: Any, num_completions: int) -> None:
        """Raise ApiError if a parameter of a request is out of range."""
        # Without booleans: `logprobs` is a switch in chats and a number in completions.
        parameters = {name: value for name, value in request if value is not None and not isinstance(value, bool)}
        for name, (minimum, maximum) in _RANGES.items():
            # NaN fails both comparisons, and is refused.
            if not minimum <= parameters.get(name, minimum) <= maximum:
                raise _wrong(name, f"a number from {minimum:g} to {maximum:g}")
        if parameters.get("temperature") and not _COLDEST <= parameters["temperature"] <= self._hottest:
            raise _wrong("temperature", f"0, or a number from {_COLDEST:g} to {self._hottest:g}")
        if num_completions > _MOST_COMPLETIONS:
            problem = f"the request asks for {num_completions} completions, more than {_MOST_COMPLETIONS}"
            raise ApiError(400, problem, param=self.text)
        # Per position, a response lists the sampled token and the `logprobs` likeliest ones; -1 stands for neither.
        logprobs = parameters.get(
            "logprobs", parameters.get("top_logprobs", 0) if getattr(request, "logprobs", None) else -1
        )
        if num_completions * (logprobs + 1) > _MOST_LOGPROBS:
            problem = f"all completions together may have {_MOST_LOGPROBS} logprobs per position; request fewer"
            raise ApiError(400, problem, param="logprobs")
        # Without echo, there would be nothing to return.
        if parameters.get("max_tokens") == 0 and not getattr(request, "echo", False):
            raise ApiError(400, "max_tokens 0 requires echo to be true", param="max_tokens")
        if getattr(request, "stream", False) and scores_prompt(request):
            raise ApiError(400, "prompt logprobs are not supported in a stream", param="stream")
        for name, (maximum, max_total) in _LENGTHS.items():
            if len(parameters.get(name, ())) > maximum or len(parameters.get(name, ())) * num_completions > max_total:
                raise _wrong(name, f"of at most {maximum} entries, and {max_total} over all completions")
        # Written with `all` and `<=` so that NaN is refused too.
        if not all(abs(bias) <= _BIAS for bias in parameters.get("logit_bias", {}).values()):
            raise _wrong("logit_bias", f"an object of numbers from {-_BIAS:g} to {_BIAS:g}")
        if not all(0 < len(word) <= _MOST_WORD_CHARACTERS for word in parameters.get("bad_words", ())):
            raise _wrong("bad_words", f"a list of words with 1 to {_MOST_WORD_CHARACTERS} characters")
        _check_template(parameters.get("chat_template_kwargs") or {})
        for index, tool in enumerate(parameters.get("tools", ())):
            kind = getattr(tool, "type", "function")
            if kind not in ("function", "custom"):
                problem = f"tools of type {kind!r} are not supported: agents run their own"
                raise ApiError(400, problem, param=f"tools.{index}")


def scores_prompt(request: Any) -> bool:
    """Return whether the response to a request has logprobs of its prompts' tokens."""
    echoes = getattr(request, "echo", False) and request.logprobs is not None
    return bool(echoes) or getattr(request, "prompt_logprobs", None) is not None


def template_settings(variables: Mapping[str, object]) -> dict[str, object]:
    """Return the subset of vLLM's chat template variables that a request may set."""
    return {name: value for name, value in variables.items() if _may_set_variable(name) and value is not None}


def _check_template(settings: Mapping[str, object]) -> None:
    """Raise ApiError if a request's template variables could be rendered as a message."""
    for name, value in settings.items():
        is_plain = value is None or isinstance(value, bool | int | float)
        is_word = isinstance(value, str) and _TEMPLATE_WORD.fullmatch(value)
        if not name.isidentifier() or not _may_set_variable(name) or not (is_plain or is_word):
            words = "numbers, true, false, null and single words, and may not set special tokens or the renderer's own"
            raise _wrong("chat_template_kwargs", f"an object of {words} variables")


def _may_set_variable(name: str) -> bool:
    return name not in _TEMPLATE_OWN and not name.endswith(_SPECIAL_TOKENS)


def _read_stop(parameters: dict[str, Any]) -> list[str]:
    """Remove the stop strings from a request, and return them."""
    # Anthropic's name, then OpenAI's.
    name = "stop_sequences" if "stop_sequences" in parameters else "stop"
    stop = parameters.pop(name, [])
    stop = [stop] if isinstance(stop, str) else stop
    is_valid = _all_of(str, stop) and all(0 < len(stop_string) <= _MOST_STOP_CHARACTERS for stop_string in stop)
    if not is_valid or len(stop) > _MOST_STOPS:
        problem = f"at most {_MOST_STOPS} stop strings of 1 to at most {_MOST_STOP_CHARACTERS} characters are allowed"
        raise ApiError(400, problem, param=name, code="invalid_value")
    return stop


def _all_of(kind: type, value: object) -> bool:
    # By exact type: True is an int to isinstance, but not a token id.
    return isinstance(value, list) and all(type(entry) is kind for entry in value)


def _wrong(name: str, expected: str) -> ApiError:
    return ApiError(400, f"{name} must be {expected}", param=name, code="invalid_value")


def _parse(body: bytes) -> dict[str, Any]:
    """Parse a body.

    Raises:
        ApiError: it is not a JSON object, or a string in it has a lone surrogate.
    """
    try:
        value = pydantic_core.from_json(body)
    except ValueError as error:
        # The parser refuses lone surrogates without saying where; clients get the path of the first one.
        if (param := _lone_surrogate(body)) is not None:
            problem = f"{param or 'the body'} has a lone surrogate, which stands for no character"
            raise ApiError(400, problem, param=param or None, code="invalid_value") from None
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    return value


def _lone_surrogate(body: bytes) -> str | None:
    """Return the path of a body's lone surrogate, such as "messages.0.content"; "" for a top-level string or key.

    None if there is none, or if the body is too long to search or not JSON.
    """
    if len(body) > _SEARCHED_BYTES or not _SURROGATE.search(body):
        return None
    try:
        pending: list[tuple[object, tuple[str, ...]]] = [(json.loads(body.decode(errors="surrogatepass")), ())]
    except (ValueError, RecursionError):
        return None
    # Depth first with a stack of our own: documents may nest deeper than Python recurses.
    while pending:
        value, path = pending.pop()
        texts = value if isinstance(value, dict) else [value]
        if any(isinstance(text, str) and re.search("[\ud800-\udfff]", text) for text in texts):
            return ".".join(path)
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        pending += ((entry, (*path, str(name))) for name, entry in reversed([*entries]))
    return None
