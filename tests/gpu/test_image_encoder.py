"""The image encoder on a GPU: attention inside sequences against fp64, and compiled layers of towers against the eager tower."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.engine.test_image_encoder import Encoder, images, zoo_encoder
from torchweave.config import TorchCompileConfig
from torchweave.engine.startup.image_encoder import compile_layers
from torchweave.ops.attention.varlen import varlen_attention
from torchweave.report import Report

pytestmark = pytest.mark.gpu
INDUCTOR = TorchCompileConfig(enable_inductor=True, compile_cache=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 72, 20])
@pytest.mark.parametrize("lengths", [[300], [64, 1, 129, 64]])
def test_varlen_attention(dtype: torch.dtype, head_dim: int, lengths: list[int]) -> None:
    bounds = np.cumsum([0, *lengths]).tolist()
    query, key, value = torch.randn(3, bounds[-1], 4, head_dim, device="cuda", dtype=dtype)
    out = varlen_attention(query, key, value, torch.tensor(bounds, device="cuda", dtype=torch.int32), 0.2)
    assert out.is_contiguous()
    for begin, end in pairwise(bounds):
        q, k, v = (tensor[begin:end].double() for tensor in (query, key, value))
        expected = torch.einsum("hqk,khd->qhd", (torch.einsum("qhd,khd->hqk", q, k) * 0.2).softmax(-1), v)
        tolerance = 1e-3 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out[begin:end].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "gemma3", "got_ocr2", "idefics3", "llava_next"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_features_of_compiled_layers(model_type: str, dtype: torch.dtype) -> None:
    entry, on_cpu = zoo_encoder(model_type)
    encoder = Encoder(on_cpu.model.to("cuda", dtype))
    encoder._step.image_rows = torch.zeros(1, 1, device="cuda", dtype=dtype)
    other = images(entry, range(1, 7))
    expected = [encoder.features(image).double() for image in other]
    report = Report(show=False)
    compile_layers(encoder, images(entry, range(3)), INDUCTOR, None, report)
    (event,) = report.select("image_encoder")
    assert event["compiled"] == 2, event
    for image, features in zip(other, expected, strict=True):
        difference = (encoder.features(image).double() - features).norm() / features.norm()
        assert difference < (1e-4 if dtype == torch.float32 else 3e-2)
