"""`torchweave.compile` on modules of other people: what eager code may do, the compiled module does, or a sentence says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweave
from torchweave.compiler import TraceError
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)
INDUCTOR = TorchCompileConfig(compile_cache=False)


def module_of(forward: Any) -> nn.Module:
    return type("Module", (nn.Module,), {"forward": forward})()


def _set_items(self: nn.Module, v: Tensor, i: Tensor) -> Tensor:
    v = v * 1.5
    v[i] = v.clone()
    return v


def _index_copy_into_input(self: nn.Module, v: Tensor, i: Tensor) -> Tensor:
    v.index_copy_(0, i, v.clone())
    return v + 1


def _index_add_into_input(self: nn.Module, v: Tensor, i: Tensor) -> Tensor:
    v.index_add_(0, i, v.clone())
    return v + 1


def _shift_rows(self: nn.Module, v: Tensor, i: Tensor) -> Tensor:
    v[1:].copy_(v[:-1].clone())
    return v[i]


WRITES = {
    "index_put": lambda m, i, x: m.index_put((i,), x),
    "accumulate": lambda m, i, x: m.index_put((i,), x, accumulate=True),
    "scatter": lambda m, i, x: m.scatter(0, i[:, None].expand(-1, m.shape[1]), x),
    "scatter_add": lambda m, i, x: m.scatter_add(0, i[:, None].expand(-1, m.shape[1]), x),
    "index_copy": lambda m, i, x: m.index_copy(0, i, x),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_not_fused_with_a_gather_by_its_index(name: str) -> None:
    """Stock torch.compile is wrong here: the sum misses what other iterations wrote; see `copy_before_write`."""

    def forward(self: nn.Module, x: Tensor, i: Tensor) -> Tensor:
        gathered = x.gather(0, i[:, None].expand(-1, x.shape[1]))
        return WRITES[name](x * 1.0, i, x) + gathered

    module, dynamic = module_of(forward), {"x": {0: "T"}, "i": {0: "T"}}
    compiled = torchweave.compile(
        module, {"x": torch.randn(7, 4), "i": torch.arange(7)}, dynamic=dynamic, config=INDUCTOR
    )
    for rows in (2, 5, 33):
        x, i = torch.randn(rows, 4), torch.arange(rows).flip(0).roll(1)
        torch.testing.assert_close(compiled(x, i), module(x, i))


def _mask_after_index_copy(self: nn.Module, v: Tensor, i: Tensor) -> Tensor:
    w = v * 1.5
    w.index_copy_(0, i, w.clone())
    w[v > 1] = 0
    return w


def _clamp_after_scatter(self: nn.Module, v: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    w = v * 1.5
    w.scatter_(0, i[:, None].expand(-1, 4), w.clone())
    w.clamp_(min=-1)
    return nn.functional.layer_norm(v, (4,)).masked_fill(w > 1, 0.25), w


def _add_after_scatter_reduce(self: nn.Module, v: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    w = v * 1.5
    w.scatter_reduce_(0, i[:, None].expand(-1, 4), v, "sum")
    torch.add(w, v, out=w)
    return nn.functional.layer_norm(v, (4,)), w


def _add_after_scatter_into_columns(self: nn.Module, v: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    """Seed 2673 of the fuzzer: the write to a column has transposed memory, and scatter's result is contiguous."""
    w = v * 1
    w.t()[2].zero_()
    w.scatter_reduce_(0, i[:, None].expand(-1, 4), v, "sum")
    w.unsqueeze(0).squeeze_(0).sub_(0.25)
    return (w,)


@pytest.mark.parametrize(
    "forward",
    [_mask_after_index_copy, _clamp_after_scatter, _add_after_scatter_reduce, _add_after_scatter_into_columns],
)
def test_a_write_after_an_indexed_write_is_kept_after_it(forward: Any) -> None:
    """Inductor orders the second write first, or reads what is not yet written; see `copy_before_write`."""
    compiled = torchweave.compile(
        module_of(forward), {"v": torch.randn(5, 4), "i": torch.arange(5)}, {"v": {0: "T"}, "i": {0: "T"}}, INDUCTOR
    )
    for rows in (2, 5, 17):
        torch.manual_seed(rows)
        v, i = torch.randn(rows, 4), torch.randperm(rows)
        torch.testing.assert_close(compiled(v, i), forward(None, v, i))


def _write_into_flipped_input(self: nn.Module, v: Tensor, i: Tensor) -> Tensor:
    v.copy_(v.flip(0))
    v.t()[2].zero_()
    return v.sum(0) + i.sum()


@pytest.mark.parametrize(
    "forward",
    [_set_items, _index_copy_into_input, _index_add_into_input, _shift_rows, _write_into_flipped_input],
)
def test_a_copy_is_taken_before_its_source_is_written(forward: Any) -> None:
    """Inductor removes the copy and then writes in place: stock torch.compile is wrong here; see `copy_before_write`."""
    compiled = torchweave.compile(
        module_of(forward), {"v": torch.randn(5, 4), "i": torch.arange(5)}, {"v": {0: "T"}, "i": {0: "T"}}, INDUCTOR
    )
    for rows in (1, 5, 33):
        torch.manual_seed(rows)
        v, i = torch.randn(rows, 4), torch.randperm(rows)
        written = v.clone()
        expected = forward(None, v, i)
        torch.testing.assert_close(compiled(written, i), expected)
        torch.testing.assert_close(written, v)


class _WritesByMask(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4) if kind == "Linear" else getattr(nn, kind)(4, 4, batch_first=True)

    def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        m = x * 1
        read = self.layer(m[:, None])
        m[i % 3 == 0] = 2
        return (read if isinstance(read, Tensor) else read[0]), m


@pytest.mark.parametrize("kind", ["Linear", "GRU", "LSTM", "RNN"])
@torch.no_grad()
def test_what_was_read_before_a_write_by_a_mask_is_not_what_was_written(kind: str) -> None:
    """Seed 1524 of the fuzzer: Inductor let the layer read the written tensor."""
    module, inputs = _WritesByMask(kind).eval(), {"x": torch.randn(5, 4), "i": torch.arange(5)}
    compiled = torchweave.compile(
        module, inputs, {"x": {0: "T"}, "i": {0: "T"}}, TorchCompileConfig(compile_cache=False)
    )
    torch.testing.assert_close(compiled(**inputs), module(*inputs.values()))


@pytest.mark.parametrize("config", [FX, INDUCTOR], ids=["fx", "inductor"])
def test_a_result_in_an_out_argument_has_its_strides(config: TorchCompileConfig) -> None:
    """Seed 6024 of the fuzzer: stock torch.compile returns the strides of the sum, which are transposed."""

    def forward(self: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        m = x * 1
        torch.add((x.t() * 2).contiguous().t(), y, out=m)
        return m, m[1:], torch.mul(m, m, out=x)

    inputs = {"x": torch.randn(5, 4), "y": torch.randn(5, 4)}
    compiled = torchweave.compile(module_of(forward), inputs, {"x": {0: "T"}, "y": {0: "T"}}, config)
    for rows in (2, 5, 17):
        x, y = torch.randn(rows, 4), torch.randn(rows, 4)
        written, expected = x.clone(), forward(None, x, y)  # type: ignore[arg-type]
        results = compiled(written, y)
        torch.testing.assert_close((*results, written), (*expected, x))
        assert [each.stride() for each in results] == [each.stride() for each in expected]


@pytest.mark.parametrize("config", [FX, INDUCTOR], ids=["fx", "inductor"])
def test_several_results_in_out_arguments_have_their_strides(config: TorchCompileConfig) -> None:
    """Stock torch.compile returns LAPACK's vectors in columns."""

    def forward(self: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        values, vectors, largest, index = x.new_zeros(4), x.new_zeros(4, 4), x * 1, x.long()
        r = torch.linalg.eigh(x.t() @ x, out=(values, vectors))
        torch.cummax(x, 1, out=(largest, index))
        return r[0], vectors.square(), r.eigenvectors.abs(), largest, index, index[1:], torch.var_mean(x)[1]

    compiled = torchweave.compile(module_of(forward), {"x": torch.randn(5, 4)}, {"x": {0: "T"}}, config)
    for rows in (4, 5, 17):
        x = torch.randn(rows, 4)
        results, expected = compiled(x), forward(None, x)  # type: ignore[arg-type]
        torch.testing.assert_close(results, expected, atol=1e-4, rtol=1e-4)
        assert [each.stride() for each in results] == [each.stride() for each in expected]


def test_a_piece_that_fails_an_assertion_of_inductor_runs_as_fx_code() -> None:
    def forward(self: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x[:, 1:3] += (y + 1)[:, :2]
        return x[y > 1].sum(), x

    inputs = {"x": torch.randn(5, 4), "y": torch.randn(5, 4)}
    compiled = torchweave.compile(module_of(forward), inputs, {"x": {0: "T"}, "y": {0: "T"}}, INDUCTOR)
    for rows in (2, 5, 17):
        x, y = torch.randn(rows, 4), torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x.clone(), y), forward(None, x, y))  # type: ignore[arg-type]


def test_a_piece_for_which_inductor_s_pattern_fails_runs_as_fx_code() -> None:
    """Stock torch.compile raises: Inductor's pattern of `x[torch.randperm(n)]` lacks an input where n is dynamic."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x[torch.randperm(x.shape[0])]

    compiled = torchweave.compile(module_of(forward), {"x": torch.randn(5, 4)}, {"x": {0: "T"}}, INDUCTOR)
    for rows in (1, 2, 9):
        x = torch.randn(rows, 4)
        torch.manual_seed(rows)
        result = compiled(x)
        torch.manual_seed(rows)
        assert torch.equal(result, forward(None, x))  # type: ignore[arg-type]


def test_returned_linears_have_their_own_memory() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.q(x), self.k(x).view(-1, 4)

    module, x = Heads(), torch.randn(7, 16)
    compiled = torchweave.compile(module, {"x": x[:3]}, {"x": {0: "T"}}, FX)
    for got, expected in zip(compiled(x), module(x), strict=True):
        assert got.stride() == expected.stride() and got.untyped_storage().nbytes() == got.nbytes
        torch.testing.assert_close(got.view(-1), expected.view(-1))


class _Difference(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x - y


class _Optional(nn.Module):
    def forward(self, mask: Tensor | None = None, x: Tensor | None = None, scale: float = 2.0, y: Any = None) -> Tensor:
        assert x is not None
        return (x if mask is None else x * mask) * scale + (0 if y is None else y)


def test_optional_arguments_before_tensors_keep_their_defaults() -> None:
    x, y = torch.randn(2, 3)
    compiled = torchweave.compile(_Optional(), {"x": x, "y": y}, {"x": {0: "T"}, "y": {0: "T"}}, FX)
    for result in (compiled(x, y), compiled(y=y, x=x)):
        assert torch.equal(result, 2 * x + y)
    with pytest.raises(ValueError, match=r"^inputs must be named in forward's order: \['x', 'y'\], not \['y'\]$"):
        torchweave.compile(_Difference(), {"y": y}, config=FX)


def _views_of_a_reshaped_copy(self: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    v = x.permute(1, 0).reshape(-1, 8)
    return v.t(), v[:, 2:6], v[v.shape[0] // 2 :]


def _parts_of_a_copy(self: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    v = (x.t() + 1).reshape(-1, 8)
    return (*v.chunk(2, -1), x[x > 100].sum())


@pytest.mark.parametrize("config", [FX, INDUCTOR])
@pytest.mark.parametrize("forward", [_views_of_a_reshaped_copy, _parts_of_a_copy])
def test_returned_views_have_the_strides_and_the_memory_of_eager_code(forward: Any, config: TorchCompileConfig) -> None:
    """Inductor stores such a view densely, in memory of its own; see `result_views`."""
    compiled = torchweave.compile(module_of(forward), {"x": torch.randn(5, 8)}, {"x": {0: "T"}}, config)
    for rows in (2, 5, 17):
        x = torch.randn(rows, 8)
        results, expected = compiled(x), forward(None, x)
        torch.testing.assert_close(results, expected)
        assert [each.stride() for each in results] == [each.stride() for each in expected]
        results[0].zero_(), expected[0].zero_()
        torch.testing.assert_close(results, expected)


@pytest.mark.parametrize("config", [FX, INDUCTOR])
def test_overlapping_views_are_returned_as_views(config: TorchCompileConfig) -> None:
    def forward(self: nn.Module, slice: Tensor) -> tuple[Tensor, ...]:  # the name of a builtin
        v = (slice * 2).view(-1, 2, 4).transpose(0, 1)
        return v, v.unfold(2, 2, 1), v[:, : v.shape[1] - 1, ..., None]

    compiled = torchweave.compile(module_of(forward), {"slice": torch.randn(5, 8)}, {"slice": {0: "T"}}, config)
    for rows in (2, 5, 17):
        x = torch.randn(rows, 8)
        results, expected = compiled(x), forward(None, x)  # type: ignore[arg-type]
        results[0].add_(1), expected[0].add_(1)
        torch.testing.assert_close(results, expected)
        assert [each.stride() for each in results] == [each.stride() for each in expected]


@pytest.mark.parametrize("config", [FX, INDUCTOR])
def test_a_slice_that_begins_at_half_of_a_size_is_written(config: TorchCompileConfig) -> None:
    """torch's fake `copy_` asks whether the slice has more than one row, which excluded 2."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        v = x * 2
        v[v.shape[0] // 2 :] = x[v.shape[0] // 2 :]
        v[v.shape[0] // 2 :, ::2].add_(x[v.shape[0] // 2 :, 1::2])
        return v

    compiled = torchweave.compile(module_of(forward), {"x": torch.randn(5, 8)}, {"x": {0: "T"}}, config)
    for rows in (1, 2, 3, 4, 17):
        x = torch.randn(rows, 8)
        assert torch.equal(compiled(x), forward(None, x))  # type: ignore[arg-type]


def _write_columns(self: nn.Module, x: Tensor) -> Tensor:
    m, n = x * 2, x.shape[0]
    m[n // 2 :, 1:5] = x[n // 2 :, 1:5]
    m[n // 2 :, 1:3], m[: n // 2, 6] = 2.0, x[: n // 2, 0]
    return m


def _write_later_columns(self: nn.Module, x: Tensor) -> Tensor:
    m, n = x @ x.t(), x.shape[0]
    m[:, n // 2 :] = x[:, :1]
    m[n // 3 :, n // 2 :] *= 3
    return m


def _add_to_a_range(self: nn.Module, x: Tensor) -> Tensor:
    m, n = x * 2, x.shape[0]
    a, b, c = n // 3, n - 1, n // 4
    m[a:b, 2:] += x[a:b, 2:]
    m[c:, None, 1:3] += 1
    return m


def _write_from_the_end(self: nn.Module, x: Tensor) -> Tensor:
    m, n = x * 2, x.shape[0]
    m[-n:, 1:3] = 0.5
    m[-(n // 2) - 1 :, 2:] *= x[-(n // 2) - 1 :, 2:]
    m[1 - n :, ::2] -= 1
    return m


def _half_from_the_end(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    m, n = x * 2, x.shape[0]
    m[-(n // 2) :, 2:] += 1
    m[n - 3 :, ::2] = 0.0
    return m[-(n // 2) :] + 1, m[: -(n // 2)] * 2


def _write_other_columns_than_a_view(self: nn.Module, x: Tensor) -> Tensor:
    m = x @ x.t() @ x
    m[x.shape[0] // 3 :, 2:] += 1
    return m.cumsum(0)


def _narrow(self: nn.Module, x: Tensor) -> Tensor:
    half = x.shape[0] // 2
    return x.narrow(0, half, 1) * torch.cat([x[half:], x[:half]]) + torch.cat([x[half:], x[:half]])[:1]


@pytest.mark.parametrize("config", [FX, INDUCTOR], ids=["fx", "inductor"])
@pytest.mark.parametrize(
    "forward",
    [
        _write_columns,
        _write_later_columns,
        _add_to_a_range,
        _write_from_the_end,
        _write_other_columns_than_a_view,
        _narrow,
    ],
)
def test_slices_that_begin_at_a_part_of_a_size(forward: Any, config: TorchCompileConfig) -> None:
    """torch does not know that a half of a size is no larger than the size, and asks whether such slices have two rows."""
    compiled = torchweave.compile(module_of(forward), {"x": torch.randn(5, 8)}, {"x": {0: "T"}}, config)
    for rows in (1, 2, 3, 4, 5, 8, 17):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), forward(None, x))


def _add_another_size(self: nn.Module, x: Tensor) -> Tensor:
    return x + x.new_ones(7, 8)


def _concatenate_other_columns(self: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([x, x.t()])


def _view_as_three_columns(self: nn.Module, x: Tensor) -> Tensor:
    return x.view(-1, 3)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (
            _add_another_size,
            r"`add` with symbolic sizes: The size of tensor a \(x\.shape\[0\]\) must match the size of tensor b \(7\) at .*; leave",
        ),
        (
            _concatenate_other_columns,
            r"`cat` with symbolic sizes: Sizes of tensors must match except in dimension 0\. Expected 8 .*; leave",
        ),
        (
            _view_as_three_columns,
            r"`view` with symbolic sizes: shape '\[-1, 3\]' is invalid for input of size 8\*x\.shape\[0\]; leave",
        ),
    ],
)
def test_an_operation_that_fails_for_symbolic_sizes_is_named(forward: Any, said: str) -> None:
    with pytest.raises(TraceError, match=rf"test_foreign_modules\.py:\d+: torch cannot run {said}") as error:
        torchweave.compile(module_of(forward), {"x": torch.randn(5, 8)}, {"x": {0: "T"}}, FX)
    assert "FakeTensor" not in str(error.value)


def test_casts_are_rounded_as_in_eager_code() -> None:
    """Inductor itself keeps float32 between operations of 16 bits."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return (x.bfloat16() * 3 + x.bfloat16()).float().sum(0)

    inputs = {"x": torch.randn(40, 8)}
    compiled = torchweave.compile(module_of(forward), inputs, {"x": {0: "T"}}, INDUCTOR)
    torch.testing.assert_close(compiled(inputs["x"]), forward(None, inputs["x"]))  # type: ignore[arg-type]


def _branch(self: nn.Module, x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        return x * 2
    return x + 1


def _branch_after_contiguous(self: nn.Module, x: Tensor) -> Tensor:
    if (y := x.t().contiguous().t()).shape[0] == 1:
        return y * 2
    return y + 1


def _branch_on_contiguity(self: nn.Module, x: Tensor) -> Tensor:
    if (y := x.t().contiguous().t()).is_contiguous():
        return y * 2
    return y + 1


def _write_after_reshape(self: nn.Module, x: Tensor) -> Tensor:
    y, m = (m := x * 1.0).t().reshape(-1, 4), m
    m.zero_()
    return y + 1


def _halves(self: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([part / part.shape[0] for part in x.chunk(2)]) * 2


def _squeeze(self: nn.Module, x: Tensor) -> Tensor:
    return x.squeeze(0) + 1


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (_branch, r"forward takes another path at {file}:{line} \(`if x\.shape\[0\] == 1:`\)$"),
        (_branch_after_contiguous, r"forward takes another path at {file}:{line} \(`if .*\.shape\[0\] == 1:`\)$"),
        (_branch_on_contiguity, r"forward takes another path at {file}:{line} \(`if .*\.is_contiguous\(\):`\)$"),
        (_write_after_reshape, r"forward takes another path at {file}:{line} \(`.*\.reshape\(-1, 4\), m`\)$"),
        (_squeeze, "forward drops a dimension by `squeeze` at {file}:{line}$"),
        (_halves, r"forward splits a tensor into another number of parts at {file}:{line} \(`.*x\.chunk\(2\).*`\)$"),
    ],
)
def test_a_size_of_one_is_excluded_by_the_line_that_excludes_it(forward: Any, said: str) -> None:
    compiled = torchweave.compile(module_of(forward), {"x": torch.zeros(5, 4)}, {"x": {0: "T"}}, FX)
    assert torch.equal(compiled(torch.ones(2, 4)), torch.full((2, 4), 2.0))
    line = forward.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=said.format(file=__file__, line=line)):
        compiled(torch.ones(1, 4))


class _Halves(nn.Module):
    forward = _halves


class _LastRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[-3:] + 1


@pytest.mark.parametrize(("cls", "smallest"), [(_Halves, 2), (_LastRows, 1)])
def test_a_graph_is_as_valid_with_the_compile_cache_as_without(cls: Any, smallest: int, tmp_path: Path) -> None:
    """Storing and loading it copied its fake tensors, which asked whether a part has one row, or begins behind the first one."""
    config = TorchCompileConfig(enable_inductor=False, compile_cache_dir=str(tmp_path))
    for source in ("dynamo", "cache"):
        report = Report(show=False)
        compiled = torchweave.compile(cls(), {"x": torch.zeros(5, 4)}, {"x": {0: "T"}}, config, report)
        assert report.select("capture")[0]["source"] == source and compiled.compiled_graph.sizes[0] == smallest
        for rows in (2, 3, 8):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x), cls()(x))


def _attends(self: nn.Module, x: Tensor) -> Tensor:
    return x.view(-1, 2, 4).transpose(0, 1).contiguous().view(-1, 4)


def test_a_size_of_one_is_valid_where_only_torch_asks_for_it() -> None:
    compiled = torchweave.compile(module_of(_attends), {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, FX)
    for rows in (1, 2, 7):
        x = torch.randn(rows, 8)
        assert torch.equal(compiled(x), _attends(None, x))  # type: ignore[arg-type]


def _linspace(self: nn.Module, y: Tensor) -> Tensor:
    z = y.relu()
    w = torch.linspace(0, 1, y.shape[0])
    return z[:5] * w[:, None][:5]


def test_the_line_that_fixes_a_size_is_named() -> None:
    line = _linspace.__code__.co_firstlineno + 2
    with pytest.raises(
        ValueError, match=rf"^{__file__}:{line}: T \(y\.shape\[0\]\) was fixed to 15 by `w = torch\.lins"
    ):
        torchweave.compile(module_of(_linspace), {"y": torch.zeros(15, 4)}, {"y": {0: "T"}}, FX)


def next_positive_power_of_2(x: int) -> int:
    """TensorRT-LLM's, without `bit_length`."""
    if x < 1:
        return 1
    n = x - 1
    for bits in (1, 2, 4, 8, 16, 32):
        n |= n >> bits
    return n + 1


@pytest.mark.parametrize("config", [FX, INDUCTOR])
def test_the_next_power_of_two_of_a_size(config: TorchCompileConfig) -> None:
    def forward(self: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        size = next_positive_power_of_2(x.shape[0])
        return nn.functional.pad(x, (0, 0, 0, size - x.shape[0])), x * size

    compiled = torchweave.compile(module_of(forward), {"x": torch.randn(5, 4)}, {"x": {0: "T"}}, config)
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33):
        x = torch.randn(rows, 4)
        for got, expected in zip(compiled(x), forward(None, x), strict=True):  # type: ignore[arg-type]
            assert torch.equal(got, expected)


def test_bit_length_of_a_size_is_refused_with_its_line() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x * (1 << (x.shape[0] - 1).bit_length())

    line = forward.__code__.co_firstlineno + 1
    said = (
        rf"^{__file__}:{line}: T \(x\.shape\[0\]\) was fixed to 5 by `return .*bit_length\(\)\)`, which needs a number"
    )
    with pytest.raises(ValueError, match=said):
        torchweave.compile(module_of(forward), {"x": torch.zeros(5, 4)}, {"x": {0: "T"}}, FX)


@pytest.mark.parametrize("config", [FX, INDUCTOR])
def test_unfold_and_reshape_by_the_shape_of_an_input(config: TorchCompileConfig) -> None:
    def forward(self: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return x.unfold(1, 20, 10).reshape(*y.shape[:-1], -1, 5)

    inputs = {"x": torch.zeros(5, 40), "y": torch.zeros(5, 3)}
    compiled = torchweave.compile(module_of(forward), inputs, {"x": {0: "T"}, "y": {0: "T"}}, config)
    for rows in (1, 2, 9):
        x, y = torch.randn(rows, 40), torch.randn(rows, 3)
        assert torch.equal(compiled(x, y), forward(None, x, y))  # type: ignore[arg-type]
