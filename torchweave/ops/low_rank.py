"""Low-rank adapters (LoRA, arXiv 2106.09685) of many requests in one batch: the op, and the tensors that it reads.

`torchweave::low_rank` adds to the output of a linear what the adapter of each row adds: y + B(A(x)), with the matrices of the row's
adapter in stacked tensors. These and the rows' indices keep their addresses, so that adapters come and go without a compilation or
a recording. Row by row as in Punica (arXiv 2310.18547) and S-LoRA (arXiv 2311.03285); a row without an adapter keeps its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchweave.ops.registry import define


def _low_rank_on_gpu(y: Tensor, x: Tensor, index: Tensor, a: Tensor, b: Tensor) -> Tensor:
    from torchweave.ops.kernels.low_rank import launch

    return launch(y, x, index, a, b)


def _fake(y: Tensor, x: Tensor, index: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return y.new_empty(y.shape)


@define("torchweave::low_rank", fake=_fake, cuda=_low_rank_on_gpu)
def low_rank(y: Tensor, x: Tensor, index: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """y `[..., N]` plus the products of adapters, contiguous; sums in float32 and rounds once.

    Args:
        x: `[..., K]`, the input of the linear that computed y, with as many rows.
        index: int32, one or more numbers than rows: 0 for none, s + 1 for the adapter in slot s.
        a: `[S, R, K]`, the first matrices of the adapters in S slots, with rows of zeros up to R.
        b: `[S, N, R]`, the second ones, times the adapter's scale.
    """
    out = y.clone(memory_format=torch.contiguous_format)
    rows, inputs = out.view(-1, out.shape[-1]), x.reshape(-1, x.shape[-1])
    chosen = index[: len(rows)]
    for number in chosen.unique().tolist():
        if number:
            at = (chosen == number).nonzero()[:, 0]
            hidden = inputs[at].float() @ a[number - 1].float().t()
            rows[at] = (rows[at].float() + hidden @ b[number - 1].float().t()).to(out.dtype)
    return out


@dataclass(frozen=True)
class AdapterPlace:
    """A linear that adapters may change: its stacked matrices, as of `low_rank`."""

    a: Tensor
    b: Tensor


@dataclass
class AdapterSlots:
    """Memory of the adapters that steps use, filled by name.

    Attributes:
        num_slots: adapters that one step may use.
        max_rank: largest rank of an adapter.
        index: int32 `[tokens of the largest step]`: 0 for none, s + 1 for the adapter in slot s; written before each step.
        linears: names of modules, by the identity of their weights.
        places: by the name of the linear, as the model's class names it.
        refusals: why other linears have no place, as a clause.
        part_of: makes of what an adapter adds to a linear, by its name, this rank's part.
        has_tensor: whether a whole tensor is that of the model by a name, as far as this rank has it.
    """

    num_slots: int
    max_rank: int
    index: Tensor
    linears: Mapping[int, str] = field(default_factory=dict)
    places: dict[str, AdapterPlace] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    part_of: Callable[[str, Any], Any] = lambda _, whole: whole
    has_tensor: Callable[[str, Tensor], bool] = lambda *_: False

    @classmethod
    def of(cls, model: nn.Module, num_slots: int, max_rank: int, max_tokens: int, device: torch.device) -> AdapterSlots:
        """Slots for the linears of a model; memory is allocated for those that `place` is called for."""
        linears: dict[int, str] = {}
        refusals: dict[str, str] = {}
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, Tensor) or isinstance(module, nn.Embedding):
                continue
            if (other := linears.setdefault(id(weight), name)) != name:  # an adapter may change one and not the other
                refusals |= {other: f"it has the weight of {name}", name: f"it has the weight of {other}"}
        index = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        return cls(num_slots, max_rank, index, linears, refusals=refusals)

    def place(self, name: str, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> AdapterPlace:
        """The place of a linear; a second call returns the first one's."""
        if name not in self.places:
            options = {"dtype": dtype, "device": self.index.device}
            self.places[name] = AdapterPlace(
                torch.zeros(self.num_slots, self.max_rank, num_inputs, **options),
                torch.zeros(self.num_slots, num_outputs, self.max_rank, **options),
            )
        return self.places[name]

    @property
    def num_bytes(self) -> int:
        """Memory of the matrices."""
        return sum(place.a.nbytes + place.b.nbytes for place in self.places.values())
