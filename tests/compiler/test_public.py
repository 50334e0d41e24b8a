"""`torchweave.compile` is a function after any import order; `torchweave.compiler` is the package."""

from __future__ import annotations

import copy
import functools
import gc
import runpy
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweave
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

ROOT = Path(__file__).parents[2]
FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)


_IMPORTS = """
import os, sys
import torch._dynamo, torch._inductor  # once for all, which takes seconds
for first in sys.argv[1:]:
    if os.fork() == 0:
        exec(first)
        import torchweave
        assert callable(torchweave.compile), first
        from torchweave import compile
        assert compile is torchweave.compile, first
        from torchweave.compiler import TraceError, compile_graph, eager_forward, open_cache
        from torchweave.compiler.runtime.cuda_graphs import GraphPool
        assert callable(compile_graph) and callable(eager_forward)
        sys.exit()
    assert os.wait()[1] == 0, first
"""


def test_compile_is_callable_after_any_import_order() -> None:
    firsts = (
        "import torchweave",
        "import torchweave.compiler",
        "from torchweave import compile",
        "import torchweave.compiler.backend",
    )
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS, *firsts], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_needs_no_torch() -> None:
    code = "import sys, torchweave; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "reduce-overhead"}, "cuda_graphs=True does what torch.compile's reduce-overhead does"),
        ({"fullgraph": True}, "leave it out: forward is always captured as one graph"),
        ({"backend": "inductor"}, "unless enable_inductor is false"),
        ({"dynamics": {}}, "did you mean dynamic"),
    ],
)
def test_a_keyword_of_torch_compile_is_refused_with_what_to_do(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(
        TypeError, match=f"compile got an unexpected keyword argument '{next(iter(options))}'; .*{sentence}"
    ):
        torchweave.compile(nn.Linear(8, 8), {"input": torch.randn(2, 8)}, **options)


def test_a_plain_module_with_a_dictionary_result() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
            y = self.linear(x) * scale
            return {"logits": y, "best": y.argmax(-1)}

    module = Head().eval()
    compiled = torchweave.compile(module, {"x": torch.zeros(3, 8), "scale": torch.ones(1)}, {"x": {0: "T"}}, FX)
    for tokens in (1, 2, 9):
        x = torch.randn(tokens, 8)
        got, want = compiled(x, torch.ones(1) * 2), module(x, torch.ones(1) * 2)
        assert torch.equal(got["logits"], want["logits"]) and torch.equal(got["best"], want["best"])
        assert not got["logits"].requires_grad


def test_builtin_boundary_op_needs_no_handler() -> None:
    from torchweave.ops.attention.op import attention

    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x * 2
            out = torch.empty_like(q)
            attention(q, q, q, out, 0, 0.5)
            return out + x

    module = Attends()
    compiled = torchweave.compile(module, {"x": torch.zeros(3, 2, 8)}, {"x": {0: "T"}}, FX)
    x = torch.randn(6, 2, 8)
    assert torch.equal(compiled(x), module(x)) and len(compiled.compiled_graph.pieces) == 2


@pytest.mark.parametrize(
    ("inputs", "dynamic", "said"),
    [
        ({}, None, "inputs must be example tensors"),
        ({"input": 3}, None, "inputs must be example tensors"),
        ([torch.zeros(3, 8)], None, "inputs must be example tensors"),
        ({"input": torch.zeros(3, 8)}, {"x": {0: "T"}}, "no input is named x; inputs are input"),
        ({"input": torch.zeros(3, 8)}, {"input": {2: "T"}}, "not 2: 'T', where input has 2 dimensions"),
        ({"input": torch.zeros(3, 8)}, {"input": {-2: "T"}}, "not -2: 'T', where input has 2 dimensions"),
        ({"input": torch.zeros(3, 8)}, {"input": {0: 3}}, "not 0: 3, where input has 2 dimensions"),
        ({"input": torch.zeros(3, 8)}, {"input": ["T"]}, "dynamic names dimensions of inputs, counted from 0"),
    ],
)
def test_invalid_example_inputs_are_rejected(inputs: Any, dynamic: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        torchweave.compile(nn.Linear(8, 4), inputs, dynamic, FX)


@pytest.mark.parametrize("given", [(), (3,), (torch.zeros(3, 8), torch.zeros(3, 8))])
def test_call_with_unknown_inputs_is_rejected(given: Any) -> None:
    compiled = torchweave.compile(nn.Linear(8, 4), {"input": torch.zeros(3, 8)}, {"input": {0: "T"}}, FX)
    with pytest.raises(ValueError, match=r"^expected one tensor for each of input, not "):
        compiled(*given)


class _Difference(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x - 2 * y


def test_inputs_are_given_by_name_as_well() -> None:
    x, y = torch.randn(2, 3, 4)
    compiled = torchweave.compile(_Difference(), {"x": x, "y": y}, config=FX)
    for result in (compiled(x, y), compiled(x, y=y), compiled(y=y, x=x)):
        assert torch.equal(result, x - 2 * y)
    for positional, named in (((), {"x": x}), ((x,), {"x": x}), ((x, y), {"y": y}), ((x,), {"z": y})):
        with pytest.raises(ValueError, match=r"^expected each of x, y once, not "):
            compiled(*positional, **named)


def test_a_function_is_refused_by_a_sentence() -> None:
    with pytest.raises(
        ValueError, match=r"^module must be a torch\.nn\.Module, not relu; call a function in the forward"
    ):
        torchweave.compile(torch.relu, {"input": torch.zeros(3)})  # pyright: ignore[reportArgumentType]


def _with_defaults(forward: Any) -> Any:
    """As transformers' decorators do: settings of the module become keyword arguments of the call."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs["scale"] = kwargs.get("scale", 3.0)
        return forward(self, *args, **kwargs)

    return wrapper


class _Decorated(nn.Module):
    @_with_defaults
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


def test_a_decorator_may_write_into_its_keyword_arguments() -> None:
    compiled = torchweave.compile(_Decorated(), {"x": torch.zeros(2, 3)}, {"x": {0: "T"}}, config=FX)
    assert torch.equal(compiled(torch.ones(5, 3)), torch.full((5, 3), 3.0))


def _renaming(forward: Any) -> Any:
    """As transformers' decorator of deprecated keywords does: it passes `self` on among the positional arguments."""

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "old" in kwargs:
            kwargs["new"] = kwargs.pop("old")
        return forward(*args, **kwargs)

    return wrapper


class _Renamed(nn.Sequential):
    @_renaming
    def forward(self, x: Tensor, new: float = 1.0) -> Tensor:
        return super().forward(x) * new


@pytest.mark.parametrize("hook", [False, True])
def test_a_decorator_may_take_self_among_its_arguments(hook: bool, tmp_path: Path) -> None:
    module = _Renamed(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    if hook:  # traced through `__call__`
        module.register_forward_hook(lambda module, args, output: output + 1)
    config = TorchCompileConfig(enable_inductor=False, compile_cache_dir=str(tmp_path))
    for source in ("dynamo", "cache"):
        report = Report(show=False)
        compiled = torchweave.compile(module, {"x": torch.zeros(2, 3)}, {"x": {0: "B"}}, config, report)
        assert report.select("capture")[0]["source"] == source
        for batch in (1, 2, 5):
            x = torch.randn(batch, 3)
            torch.testing.assert_close(compiled(x), module(x))


class _Recurrent(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(4, 6, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)[0])


@pytest.mark.parametrize(
    ("kind", "options"), [("LSTM", {"num_layers": 2, "bidirectional": True}), ("GRU", {}), ("RNN", {})]
)
def test_recurrent_layers_of_torch(kind: str, options: dict[str, Any]) -> None:
    module = _Recurrent(kind, **options).eval()
    compiled = torchweave.compile(module, {"x": torch.randn(4, 5, 4)}, {"x": {0: "B"}}, FX)
    for batch in (1, 2, 7):
        x = torch.randn(batch, 5, 4)
        torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("enable_inductor", [False, True])
@pytest.mark.parametrize(
    ("layer", "shape", "dims"),
    [(nn.Conv1d(4, 8, 3, padding=1), (2, 4, 16), {0: "B", 2: "T"}), (nn.Conv2d(3, 8, 3, 2), (2, 3, 9, 9), {0: "B"})],
)
def test_convolutions_of_any_batch_size(layer: nn.Module, shape: tuple[int, ...], dims: Any, enable_inductor: bool):
    """torch asks for the batch size to select an algorithm, which changes no result."""
    config = TorchCompileConfig(enable_inductor=enable_inductor, compile_cache=False)
    compiled = torchweave.compile(layer, {"input": torch.randn(shape)}, {"input": dims}, config=config)
    for batch in (1, 2, 16, 33):
        x = torch.randn(batch, *shape[1:])
        torch.testing.assert_close(compiled(x), layer(x))


def test_autocast_is_as_it_was_when_the_module_was_compiled() -> None:
    """A graph fixes autocast when it is compiled; a module reads it at each call."""
    module, x = nn.Linear(8, 4), torch.randn(3, 8)
    outside = torchweave.compile(module, {"input": x}, {"input": {0: "T"}}, FX)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torchweave.compile(module, {"input": x}, {"input": {0: "T"}}, FX)
        assert torch.equal(inside(x), module(x)) and inside(x).dtype is torch.bfloat16
        with pytest.raises(ValueError, match=r"^compiled with autocast off and called with autocast torch\.bfloat16; "):
            outside(x)
    with pytest.raises(ValueError, match=r"^compiled with autocast torch\.bfloat16 and called with autocast off; "):
        inside(x)


def test_woven_is_a_deprecated_alias_of_compiled_graph() -> None:
    compiled = torchweave.compile(nn.Linear(8, 4), {"input": torch.zeros(3, 8)}, {"input": {0: "T"}}, FX)
    with pytest.warns(DeprecationWarning, match=r"use `\.compiled_graph`"):
        assert compiled.woven is compiled.compiled_graph


class Scale(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def scaling(by: float) -> nn.Module:
    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(x)

        def scaled(self, x: Tensor) -> Tensor:
            return x * by

    return Scales()


def of_no_file(by: float) -> nn.Module:
    namespace = {"Scale": Scale}
    exec(f"class Cell(Scale):\n    def forward(self, x):\n        return x * {by}", namespace)
    cell: Any = namespace["Cell"]
    return cell(0.0)


@pytest.mark.parametrize(
    ("make", "kept"), [(Scale, True), (scaling, True), (of_no_file, False)], ids=["class", "made", "typed"]
)
def test_user_module_is_stored_in_the_compile_cache(make: Any, kept: bool, tmp_path: Path) -> None:
    config = TorchCompileConfig(enable_inductor=False, compile_cache_dir=str(tmp_path))
    outcomes = []
    for by in (2.0, 2.0, 3.0):
        report = Report(show=False)
        compiled = torchweave.compile(make(by), {"x": torch.zeros(5)}, {"x": {0: "T"}}, config, report)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), by))
        outcomes.append([each["outcome"] for each in report.select("cache") if each["entry"] == "graph"])
    miss = ["miss", "stored" if kept else "miss"]
    assert outcomes == [miss, ["hit"] if kept else miss, miss]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "compile_module.py"), run_name="__main__")
    assert "piece 0" in capsys.readouterr().out


# -- classes -----------------------------------------------------------------------------------------------------------


def make_gate(report: Report) -> type[nn.Module]:
    @torchweave.compile(dynamic={"x": {0: "T"}}, config=FX, report=report)
    class Gate(nn.Module):
        """A module of its own width."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor, scale: Tensor | None = None, note: str = "") -> Tensor:
            y = nn.functional.silu(self.linear(x)) * x
            return y if scale is None else y * scale

    return Gate


def test_modules_of_a_decorated_class_compile_at_their_first_call() -> None:
    report = Report(show=False)
    cls = make_gate(report)
    assert (cls.__name__, cls.__doc__) == ("Gate", "A module of its own width.")
    modules = [cls(4), cls(6)]
    assert not report.select("capture")
    with torch.no_grad():
        for module, width in zip(modules, (4, 6), strict=True):
            for rows in (5, 2, 9):
                x = torch.randn(rows, width)
                expected = nn.functional.silu(module.linear(x)) * x
                torch.testing.assert_close(module(x=x) if rows == 2 else module(x), expected)
    assert len(report.select("capture")) == 2  # one for each module, none for other sizes
    modules[0].linear.weight.data.fill_(0.5)  # written in place: the compiled module sees it
    x = torch.randn(3, 4)
    torch.testing.assert_close(modules[0](x), nn.functional.silu(modules[0].linear(x)) * x)


def test_a_decorated_module_is_part_of_a_module_that_is_compiled() -> None:
    inner, report = Report(show=False), Report(show=False)
    outer = nn.Sequential(make_gate(inner)(4), nn.ReLU())
    x = torch.randn(3, 4)
    compiled = torchweave.compile(outer, {"input": x}, {"input": {0: "T"}}, FX, report)
    expected = torch.relu(nn.functional.silu(outer[0].linear(x)) * x)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(compiled(x), expected)
    assert not inner.select("capture") and len(report.select("capture")) == 1


def test_decorated_modules_are_copied_and_dropped_like_others() -> None:
    gc.freeze()  # the collection below looks at new objects only: the others of this process take seconds
    module = make_gate(Report(show=False))(4)
    x = torch.randn(3, 4)
    first = module(x)
    twin = copy.deepcopy(module)
    twin.linear.weight.data.zero_()
    assert not torch.equal(twin(x), first) and torch.equal(module(x), first)
    gone = weakref.ref(module)
    del module
    gc.collect()
    gc.unfreeze()
    assert gone() is None


class _Starred(nn.Module):
    def forward(self, *tensors: Tensor) -> Tensor:
        return tensors[0] + 1


def test_bad_uses_of_compile_are_one_sentence() -> None:
    gate = make_gate(Report(show=False))(4)
    x = torch.randn(3, 4)
    for use, words in (
        (lambda: gate(x, note="b"), "takes tensors only, but note is a str"),
        (
            lambda: torchweave.compile(_Starred(), {"x": x}),
            "forward of _Starred has no named parameter for x; name its tensors",
        ),
        (
            lambda: torchweave.compile(_Starred)()(x),
            "takes named parameters only, but this call gives values to tensors",
        ),
        (
            lambda: torchweave.compile(torch.relu, {"x": x}),
            "module must be a torch.nn.Module, not relu",
        ),
        (lambda: torchweave.compile(dict), "expected a class of torch.nn.Module, not 'dict'"),
        (lambda: torchweave.compile(nn.ReLU()), "inputs must be example tensors by forward's parameter names"),
        (
            lambda: torchweave.compile(nn.ReLU(), {"input": x}, config=FX)(y=x),
            "expected each of input once, not y",
        ),
        (
            lambda: torchweave.compile(nn.ReLU(), {"input": x}, config=FX)(x, input=x),
            "expected each of input once, not input, input",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            use()  # type: ignore[no-untyped-call]
        assert words in str(caught.value) and "\n" not in str(caught.value)
    compiled = torchweave.compile(nn.ReLU(), {"input": x}, config=FX)
    torch.testing.assert_close(compiled(input=x), torch.relu(x))


def test_config_may_be_a_dict() -> None:
    module, x = nn.Linear(4, 4), torch.ones(2, 4)
    compiled = torchweave.compile(module, {"input": x}, config={"enable_inductor": False, "compile_cache": False})
    torch.testing.assert_close(compiled(x), module(x))
    assert repr(compiled) == "CompiledModule(inputs=(input), pieces=1)"
    with pytest.raises(
        ValueError, match=r"compile_cache_dir='None' is not the name of a folder; set compile_cache=False"
    ):
        torchweave.compile(Scale(2.0), {"x": torch.zeros(5)}, config={"compile_cache_dir": "None"})
    with pytest.raises(ValueError, match=r"unknown option enable_inducter; did you mean enable_inductor\?"):
        torchweave.compile(module, {"input": x}, config={"enable_inducter": False})
