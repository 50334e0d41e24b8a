"""The images of a loaded image-text model: its encoder, which fills rows of the pool, and the positions of prompts with images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweave.images import ImageInput
from torchweave.models.multimodal.image_step import ImageDecoderStep
from torchweave.models.multimodal.support import image_token_id

NO_ROPE_OFFSETS = np.empty((0, 0), np.int32)
ENCODER_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""Errors that towers raise for images they reject."""
_TORCH_DTYPES = {
    name: getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}


class ImageEncoder:
    """Runs the vision tower and projector, one image at a time.

    Towers split and index by values, eagerly; their layers are compiled where they can be (`vision_layers`).

    Args:
        step: the model's forward, which owns the pool.
        graphs: `features` by CUDA graphs, whose result is valid until its next call; None: without.

    Attributes:
        step: as given.
        model: the image-text model.
        num_rows: rows of the pool.
        first_image_id: see `ImageDecoderStep`.
        token_id: the token that stands for a row of an image in a prompt.
        rope_axes: rows of the positions; 0: one position a token.
        both_ways: see `ImageDecoderStep`.
    """

    def __init__(self, step: ImageDecoderStep, graphs: Callable[[ImageInput], Tensor] | None = None) -> None:
        model: Any = step.model
        self.step, self.model, self._graphs = step, model, graphs
        self.num_rows = len(step.image_rows)
        self.first_image_id = step.first_image_id
        self.token_id = image_token_id(model.config)
        self.rope_axes = step.rope_axes
        self.both_ways = step.both_ways

    @torch.inference_mode()
    def encode(self, image: ImageInput, rows: np.ndarray) -> None:
        """Write the features of an image to `rows` of the pool.

        Raises:
            ValueError: the tower fails on this image, or returns another number of rows.
        """
        pool = self.step.image_rows
        try:
            features = self.features(image) if self._graphs is None else self._graphs(image)
        except ENCODER_ERRORS as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise ValueError("The GPU has too little memory to encode the image; send a smaller one.") from error
            why = " ".join(str(error).split())[:200].rstrip(".")
            raise ValueError(f"The model cannot encode the image ({why}); send another one.") from error
        if features.shape != (len(rows), pool.shape[1]):
            raise ValueError(
                f"The model encodes the image as {len(features)} rows, but the prompt has {len(rows)} tokens for it; use the "
                "checkpoint's own processor."
            )
        index = _to_device(rows.astype(np.int64), pool)  # without a wait for the tower
        pool.index_copy_(0, index, features.to(pool.dtype))

    @torch.inference_mode()
    def features(self, image: ImageInput) -> Tensor:
        """Features of an image from tower and projector, `[rows, width of the pool]`; raises one of `ENCODER_ERRORS`."""
        return self.run(self.inputs(image))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tower's floating-point inputs."""
        return self.step.image_rows.dtype

    def inputs(self, image: ImageInput) -> dict[str, Tensor]:
        """Tensors of an image on the device."""
        return {name: _to_device(array, self.step.image_rows) for name, array in image.tensors.items()}

    def run(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """As `features`, of tensors on the device."""
        return image_features(self.model, tensors)

    def rope_offsets(self, token_ids: np.ndarray, images: Sequence[ImageInput]) -> tuple[np.ndarray, int]:
        """What each axis adds to the positions of a prompt, int32 `[rope_axes, tokens]`, and of what follows it."""
        if not self.rope_axes or not images:
            return NO_ROPE_OFFSETS, 0
        inner: Any = self.model.model
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        kinds = (ids == self.token_id).int()  # 0 for text, 1 for an image
        accepted = inspect.signature(inner.get_rope_index).parameters
        grids = {name: array for name, array in _joined(images).items() if name in accepted and name != "pixel_values"}
        positions, delta = inner.get_rope_index(ids, mm_token_type_ids=kinds, **grids)
        offsets = positions[:, 0] - torch.arange(ids.shape[1])
        return offsets.numpy().astype(np.int32), int(delta.reshape(-1)[0])


def _to_device(array: np.ndarray, pool: Tensor) -> Tensor:
    """A copy on the pool's device, floating-point numbers in its dtype; the copy to a GPU waits for no step in flight.

    NumPy copies into pinned memory and the device converts: torch would copy with a thread on each core, which took 8 ms in place
    of 1 ms on a host without an idle core.
    """
    staged = torch.empty(array.shape, dtype=_TORCH_DTYPES[array.dtype.name], pin_memory=pool.is_cuda)
    np.copyto(staged.numpy(), array)
    tensor = staged.to(pool.device, non_blocking=True)
    return tensor.to(pool.dtype) if tensor.is_floating_point() else tensor


def _joined(images: Sequence[ImageInput]) -> Mapping[str, Tensor]:
    """The tensors of all images by name, without their pixels."""
    names = [name for name in images[0].tensors if not name.startswith("pixel")]
    return {name: torch.from_numpy(np.concatenate([image.tensors[name] for image in images])) for name in names}


def image_features(model: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """Features of one image as `[rows, hidden]`, followed in each row by those of the layers that add their own (DeepStack)."""
    output = model.model.get_image_features(**tensors)
    features = _flat(output.pooler_output if hasattr(output, "pooler_output") else output)
    added = getattr(output, "deepstack_features", None) or ()
    return torch.cat([features, *map(_flat, added)], dim=1) if added else features


def _flat(features: Any) -> Tensor:
    parts = features if isinstance(features, (list, tuple)) else [features]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
