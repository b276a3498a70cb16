"""JSON requests of the Tinker API, with the fields that are supported here; others are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_rl.gateway.errors import ApiError, invalid

_MOST_BYTES = 1 << 20
"""Maximum bytes of a request without tokens, as the event loop reads it."""
# Well within the journal's 64-bit integers.
Seq = Annotated[int, Field(ge=0, lt=1 << 62)]
Text = Annotated[str, Field(max_length=500)]
# Ids go into int32 arrays.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1 << 20)]


class _ClientRequest(BaseModel):
    # Leaving out a field that the server does not know may change what a request means. The API names fields model_*,
    # which pydantic reserves by default.
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    type: str = ""


class RequestPlace(BaseModel):
    """The training of a request, and its place there; its other fields may be anything."""

    model_config = ConfigDict(protected_namespaces=())

    model_id: Text | None = None
    seq_id: Seq | None = None


R = TypeVar("R", bound=BaseModel)


class CreateSession(_ClientRequest):
    tags: list[Text] = Field(default=[], max_length=50)
    user_metadata: Mapping[str, Any] | None = None
    sdk_version: Text = ""
    project_id: Text | None = None
    display_name: Text | None = None


class SessionId(_ClientRequest):
    session_id: Text


class Lora(BaseModel):
    model_config = ConfigDict(extra="forbid")

    rank: Annotated[int, Field(ge=1, le=1 << 16)] = 32
    seed: Annotated[int, Field(ge=0, lt=1 << 62)] | None = None
    # Accepted, as it is the client's default, and without effect: adapters are of linear layers.
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["adamw"] = "adamw"


class CreateModel(_ClientRequest):
    session_id: Text
    # At most nine digits, as the ids of trainings have.
    model_seq_id: Annotated[int, Field(ge=0, lt=10**9)]
    base_model: Text
    user_metadata: Mapping[str, Any] | None = None
    lora_config: Lora = Lora()
    optimizer_config: Optimizer = Optimizer()


class LoadWeights(_ClientRequest):
    model_id: Text | None = None
    seq_id: Seq | None = None
    session_id: Text | None = None
    model_seq_id: Annotated[int, Field(ge=0, lt=10**9)] | None = None
    base_model: Text | None = None
    user_metadata: Mapping[str, Any] | None = None
    path: Text
    optimizer: bool
    optimizer_config: Optimizer | None = None
    # A type of None or of one literal refuses every other value: the feature is not supported.
    weights_access_token: None = None


class Adam(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(_ClientRequest):
    adam_params: Adam
    model_id: Text
    seq_id: Seq


class SaveWeights(_ClientRequest):
    model_id: Text
    path: Text | None = None
    seq_id: Seq
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] | None = None
    sampling_session_seq_id: Seq | None = None
    kind: Literal["snapshot"] = "snapshot"


class ModelId(_ClientRequest):
    model_id: Text


class WeightsInfo(_ClientRequest):
    tinker_path: Text


class CreateSamplingSession(_ClientRequest):
    session_id: Text
    sampling_session_seq_id: Seq
    base_model: Text | None = None
    model_path: Text | None = None


class TextChunk(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tokens: TokenIds
    type: Literal["encoded_text"] = "encoded_text"


class SamplePrompt(BaseModel):
    model_config = ConfigDict(extra="forbid")

    chunks: list[TextChunk] = Field(max_length=10000)


class SamplingParams(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: (
        Annotated[str, Field(max_length=1000)]
        | Annotated[list[Annotated[str, Field(max_length=1000)]] | TokenIds, Field(max_length=64)]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleRequest(_ClientRequest):
    num_samples: Annotated[int, Field(ge=1)] = 1
    prompt: SamplePrompt
    sampling_params: SamplingParams
    base_model: Text | None = None
    model_path: Text | None = None
    sampling_session_id: Text | None = None
    seq_id: Seq | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: Literal[False] | None = None


class Retrieve(_ClientRequest):
    request_id: Text
    allow_metadata_only: bool = False


def read(kind: type[R], body: bytes) -> R:
    """Read a JSON request.

    Raises:
        ApiError: the body is not one; names the first field that is malformed or not supported.
    """
    if len(body) > _MOST_BYTES and kind is not SampleRequest:
        raise ApiError(413, f"a request of {len(body)} bytes; at most {_MOST_BYTES}", code="request_too_large")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from None
