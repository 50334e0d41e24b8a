"""Compiled layers of vision towers: features equal the eager tower's, for images of any size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests import image_model
from tests.compiler.runtime.tape import TapePool
from torchweave import LLM, SamplingParams
from torchweave.config import AttentionFacts, DeviceFacts, EngineConfig, ModelFacts, Plan, TorchCompileConfig, resolve
from torchweave.config.options import CudaGraphConfig
from torchweave.engine.runner.encoder_graphs import EncoderGraphs
from torchweave.engine.startup import image_encoder as startup
from torchweave.engine.startup.image_encoder import compile_layers
from torchweave.images import ImageInput
from torchweave.models.load import LoadedModel, load
from torchweave.models.multimodal import vision_layers
from torchweave.models.multimodal.image_encoder import ImageEncoder
from torchweave.models.multimodal.patch_embedding import patch_convolutions, use_products
from torchweave.models.multimodal.support import VERIFIED
from torchweave.models.multimodal.vision_layers import (
    Arguments,
    Signature,
    UnsupportedLayer,
    restore_forward,
    tower_layers,
)
from torchweave.ops.attention import varlen
from torchweave.ops.attention.varlen import varlen_attention
from torchweave.report import Report
from torchweave.verify import image_zoo

QUICK = TorchCompileConfig(enable_inductor=False, compile_cache=False)


@dataclass
class Step:
    """What an encoder needs of a model's step."""

    image_rows: Tensor


class Encoder(ImageEncoder):
    """The encoder of a model of the zoo, without a decoder's step."""

    def __init__(self, model: Any) -> None:
        self._graphs = None
        self.model, self.step = model, Step(torch.zeros(1, 1))  # type: ignore[assignment]


def images(entry: image_zoo.ImageZooModel, sizes: range) -> list[ImageInput]:
    torch.manual_seed(len(sizes))
    made = [{name: tensor.numpy() for name, tensor in entry.image(size).items()} for size in sizes]
    return [ImageInput(tensors, np.arange(4, dtype=np.int32)) for tensors in made]


def zoo_encoder(model_type: str) -> tuple[image_zoo.ImageZooModel, Encoder]:
    entry = image_zoo.zoo_entry(f"{model_type}-images")
    assert isinstance(entry, image_zoo.ImageZooModel)
    return entry, Encoder(entry.build())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a layer was accepted by its compiled forward."""
    seen: list[bool] = []
    matches = Signature.matches

    def recorded(self: Signature, call: Arguments) -> bool:
        seen.append(matches(self, call))
        return seen[-1]

    monkeypatch.setattr(Signature, "matches", recorded)
    return seen


@pytest.mark.parametrize("model_type", sorted(VERIFIED))
def test_features_of_compiled_layers_equal_the_eager_tower(model_type: str, calls: list[bool]) -> None:
    entry, encoder = zoo_encoder(model_type)
    other = images(entry, range(1, 7))
    expected = [encoder.features(image) for image in other]
    report = Report(show=False)
    compile_layers(encoder, images(entry, range(3)), QUICK, None, report)
    (event,) = report.select("image_encoder")
    layers = [layer for group in tower_layers(encoder.model) for layer in group]
    assert (event["compiled"], event.get("why")) == (len(layers), None) and layers
    calls.clear()
    for image, features in zip(other, expected, strict=True):
        torch.testing.assert_close(encoder.features(image), features, rtol=1e-4, atol=1e-4)
    assert calls and all(calls)


def test_layers_use_their_own_weights() -> None:
    entry, encoder = zoo_encoder("qwen3_vl")
    compile_layers(encoder, images(entry, range(3)), QUICK, None, Report(show=False))
    (image,) = images(entry, range(1))
    before = encoder.features(image)
    (group,) = tower_layers(encoder.model)
    group[1].mlp.linear_fc2.weight.data.mul_(2.0)  # type: ignore[union-attr, operator]
    assert not torch.allclose(encoder.features(image), before)


def test_layers_use_their_own_merged_weights() -> None:
    """Those of q, k and v become views of one tensor in each layer, which the layer's own forward reads as well."""
    entry, encoder = zoo_encoder("gemma3")
    (image,) = images(entry, range(1))
    (group,) = tower_layers(encoder.model)
    names = [f"self_attn.{name}_proj.{kind}" for kind in ("weight", "bias") for name in "qkv"]
    values = [{name: layer.get_parameter(name).clone() for name in names} for layer in group]
    compile_layers(encoder, images(entry, range(3)), QUICK, None, Report(show=False))
    before = encoder.features(image)
    for layer, expected in zip(group, values, strict=True):
        stacked = [layer.get_parameter(name) for name in names]
        assert all(torch.equal(tensor, expected[name]) for name, tensor in zip(names, stacked, strict=True))
        assert len({tensor.untyped_storage().data_ptr() for tensor in stacked}) == 2
        for tensor in (*stacked[:4], stacked[5]):  # a softmax is the same with any bias of keys
            kept = tensor.clone()
            tensor.data.add_(torch.randn_like(tensor))
            assert not torch.allclose(encoder.features(image), before)
            tensor.data.copy_(kept)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("bias", [True, False])
def test_patch_convolutions_are_products(kind: Any, bias: bool) -> None:
    sizes = {nn.Conv2d: (14, 7), nn.Conv3d: (2, 14, 7)}[kind]
    convolution = kind(3, 8, sizes, sizes, bias=bias)
    plain = convolution.forward
    x = torch.randn(2, 3, *(size * count for size, count in zip(sizes, (5, 4, 3), strict=False)))
    larger = torch.nn.functional.pad(x, (0, 1))
    expected = [plain(each) for each in (x, larger, x[0])]
    use_products([convolution])
    with (
        mock.patch("torch.nn.functional.conv2d", side_effect=AssertionError),
        mock.patch("torch.nn.functional.conv3d", side_effect=AssertionError),
    ):
        torch.testing.assert_close(convolution(x), expected[0], rtol=1e-4, atol=1e-4)
    for each, result in zip((larger, x[0]), expected[1:], strict=True):
        assert convolution(each).equal(result), "an image with a rest, or without a batch, is convolved"
    restore_forward([convolution])
    assert convolution.forward == plain


def test_convolutions_that_are_no_product_of_patches() -> None:
    _, encoder = zoo_encoder("qwen3_vl")
    encoder.model.more = nn.ModuleList(
        [
            nn.Conv2d(3, 4, 4, 2),
            nn.Conv2d(3, 4, 4, 4, padding=1),
            nn.Conv2d(4, 4, 4, 4, groups=2),
            nn.Conv2d(3, 4, 4, 4, dilation=2),
            nn.Conv2d(3, 4, 4, 4, padding="valid"),
        ]
    )
    assert patch_convolutions(encoder.model) == [encoder.model.model.visual.patch_embed.proj, encoder.model.more[-1]]


def test_a_call_of_another_form_runs_eagerly(calls: list[bool]) -> None:
    entry, encoder = zoo_encoder("llava_onevision")  # tiles of one image are a batch, of two and more
    (tile,) = images(entry, range(1))
    single = ImageInput({**tile.tensors, "pixel_values": tile.tensors["pixel_values"][:, :1]}, tile.index)
    tower, pixels = encoder.model.model.vision_tower, torch.from_numpy(single.tensors["pixel_values"][0])
    with torch.inference_mode():
        expected = tower(pixels).last_hidden_state
        compile_layers(encoder, images(entry, range(3)), QUICK, None, Report(show=False))
        calls.clear()
        torch.testing.assert_close(tower(pixels).last_hidden_state, expected)
    assert calls and not any(calls)


def test_a_tower_that_cannot_be_traced_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, encoder = zoo_encoder("gemma3")
    (group,) = tower_layers(encoder.model)
    (image,) = images(entry, range(1))
    expected, forward = encoder.features(image), type(group[0]).forward

    def reads_values(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        scale = 2.0 if hidden_states.sum().item() > 1e9 else 1.0
        return forward(self, hidden_states * scale, *args, **kwargs)

    monkeypatch.setattr(type(group[0]), "forward", reads_values)
    report = Report(show=False)
    compile_layers(encoder, images(entry, range(3)), QUICK, None, report)
    (event,) = report.select("image_encoder")
    assert event["compiled"] == 0 and "decides by the values of a tensor" in event["why"]
    assert not any("forward" in vars(module) for module in (*group, *patch_convolutions(encoder.model)))
    torch.testing.assert_close(encoder.features(image), expected)


def test_a_compiled_tower_with_other_features_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, encoder = zoo_encoder("glm4v")
    module = "torchweave.models.multimodal.vision_layers"
    monkeypatch.setattr(f"{module}.varlen_attention", lambda query, key, value, *_: value.clone())
    report = Report(show=False)
    compile_layers(encoder, images(entry, range(3)), QUICK, None, report)
    (event,) = report.select("image_encoder")
    assert event["compiled"] == 0 and "its features differ by" in event["why"]
    assert encoder.model.config.vision_config._attn_implementation == "eager"


@pytest.mark.parametrize("model_type", ["gemma3", "idefics3", "llava_next"])
def test_towers_without_cu_seqlens_call_varlen_attention(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the calls that the Triton kernel takes, which no CPU does: here all of them, computed by the reference."""
    entry, encoder = zoo_encoder(model_type)
    encoder.model.config.vision_config._attn_implementation = "sdpa"
    other = images(entry, range(1, 7))
    expected = [encoder.features(image) for image in other]
    module, sequences = "torchweave.models.multimodal.vision_layers", []
    monkeypatch.setattr(f"{module}.has_triton_kernel", lambda device: True)
    monkeypatch.setattr(f"{module}.takes_triton_kernel", lambda *_: True)
    reference = varlen.varlen_reference

    def counted(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        sequences.append(len(cu_seqlens) - 1)
        return reference(query, key, value, cu_seqlens, scale)

    monkeypatch.setattr("torchweave.ops.attention.varlen.varlen_reference", counted)
    report = Report(show=False)
    compile_layers(encoder, images(entry, range(3)), QUICK, None, report)
    assert [event["compiled"] for event in report.select("image_encoder")] == [2]
    sequences.clear()
    for image, features in zip(other, expected, strict=True):
        torch.testing.assert_close(encoder.features(image), features, rtol=1e-4, atol=1e-4)
    assert len(sequences) == 2 * len(other) and all(sequences)


def test_calls_with_a_mask_or_an_order_keep_their_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{vision_layers.__name__}.takes_triton_kernel", lambda *_: True)
    monkeypatch.setattr(f"{vision_layers.__name__}.varlen_attention", lambda *_: pytest.fail("the mask is lost"))
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    mask = torch.rand(2, 1, 5, 5) > 0.3
    mask[..., 0] = True
    attend = vision_layers._batch_forward
    for given in ({"attention_mask": mask}, {"is_causal": True}, {"position_bias": torch.randn(1, 4, 5, 5)}):
        options = {"attention_mask": None, "is_causal": False, "scaling": 0.4} | given
        out, _ = attend(nn.Identity(), query, key, value, **options)
        expected, _ = sdpa_attention_forward(nn.Identity(), query, key, value, **options)
        torch.testing.assert_close(out, expected)
    fewer_keys = attend(nn.Identity(), query, key[:, :, :3], value[:, :, :3], None, is_causal=False)[0]
    assert fewer_keys.shape == (2, 5, 4, 8)


def test_the_engine_compiles_the_tower_and_answers_as_before(tmp_path: Path) -> None:
    _, processor = image_model.save(tmp_path)
    prompt = {"prompt": "<image>1+1=", "multi_modal_data": {"image": image_model.picture(1)}}
    greedy, answers = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), []
    for fullgraph in (False, True):
        options = TorchCompileConfig(enable_inductor=False, compile_cache=False, enable_fullgraph=fullgraph)
        config = EngineConfig(
            model=str(tmp_path), dtype="float32", device="cpu", num_kv_blocks=64, torch_compile_config=options
        )
        report = Report(show=False)
        with LLM.from_config(config, report) as llm:
            answers.append(list(llm.generate(prompt, greedy)[0].outputs[0].token_ids))
        assert [event["compiled"] for event in report.select("image_encoder")] == [2] * fullgraph
    assert processor is not None and answers[0] == answers[1]


def start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, max_graphs: int = 4
) -> tuple[LoadedModel, EncoderGraphs | None, Plan, Report]:
    """The graphs of a tiny model's encoder as an engine on a GPU records them, on a recorder without a GPU."""
    monkeypatch.setattr(startup, "GraphPool", lambda device: TapePool())
    report = Report(show=False)
    facts = DeviceFacts("cuda:0", "a device", (9, 0), (AttentionFacts("triton", 64),))
    config = EngineConfig(model=str(folder), cuda_graph_config=CudaGraphConfig(max_encoder_graphs=max_graphs))
    plan = resolve(config, facts, ModelFacts("m", 131072, "float32"))
    loaded = load(str(folder), torch.float32, "cpu", images=True)
    return loaded, *startup.record_encoder_graphs(loaded, plan, report), report


def test_the_engine_records_the_encoder_for_an_ordinary_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_model.save(tmp_path)
    loaded, graphs, plan, report = start(tmp_path, monkeypatch)
    assert graphs is not None and plan.max_encoder_graphs == 4 and len(graphs.keys) == graphs.num_replays == 1
    assert [event["bytes"] for event in report.select("encoder_graphs")] == [graphs.num_bytes()]
    loaded.module.allocate_image_rows(64)  # type: ignore[operator]
    plain, replayed = ImageEncoder(loaded.module), ImageEncoder(loaded.module, graphs)  # type: ignore[arg-type]
    image = startup.example_image(loaded, (40, 50))
    assert image is not None
    rows = np.arange(len(image.index), dtype=np.int32)
    for encoder, begin in ((plain, 0), (replayed, 32)):
        encoder.encode(image, rows + begin)
    pool = plain.step.image_rows
    torch.testing.assert_close(pool[: len(rows)], pool[32 : 32 + len(rows)])
    assert graphs.num_replays == 2 and pool[: len(rows)].any()


def test_the_plan_says_why_the_encoder_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_model.save(tmp_path)

    def why(max_graphs: int = 4) -> str:
        _, graphs, plan, report = start(tmp_path, monkeypatch, max_graphs)
        assert graphs is None and plan.max_encoder_graphs == 0 and not report.select("encoder_graphs")
        return next(entry.why for entry in plan.entries if entry.name == "cuda_graph_config.max_encoder_graphs")

    assert why(0) == "as asked"
    with monkeypatch.context() as changed:
        changed.setattr(EncoderGraphs, "__call__", lambda self, image: self._encoder.features(image) * 1.1)
        assert why() == "its features differ by 0.1 of their norm from those without CUDA graphs"
    with monkeypatch.context() as changed:
        changed.setattr(TapePool, "begin", lambda self: (_ for _ in ()).throw(RuntimeError("no capture")))
        assert why() == "no capture"
    for name in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    assert why() == "the folder has no image processor"


def test_sequences_do_not_see_each_other() -> None:
    query, key, value = torch.randn(3, 9, 2, 8)
    out = varlen_attention(query, key, value, torch.tensor([0, 4, 9]), 0.3)
    for begin, end in ((0, 4), (4, 9)):
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].double(), key[begin:end].double()) * 0.3
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[begin:end].double())
        torch.testing.assert_close(out[begin:end].double(), expected, rtol=1e-5, atol=1e-5)
    torch.library.opcheck(varlen_attention, (query, key, value, torch.tensor([0, 4, 9]), 0.3))


def test_arguments_that_depend_on_the_image_are_refused() -> None:
    x = torch.zeros(4, 8)
    with pytest.raises(UnsupportedLayer, match="an argument that is no tensor depends on the image"):
        Signature.of([Arguments.of((x,), {"height": 2}), Arguments.of((x,), {"height": 3})])
    with pytest.raises(UnsupportedLayer, match="an argument is a set"):
        Arguments.of((x, {1}), {})
    signature = Signature.of([Arguments.of((x, x[:2]), {}), Arguments.of((torch.zeros(6, 8), x[:3]), {})])
    assert signature.sizes == (("S0", 8), ("S1", 8)) and signature.dynamic == {"a": {0: "S0"}, "b": {0: "S1"}}
    assert signature.matches(Arguments.of((torch.zeros(9, 8), x), {}))
    assert not signature.matches(Arguments.of((torch.zeros(9, 7), x), {}))
    assert not signature.matches(Arguments.of((torch.zeros(1, 8), x), {}))
    signature.limits = (2, 8)
    assert signature.matches(Arguments.of((torch.zeros(8, 8), x), {}))
    assert not signature.matches(Arguments.of((torch.zeros(9, 8), x), {}))
