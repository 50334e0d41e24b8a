"""Images of prompts: chunks with whole images, rows of the image pool, offsets of positions, and tokens that see later ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchweave.engine.kv_cache.image_rows import ImageRows, PromptImages
from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.request import InferenceRequest
from torchweave.engine.scheduler.parts.base import Host, StepPart, StepRows
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.step import Payload


@dataclass(frozen=True)
class ImageInputs(Payload):
    """Inputs of a step with chunks.

    Attributes:
        rope_offsets: int32 [axes, tokens], what each axis adds to the positions; None for a model with one position a token.
        lookahead: int32 [tokens], how many tokens after it each token sees; None for a causal model.
    """

    rope_offsets: np.ndarray | None = None
    lookahead: np.ndarray | None = None


class ImagesPart(StepPart):
    """Brings the images of chunks into the pool before their step."""

    name = "images"

    @classmethod
    def needed(cls, host: Host) -> bool:
        return host.resources.image_rows is not None

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        assert host.resources.image_rows is not None
        self._image_rows: ImageRows = host.resources.image_rows

    def rejection_reason(self, request: InferenceRequest) -> str:
        if not request.images:
            return ""
        if self._image_rows.model.both_ways and request.sampling.prompt_logprobs is not None:
            return "prompt_logprobs is not supported for this model's prompts with images; leave prompt_logprobs out."
        return self._image_rows.rejection_reason(np.asarray(request.input_ids), request.images)

    def add(self, state: RequestState) -> None:
        if images := state.request.images:
            offsets, state.rope_delta = self._image_rows.model.rope_offsets(state.prompt, images)
            state.images = PromptImages(images, offsets, self._image_rows.model.both_ways)

    def start(self, slot: int, state: RequestState, hit: PrefixHit) -> bool:
        table = self.host.running.slots
        self._image_rows.rope_delta[slot] = state.rope_delta
        if self._image_rows.model.rope_axes:
            self.host.updates.set("rope_delta", slot, state.rope_delta)
        if state.images is None:
            return False
        table.prefill_tokens[slot] = table.prefill_tokens[slot].copy()  # `fit` enters rows of the pool
        return True

    def fit(self, chunks: list[tuple[int, int]], room: int) -> list[tuple[int, int]]:
        """Cut chunks where the pool has no room for an image, and around images whose tokens see each other.

        Where the first chunk grows, later ones shrink. A request whose image cannot be encoded ends.
        """
        self._image_rows.begin_step()
        fitting, table = [], self.host.running.slots
        for slot, size in chunks:
            state, size = table.state_of(slot), min(size, room)
            if state.images is not None:
                start, tokens = int(table.num_computed[slot]), table.prefill_tokens[slot]
                try:
                    size = state.images.fit(start, size, room, self._image_rows)
                except ValueError as error:
                    state.error = str(error)
                    self.host.finish(slot, "error")
                    continue
                state.images.substitute(start, tokens[start : start + size], self._image_rows.model.first_image_id)
            if size:
                fitting.append((slot, size))
                room -= size
        return fitting

    def payload(self, rows: StepRows) -> ImageInputs | None:
        model = self._image_rows.model
        if not (rows.chunks and (model.rope_axes or model.both_ways)):
            return None
        offsets = self._rope_offsets(rows) if model.rope_axes else None
        return ImageInputs(offsets, self._lookahead(rows) if model.both_ways else None)

    def _rope_offsets(self, rows: StepRows) -> np.ndarray:
        axes, table = self._image_rows.model.rope_axes, self.host.running.slots
        parts = [np.broadcast_to(self._image_rows.rope_delta[rows.decode_rows], (axes, len(rows.decode_rows)))]
        for slot, chunk in rows.chunks:
            state, size = table.state_of(slot), len(chunk.tokens)
            if state.images is None:
                parts.append(np.zeros((axes, size), np.int32))
            else:
                parts.append(state.images.rope_offsets(chunk.start, size, state.rope_delta))
        return np.concatenate(parts, axis=1)

    def _lookahead(self, rows: StepRows) -> np.ndarray:
        parts = [np.zeros(len(rows.decode_rows), np.int32)]
        for slot, chunk in rows.chunks:
            images, size = self.host.running.slots.state_of(slot).images, len(chunk.tokens)
            parts.append(np.zeros(size, np.int32) if images is None else images.lookahead(chunk.start, size))
        return np.concatenate(parts)


PART = ImagesPart
