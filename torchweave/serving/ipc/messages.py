"""msgpack messages between the HTTP processes and the engine process. Prompts and answers are token ids.

The engine process does not validate messages: the sockets lie in a folder that only their owner can enter.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from torchweave.engine.control.errors import Fault
from torchweave.engine.request import InferenceRequest, Response, Responses, SamplingParams, StructuredOutputs
from torchweave.images import ImageInput, ImageLimits
from torchweave.pooling import Pooling

Ids = TypeVar("Ids", int, np.ndarray)
_LIFE_BITS = 40
"""More requests than one HTTP process gets."""
Array = tuple[str, tuple[int, ...], bytes]
"""dtype, shape and content."""
State = Literal["starting", "ready", "failed", "stopped"]


@dataclass(frozen=True)
class Addresses:
    """Unix sockets of one engine process: one that all HTTP processes write to, and one that each HTTP process listens at."""

    folder: str

    @property
    def to_engine(self) -> str:
        return f"{self.folder}/to_engine"

    def from_engine(self, frontend: int) -> str:
        return f"{self.folder}/from_engine.{frontend}"


@dataclass(frozen=True)
class ReplicaInfo:
    """Position of an engine behind a server: replica `index` of `count`, used by `frontends` HTTP processes."""

    index: int = 0
    count: int = 1
    frontends: int = 1

    def ids(self, frontend: int, life: int = 0) -> Iterator[int]:
        """Request ids that only this HTTP process uses at this engine; those of an earlier life of it are smaller."""
        step = self.count * self.frontends
        return itertools.count(self.index + self.count * frontend + (life << _LIFE_BITS) * step, step)

    def frontend_of(self, ids: Ids) -> Ids:
        """HTTP process of each request id."""
        return ids // self.count % self.frontends


PROCESS_START_PROGRESS = {"title": "engine process", "done": 0, "total": 1, "note": "importing"}
"""First progress event: the imports take seconds and precede the engine's report."""


GENERATION_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters that a checkpoint may set."""


@dataclass(frozen=True)
class ModelCard:
    """Model facts for the HTTP processes.

    Attributes:
        name: as the user spelled it.
        folder: contains the tokenizer's files; None for a model shape without files.
        max_model_len: tokens of a request, prompt and answer.
        max_batch_size: requests in a step.
        trust_remote_code: the tokenizer may run code from the folder.
        temperature, top_k, top_p, min_p, repetition_penalty: the checkpoint's defaults; None if it has none.
        max_new_tokens: the checkpoint's default of `max_tokens`; None if it has none.
        images: how prompts with images are encoded.
        pooling: how a model with runner=pooling pools; None: it generates.
    """

    name: str
    folder: str | None
    architecture: str
    dtype: str
    device: str
    quantization: str | None
    num_parameters: int
    max_model_len: int
    max_batch_size: int
    vocab_size: int
    num_kv_blocks: int
    block_size: int
    trust_remote_code: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    images: ImageLimits = field(default_factory=ImageLimits)
    pooling: Pooling | None = None


# -- to the engine -----------------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, tag=True, array_like=True):
    """A request. `sampling` holds the non-default fields; `input_ids` are int32; an image is its arrays, index and digest."""

    id: int
    input_ids: bytes
    sampling: dict[str, Any]
    streaming: bool
    priority: int
    cache_salt: str
    images: list[tuple[dict[str, Array], bytes, bytes]] = []
    pooling: bool = False
    adapter: str = ""
    client: str = ""


class Stop(msgspec.Struct, tag=True, array_like=True):
    """Requests to cancel."""

    ids: list[int]


class Call(msgspec.Struct, tag=True, array_like=True):
    """A control call, answered with `Answer`."""

    id: int
    name: str
    arguments: dict[str, Any]


class FrontendEnded(msgspec.Struct, tag=True, array_like=True):
    """An HTTP process has ended, and a new one will listen at its address. Its requests, with ids below `before`, are stopped."""

    frontend: int
    before: int


class Ping(msgspec.Struct, tag=True, array_like=True):
    """Answer with `Pong`: a process that hangs does not."""


class End(msgspec.Struct, tag=True, array_like=True):
    """End the process, without finishing its requests."""


ToEngine = Submit | Stop | Call | FrontendEnded | Ping | End


# -- from the engine ---------------------------------------------------------------------------------------------------


class EngineEvent(msgspec.Struct, tag=True, array_like=True):
    """An event of the engine's report; `at` in seconds since its start."""

    at: float
    kind: str
    facts: dict[str, Any]


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The engine takes requests. `explanation`: the output of `torchweave explain --json`."""

    model: ModelCard
    explanation: str


class Accepted(msgspec.Struct, tag=True, array_like=True):
    """The engine accepted a request, or rejected it for the reason `refusal`."""

    id: int
    refusal: str = ""


class Outputs(msgspec.Struct, tag=True, array_like=True):
    """Outputs of an iteration: one token (int32) for each of `ids` (uint64), then all other responses.

    `ids` may include requests of other HTTP processes.

    `failing`: errors are those of the engine, which ends; otherwise each is an error of its request.
    """

    ids: bytes
    tokens: bytes
    others: list[Response]
    failing: bool = False

    def new_tokens(self) -> Iterator[tuple[int, int]]:
        """Yield (request id, token)."""
        return zip(
            np.frombuffer(self.ids, np.uint64).tolist(), np.frombuffer(self.tokens, np.int32).tolist(), strict=True
        )


class RequestStateChanges(msgspec.Struct, tag=True, array_like=True):
    """Requests that started prefill (`started`), were preempted (`paused`), or sampled their first token (`answering`)."""

    moves: list[tuple[int, str]]


class Stats(msgspec.Struct, tag=True, array_like=True):
    """JSON statistics of an iteration, as passed to the batch manager's callback.

    `iterations`: (seconds, prefilled tokens, sampled tokens) of each iteration since the previous message.
    """

    record: str
    iterations: list[tuple[float, int, int]] = []


class Answer(msgspec.Struct, tag=True, array_like=True):
    """The result of a `Call`, or its error."""

    id: int
    result: Any = None
    fault: Fault | None = None


class Pong(msgspec.Struct, tag=True, array_like=True):
    """The answer to `Ping`."""


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The engine ends. `is_config_error`: an option or the model is invalid, as opposed to a fault of the engine."""

    why: str
    is_config_error: bool


FromEngine = EngineEvent | Ready | Accepted | Outputs | RequestStateChanges | Stats | Answer | Pong | Failed


# -- from the HTTP process that starts the engines to the others -------------------------------------------------------


class EngineStarted(msgspec.Struct, tag=True, array_like=True):
    """A process of engine number `engine` is about to start; HTTP processes reach it at `addresses`."""

    engine: int
    addresses: Addresses


class EngineStateChanged(msgspec.Struct, tag=True, array_like=True):
    """New state of an engine; `model` is set while the engine is ready."""

    engine: int
    state: State
    failure: str
    restarts: int
    model: ModelCard | None


class EngineExited(msgspec.Struct, tag=True, array_like=True):
    """The engine's process ended. Follows the `EngineStateChanged` that this caused."""

    engine: int
    why: str


class PromptRouted(msgspec.Struct, tag=True, array_like=True):
    """A prompt was sent to a replica.

    Attributes:
        num_restarts: number of the replica's engine process.
        prefix_hashes: of the prompt, see `hash_prefixes`.
        capacity: prefixes that fit in the replica's KV cache.
    """

    replica: int
    num_restarts: int
    prefix_hashes: list[int]
    capacity: int


# -- bytes -------------------------------------------------------------------------------------------------------------


def _to_msgpack(value: Any) -> Any:
    """Encode the types that msgspec does not support (an `enc_hook`)."""
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.dtype == np.int32 else value.tolist()
    if isinstance(value, deque):
        return list(value)
    if isinstance(value, np.generic):
        return value.item()
    return str(value)


def from_msgpack(hint: type, value: Any) -> Any:
    """Decode the types that msgspec does not support (a `dec_hook`)."""
    if hint is np.ndarray:
        return np.frombuffer(value, np.int32) if isinstance(value, bytes) else np.asarray(value, np.int32)
    if get_origin(hint) is deque:
        return deque(msgspec.convert(value, list[get_args(hint)[0]]))
    raise NotImplementedError(hint)


encode = msgspec.msgpack.Encoder(enc_hook=_to_msgpack).encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=from_msgpack).decode


def submit(request: InferenceRequest) -> Submit:
    """Encode a request, without its stop strings.

    Raises:
        UnicodeEncodeError: a stop string is no text.
    """
    for string in request.sampling.stop_strings:
        string.encode()
    ids = np.ascontiguousarray(request.input_ids, np.int32).tobytes()
    sampling = _non_default_fields(request.sampling)
    images = [_encode_image(image) for image in request.images]
    others = request.streaming, request.priority, request.cache_salt, images, request.pooling, request.adapter
    return Submit(request.id, ids, sampling, *others, request.client)


def _encode_image(image: ImageInput) -> tuple[dict[str, Array], bytes, bytes]:
    arrays = {name: np.ascontiguousarray(array) for name, array in image.tensors.items()}
    tensors = {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()}
    return tensors, image.index.tobytes(), image.digest


def _decode_image(tensors: dict[str, Array], index: bytes, digest: bytes) -> ImageInput:
    arrays = {name: np.frombuffer(data, dtype).reshape(shape) for name, (dtype, shape, data) in tensors.items()}
    return ImageInput(arrays, np.frombuffer(index, np.int32), digest)


def decode_request(message: Submit) -> InferenceRequest:
    """Decode a request for the engine.

    Raises:
        ValueError: a sampling parameter is invalid.
    """
    sampling = dict(message.sampling)
    if "structured_outputs" in sampling:
        sampling["structured_outputs"] = StructuredOutputs(**sampling["structured_outputs"])
    return InferenceRequest(
        message.id,
        np.frombuffer(message.input_ids, np.int32),
        SamplingParams.restored(sampling),
        message.streaming,
        message.priority,
        message.cache_salt,
        tuple(_decode_image(*image) for image in message.images),
        message.pooling,
        message.adapter,
        message.client,
    )


def messages(
    item: Sequence[Response] | FromEngine, replica_info: ReplicaInfo, failing: bool = False
) -> Iterator[tuple[int, bytes]]:
    """Encode `item` for each HTTP process that needs it; messages that concern no request go to the first.

    Args:
        failing: errors in responses are those of the engine.

    Yields:
        (number of the HTTP process, message).
    """
    if isinstance(item, Accepted | Answer):
        yield replica_info.frontend_of(item.id), encode(item)
    elif isinstance(item, RequestStateChanges):
        for frontend in range(replica_info.frontends):
            if moves := [each for each in item.moves if replica_info.frontend_of(each[0]) == frontend]:
                yield frontend, encode(RequestStateChanges(moves))
    elif isinstance(item, msgspec.Struct):
        yield 0, encode(item)
    else:
        yield from _encode_outputs(item if isinstance(item, Responses) else Responses(item), replica_info, failing)


def _encode_outputs(responses: Responses, replica_info: ReplicaInfo, failing: bool) -> Iterator[tuple[int, bytes]]:
    """Send all tokens to each HTTP process with one of the streams: to split them costs more than to skip foreign ones."""
    ids, tokens = responses.ids.tobytes(), responses.tokens.tobytes()
    others: dict[int, list[Response]] = {}
    for each in responses.others:
        others.setdefault(replica_info.frontend_of(each.id), []).append(each)
    owners = set(others) | set(
        replica_info.frontend_of(responses.ids).tolist() if replica_info.frontends > 1 else range(len(ids) > 0)
    )
    shared_message = encode(Outputs(ids, tokens, [], failing)) if len(owners) > len(others) else b""
    for frontend in sorted(owners):
        encoded = others.get(frontend)
        yield frontend, shared_message if encoded is None else encode(Outputs(ids, tokens, encoded, failing))


def _non_default_fields(params: SamplingParams) -> dict[str, Any]:
    """Fields that differ from their defaults, dataclasses as dicts, without those that the caller handles."""
    changed: dict[str, Any] = {}
    for item in fields(params):
        if item.name in ("stop", "truncate_prompt_tokens", "output_kind"):
            continue
        value = getattr(params, item.name)
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        if value != default:
            changed[item.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return changed
