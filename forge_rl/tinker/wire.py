"""Messages of the Tinker API in protobuf: requests for passes, and results of passes and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from forge_rl.gateway.errors import ApiError

PROTOBUF = "application/x-protobuf"
_MOST_PARTS = 1 << 16
"""Maximum messages in a request for a pass: millions of empty ones fit in a body, and take gigabytes of memory."""
_PACKAGE = "tinker_public"
_MESSAGES: Mapping[str, str] = {
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes?, 3 topk_prompt_logprobs TopkLogprobs?, "
    "4 prompt_cache_hit_tokens int32",
    "SampledSequence": "1 stop_reason StopReason, 2 tokens bytes, 3 logprobs bytes?, "
    "4 topk_sampled_logprobs TopkLogprobs?",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype DType, 4 shape int64*",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype DType, 4 trailing_shape int64*",
    "ArrayRecord": "1 type_tag string, 2 fields {BatchedTensor}, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics {double}",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, "
    "5 loss_fn_config {double}, 6 forward_only bool, 7 loss_fn_config_v2 {LossConfigValue}",
    "LossConfigValue": "1 number double?, 2 text string?",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs {Tensor}, 3 model_input_spans bytes*, "
    "4 loss_fn_input_spans bytes*",
    "Chunk": "1 encoded_text EncodedTextChunk, 2 image Unread, 3 dmel Unread",
    "EncodedTextChunk": "1 tokens bytes",
    "Unread": "",
}
"""Fields of each message: number, name and type; * is repeated, ? optional, and {} a map from strings. Spans tell where
tokens were sampled, which changes nothing."""
_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
_DTYPES: Mapping[int, type[np.generic]] = {1: np.float32, 2: np.int64, 3: np.int32}


@dataclass(frozen=True, kw_only=True, eq=False)
class Datum:
    """One example of a pass: T tokens, and what its loss needs of each of their targets."""

    tokens: npt.NDArray[np.int32]
    """[T]."""
    inputs: Mapping[str, npt.NDArray[Any]]
    """[T] each, int64 or float32, by the API's names, such as "target_tokens"."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PassRequest:
    """A request for a pass over data."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss_fn: str
    loss_config: Mapping[str, float]
    forward_only: bool

    @property
    def tokens(self) -> int:
        """Number of tokens of all data."""
        return sum(len(datum.tokens) for datum in self.data)


@dataclass(frozen=True, kw_only=True, eq=False)
class WireSample:
    """One sampled completion."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    is_stopped: bool
    """True if a stop ended it, False if its maximum length did."""
    top: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None = None
    """[T, k] ids of the most likely tokens at each position, and their logprobs."""


@dataclass(frozen=True, kw_only=True)
class PassAddress:
    """The training and sequence number of a requested pass, and its size."""

    model_id: str
    seq_id: int
    tokens: int


def read_address(body: bytes) -> PassAddress:
    """Read the address of a requested pass; its data are not checked yet.

    Raises:
        ApiError: the body is not such a request.
    """
    message = _parsed(body)
    if message.seq_id < 0:
        raise ApiError(400, f"seq_id is {message.seq_id}", param="seq_id")
    parts = len(message.data)
    # The number of data alone may exceed the maximum; then none is looked at.
    for datum in message.data if parts <= _MOST_PARTS else ():
        parts += len(datum.model_input) + len(datum.loss_fn_inputs)
    if parts > _MOST_PARTS:
        raise ApiError(400, f"more than {_MOST_PARTS} data, chunks and values in a request", param="data")
    sizes = (len(chunk.encoded_text.tokens) // 4 for datum in message.data for chunk in datum.model_input)
    return PassAddress(model_id=message.model_id, seq_id=message.seq_id, tokens=sum(sizes))


def read_pass(body: bytes, *, most_data: int) -> PassRequest:
    """Read a request for a pass.

    Raises:
        ApiError: the body is malformed, or asks for something unsupported.
    """
    message = _parsed(body)
    if not message.data or len(message.data) > most_data:
        raise ApiError(400, f"a request has 1 to {most_data} data, and this one {len(message.data)}", param="data")
    config = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.HasField("text"):
            raise ApiError(400, f"the loss's setting {name[:40]!r} is text, which is not supported", param="loss_fn")
        config[name] = value.number
    data = [_read_datum(datum, index) for index, datum in enumerate(message.data)]
    size = message.ByteSize()
    message.DiscardUnknownFields()
    # Fields of a later client, without which the request may mean something else.
    if message.ByteSize() < size:
        raise ApiError(400, "the request has fields that are not supported here", code="not_supported")
    return PassRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=data,
        loss_fn=message.loss_fn,
        loss_config=config,
        forward_only=message.forward_only,
    )


def _parsed(body: bytes) -> Any:
    message = _message("ForwardBackwardRequest")
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise ApiError(400, "the body is not a protobuf ForwardBackwardRequest") from None
    return message


def _read_datum(datum: Any, index: int) -> Datum:
    parts = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise ApiError(400, "only text is supported, not images or audio", param=f"data.{index}.model_input")
        parts.append(_array(chunk.encoded_text.tokens, np.int32, f"data.{index}.model_input"))
    inputs = {}
    for name, tensor in datum.loss_fn_inputs.items():
        param = f"data.{index}.loss_fn_inputs.{name[:40]}"
        # Several targets for a token, as sparse rows or a dense matrix.
        if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
            raise ApiError(400, f"{name[:40]} has several values for a token, which is not supported", param=param)
        if tensor.dtype not in _DTYPES:
            raise ApiError(400, f"{name[:40]} has dtype {tensor.dtype}, which is not supported", param=param)
        inputs[name] = _array(tensor.dense, _DTYPES[tensor.dtype], param)
    return Datum(tokens=np.concatenate(parts) if parts else np.empty(0, np.int32), inputs=inputs)


def _array(data: bytes, dtype: type[np.generic], param: str) -> npt.NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise ApiError(400, f"{len(data)} bytes are not a whole number of values", param=param)
    # A view of the message's bytes, not a copy.
    return np.frombuffer(data, dtype)


def encode_pass(logprobs: Sequence[npt.NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Encode the result of a pass.

    Args:
        logprobs: [T] for each of the data.
    """
    message = _message("ForwardBackwardOutput")
    message.loss_fn_output_type = "ArrayRecord"
    for name, value in metrics.items():
        message.metrics[name] = value
    record = message.loss_fn_outputs.add()
    record.type_tag, record.num_datums = "ArrayRecord", len(logprobs)
    field = record.fields["logprobs"]
    field.dtype = 1
    field.data = np.concatenate(logprobs).astype(np.float32).tobytes()
    # Byte offsets of each datum's float32 values, and of the end.
    field.offsets = (4 * np.cumsum([0, *(len(values) for values in logprobs)])).astype(np.int64).tobytes()
    return bytes(message.SerializeToString())


def encode_samples(
    samples: Sequence[WireSample],
    prompt_logprobs: npt.NDArray[np.float32] | None,
    top: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None,
) -> bytes:
    """Encode the result of a request for samples.

    Args:
        prompt_logprobs: [T], NaN where there is none.
        top: [T, k] ids of the most likely tokens at each position of the prompt, and their logprobs.
    """
    message = _message("SampleResponse")
    for sample in samples:
        sequence = message.sequences.add()
        # STOP_REASON_STOP, or STOP_REASON_LENGTH.
        sequence.stop_reason = 0 if sample.is_stopped else 1
        sequence.tokens = sample.token_ids.astype(np.int32).tobytes()
        sequence.logprobs = sample.logprobs.astype(np.float32).tobytes()
        if sample.top is not None:
            _write_top(sequence.topk_sampled_logprobs, sample.top)
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    if top is not None:
        _write_top(message.topk_prompt_logprobs, top)
    return bytes(message.SerializeToString())


def _write_top(place: Any, top: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]) -> None:
    token_ids, logprobs = top
    place.length, place.k = token_ids.shape
    place.token_ids, place.logprobs = token_ids.astype(np.int32).tobytes(), logprobs.astype(np.float32).tobytes()


def _message(name: str) -> Any:
    return _classes()[f"{_PACKAGE}.{name}"]()


@cache
def _classes() -> Mapping[str, Any]:
    """Make the message classes, in a pool of their own."""
    file = descriptor_pb2.FileDescriptorProto(name="tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in filter(None, fields.split(", ")):
            _add_field(message, *text.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes: Mapping[str, Any] = message_factory.GetMessageClassesForFiles(["tinker.proto"], pool)
    return classes


def _add_field(message: Any, number: str, name: str, kind: str) -> None:
    # Label 3 is repeated, 1 is optional. On the wire, a map is a repeated message of key and value.
    field = message.field.add(name=name, number=int(number), label=3 if kind[-1] in "*}" else 1)
    if kind.startswith("{"):
        entry_name = "".join(part.title() for part in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, "1", "key", "string")
        _add_field(entry, "2", "value", kind.strip("{}"))
        kind = f"{message.name}.{entry_name}"
    elif kind.endswith("?"):
        # proto3 writes an optional field as the only member of a oneof.
        field.oneof_index, field.proto3_optional = len(message.oneof_decl), True
        message.oneof_decl.add(name=f"_{name}")
    kind = kind.strip("*?")
    proto = descriptor_pb2.FieldDescriptorProto
    if kind in _ENUMS:
        field.type, field.type_name = proto.TYPE_ENUM, f".{_PACKAGE}.{kind}"
    elif kind[0].isupper():
        field.type, field.type_name = proto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = getattr(proto, f"TYPE_{kind.upper()}")
