"""The plan: effective values, and the requested value and reason of every option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchweave.config.options import EngineConfig, PoolingType


@dataclass(frozen=True)
class PlanEntry:
    """One option: dotted name, requested value, effective value, and reason."""

    name: str
    requested: Any
    effective: Any
    why: str


@dataclass(frozen=True)
class Plan:
    """Resolved values of all options; `entries` lists requested value, effective value and reason per option.

    Attributes:
        quantization: quantization scheme of linears (`fp8_per_tensor`); None: unquantized.
        kv_cache_dtype: dtype of keys and values: `fp8_e4m3`, `fp8_e5m2` or a torch dtype's name.
        kv_offload_gb: host memory for blocks evicted from the device, in GiB; 0: none.
        batch_sizes: decode batch sizes recorded as whole-step graphs, ascending; empty: none.
        token_buckets: token counts recorded for context and mixed steps, ascending; empty: none.
        decode_graphs: record each decode batch size as one CUDA graph.
        piecewise_graphs: record pieces as CUDA graphs per token bucket, with boundary ops between them.
        full_mixed_graphs: record mixed steps as whole-step graphs too.
        inductor: compile pieces with Inductor instead of running plain FX code.
        compile_sizes: token counts for which pieces are also compiled with a static shape.
        fullgraph: capture the model as one graph instead of running it eagerly, split at boundary ops.
        max_num_streams: largest number of CUDA streams for a piece.
        userbuffers: write operands of collectives directly into symmetric memory.
        tune: measure kernel candidates without measurements before compiling.
        query_lens: the numbers of tokens that a decode row may have in a step with drafts, ascending; empty: no speculation.
        max_drafting_rows: most rows of a step with drafts.
        max_encoder_graphs: most sizes of images for which the image encoder is recorded; 0: none.
        pooling: how steps pool the hidden states of their rows; None: they sample tokens.
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
    query_lens: tuple[int, ...]
    max_drafting_rows: int
    max_encoder_graphs: int
    entries: tuple[PlanEntry, ...]
    pooling: PoolingType | None = None

    @property
    def query_len(self) -> int:
        """Most tokens of a decode row: the last token and drafts; 1: no speculation."""
        return max(self.query_lens, default=1)

    @property
    def history_len(self) -> int:
        """Tokens of each request that the device keeps, to look drafts up in; 0: none."""
        return self.max_model_len if self.query_len > 1 else 0

    @property
    def mixed_step_sizes(self) -> tuple[int, ...]:
        """Valid token counts of mixed steps; empty: any.

        Recorded sizes from `mixed_step_tokens` up, since a step between two is padded to the larger, then multiples of
        `mixed_step_tokens`.
        """
        least = self.mixed_step_tokens
        if not least:
            return ()
        recorded = tuple(size for size in self.token_buckets if size >= least)
        above = (recorded[-1] // least + 1) * least if recorded else least
        return (*recorded, *range(above, self.max_num_tokens + 1, least))

    def with_effective(self, name: str, effective: Any, why: str, **changes: Any) -> Plan:
        """A copy with another effective value of option `name` and the plan fields in `changes`."""
        assert any(entry.name == name for entry in self.entries), f"no option {name}"
        entries = tuple(
            replace(entry, effective=effective, why=why) if entry.name == name else entry for entry in self.entries
        )
        return replace(self, entries=entries, **changes)

    def table(self) -> str:
        """The entries as aligned text: option, asked, effective, why."""
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
    """Format a value for tables; evenly spaced runs of sizes become `first-last/step`."""
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
