"""Image-text models with dummy weights: decoding beside the text decoder alone, an image to the first token, the
encoder as eager code, with compiled layers and as CUDA graphs, images a second.

    python bench/engine/images.py --models shape:qwen3-vl-8b shape:gemma-3-4b --json bench/results/images_h100_202611.json
    python bench/engine/images.py --encoder-only

The text decoder and the image-text model are built one after the other. Images are random arrays in the form that
the model's processor returns, so a time to first token begins at the engine, as for prompts of token ids; `processor_ms` is what
the processor takes before, in a thread of the HTTP process. Every image is another one, so none is found in the pool.
The three forms of the encoder are measured in turns. `--encoder-only` runs no engine and builds few layers of text; it adds the
kernels of one image that take most time.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchweave import LLM
from torchweave.bench.protocol import Sizes, Workload, decode, fixed_length_params
from torchweave.bench.result import header
from torchweave.compiler.runtime.cuda_graphs import GraphPool
from torchweave.config import TorchCompileConfig
from torchweave.config.model_source import resolve
from torchweave.engine.runner.encoder_graphs import EncoderGraphs
from torchweave.engine.startup.compile_model import effective_compile_config
from torchweave.engine.startup.image_encoder import EXAMPLE_IMAGE_SIZES, compile_layers
from torchweave.images import EncodedPrompt, ImageInput, blank_image
from torchweave.models.load import LoadedModel, load
from torchweave.models.multimodal.image_encoder import ImageEncoder
from torchweave.models.multimodal.image_step import ImageDecoderStep
from torchweave.models.multimodal.patch_embedding import patch_convolutions
from torchweave.models.multimodal.vision_layers import tower_layers
from torchweave.report import Report

PROCESSORS = {
    "qwen3_vl": ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
    "gemma3": ("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil"),
}
TEXT_MODELS = {"shape:qwen3-vl-8b": "shape:qwen3-8b"}
"""Text decoders of the same size, where transformers has none for the model's own text part."""
FEW_LAYERS = 4  # of text, with `--encoder-only`; DeepStack needs three
TOGETHER = 8  # images that are encoded without a wait between them
WORDS = 16  # tokens of text in a prompt with an image
_NUMBERS = itertools.count()


def processor_of(config: Any) -> Callable[[Any], dict[str, np.ndarray]]:
    """The model's image processor with its defaults and the sizes of the config."""
    module, name = PROCESSORS[config.model_type]
    vision = config.vision_config
    if config.model_type == "gemma3":
        size = {"size": {"height": vision.image_size, "width": vision.image_size}}
    else:
        size = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
    processor = getattr(importlib.import_module(f"transformers.models.{module}"), name)(**size)

    def process(image: Any) -> dict[str, np.ndarray]:
        output = processor(images=[image], return_tensors="np")
        return {key: np.asarray(value) for key, value in output.items() if key != "num_crops"}

    return process


def num_rows(config: Any, tensors: dict[str, np.ndarray]) -> int:
    """Tokens of an image in the prompt."""
    if "image_grid_thw" in tensors:
        return int(tensors["image_grid_thw"].prod()) // config.vision_config.spatial_merge_size**2
    return int(config.mm_tokens_per_image)


class Images:
    """Images of one size, and prompts with one each."""

    def __init__(self, loaded: LoadedModel, size: int) -> None:
        step = loaded.module
        if not isinstance(step, ImageDecoderStep):
            raise ValueError(f"The model is served without images: {loaded.no_images}.")
        self.encoder = ImageEncoder(step)
        config: Any = step.model.config
        process, picture = processor_of(config), blank_image(size, size)
        self.examples = [
            ImageInput(process(blank_image(*example)), np.zeros(1, np.int32)) for example in EXAMPLE_IMAGE_SIZES
        ]
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            tensors = process(picture)
            times.append(time.perf_counter() - begin)
        self.processor_ms = statistics.median(times) * 1e3
        noise = np.random.default_rng(0).standard_normal(tensors["pixel_values"].shape, np.float32)
        self.tensors = tensors | {"pixel_values": noise}
        self.rows = num_rows(config, tensors)

    def image(self) -> ImageInput:
        """An image that no other prompt has: the digest decides."""
        index = np.arange(WORDS // 2, WORDS // 2 + self.rows, dtype=np.int32)
        return ImageInput(self.tensors, index, next(_NUMBERS).to_bytes(16, "little"))

    def prompt(self) -> EncodedPrompt:
        image, words = self.image(), np.random.default_rng(next(_NUMBERS)).integers(5, 1000, WORDS)
        ids = np.concatenate([words[: WORDS // 2], np.full(self.rows, self.encoder.token_id), words[WORDS // 2 :]])
        return EncodedPrompt(ids, (image,))

    def seconds(self, llm: LLM, count: int) -> float:
        """Until `count` prompts, sent together, have one token each."""
        prompts = [self.prompt() for _ in range(count)]
        begin = time.perf_counter()
        llm.generate(prompts, fixed_length_params(1))
        return time.perf_counter() - begin

    def encoder_ms(self, repeats: int, encoder: ImageEncoder, together: int = 1) -> Iterator[float]:
        """Milliseconds an image of the tower and projector, with the transfer of the image to the device."""
        rows = np.arange(self.rows, dtype=np.int32)
        for _ in range(repeats):
            synchronize()
            begin = time.perf_counter()
            for _ in range(together):
                encoder.encode(self.image(), rows)
            synchronize()
            yield (time.perf_counter() - begin) * 1e3 / together

    def transfer_ms(self, repeats: int) -> float:
        """Milliseconds of the transfer alone."""
        times = []
        for _ in range(repeats):
            synchronize()
            begin = time.perf_counter()
            self.encoder.inputs(self.image())
            synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times)


class Forms:
    """The layers and patch embeddings of a tower as eager code and compiled: `select(compiled)`."""

    def __init__(self, encoder: ImageEncoder) -> None:
        self.layers = [layer for group in tower_layers(encoder.model) for layer in group]
        self.layers += patch_convolutions(encoder.model)
        modules = [module for layer in self.layers for module in layer.modules() if hasattr(module, "config")]
        self.configs: dict[int, Any] = {id(module.config): module.config for module in modules}
        self.states: dict[bool, tuple[list[Any], list[str]]] = {}

    def keep(self, compiled: bool) -> None:
        """Keep the present form under this name."""
        forwards = [vars(layer).get("forward") for layer in self.layers]
        self.states[compiled] = (forwards, [config._attn_implementation for config in self.configs.values()])

    def select(self, compiled: bool) -> None:
        forwards, attention = self.states[compiled]
        for layer, forward in zip(self.layers, forwards, strict=True):
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward
        for config, name in zip(self.configs.values(), attention, strict=True):
            config._attn_implementation = name


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def quiet(*_: Any) -> None:
    pass


def measure(model: str, args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """All figures of a model."""
    sizes = Sizes(batch_sizes=tuple(args.batch_sizes), output_len=args.output_len, repeats=args.repeats)
    result: dict[str, Any] = {"model": model, "image_size": args.size}
    for name, limit in (("text", 0), ("images", args.images)):
        of_size = model if limit else TEXT_MODELS.get(model, model)
        llm = LLM(
            of_size, load_format="dummy", limit_mm_per_prompt={"image": limit}, report=Report(show=False), **options
        )
        with llm:
            work = Workload(llm, 0)
            result[name] = {"decode": decode(work, sizes, quiet)}
            if limit:
                result |= with_images(llm, Images(llm.engine.loaded, args.size), work, args)
                result["dtype"] = llm.plan.dtype
        del llm, work
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    pairs = zip(result["text"]["decode"], result["images"]["decode"], strict=True)
    result["decode_ratios"] = [
        image["median_tpot_ms"] / text["median_tpot_ms"] for text, image in pairs if "median_tpot_ms" in text
    ]
    return result


def encoder_figures(images: Images, config: TorchCompileConfig, repeats: int) -> dict[str, Any]:
    """Eager, compiled and as CUDA graphs; the encoder is prepared here, since a shape has no processor for the engine to find."""
    plain, forms, report = images.encoder, Forms(images.encoder), Report(show=False)
    forms.keep(compiled=False)
    list(images.encoder_ms(3, plain))
    compile_layers(plain, images.examples, config, None, report)
    forms.keep(compiled=True)
    (event,) = report.select("image_encoder")
    encoders, facts = {"eager": plain, "compiled": plain}, {}
    if torch.cuda.is_available():
        graphs = EncoderGraphs(plain, GraphPool("cuda"), 1, report)
        begin = time.perf_counter()
        graphs.record_largest(images.image())
        facts = {
            "graph_seconds": time.perf_counter() - begin,
            "graph_bytes": graphs.num_bytes(),
            "no_graphs": graphs.why_plain,
        }
        facts["graph_error"] = float((graphs(images.image()) - plain.features(images.image())).float().abs().max())
        encoders["graphs"] = ImageEncoder(plain.step, graphs)
    times: dict[str, list[float]] = {name: [] for name in encoders}
    together: dict[str, list[float]] = {name: [] for name in encoders}
    for turn in range(1 + repeats):
        for name, encoder in encoders.items():
            forms.select(compiled=name != "eager")
            measured = list(images.encoder_ms(7, encoder)), list(images.encoder_ms(1, encoder, TOGETHER))
            if turn:
                times[name] += measured[0]
                together[name] += measured[1]
    images.encoder = encoders[name]
    return {
        "rows": images.rows,
        "processor_ms": images.processor_ms,
        "transfer_ms": images.transfer_ms(7 * repeats),
        "encoder_compiled_layers": event["compiled"],
        "encoder_compile_seconds": event.get("seconds", event.get("why")),
        **facts,
        **{f"encoder_{name}_ms": statistics.median(values) for name, values in times.items()},
        **{f"encoder_{name}_ms_together": statistics.median(values) for name, values in together.items()},
    }


def encoder_only(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of the encoder of a shape, and its slowest kernels on a GPU."""
    config = dict(resolve(model).config)
    config["text_config"] = config["text_config"] | {"num_hidden_layers": FEW_LAYERS}
    loaded = load(config, device=args.device or "cuda", load_format="dummy", images=True)
    images = Images(loaded, args.size)
    loaded.module.allocate_image_rows(images.rows)
    compiling = TorchCompileConfig(enable_inductor=True, compile_cache=False)
    result = {"model": model, "image_size": args.size, **encoder_figures(images, compiling, args.repeats)}
    with torch.profiler.profile() as profile:
        list(images.encoder_ms(1, images.encoder))
    events = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA] or events
    kernels.sort(key=lambda event: -event.self_device_time_total)
    result["kernels_ms"] = sum(event.self_device_time_total for event in kernels) / 1e3
    result["kernels"] = [[event.key[:160], event.count, event.self_device_time_total / 1e3] for event in kernels[:12]]
    return result


def with_images(llm: LLM, images: Images, work: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of prompts with images."""
    figures = encoder_figures(images, effective_compile_config(llm.plan), args.repeats)
    images.seconds(llm, 1), images.seconds(llm, args.images)
    first = [images.seconds(llm, 1) * 1e3 for _ in range(7 * args.repeats)]
    together = [images.seconds(llm, args.images) for _ in range(args.repeats)]
    text_ms = [work.run(work.prompts(1, images.rows + WORDS), 1) * 1e3 for _ in range(7 * args.repeats)]
    return figures | {
        "image_ttft_ms": statistics.median(first),
        "text_ttft_ms": statistics.median(text_ms),
        "images_per_second": args.images / statistics.median(together),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["shape:qwen3-vl-8b", "shape:gemma-3-4b"])
    parser.add_argument("--size", type=int, default=1024, help="pixels of a side of an image")
    parser.add_argument("--encoder-only", action="store_true", help="measure the encoder without an engine")
    parser.add_argument("--images", type=int, default=16, help="prompts that are sent together")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default=None, help="a CPU for a trial run with a folder of a small config")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = {"device": args.device} if args.device else {}
    options |= {"max_model_len": 4096}
    results: list[dict[str, Any]] = []
    for model in args.models:
        try:
            results.append(encoder_only(model, args) if args.encoder_only else measure(model, args, options))
        except ValueError as error:  # of a model that is not served with images; the others are still measured
            results.append({"model": model, "error": str(error)})
        print(json.dumps(results[-1]), flush=True)
        if args.json:
            facts = header("images", ", ".join(args.models), device=args.device or "cuda") | {"results": results}
            args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
