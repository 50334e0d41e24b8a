"""Equal layers are traced once; the graph equals that of a plain capture, which is also the fallback."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.canonical import canonical
from tests.compiler.toy import BOUNDARY, DYNAMIC, Layer, example, step, toy
from torchweave.compiler import compile_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)
MODE: Any = "backed_size_oblivious"


def captured_twice(module: nn.Module, mode: Any = MODE, inputs: Any = None, dynamic: Any = DYNAMIC) -> dict[str, Any]:
    """Capture a module with and without `trace_once`, compare the graphs, and return the `trace_once` event."""
    report = Report(show=False)
    inputs = inputs or example()
    once = capture(module, inputs, dynamic, mode, report)
    plain = capture(module, inputs, dynamic, mode, trace_once=False)
    assert canonical(once) == canonical(plain)
    assert [constant.source for _, constant in once.constants()] == [item.source for _, item in plain.constants()]
    events = report.select("trace_once")
    return events[0] if events else {}


@pytest.mark.parametrize("mode", ["backed_size_oblivious", "unbacked", "backed"])
def test_one_traced_layer_gives_the_graph_of_a_plain_capture(mode: Any) -> None:
    module = toy(layers=5)
    classes = [type(layer) for layer in module.layers]
    event = captured_twice(module, mode)
    assert (event["traced"], event["cloned"]) == (["layers.0"], 4)
    assert [type(layer) for layer in module.layers] == classes, "the module is restored"
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.layers)


def test_cloned_graph_compiles() -> None:
    module = toy(layers=5)
    compiled_graph = compile_graph(module, example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX)
    assert len({piece.digest for piece in compiled_graph.pieces}) == 3 and len(compiled_graph.pieces) == 6
    for tokens, rows in ((1, 1), (7, 3), (64, 5)):
        assert torch.equal(compiled_graph(call_op, *step(tokens, rows)), module(*step(tokens, rows)))


class _Block(nn.Module):
    """x -> x + w(x), with attributes and operations that a test adds."""

    def __init__(self, index: int, extra: Callable[[Any, Tensor], Tensor] | None = None, **facts: Any) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(8, 8)
        self.extra = extra
        for name, fact in facts.items():
            setattr(self, name, fact)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + (y if self.extra is None else self.extra(self, y))


class _Stack(nn.Module):
    def __init__(self, blocks: list[Any], call: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks, self.call = nn.ModuleList(blocks), call

    def forward(self, x: Tensor) -> Tensor:
        if self.call is not None:
            return self.call(self, x)
        for block in self.blocks:
            x = block(x)
        return x


def _stack(extra: Callable[[Any, Tensor], Tensor] | None = None, layers: int = 5, **options: Any) -> _Stack:
    torch.manual_seed(0)
    return _Stack([_Block(index, extra) for index in range(layers)], **options).eval().requires_grad_(False)


def _captured(module: nn.Module) -> dict[str, Any]:
    return captured_twice(module, inputs={"x": torch.zeros(6, 8)}, dynamic={"x": {0: "T"}})


def _scaled(block: Any, y: Tensor) -> Tensor:
    return y * (block.index + 1)


def _every_other(block: Any, y: Tensor) -> Tensor:
    return y.relu() if block.index % 2 else y.tanh()


_TABLE = [3.0, 3.0, 5.0, 3.0, 5.0]


def _by_table(block: Any, y: Tensor) -> Tensor:
    return y + _TABLE[block.index]


def _in_place(block: Any, y: Tensor) -> Tensor:
    return y.add_(1).mul_(2)


def test_layer_constant_in_arithmetic_prevents_cloning() -> None:
    assert not _captured(_stack(_scaled)).get("cloned")


def test_layers_that_differ_by_index_only_are_distinguished() -> None:
    event = _captured(_stack(_every_other))
    assert (event["traced"], event["cloned"]) == (["blocks.0", "blocks.1"], 3)
    event = _captured(_stack(_by_table))
    assert (event["traced"], event["cloned"]) == (["blocks.0", "blocks.2"], 3)


def test_in_place_operations_and_views_are_cloned() -> None:
    assert _captured(_stack(_in_place))["cloned"] == 4


def test_cloned_views_keep_their_base() -> None:
    """Operations between layers read placeholders while they are traced; their aliases must be those of the clones."""

    def through_views(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x[:, 1:3].add_(1)
        return x.view(-1)[1:]

    assert _captured(_stack(call=through_views))["cloned"] == 4

    class InPlace(_Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y[:, 2:].mul_(2)
            return y.view(-1)[:].view(-1, 8).add_(1)

    module = _Stack([InPlace(index) for index in range(5)]).eval().requires_grad_(False)
    assert _captured(module)["cloned"] == 4


def test_layer_that_returns_its_input_is_traced_each_time() -> None:
    class Same(_Block):
        def forward(self, x: Tensor) -> Tensor:
            x.add_(self.linear(x))
            return x[:, :]

    module = _Stack([Same(index) for index in range(5)]).eval().requires_grad_(False)
    event = captured_twice(module, inputs={"x": torch.zeros(6, 8)}, dynamic={"x": {0: "T"}})
    assert event["cloned"] == 0 and "returns one of its inputs" in event["why"]


def test_values_that_skip_layers_keep_their_readers() -> None:
    def skips(self: Any, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return kept[0] * kept[3] + kept[1] - x

    module = _stack(call=skips)
    assert _captured(module)["cloned"] == 4
    compiled_graph = compile_graph(module, {"x": torch.zeros(6, 8)}, {"x": {0: "T"}}, config=FX)
    x = torch.randn(9, 8)
    assert torch.equal(compiled_graph(call_op, x), module(x))


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [2, 0, 1, 4, 3]])
def test_layers_keep_the_order_of_forward(order: list[int]) -> None:
    def shuffled(self: Any, x: Tensor) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x

    event = _captured(_stack(call=shuffled))
    assert event["cloned"] == 4 or "is called before" in event["why"]


def test_a_layer_that_runs_twice_is_traced_as_often() -> None:
    def twice(self: Any, x: Tensor) -> Tensor:
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return x

    event = _captured(_stack(call=twice))
    assert (event["traced"], event["cloned"]) == (["blocks.1"], 3)


def test_layer_side_effects_are_detected() -> None:
    """Each layer reads a tensor that the previous one stored on a shared object, which is not among its arguments."""

    def through_a_box(block: Any, y: Tensor) -> Tensor:
        before = block.box.get("y")
        block.box["y"] = y
        return y if before is None else y + before

    box: dict[str, Tensor] = {}
    module = _Stack([_Block(index, through_a_box, box=box) for index in range(5)]).eval().requires_grad_(False)
    module.call = lambda self, x: ([x := block(x) for block in self.blocks], box.clear())[0][-1]
    report = Report(show=False)
    once = capture(module, {"x": torch.zeros(6, 8)}, {"x": {0: "T"}}, MODE, report)
    box.clear()
    plain = capture(module, {"x": torch.zeros(6, 8)}, {"x": {0: "T"}}, MODE, trace_once=False)
    assert canonical(once) == canonical(plain)


def test_tensor_shared_by_layers_stays_shared() -> None:
    shared = nn.Parameter(torch.randn(8), requires_grad=False)
    module = _stack(lambda block, y: y * block.shared)
    for block in module.blocks:
        block.shared = shared
    assert _captured(module)["cloned"] == 4


def test_lists_within_layers_and_sequences_are_found() -> None:
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)]
    module = nn.Sequential(*inner, nn.Linear(8, 3)).eval().requires_grad_(False)
    event = captured_twice(module, inputs={"input": torch.zeros(6, 8)}, dynamic={"input": {0: "T"}})
    assert (event["traced"], event["cloned"]) == (["0"], 3)


def test_layer_hooks_are_traced() -> None:
    module = _stack()
    module.blocks[2].register_forward_hook(lambda module, args, output: output * 3)
    event = _captured(module)
    assert event["cloned"] == 3
    for block in module.blocks:
        block.linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    _captured(module)


def test_forward_set_on_an_instance_is_traced_and_kept() -> None:
    module = toy(layers=4)
    for layer in module.layers:
        layer.forward = Layer.forward.__get__(layer)
    kept = [layer.forward for layer in module.layers]
    assert captured_twice(module)["cloned"] == 3
    assert [layer.forward for layer in module.layers] == kept


def test_untraceable_forward_gives_the_error_of_a_plain_capture() -> None:
    def branch(block: Any, y: Tensor) -> Tensor:
        return y if y.sum() > 0 else y + 1

    from torchweave.compiler.errors import TraceError

    with pytest.raises(TraceError, match="forward decides by the values of a tensor"):
        capture(_stack(branch), {"x": torch.zeros(6, 8)}, {"x": {0: "T"}}, MODE)


def test_repeated_layers_are_hidden_from_tracing() -> None:
    module = _stack()
    assert _captured(module)["cloned"] == 4
    compiled_graph = compile_graph(module, {"x": torch.zeros(6, 8)}, {"x": {0: "T"}}, config=FX)
    x = torch.randn(9, 8)
    assert torch.equal(compiled_graph(call_op, x), module(x))


def test_alternating_layers_are_traced_for_one_period() -> None:
    event = _captured(_stack(_every_other))
    assert (event["traced"], event["cloned"]) == (["blocks.0", "blocks.1"], 3)


def _mean(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = block(x)
    return x / len(self.blocks)


def _first_again(self: Any, x: Tensor) -> Tensor:
    first = x = self.blocks[0](x)
    for block in [*self.blocks][1:]:
        x = block(x)
    return x * first


def _one_in_the_middle(self: Any, x: Tensor) -> Tensor:
    kept = []
    for block in self.blocks:
        x = block(x)
        kept.append(x)
    return x + kept[len(kept) // 2]


def _something_between(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = block(x) + 1
    return x


def _no_operation_between(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = block(x).contiguous()
    return x


def _by_number(self: Any, x: Tensor) -> Tensor:
    for index in range(5):
        x = self.blocks[index](x)
    return x


def _backwards(self: Any, x: Tensor) -> Tensor:
    for index in (0, 4, 3, 2, 1):
        x = self.blocks[index](x)
    return x


def _all_from_the_input(self: Any, x: Tensor) -> Tensor:
    y = x
    for block in self.blocks:
        y = block(x)
    return y


@pytest.mark.parametrize(
    "call",
    [
        _mean,
        _first_again,
        _one_in_the_middle,
        _something_between,
        _no_operation_between,
        _by_number,
        _backwards,
        _all_from_the_input,
    ],
)
def test_code_around_the_layers_is_traced_in_full(call: Any) -> None:
    assert _captured(_stack(call=call))["cloned"] == 4


class _Pair(_Block):
    def forward(self, x: Tensor, y: Tensor, masks: tuple[Tensor, ...] = (), *, scale: Any = None) -> Any:
        z = self.linear(x) + y
        return {"x": z * masks[0] if masks else z, "rest": (y + z, None)}


def _pairs(call: Callable[[Any, Tensor], Tensor]) -> _Stack:
    torch.manual_seed(0)
    return _Stack([_Pair(index) for index in range(5)], call).eval().requires_grad_(False)


def test_layer_inputs_and_outputs_may_be_nested() -> None:
    def call(self: Any, x: Tensor) -> Tensor:
        masks, y = (x.relu(), x.tanh()), x.exp()
        for block in self.blocks:
            out = block(x, y, masks, scale=masks[1])
            x, (y, _) = out["x"], out["rest"]
        return x - y

    assert _captured(_pairs(call))["cloned"] == 4

    def crossed(self: Any, x: Tensor) -> Tensor:
        y = x.exp()
        for block in self.blocks:
            out = block(x, y)
            x, y = out["rest"][0], out["x"]
        return x - y

    assert _captured(_pairs(crossed))["cloned"] == 4


def test_a_layer_that_returns_one_tensor_twice_is_traced_each_time() -> None:
    class Twice(_Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            return y, y[:]

    def call(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, y = block(x)
            y.add_(1)
        return x

    module = _Stack([Twice(index) for index in range(5)], call).eval().requires_grad_(False)
    event = captured_twice(module, inputs={"x": torch.zeros(6, 8)}, dynamic={"x": {0: "T"}})
    assert event["cloned"] == 0 and "share memory" in event["why"]


def test_layers_may_have_individual_inputs() -> None:
    def by_turns(self: Any, x: Tensor) -> Tensor:
        masks, y = ((x.relu(),), (x.tanh(),)), x.exp()
        for index, block in enumerate(self.blocks):
            x = block(x, y, masks[index % 2])["x"]
        return x

    assert _captured(_pairs(by_turns))["cloned"] == 4


def test_layers_are_restored_when_tracing_fails() -> None:
    from torchweave.compiler.errors import TraceError

    def call(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.view(-1) if x.sum() > 0 else x

    module = _stack(call=call)
    with pytest.raises(TraceError):
        capture(module, {"x": torch.zeros(6, 8)}, {"x": {0: "T"}}, MODE)
    assert {type(block) for block in module.blocks} == {_Block}


def _work(module: nn.Module, inputs: Any, dynamic: Any) -> Counter[str]:
    """The work of a capture: instructions that Dynamo traces, and operations on fake tensors."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._subclasses.fake_tensor import FakeTensorMode

    seen: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return original(*args, **kwargs)

        patch.setattr(owner, name, count)

    with pytest.MonkeyPatch.context() as patch:
        counted(InstructionTranslatorBase, "step")
        counted(FakeTensorMode, "dispatch")
        capture(module, inputs, dynamic, MODE)
    return seen


def test_traced_layer_is_one_call() -> None:
    """The toy computes its rotary angles in the loop over layers, which is traced."""
    few, many = (_work(toy(layers=layers), example(), DYNAMIC)["dispatch"] for layers in (4, 12))
    assert (many - few) / 8 < 10, f"{(many - few) / 8} operations on fake tensors for each further layer"
