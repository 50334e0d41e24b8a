"""The numbers of a request on the device: one table, from which regions, records, updates and kernels follow.

A field is an int32 or float32 for each slot. A number of `SamplingParams` that the sampler reads is one line here, and is then
uploaded with each request, present in `SlotState`, and copied for rows with drafts; kernels load it by its index.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Writer = Literal["params", "scheduler", "step"]


class SlotField(NamedTuple):
    """A number of each slot.

    Attributes:
        name: of the region; for the writer "params" also of the sampling parameter.
        dtype: of the number, which takes 4 bytes.
        default: value of an empty slot.
        writer: "params": the request's sampling parameter, when it starts; "scheduler": the host, when the request starts; "step":
            the kernels of steps.
        sampled: the sampler reads it.
        part: of steps that have it: "" of all, "rope" of a model with several axes of positions, "drafts" of speculation,
            "adapters" with low-rank adapters.
        meaning: one line.
    """

    name: str
    dtype: Literal["int32", "float32"]
    default: float
    writer: Writer
    sampled: bool
    part: Literal["", "rope", "drafts", "adapters"]
    meaning: str


FIELDS = (
    SlotField("last_token", "int32", 0, "step", False, "", "token that the slot's next decode step feeds"),
    SlotField(
        "position", "int32", 0, "scheduler", False, "",
        "position of the last token fed or, between steps, of `last_token`; the token that a step samples has position + 1",
    ),
    SlotField("temperature", "float32", 0.0, "params", True, "", "0 = greedy"),
    SlotField("top_k", "int32", 0, "params", True, "", "<= 0 = all"),
    SlotField("top_p", "float32", 1.0, "params", True, "", "1 = off"),
    SlotField("min_p", "float32", 0.0, "params", True, "", "0 = off"),
    SlotField("top_n_sigma", "float32", 0.0, "params", True, "", "<= 0 = off"),
    SlotField("seed_lo", "int32", 0, "scheduler", True, "", "low half of the 64-bit seed"),
    SlotField("seed_hi", "int32", 0, "scheduler", True, "", "high half of the 64-bit seed"),
    SlotField(
        "min_position", "int32", 0, "scheduler", True, "",
        "stop ids may not be sampled at positions below (prompt length + min_tokens; 0 = no bound)",
    ),
    SlotField("rope_delta", "int32", 0, "scheduler", False, "rope", "added to the positions of generated tokens for the rotation"),
    SlotField("draft_limit", "int32", -1, "scheduler", False, "drafts", "last position at which the slot feeds a draft; -1 = none"),
    SlotField(
        "draft_computed", "int32", -1, "scheduler", False, "drafts",
        "positions whose keys and values a draft model has computed, from the first on",
    ),
    SlotField("adapter", "int32", 0, "scheduler", False, "adapters", "low-rank adapter: 0 = none, s + 1 = that in adapter slot s"),
)  # fmt: skip
"""In the order of the regions; those of parts come last, so that an index is the same in every engine."""

INDEX = {field.name: index for index, field in enumerate(FIELDS)}
"""Place of each field: its numbers lie at `INDEX[name] * field_stride` of the arena."""
PARAMS = tuple(field.name for field in FIELDS if field.writer == "params")
"""Sampling parameters that are uploaded as they are."""
RECORD = tuple(field.name for field in FIELDS if field.writer != "step" and not field.part)
"""Fields that are uploaded together when a request starts."""
SAMPLED = tuple(field.name for field in FIELDS if field.sampled)
"""Fields that the sampler reads, besides position and stop ids; they lie beside each other."""

assert [INDEX[name] for name in SAMPLED] == list(range(INDEX[SAMPLED[0]], INDEX[SAMPLED[0]] + len(SAMPLED)))
assert [not field.part for field in FIELDS] == sorted((not field.part for field in FIELDS), reverse=True)
