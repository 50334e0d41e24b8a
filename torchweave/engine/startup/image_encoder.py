"""The image encoder at the start: example images, its layers compiled, and the large image that memory is measured with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from torchweave.compiler.backend import compile_graph
from torchweave.compiler.cache.store import CompileCache, open_cache
from torchweave.compiler.codegen.inductor import stop_inductor_workers
from torchweave.compiler.errors import InvariantError
from torchweave.compiler.passes.torch_ir.linear_gelu import LinearGelu
from torchweave.compiler.passes.torch_ir.merge_linears import MergeLinears
from torchweave.compiler.runtime.cuda_graphs import GraphPool
from torchweave.compiler.runtime.forward import call_op
from torchweave.config import Plan
from torchweave.config.options import TorchCompileConfig
from torchweave.engine.runner.encoder_graphs import EncoderGraphs
from torchweave.engine.startup.compile_model import effective_compile_config
from torchweave.images import ImageInput, ImageLimits, ImageProcessor, blank_image
from torchweave.models.load import LoadedModel
from torchweave.models.multimodal.image_encoder import ENCODER_ERRORS, ImageEncoder
from torchweave.models.multimodal.image_step import ImageDecoderStep
from torchweave.models.multimodal.patch_embedding import patch_convolutions, use_products
from torchweave.models.multimodal.vision_layers import (
    INPUT_NAMES,
    Arguments,
    LayerCall,
    Signature,
    UnsupportedLayer,
    replace_forward,
    restore_forward,
    tower_layers,
    use_varlen_attention,
    watch,
    without_hooks,
)
from torchweave.report import Report

_MEASURED_IMAGE_SIZE = (2048, 2048)  # pixels of the image that is encoded while memory is measured
_RECORDED_IMAGE_SIZE = (1024, 1024)  # pixels of the largest image with a CUDA graph; larger ones are bound by kernels
EXAMPLE_IMAGE_SIZES = ((224, 224), (448, 336), (336, 672))
"""Width and height of the images from which dynamic sizes are known: they differ in patches, rows and tiles."""
_PASSES = (MergeLinears(), LinearGelu())
"""They leave each constant a weight of the layer or several stacked ones, which those of another layer can replace."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest norm of the difference from the features of the eager encoder, in parts of the norm of these."""


def example_image(loaded: LoadedModel, size: tuple[int, int]) -> ImageInput | None:
    """A black image as the checkpoint's processor returns it; None without images, and for a folder without a processor."""
    if not isinstance(loaded.module, ImageDecoderStep) or loaded.tokenizer is None:
        return None
    tokenizer, token_id = loaded.tokenizer, ImageEncoder(loaded.module).token_id
    try:
        processor = ImageProcessor(tokenizer.folder, ImageLimits(token_id, 1), tokenizer.trust_remote_code)
        return processor.encode(processor.placeholder, [blank_image(*size)]).images[0]
    except ValueError:
        return None


def large_image_encoding(loaded: LoadedModel) -> Callable[[], None] | None:
    """A function that encodes a large image; None where there is no example image."""
    image = example_image(loaded, _MEASURED_IMAGE_SIZE)
    if image is None:
        return None
    encoder = ImageEncoder(loaded.module)  # type: ignore[arg-type]
    rows = np.arange(min(len(image.index), encoder.num_rows), dtype=np.int32)

    def encode() -> None:
        with suppress(ValueError):  # it has used what memory there is, or a tower refuses the image
            encoder.encode(image, rows)

    return encode


def compile_image_encoder(loaded: LoadedModel, plan: Plan, report: Report) -> None:
    """Compile the layers of a model's vision tower; one that cannot be compiled stays eager, with the reason in the report."""
    if not isinstance(loaded.module, ImageDecoderStep) or not plan.fullgraph:
        return
    with report.stage("compiling the image encoder"):
        examples = [example_image(loaded, size) for size in EXAMPLE_IMAGE_SIZES]
        images = [image for image in examples if image is not None]
        if not images:
            report.event("image_encoder", compiled=0, why="the folder has no image processor")
            return
        config = effective_compile_config(plan)
        compile_layers(ImageEncoder(loaded.module), images, config, open_cache(config, report), report)


def record_encoder_graphs(loaded: LoadedModel, plan: Plan, report: Report) -> tuple[EncoderGraphs | None, Plan]:
    """Record the image encoder for the size of an ordinary image, if the plan allows graphs of it.

    A replay on other pixels is compared with the encoder without graphs. A model whose encoder cannot be recorded gets no
    graphs; the plan has the reason.
    """
    if not plan.max_encoder_graphs:
        return None, plan
    option = "cuda_graph_config.max_encoder_graphs"
    if not isinstance(loaded.module, ImageDecoderStep):
        return None, plan.with_effective(option, 0, "the model has no images", max_encoder_graphs=0)
    image = example_image(loaded, _RECORDED_IMAGE_SIZE)
    if image is None:
        return None, plan.with_effective(option, 0, "the folder has no image processor", max_encoder_graphs=0)
    with report.stage("recording the image encoder"):
        encoder = ImageEncoder(loaded.module)
        graphs = EncoderGraphs(encoder, GraphPool(plan.device), plan.max_encoder_graphs, report)
        why = _record_and_compare(encoder, graphs, image)
        if why:
            return None, plan.with_effective(option, 0, why, max_encoder_graphs=0)
        report.event("encoder_graphs", bytes=graphs.num_bytes())
        return graphs, plan


def _record_and_compare(encoder: ImageEncoder, graphs: EncoderGraphs, image: ImageInput) -> str:
    """Record the largest size; returns why its graph cannot be used."""
    random = np.random.default_rng(0)
    noise = {
        name: random.standard_normal(array.shape).astype(array.dtype) if array.dtype.kind == "f" else array
        for name, array in image.tensors.items()
    }
    other = ImageInput(noise, image.index)
    try:
        expected = encoder.features(other)  # before the recording: it makes what the tower keeps for a size
        graphs.record_largest(image)
        if graphs.why_plain:
            return graphs.why_plain
        error = _difference(graphs(other), expected)
    except ENCODER_ERRORS as why:
        return " ".join(str(why).split()).rstrip(".")
    if error > _TOLERANCE.get(expected.dtype, 0.0):
        return f"its features differ by {error:.2g} of their norm from those without CUDA graphs"
    return ""


def compile_layers(
    encoder: ImageEncoder,
    images: Sequence[ImageInput],
    config: TorchCompileConfig,
    cache: CompileCache | None,
    report: Report,
) -> None:
    """Compile the layers of the encoder's tower, and compare features with those of the eager tower.

    Args:
        images: of different sizes; a size of a tensor that differs between them is dynamic.
        report: receives an `image_encoder` event: compiled layers, or the reason why there are none.
    """
    begin = time.monotonic()
    groups = tower_layers(encoder.model)
    layers = [layer for group in groups for layer in group]
    if not layers:
        report.event("image_encoder", compiled=0, why="the tower has no list of layers")
        return
    with ExitStack() as on_failure:
        try:
            expected = [encoder.features(image) for image in images]
            on_failure.callback(use_varlen_attention(layers))
            convolutions = patch_convolutions(encoder.model)
            on_failure.callback(restore_forward, [*layers, *convolutions])
            use_products(convolutions)
            for group in groups:
                with watch(group) as calls:
                    for image in images:
                        encoder.features(image)
                _compile_group(group, [Arguments.of(*call) for call in calls], config, cache)
            error = max(map(_difference, map(encoder.features, images), expected))
            if error > _TOLERANCE.get(expected[0].dtype, 0.0):
                raise UnsupportedLayer(
                    f"its features differ by {error:.2g} of their norm from those of the eager encoder"
                )
        except (UnsupportedLayer, InvariantError, *ENCODER_ERRORS) as why:  # a TraceError is a ValueError
            report.event("image_encoder", compiled=0, why=" ".join(str(why).split()).rstrip("."))
            return
        on_failure.pop_all()
    report.event("image_encoder", compiled=len(layers), kinds=len(groups), seconds=time.monotonic() - begin)


def _compile_group(
    group: Sequence[nn.Module], examples: Sequence[Arguments], config: TorchCompileConfig, cache: CompileCache | None
) -> None:
    """Compile the first layer of a group, and let all of them call the result with their own weights."""
    if not examples:
        raise UnsupportedLayer("a layer is not called")
    signature = Signature.of(examples)
    largest = max(examples, key=lambda each: sum(tensor.numel() for tensor in each.tensors))
    first, inputs = group[0], [tensor.contiguous() for tensor in largest.tensors]
    with stop_inductor_workers(), without_hooks(first):
        compiled = compile_graph(
            LayerCall(first, signature.structure),
            dict(zip(INPUT_NAMES, inputs, strict=False)),
            signature.dynamic,
            config=replace(config, pass_numerics="tolerance"),  # the features are compared with the eager encoder's
            cache=cache,
            passes=_PASSES,
            as_eager=True,
        )
    low, high = compiled.sizes
    signature.limits = (max(low, signature.limits[0]), high)
    known = _weights(first)
    for layer in group:
        weights = known if layer is first else _weights(layer)

        def weight_of(constant: Tensor, weights: dict[str, Tensor] = weights) -> Tensor:
            return _own_weight(constant, known, weights)

        forward = compiled.with_constants(weight_of)
        replace_forward(layer, signature, lambda *tensors, forward=forward: forward(call_op, *tensors))


def _own_weight(constant: Tensor, known: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
    """A layer's tensor for a constant of the compiled layer: a weight, or several that become views of one.

    Args:
        known: the weights of the compiled layer.
        weights: those of the layer.
    """
    start, size = constant.data_ptr(), constant.dtype.itemsize
    for name, tensor in known.items():
        if (tensor.data_ptr(), tensor.shape) == (start, constant.shape):
            return weights[name].detach()
    end = start + constant.numel() * size
    stacked = {name: tensor for name, tensor in known.items() if start <= tensor.data_ptr() < end}
    if not stacked:
        raise UnsupportedLayer("a layer reads a tensor that is no weight of it")
    if weights is known:
        return constant.detach()
    own = torch.zeros_like(constant)
    for name, tensor in stacked.items():
        first = (tensor.data_ptr() - start) // size
        part = own.view(-1)[first : first + tensor.numel()].view(tensor.shape)
        weights[name].data = part.copy_(weights[name])
    return own


def _weights(layer: nn.Module) -> dict[str, Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _difference(features: Tensor, expected: Tensor) -> float:
    features, expected = features.double(), expected.double()
    return float((features - expected).norm() / expected.norm().clamp(min=1e-30))
