"""CUDA graphs of the image encoder on a recorder without a GPU: keys, bounds, eviction, memory, features of all architectures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compiler.runtime.tape import TapePool
from tests.engine.test_image_encoder import Encoder, images, zoo_encoder
from torchweave.engine.runner import encoder_graphs
from torchweave.engine.runner.encoder_graphs import BYTES_PER_GRAPH, EncoderGraphs, graph_key
from torchweave.images import ImageInput
from torchweave.models.multimodal.support import VERIFIED
from torchweave.models.multimodal.vision_layers import tower_layers, use_varlen_attention
from torchweave.report import Report

READ_ON_THE_HOST = {"item", "tolist", "numpy", "__int__", "__bool__", "__float__", "__index__"}
WITH_HOST_READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive"}
BY_PIXELS = {"idefics3", "smolvlm"}
"""Towers that drop images of black pixels, and so read pixels on the host."""


class _RefuseReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.__name__ in READ_ON_THE_HOST:
            raise RuntimeError(f"{func.__name__} reads on the host")
        return func(*args, **(kwargs or {}))


class _RefuseOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        indices = args[1] if name.startswith(("index", "_index")) and isinstance(args[1], (list, tuple)) else ()
        masks = [each for each in indices if isinstance(each, Tensor) and each.dtype is torch.bool]
        if name in WITH_HOST_READS or masks or func is torch.ops.aten.repeat_interleave.Tensor:
            raise RuntimeError(f"{name} reads on the host")
        return func(*args, **(kwargs or {}))


class StrictPool(TapePool):
    """A tape that fails where the capture of a CUDA graph does: at a read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse = contextlib.ExitStack()

    @contextlib.contextmanager
    def recording(self, may_load_kernels: bool = False) -> Iterator[None]:
        with super().recording(may_load_kernels), self.refuse:
            yield

    def begin(self) -> None:
        super().begin()
        self.refuse.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True))
        self.refuse.enter_context(_RefuseReads())
        self.refuse.enter_context(_RefuseOps())

    def end(self) -> Callable[[], None]:
        self.refuse.close()
        return super().end()


class Sums(Encoder):
    """An encoder whose features depend on the pixels and on the grid's height; `ran` counts what is launched plainly."""

    def __init__(self) -> None:
        super().__init__(zoo_encoder("gemma3")[1].model)
        self.ran: list[int] = []

    def run(self, tensors: Any) -> Tensor:
        self.ran.append(len(tensors["pixel_values"]))
        ((height, width),) = tensors["grid"].tolist()
        return (tensors["pixel_values"] * 2 + height).view(height, width)


def image(height: int, width: int, value: float = 0.0) -> ImageInput:
    pixels = np.full(height * width, value, np.float32)
    return ImageInput({"pixel_values": pixels, "grid": np.array([[height, width]])}, np.arange(4, dtype=np.int32))


def graphs_of(encoder: Encoder, max_graphs: int = 8, pool: Any = None) -> tuple[EncoderGraphs, Report]:
    report = Report(show=False)
    return EncoderGraphs(encoder, cast(Any, pool or StrictPool()), max_graphs, report), report


def sizes(graphs: EncoderGraphs) -> list[tuple[int, ...]]:
    """Height and width of the images with a graph, the least recently used first."""
    return [tuple(np.frombuffer(values, np.int64)) for (_, _, _, values), _ in graphs.keys]


def encode(graphs: EncoderGraphs, shapes: Sequence[tuple[int, int]]) -> int:
    """Check the features of images of these shapes; returns how many replayed a graph."""
    before = graphs.num_replays
    for number, shape in enumerate(shapes):
        features = graphs(image(*shape, number))
        assert features.shape == shape and features.eq(2 * number + shape[0]).all()
    return graphs.num_replays - before


@pytest.mark.parametrize("model_type", sorted(VERIFIED))
def test_features_of_all_architectures(model_type: str) -> None:
    entry, encoder = zoo_encoder(model_type)
    use_varlen_attention([layer for group in tower_layers(encoder.model) for layer in group])
    seen, other = images(entry, range(2, 6)), images(entry, range(6))
    largest = max(seen, key=lambda image: image.tensors["pixel_values"].size)
    graphs, _ = graphs_of(encoder)
    graphs.record_largest(largest)
    for each in (*seen, *seen):
        graphs(each)
    replays = graphs.num_replays
    for each in other[2:]:
        torch.testing.assert_close(graphs(each), encoder.features(each), rtol=1e-5, atol=1e-5)
    if model_type in BY_PIXELS:
        assert graphs.why_plain == "index reads on the host" and not graphs.keys
    else:
        assert not graphs.why_plain and graphs.num_replays == replays + 4
        assert len(graphs.keys) == len({graph_key(each) for each in seen})


def test_grids_of_one_number_of_patches_share_no_graph() -> None:
    entry, encoder = zoo_encoder("qwen3_vl")
    use_varlen_attention([layer for group in tower_layers(encoder.model) for layer in group])
    (example,) = images(entry, range(3, 4))
    width = example.tensors["pixel_values"].shape[1]
    pixels = np.random.default_rng(0).standard_normal((1024, width), np.float32)
    grids = [(16, 64), (32, 32), (64, 16)]
    given = [
        ImageInput({"pixel_values": pixels, "image_grid_thw": np.array([[1, *grid]])}, example.index) for grid in grids
    ]
    assert len({graph_key(each) for each in given}) == 3
    graphs, _ = graphs_of(encoder)
    graphs.record_largest(given[0])
    results = []
    for _ in range(3):
        results = [graphs(each).clone() for each in given]
    assert graphs.num_replays == 5 and len(graphs.keys) == 3
    for each, features in zip(given, results, strict=True):
        torch.testing.assert_close(features, encoder.features(each), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(results[0], results[1]) and not torch.allclose(results[1], results[2])


def test_keys_have_everything_but_the_values_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    first = image(4, 4)
    assert graph_key(first) == graph_key(image(4, 4, 7.0)) != graph_key(image(2, 8))
    for name, array in (
        ("pixel_values", np.zeros(17, np.float32)),
        ("pixel_values", np.zeros(16, np.float16)),
        ("pixel_values", np.zeros(16, np.uint8)),
        ("grid", np.array([[4, 4]], np.int32)),
        ("sizes", np.array([4])),
    ):
        assert graph_key(ImageInput({**first.tensors, name: array}, first.index)) != graph_key(first)
    monkeypatch.setattr(encoder_graphs, "_MAX_KEY_BYTES", 8)
    assert graph_key(first) is None
    graphs, _ = graphs_of(encoder := Sums())
    assert graphs.record_largest(first).shape == (4, 4) and graphs(first).shape == (4, 4)
    assert graphs.why_plain == "the integers of an image are more than 8 bytes" and encoder.ran == [16, 16]


def test_a_size_is_recorded_at_its_second_image_up_to_the_largest() -> None:
    graphs, report = graphs_of(encoder := Sums())
    graphs.record_largest(image(4, 8))
    assert encoder.ran == [32, 32]  # a warm-up and a recording
    assert encode(graphs, [(4, 8), (2, 2), (4, 8), (2, 2), (2, 2), (4, 8)]) == 4
    assert encoder.ran == [32, 32, 4, 4, 4]
    assert encode(graphs, [(8, 8)] * 3) == 0  # larger
    assert sizes(graphs) == [(2, 2), (4, 8)] and graphs.num_plain == 5
    assert [(each["step"], each["segments"]) for each in report.select("graph")] == [("image", 1)] * 2


def test_a_graph_gives_way_if_it_is_not_used_between_two_images_of_another_size() -> None:
    graphs, _ = graphs_of(Sums(), max_graphs=2)
    graphs.record_largest(image(8, 8))
    encode(graphs, [(2, 2), (2, 2)])
    turns = [(8, 8), (2, 2), (3, 3)]
    assert encode(graphs, turns * 4) == 8 and sizes(graphs) == [(8, 8), (2, 2)]  # sizes that take turns evict none
    assert encode(graphs, [(2, 2), (3, 3), (2, 2), (3, 3)]) == 3
    assert sizes(graphs) == [(2, 2), (3, 3)]
    assert encode(graphs, [(3, 3), (2, 2), (8, 8)]) == 2 and sizes(graphs) == [(3, 3), (2, 2)]
    assert encode(graphs, [(8, 8), (8, 8)]) == 1 and sizes(graphs) == [(2, 2), (8, 8)]


def test_memory_of_all_graphs_is_bounded() -> None:
    pool = StrictPool()
    graphs, report = graphs_of(Sums(), pool=pool)
    graphs.record_largest(image(8, 8))
    assert graphs.num_bytes() == pool.bytes + 64 * 4
    encode(graphs, [(2, 2), (2, 2)])
    assert len(graphs.keys) == 2 and not graphs.why_plain
    pool.bytes += 8 * BYTES_PER_GRAPH
    encode(graphs, [(3, 3), (3, 3)])
    assert graphs.why_plain == "the graphs take all memory that is planned for them"
    assert encode(graphs, [(4, 4), (4, 4), (4, 4), (3, 3), (8, 8)]) == 2
    assert [each["why"] for each in report.select("warning")] == [
        "images of other sizes are encoded without CUDA graphs: the graphs take all memory that is planned for them"
    ]


def test_an_encoder_that_cannot_be_recorded_runs_plainly_with_the_reason() -> None:
    class ReadsPixels(Sums):
        def run(self, tensors: Any) -> Tensor:
            return super().run(tensors) * (2 if tensors["pixel_values"].sum().item() > 1e9 else 1)

    graphs, report = graphs_of(ReadsPixels())
    assert graphs.record_largest(image(4, 4, 1.0)).eq(6).all()
    assert encode(graphs, [(4, 4)] * 3) == 0 and not graphs.keys
    (warning,) = report.select("warning")
    assert warning["why"] == "images are encoded without CUDA graphs: item reads on the host"


def test_an_encoder_that_writes_to_constants_still_encodes_the_image() -> None:
    class Writes(Sums):
        def run(self, tensors: Any) -> Tensor:
            table = torch.zeros(len(tensors["pixel_values"]))
            table += tensors["pixel_values"]
            return super().run({**tensors, "pixel_values": table})

    graphs, report = graphs_of(Writes())
    assert graphs.record_largest(image(4, 4, 1.0)).eq(6).all()
    assert encode(graphs, [(4, 4)] * 3) == 0
    (warning,) = report.select("warning")
    assert "it writes to a tensor that is read before" in warning["why"]


def test_an_error_of_the_tower_is_raised_and_records_nothing() -> None:
    class Refuses(Sums):
        refused = False

        def run(self, tensors: Any) -> Tensor:
            if self.refused:
                raise ValueError("too narrow")
            return super().run(tensors)

    graphs, _ = graphs_of(encoder := Refuses())
    graphs.record_largest(image(8, 8))
    encode(graphs, [(2, 2)])
    encoder.refused = True
    for _ in range(2):
        with pytest.raises(ValueError, match="too narrow"):
            graphs(image(2, 2))
    encoder.refused = False
    assert not graphs.why_plain and sizes(graphs) == [(8, 8)]
    assert encode(graphs, [(2, 2), (2, 2), (2, 2), (8, 8)]) >= 2
