"""Rows of the image pool: which image is where, and the tokens of a prompt that stand for its images.

The pool is a cache by content: an image stays until its rows are needed for another. Between two steps every image may be
dropped, since a later step encodes it again, so requests cannot wait for each other's rows. Rows may be rewritten while steps in
flight read them: the device runs the encoder after those steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from torchweave.images import ImageInput


class ImageModel(Protocol):
    """The images of a loaded model, see `torchweave.models.multimodal.image_encoder.ImageEncoder`."""

    num_rows: int
    first_image_id: int
    token_id: int
    rope_axes: int
    both_ways: bool

    def encode(self, image: ImageInput, rows: np.ndarray) -> None: ...

    def rope_offsets(self, token_ids: np.ndarray, images: Sequence[ImageInput]) -> tuple[np.ndarray, int]: ...


class ImageRows:
    """Owner of the pool's rows.

    Args:
        model: encodes images.
        max_slots: most running requests.
        max_images: most images of a prompt.
        max_span: most image tokens that see each other in both directions; one step computes them.

    Attributes:
        model: as given.
        max_images: as given.
        max_span: as given.
        rope_delta: int32 `[slots]`, what is added to the positions of a slot's generated tokens.
        encoded_total, reused_total: images encoded, and found in the pool.
    """

    def __init__(self, model: ImageModel, max_slots: int, max_images: int, max_span: int) -> None:
        self.model = model
        self.max_images = max_images
        self.max_span = max_span
        self.rope_delta = np.zeros(max_slots, np.int32)
        self.encoded_total = self.reused_total = 0
        self._free = np.arange(model.num_rows - 1, -1, -1, dtype=np.int32)
        self._num_free = model.num_rows
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()  # least recently used first
        self._in_step: set[bytes] = set()

    def rejection_reason(self, prompt: np.ndarray, images: Sequence[ImageInput]) -> str:
        """Why a prompt with these images can never run, in a sentence; empty if it can."""
        if len(images) > self.max_images:
            return (
                f"The prompt has {len(images)} images, but limit_mm_per_prompt.image is {self.max_images}; send fewer, or raise "
                "the limit."
            )
        if images and not np.array_equal(
            np.concatenate([image.index for image in images]), np.flatnonzero(prompt == self.model.token_id)
        ):
            return (
                f"The images of the prompt are not those that its image tokens (id {self.model.token_id}) stand for; use the "
                "checkpoint's own processor."
            )
        largest = max((len(image.index) for image in images), default=0)
        if largest > self.model.num_rows:
            return (
                f"An image takes {largest} tokens, but the engine keeps {self.model.num_rows} at most; send a smaller image, or "
                "raise max_num_tokens."
            )
        longest = int(np.diff(image_spans(images)).max(initial=0)) if self.model.both_ways else 0
        if longest > min(self.max_span, self.model.num_rows):
            return (
                f"{longest} consecutive image tokens see each other and need one step, which has room for "
                f"{max(min(self.max_span, self.model.num_rows), 0)}; write text between the images, send smaller ones, or raise "
                "max_num_tokens."
            )
        return ""

    def begin_step(self) -> None:
        """Allow the images of earlier steps to be dropped."""
        self._in_step.clear()

    def rows_of(self, image: ImageInput) -> np.ndarray | None:
        """Rows of an image, int32, encoded if it is not in the pool; None if the step's other images leave no room.

        Raises:
            ValueError: the model cannot encode it.
        """
        rows = self._rows.get(image.digest)
        if rows is not None:
            self._rows.move_to_end(image.digest)
            self._in_step.add(image.digest)
            self.reused_total += 1
            return rows
        need = len(image.index)
        for digest in [each for each in self._rows if each not in self._in_step]:
            if self._num_free >= need:
                break
            self._release(self._rows.pop(digest))
        if self._num_free < need:
            return None
        self._num_free -= need
        rows = self._free[self._num_free : self._num_free + need].copy()
        try:
            self.model.encode(image, rows)
        except ValueError:
            self._release(rows)
            raise
        self._rows[image.digest] = rows
        self._in_step.add(image.digest)
        self.encoded_total += 1
        return rows

    def _release(self, rows: np.ndarray) -> None:
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)


def image_spans(images: Sequence[ImageInput]) -> np.ndarray:
    """Runs of consecutive image tokens in a prompt as (first, end), int64 `[n, 2]`; a run may have several images."""
    index = np.concatenate([np.empty(0, np.int64), *(image.index for image in images)])
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    starts, ends = np.append(0, breaks)[: len(index)], np.append(breaks, len(index))[: len(index)]
    return np.stack([index[starts], index[ends - 1] + 1], axis=1)


class PromptImages:
    """The images of one request.

    Args:
        images: of the prompt.
        rope_offsets: int32 `[axes, tokens]`, what each axis adds to the positions of the prompt; empty without axes.
        both_ways: consecutive image tokens see each other, so one step computes them all.
    """

    def __init__(self, images: Sequence[ImageInput], rope_offsets: np.ndarray, both_ways: bool = False) -> None:
        self._images = tuple(images)
        self._rope_offsets = rope_offsets
        self._spans = image_spans(images if both_ways else ())
        self._lookahead = np.zeros(self._spans[-1, 1] if len(self._spans) else 0, np.int32)
        for first, end in self._spans.tolist():
            self._lookahead[first:end] = np.arange(end - first - 1, -1, -1)
        self._rows: dict[int, np.ndarray] = {}  # of the images in the next step, by their order in the prompt

    def fit(self, start: int, size: int, most: int, image_rows: ImageRows) -> int:
        """Bring the images of a chunk into the pool; returns how many tokens can be computed.

        Args:
            most: tokens that the step has room for; a chunk grows to the end of a run of images that see each other.

        Raises:
            ValueError: an image cannot be encoded.
        """
        self._rows = {}
        size = self._with_whole_spans(start, size, most)
        for number, image in enumerate(self._images):
            if image.index[-1] < start or image.index[0] >= start + size:
                continue
            rows = image_rows.rows_of(image)
            if rows is None:
                size = max(int(image.index[0]) - start, 0)
                return self._with_whole_spans(start, size, size)
            self._rows[number] = rows
        return size

    def _with_whole_spans(self, start: int, size: int, most: int) -> int:
        """The size of a chunk that cuts no span: it ends before the span, or at its end if it begins within."""
        at = int(np.searchsorted(self._spans[:, 0], start + size)) - 1  # the last span that begins before the end
        if not size or at < 0 or start + size >= self._spans[at, 1]:
            return size
        first, end = self._spans[at].tolist()
        if first > start:
            return first - start
        return end - start if end - start <= most else 0

    def substitute(self, start: int, tokens: np.ndarray, first_image_id: int) -> None:
        """Replace the image tokens of a chunk for which `fit` was called by ids of rows."""
        for number, rows in self._rows.items():
            index = self._images[number].index
            inside = (index >= start) & (index < start + len(tokens))
            tokens[index[inside] - start] = first_image_id + rows[inside]

    def rope_offsets(self, start: int, size: int, delta: int) -> np.ndarray:
        """What each axis adds to positions `start` to `start + size`, int32 `[axes, size]`; `delta` is that behind the prompt."""
        offsets = self._rope_offsets[:, start : start + size]
        missing = size - offsets.shape[1]
        return np.pad(offsets, ((0, 0), (0, missing)), constant_values=delta) if missing else offsets

    def lookahead(self, start: int, size: int) -> np.ndarray:
        """How many tokens behind each of positions `start` to `start + size` it sees, int32 `[size]`."""
        seen = self._lookahead[start : start + size]
        return np.pad(seen, (0, size - len(seen)))

    def block_keys(self, block_size: int) -> dict[int, bytes]:
        """What the hash of a block includes beside its tokens, by block: the digests of images that its tokens depend on.

        These are the images with tokens in it, and with spans all images of a span with tokens in it.
        """
        keys: dict[int, bytes] = {}
        for image in self._images:
            first, end = int(image.index[0]), int(image.index[-1]) + 1
            blocks = np.unique(image.index // block_size)
            if len(self._spans):
                first, end = self._spans[np.searchsorted(self._spans[:, 0], first, side="right") - 1].tolist()
                blocks = np.arange(first // block_size, (end - 1) // block_size + 1)
            for block in blocks.tolist():
                keys[block] = keys.get(block, b"") + image.digest
        return keys
