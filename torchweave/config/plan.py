"""The plan itself: what is effective, and of every option what was asked and why it became so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchweave.config.options import EngineConfig


@dataclass(frozen=True)
class PlanEntry:
    """One option: its dotted name, what was asked, what is effective, and why."""

    name: str
    requested: Any
    effective: Any
    why: str


@dataclass(frozen=True)
class Plan:
    """What is effective: resolved values, and in `entries` what was asked of every option and why it became so.

    Attributes:
        quantization: how linears are quantised (`fp8_per_tensor`); None: they are not.
        kv_cache_dtype: what keys and values are kept in: `fp8_e4m3`, `fp8_e5m2` or the name of a dtype.
        kv_offload_gb: host memory for blocks that the device has lost, in GiB; 0: none.
        batch_sizes: decode batch sizes that are recorded as whole-step graphs, ascending; empty when none are.
        token_buckets: token counts that are recorded for context and mixed steps, ascending; empty when none are.
        decode_graphs: the whole decode step is one CUDA graph per batch size.
        piecewise_graphs: pieces are CUDA graphs per token bucket; boundary ops run between them.
        full_mixed_graphs: mixed steps are recorded whole too.
        inductor: distinct pieces are built by Inductor; else they run as plain FX code.
        compile_sizes: token counts for which pieces are built once more with that size fixed.
        fullgraph: the model is captured as one graph; else it runs as it is, cut at boundary ops while recording.
        max_num_streams: CUDA streams that a piece may be spread over.
        userbuffers: operands of collectives are made where the collectives read them.
        tune: what was not measured on this kind of device is measured before the model is woven.
    """

    config: EngineConfig
    device: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    kv_offload_gb: float
    max_batch_size: int
    max_num_tokens: int
    mixed_step_tokens: int
    max_model_len: int
    block_size: int
    attention_backend: str
    run_ahead: int
    batch_sizes: tuple[int, ...]
    token_buckets: tuple[int, ...]
    decode_graphs: bool
    piecewise_graphs: bool
    full_mixed_graphs: bool
    inductor: bool
    compile_sizes: tuple[int, ...]
    fullgraph: bool
    max_num_streams: int
    userbuffers: bool
    tune: bool
    entries: tuple[PlanEntry, ...]

    @property
    def mixed_step_sizes(self) -> tuple[int, ...]:
        """Tokens that a step may hold which reads prompts while others generate; empty: any number.

        Recorded sizes from `mixed_step_tokens` on, since a step between two of them would be padded up to the larger one; above
        the last of them, its multiples.
        """
        least = self.mixed_step_tokens
        if not least:
            return ()
        recorded = tuple(size for size in self.token_buckets if size >= least)
        above = (recorded[-1] // least + 1) * least if recorded else least
        return (*recorded, *range(above, self.max_num_tokens + 1, least))

    def with_effective(self, name: str, effective: Any, why: str, **changes: Any) -> Plan:
        """A plan in which option `name` turned out as `effective`; `changes` are plan fields that change with it."""
        assert any(entry.name == name for entry in self.entries), f"no option {name}"
        entries = tuple(
            replace(entry, effective=effective, why=why) if entry.name == name else entry for entry in self.entries
        )
        return replace(self, entries=entries, **changes)

    def table(self) -> str:
        """The entries as aligned text, one option a line: option, asked, effective, why."""
        rows = [("option", "asked", "effective", "why")]
        rows += [
            (entry.name, format_value(entry.requested), format_value(entry.effective), entry.why)
            for entry in self.entries
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        widths.append(0)
        cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
        return "\n".join("  ".join(row).rstrip() for row in cells)


def format_value(value: Any) -> str:
    """A value as the tables print it: sizes in short, with evenly spaced runs as `first-last/step`."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        if value and all(isinstance(item, int) for item in value):
            return _show_sizes(value)
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _show_sizes(sizes: Sequence[int]) -> str:
    parts: list[str] = []
    start = 0
    while start < len(sizes):
        end = start + 1
        while end + 1 < len(sizes) and sizes[end + 1] - sizes[end] == sizes[start + 1] - sizes[start]:
            end += 1
        if end < len(sizes) and end - start >= 3:
            parts.append(f"{sizes[start]}-{sizes[end]}/{sizes[start + 1] - sizes[start]}")
            start = end + 1
        else:
            parts.append(str(sizes[start]))
            start += 1
    return " ".join(parts)
