"""Image-text models with dummy weights: decoding beside the text decoder alone, an image to the first token, the
encoder with and without compiled layers, images a second.

    python bench/engine/images.py --models shape:qwen3-vl-8b shape:gemma-3-4b --json bench/results/images_h100_202611.json
    python bench/engine/images.py --encoder-only

The text decoder and the image-text model are built one after the other. Images are random arrays in the form that
the model's processor returns, so a time to first token begins at the engine, as for prompts of token ids; `processor_ms` is what
the processor takes before, in a thread of the HTTP process. Every image is another one, so none is found in the pool.
`--encoder-only` runs no engine and builds few layers of text; it adds the kernels of one image that take most time.
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
from torchweave.config import TorchCompileConfig
from torchweave.engine.startup.compile_model import effective_compile_config
from torchweave.engine.startup.image_encoder import EXAMPLE_IMAGE_SIZES, compile_layers
from torchweave.images import EncodedPrompt, ImageInput, blank_image
from torchweave.models.load import LoadedModel, load
from torchweave.models.multimodal.image_encoder import ImageEncoder
from torchweave.models.multimodal.image_step import ImageDecoderStep
from torchweave.models.resolve import resolve
from torchweave.report import Report

PROCESSORS = {
    "qwen3_vl": ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
    "gemma3": ("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil"),
}
TEXT_MODELS = {"shape:qwen3-vl-8b": "shape:qwen3-8b"}
"""Text decoders of the same size, where transformers has none for the model's own text part."""
FEW_LAYERS = 4  # of text, with `--encoder-only`; DeepStack needs three
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

    def encoder_ms(self, repeats: int) -> Iterator[float]:
        """Milliseconds of the tower and projector, with the transfer of an image to the device."""
        rows = np.arange(self.rows, dtype=np.int32)
        for _ in range(repeats):
            synchronize()
            begin = time.perf_counter()
            self.encoder.encode(self.image(), rows)
            synchronize()
            yield (time.perf_counter() - begin) * 1e3


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
    """Eager and compiled; the encoder is compiled here, since a shape has no processor for the engine to find."""
    eager = list(images.encoder_ms(3 + 7 * repeats))[3:]
    report = Report(show=False)
    compile_layers(images.encoder, images.examples, config, None, report)
    (event,) = report.select("image_encoder")
    compiled = list(images.encoder_ms(3 + 7 * repeats))[3:]
    return {
        "rows": images.rows,
        "processor_ms": images.processor_ms,
        "encoder_compiled_layers": event["compiled"],
        "encoder_compile_seconds": event.get("seconds", event.get("why")),
        "encoder_eager_ms": statistics.median(eager),
        "encoder_ms": statistics.median(compiled),
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
        list(images.encoder_ms(1))
    kernels = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    result["kernels"] = [[event.key[:80], event.count, event.self_device_time_total / 1e3] for event in kernels[:8]]
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
