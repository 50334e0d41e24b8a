"""CUDA graphs of the image encoder, one for each size of images that recurs.

The first graph is that of the largest size, whose memory smaller ones reuse; it is recorded at the start. A further size is
recorded at its second image. Images of other sizes are launched plainly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from torchweave.compiler.runtime.constant_calls import ConstantCalls
from torchweave.compiler.runtime.cuda_graphs import GraphPool, Recording, record
from torchweave.compiler.runtime.forward import BoundaryHandler, call_op
from torchweave.images import ImageInput
from torchweave.models.multimodal.image_encoder import ENCODER_ERRORS, ImageEncoder
from torchweave.models.multimodal.vision_layers import tower_layers
from torchweave.report import Report

BYTES_PER_GRAPH = 8 << 20
"""Memory that is planned for a graph beside the pool of the largest: nodes, kernel arguments, and constants."""
_MAX_KEY_BYTES = 1 << 16  # of the integers of an image; sizes, grids and positions of tiles are few
_MAX_SEEN = 256  # sizes whose last image is remembered
Key = tuple[tuple[str, str, tuple[int, ...], bytes], ...]
"""Name, dtype and shape of each array of an image, and the values of those that are not floating-point."""


def graph_key(image: ImageInput) -> Key | None:
    """What the graph of an image depends on: everything but the values of its pixels; None where that is too large to compare."""
    key = []
    for name, array in sorted(image.tensors.items()):
        values = b"" if _is_float(array) else array.tobytes()
        if len(values) > _MAX_KEY_BYTES:
            return None
        key.append((name, array.dtype.str, array.shape, values))
    return tuple(key)


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f"


@dataclass
class _EncoderGraph:
    """The recorded encoder of one size.

    Attributes:
        inputs: pixels, which a replay reads, in the memory that all graphs share.
        held: other tensors that it reads.
        num_bytes: memory of the constants among them.
        last_call: number of the call that replayed it last.
    """

    recording: Recording[Tensor]
    inputs: Mapping[str, Tensor]
    held: list[Tensor]
    num_bytes: int
    last_call: int


class EncoderGraphs:
    """The image encoder as CUDA graphs: `graphs(image)`.

    Args:
        encoder: runs images plainly.
        pool: owner of the graphs' memory.
        max_graphs: most sizes with a graph, at least 1.
        report: gets an event `graph` for each recording, and a warning when no more are made.

    Attributes:
        num_replays, num_plain: images that replayed a graph, and that were launched plainly.
        why_plain: why sizes that have no graph will get none; "" while they may.
    """

    def __init__(self, encoder: ImageEncoder, pool: GraphPool, max_graphs: int, report: Report) -> None:
        self.num_replays = self.num_plain = 0
        self.why_plain = ""
        self._encoder, self._pool, self._max_graphs, self._report = encoder, pool, max_graphs, report
        self._layers = [layer for group in tower_layers(encoder.model) for layer in group]
        self._graphs: OrderedDict[Key, _EncoderGraph] = OrderedDict()  # least recently used first
        self._seen: OrderedDict[Key, int] = OrderedDict()  # number of the last call of a size without a graph
        self._num_calls = 0
        self._memory: Tensor | None = None  # inputs of all graphs
        self._max_bytes = 0

    @property
    def keys(self) -> list[Key]:
        """Sizes with a graph, the least recently used first."""
        return list(self._graphs)

    def num_bytes(self) -> int:
        """Memory of all graphs."""
        inputs = 0 if self._memory is None else self._memory.nbytes
        return self._pool.num_bytes() + inputs + sum(graph.num_bytes for graph in self._graphs.values())

    def record_largest(self, image: ImageInput) -> Tensor:
        """Record the graph of the largest size; larger images are launched plainly. Returns the image's features."""
        key = graph_key(image)
        if key is None:
            self._stop_recording(f"the integers of an image are more than {_MAX_KEY_BYTES} bytes")
            return self._encoder.features(image)
        sizes = [array.size for array in image.tensors.values() if _is_float(array)]
        with torch.inference_mode(False):
            self._memory = torch.empty(sum(sizes), dtype=self._encoder.dtype, device=self._pool.device)
        features = self._record(key, image)
        self._max_bytes = self.num_bytes() + self._max_graphs * BYTES_PER_GRAPH
        return features

    def __call__(self, image: ImageInput) -> Tensor:
        """Features of an image, as `ImageEncoder.features`; those of a replay are valid until the next call.

        Raises one of `ENCODER_ERRORS`.
        """
        self._num_calls += 1
        key = graph_key(image)
        if key is None:
            self.num_plain += 1
            return self._encoder.features(image)
        graph = self._graphs.get(key)
        if graph is None:
            return self._first_calls(key, image)
        self._graphs.move_to_end(key)
        graph.last_call = self._num_calls
        self._write(graph.inputs, self._encoder.inputs(image))
        self.num_replays += 1
        return graph.recording.replay()

    def _first_calls(self, key: Key, image: ImageInput) -> Tensor:
        """Launch an image of a size without a graph, and record it if it is worth one."""
        previous = self._seen.pop(key, None)
        self._seen[key] = self._num_calls
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        self.num_plain += 1
        if self.why_plain or previous is None or not self._fits(image) or not self._has_room(previous):
            return self._encoder.features(image)
        del self._seen[key]
        features = self._record(key, image)
        # After the recording: torch cannot reuse a pool whose only graph was freed.
        if len(self._graphs) > self._max_graphs:
            _, unused = self._graphs.popitem(last=False)
            for tensor in unused.held:
                self._pool.use_on_current_stream(tensor)
        if self.num_bytes() > self._max_bytes:
            self._stop_recording("the graphs take all memory that is planned for them")
        return features

    def _fits(self, image: ImageInput) -> bool:
        """Whether the image is not larger than the largest size with a graph."""
        size = sum(array.size for array in image.tensors.values() if _is_float(array))
        return self._memory is not None and size <= len(self._memory)

    def _has_room(self, previous: int) -> bool:
        """Whether a graph may be added or replace one that was not used since call `previous`; sizes in turns replace none."""
        return len(self._graphs) < self._max_graphs or next(iter(self._graphs.values())).last_call < previous

    def _write(self, inputs: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        self._pool.wait_for_last_stream()
        for name, buffer in inputs.items():
            buffer.copy_(tensors[name])

    def _static_inputs(self, image: ImageInput) -> dict[str, Tensor]:
        """Tensors for the pixels of such images, in the memory that all graphs share."""
        assert self._memory is not None
        inputs, begin = {}, 0
        for name, array in image.tensors.items():
            if _is_float(array):
                inputs[name] = self._memory[begin : begin + prod(array.shape)].view(array.shape)
                begin += prod(array.shape)
        return inputs

    def _record(self, key: Key, image: ImageInput) -> Tensor:
        """Record a graph; its warm-up is the call itself. After a failure no further graphs are recorded."""
        results: list[Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            tensors, inputs = self._encoder.inputs(image), self._static_inputs(image)
            self._write(inputs, tensors)
            constants = {name: tensor for name, tensor in tensors.items() if name not in inputs}
            calls = ConstantCalls(constants.values(), self._layers)

            def launch() -> None:
                results.append(self._encoder.run({**constants, **inputs}))

            def run(_: BoundaryHandler) -> Tensor:
                calls.run(launch)
                return results.pop() if len(results) > 1 else results[0]

            try:
                recording = record(run, call_op, capture_boundary_ops=True, pool=self._pool)
            except ENCODER_ERRORS as error:
                if not results:
                    results.append(self._encoder.features(image))  # raises what the tower raises for this image
                self._stop_recording(" ".join(str(error).split())[:200].rstrip("."))
            else:
                held, num_bytes = [*constants.values(), *calls.tensors()], calls.num_bytes()
                self._graphs[key] = _EncoderGraph(recording, inputs, held, num_bytes, self._num_calls)
                self._report.event(
                    "graph",
                    step="image",
                    kind="whole",
                    key=len(image.index),
                    segments=recording.num_segments,
                    bytes=recording.bytes + num_bytes,
                    seconds=recording.seconds,
                )
        self._pool.use_on_current_stream(results[0])
        return results[0]

    def _stop_recording(self, why: str) -> None:
        self.why_plain = why
        which = "images of other sizes" if self._graphs else "images"
        self._report.event("warning", what="encoder_graphs", why=f"{which} are encoded without CUDA graphs: {why}")
