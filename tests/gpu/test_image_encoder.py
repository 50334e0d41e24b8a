"""The image encoder on a GPU: attention inside sequences against fp64, and compiled layers of towers against the eager tower."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import SiglipVisionConfig, SiglipVisionModel

from tests.engine.test_image_encoder import Encoder, images, zoo_encoder
from torchweave.compiler.runtime.cuda_graphs import GraphPool
from torchweave.config import TorchCompileConfig
from torchweave.engine.runner.encoder_graphs import EncoderGraphs, graph_key
from torchweave.engine.startup.image_encoder import compile_layers
from torchweave.images import ImageInput
from torchweave.models.multimodal.vision_layers import use_varlen_attention
from torchweave.ops.attention.varlen import VarlenConfig, has_triton_kernel, launch_varlen_attention, varlen_attention
from torchweave.report import Report

pytestmark = pytest.mark.gpu
INDUCTOR = TorchCompileConfig(enable_inductor=True, compile_cache=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 20])
@pytest.mark.parametrize("lengths", [[300], [64, 1, 129, 64]])
def test_varlen_attention(dtype: torch.dtype, head_dim: int, lengths: list[int]) -> None:
    bounds = np.cumsum([0, *lengths]).tolist()
    query, key, value = torch.randn(bounds[-1], 3, 4, head_dim, device="cuda", dtype=dtype).unbind(1)
    out = varlen_attention(query, key, value, torch.tensor(bounds, device="cuda", dtype=torch.int32), 0.2)
    assert out.is_contiguous()
    for begin, end in pairwise(bounds):
        q, k, v = (tensor[begin:end].double() for tensor in (query, key, value))
        expected = torch.einsum("hqk,khd->qhd", (torch.einsum("qhd,khd->hqk", q, k) * 0.2).softmax(-1), v)
        tolerance = 1e-3 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out[begin:end].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_dim", [24, 40, 56, 72, 80, 88, 96, 104, 112, 160])
@pytest.mark.parametrize("config", [VarlenConfig(), VarlenConfig(64, 64, 4, 2), VarlenConfig(128, 64, 8, 2)])
def test_triton_kernel_for_each_head_size(head_dim: int, config: VarlenConfig) -> None:
    query, key, value = torch.randn(3, 333, 4, head_dim, device="cuda", dtype=torch.bfloat16)
    out = launch_varlen_attention(query, key, value, torch.tensor([0, 128, 128, 333], device="cuda"), 0.2, config)
    for rows in (slice(0, 128), slice(128, 333)):
        q, k, v = (tensor[rows].double() for tensor in (query, key, value))
        expected = torch.einsum("hqk,khd->qhd", (torch.einsum("qhd,khd->hqk", q, k) * 0.2).softmax(-1), v)
        torch.testing.assert_close(out[rows].double(), expected, rtol=2e-2, atol=2e-2)


def test_siglip_layers_run_the_triton_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3's head size; images of its tower are a batch of sequences of one length, without `cu_seqlens`."""
    if not has_triton_kernel(torch.device("cuda")):
        pytest.skip("the kernel is for Hopper GPUs")
    config = SiglipVisionConfig(
        hidden_size=144, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=4
    )
    tower = SiglipVisionModel._from_config(config, attn_implementation="sdpa").eval().to("cuda", torch.bfloat16)
    layers = [*tower.vision_model.encoder.layers] if hasattr(tower, "vision_model") else [*tower.encoder.layers]
    pixels = torch.randn(3, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    launches: list[tuple[int, ...]] = []

    def counted(query: torch.Tensor, *others: Any) -> torch.Tensor:
        launches.append(tuple(query.shape))
        return launch_varlen_attention(query, *others)

    monkeypatch.setattr("torchweave.ops.attention.varlen.launch_varlen_attention", counted)
    with torch.inference_mode():
        expected = tower(pixels).last_hidden_state.double()
        assert not launches
        restore = use_varlen_attention(layers)
        hidden = tower(pixels).last_hidden_state.double()
        assert launches == [(3 * 256, 2, 72)] * 2 and (hidden - expected).norm() / expected.norm() < 3e-2
        restore()
        tower(pixels)
    assert len(launches) == 2


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "gemma3", "got_ocr2", "idefics3", "llava_next"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_features_of_compiled_layers(model_type: str, dtype: torch.dtype) -> None:
    entry, on_cpu = zoo_encoder(model_type)
    encoder = Encoder(on_cpu.model.to("cuda", dtype))
    encoder.step.image_rows = torch.zeros(1, 1, device="cuda", dtype=dtype)
    other = images(entry, range(1, 7))
    report = Report(show=False)
    with torch.backends.cudnn.flags(allow_tf32=False):  # compiled, some convolutions become products in float32
        expected = [encoder.features(image).double() for image in other]
        compile_layers(encoder, images(entry, range(3)), INDUCTOR, None, report)
        (event,) = report.select("image_encoder")
        assert event["compiled"] == 2, event
        for image, features in zip(other, expected, strict=True):
            difference = (encoder.features(image).double() - features).norm() / features.norm()
            assert difference < (1e-4 if dtype == torch.float32 else 3e-2)


def encoder_on_gpu(model_type: str, dtype: torch.dtype) -> tuple[Any, Encoder]:
    """An encoder with compiled layers."""
    entry, on_cpu = zoo_encoder(model_type)
    encoder = Encoder(on_cpu.model.to("cuda", dtype))
    encoder.step.image_rows = torch.zeros(1, 1, device="cuda", dtype=dtype)
    compile_layers(encoder, images(entry, range(3)), INDUCTOR, None, Report(show=False))
    return entry, encoder


def with_graphs(encoder: Encoder, largest: Any, max_graphs: int) -> EncoderGraphs:
    graphs = EncoderGraphs(encoder, GraphPool("cuda"), max_graphs, Report(show=False))
    graphs.record_largest(largest)
    return graphs


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_vl", "mistral3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_features_of_graphs(model_type: str, dtype: torch.dtype) -> None:
    """Sizes change from image to image; two grids of Qwen's have one number of patches. Graphs give way to those of other sizes."""
    entry, encoder = encoder_on_gpu(model_type, dtype)
    largest = max(images(entry, range(6)), key=lambda image: image.tensors["pixel_values"].size)
    graphs = with_graphs(encoder, largest, 3)
    assert not graphs.why_plain
    for sizes in (range(1, 3), range(1, 3), range(6), range(3), range(3), range(3), range(6)):
        for image in images(entry, sizes):
            image.tensors["pixel_values"][...] = np.random.default_rng().standard_normal(
                image.tensors["pixel_values"].shape
            )
            features = graphs(image).double()
            difference = (features - encoder.features(image).double()).norm() / features.norm()
            assert difference < (1e-4 if dtype == torch.float32 else 1e-2)
    assert graphs.num_replays >= 8 and not graphs.why_plain
    assert len(graphs.keys) == {"gemma3": 1, "qwen3_vl": 3, "mistral3": 3}[model_type]
    assert (graph_key(largest) in graphs.keys) == (model_type != "qwen3_vl")  # which has six sizes here


def test_graphs_of_siglip_heads_and_images_without_a_wait() -> None:
    """Gemma 3's head size, with the Triton kernel on Hopper GPUs; the rows of each image are written before the next replay."""
    config = SiglipVisionConfig(
        hidden_size=144, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=4
    )
    tower = SiglipVisionModel._from_config(config, attn_implementation="sdpa").eval().to("cuda", torch.bfloat16)
    layers = tower.vision_model.encoder.layers if hasattr(tower, "vision_model") else tower.encoder.layers
    use_varlen_attention([*layers])
    encoder = zoo_encoder("gemma3")[1]
    encoder.step.image_rows = torch.zeros(8 * 256, 144, device="cuda", dtype=torch.bfloat16)
    encoder.run = lambda tensors: tower(tensors["pixel_values"]).last_hidden_state[0]  # type: ignore[method-assign]
    pixels = torch.randn(8, 1, 3, 64, 64).numpy()
    given = [ImageInput({"pixel_values": each}, np.arange(256, dtype=np.int32)) for each in pixels]
    expected = torch.cat([encoder.features(image) for image in given]).double()
    encoder._graphs = with_graphs(encoder, given[0], 1)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        encoder.step.image_rows.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for number, image in enumerate(given):
                encoder.encode(image, np.arange(256, dtype=np.int32) + 256 * number)
        torch.cuda.synchronize()
        assert (encoder.step.image_rows.double() - expected).norm() / expected.norm() < 1e-2
    assert encoder._graphs.num_replays == 16  # type: ignore[attr-defined]


def test_a_tower_that_reads_pixels_on_the_host_is_launched_plainly() -> None:
    entry, encoder = encoder_on_gpu("idefics3", torch.float32)
    (image,) = images(entry, range(1, 2))
    expected = encoder.features(image)
    graphs = with_graphs(encoder, image, 2)
    assert graphs.why_plain and not graphs.keys
    for _ in range(3):
        torch.testing.assert_close(graphs(image), expected)
