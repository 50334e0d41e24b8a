"""Entries of the compile cache: the captured graph of a module, and each built piece; both as bytes.

A graph's nodes are written as plain tuples: a pickler writes and reads those in C, but nodes one by one in Python.

    call(linear, (x, weight, None)) -> (2, "call_function", "linear_3", ("(", ("%", 4), ("%", 1), None), ("{",))

The first number is a node of a table graph, which holds each distinct operation once. For inputs, calls of methods and the
output it is their name.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from torchweave.compiler.cache.keys import MISSING, graph_factors, piece_factors, source_digests
from torchweave.compiler.cache.read_globals import global_digests
from torchweave.compiler.cache.store import CompileCache, key_of
from torchweave.compiler.codegen.inductor import load_kernels_in_process
from torchweave.compiler.codegen.inductor_artifact import (
    deserialize_code,
    rename_device,
    retarget_on_load,
    serialize_code,
)
from torchweave.compiler.codegen.pieces import BuiltPiece, compiled_fx_graph, fast_callable, generated_code
from torchweave.compiler.ir.fake_tensors import FakeTensorFactory, geometry
from torchweave.compiler.ir.graph import Binding, CapturedGraph, Constant, Input, OutputTree, Size, SourceError, resolve
from torchweave.compiler.ir.symbols import DynamicDims, value
from torchweave.compiler.partition.split import Piece
from torchweave.config.options import TorchCompileConfig


class GraphEntry:
    """The entry of one module's captured graph.

    The traced files and the globals that their code reads are known only after tracing: their hashes are stored with the graph
    and compared when it is loaded, so that an edited model file or a rebound function is a miss.
    """

    def __init__(
        self,
        cache: CompileCache,
        module: nn.Module,
        inputs: Mapping[str, Tensor],
        dynamic: DynamicDims,
        config: TorchCompileConfig,
    ) -> None:
        self.cache, self.module = cache, module
        self.device = next(iter(inputs.values())).device
        self.factors = graph_factors(module, inputs, dynamic, config)

    def load(self) -> CapturedGraph | None:
        entry = self.cache.load("graph", self.factors)
        if entry is None:
            return None
        traced = entry.facts["sources"]
        if changed := [name for name, digest in source_digests(traced).items() if digest != traced[name]]:
            self.cache.miss("graph", entry.key, f"the source of {', '.join(changed)} changed")
            return None
        read = entry.facts["globals"]
        now = global_digests(read)
        if changed := [name for name, digest in read.items() if now.get(name) != digest]:
            self.cache.miss("graph", entry.key, f"the global {', '.join(changed)} changed")
            return None
        try:
            graph = deserialize_graph(entry.payload, self.module, self.device)
        except Exception as error:  # unpickling may raise anything; a damaged entry must not stop a start
            self.cache.reject("graph", entry.key, f"cannot be loaded ({type(error).__name__}: {error})")
            return None
        self.cache.hit(entry)
        return graph

    def store(self, graph: CapturedGraph) -> None:
        sources = source_digests(graph.sources)
        try:
            if unreadable := [name for name, digest in sources.items() if digest == MISSING]:
                raise NotSerializableError(
                    f"the source of {unreadable[0]} was traced and cannot be read, so that a change of it would not be detected"
                )
            payload = serialize_graph(graph)
        except NotSerializableError as error:
            self.cache.miss("graph", key_of("graph", self.factors), f"not stored: {error}")
            return
        self.cache.store("graph", self.factors, payload, {"sources": sources, "globals": global_digests(graph.globals)})


class PieceEntry:
    """The entry of one distinct piece.

    The facts of passes that ran while the piece was built are stored with it, so that a warm start reports them too.

    Args:
        build: builds the piece.
        factors: key factors besides the piece and the config.
    """

    def __init__(
        self,
        cache: CompileCache,
        piece: Piece,
        config: TorchCompileConfig,
        device: torch.device,
        build: Callable[[], BuiltPiece],
        factors: Mapping[str, Any] | None = None,
    ) -> None:
        self.cache, self.piece, self.build = cache, piece, build
        self.write_readable = config.compile_cache_format == "unpacked"
        self.factors = {**piece_factors(piece, config, device), **(factors or {})}
        self.facts = {"device_index": device.index or 0}

    def load_or_build(self) -> BuiltPiece:
        """Load the piece, or build and store it."""
        return self._load() or self._build()

    def _load(self) -> BuiltPiece | None:
        begin = time.monotonic()
        entry = self.cache.load("piece", self.factors)
        if entry is None:
            return None
        try:
            built = deserialize_piece(
                entry.payload, self.piece, entry.facts["device_index"], self.facts["device_index"]
            )
        except Exception as error:  # Inductor may raise anything; a damaged entry must not stop a start
            self.cache.reject("piece", entry.key, f"cannot be loaded ({type(error).__name__}: {error})")
            return None
        self.cache.hit(entry)
        self._unpack(entry.key, built)
        passes, ranges = entry.facts.get("passes", ()), entry.facts.get("ranges", ())
        return replace(
            built,
            seconds=time.monotonic() - begin,
            passes=tuple(passes),
            ranges=tuple((low, high) for low, high in ranges),
            max_size=entry.facts["max_size"],
        )

    def _build(self) -> BuiltPiece:
        built = self.build()
        try:
            payload = serialize_piece(built)
        except NotSerializableError as error:
            self.cache.miss("piece", key_of("piece", self.factors), f"not stored: {error}")
            return built
        facts = {**self.facts, "passes": built.passes, "ranges": built.ranges, "max_size": built.max_size}
        key = self.cache.store("piece", self.factors, payload, facts)
        self._unpack(key, built)
        return built

    def _unpack(self, key: str, built: BuiltPiece) -> None:
        if self.write_readable:
            texts = {"fx.py": self.piece.module.code, "inductor.py": built.code}
            self.cache.unpack("piece", key, {**texts, "factors.json": json.dumps(self.factors, indent=1)})


NodeRow = tuple[int | str, str, str, Any, Any]
_CODE = b"torchweave-code\n"
"""Prefix of a payload that holds Inductor's code alone, not its artifact."""
_NAMED = ("placeholder", "call_method", "output")  # their targets are strings


class NotSerializableError(Exception):
    """An object cannot be serialized; the message gives the reason."""


def serialize_graph(graph: CapturedGraph) -> bytes:
    """A captured graph as bytes, its constants by Dynamo's sources.

    Raises:
        NotSerializableError: the graph holds a tensor without a source, or an object that cannot be pickled.
    """
    from torch.fx._graph_pickler import GraphPickler, Options

    if any(isinstance(leaf, Constant) for leaf in graph.output.leaves):
        raise NotSerializableError("forward returns a tensor of the module")
    bindings: dict[str, Any] = {}
    for name, binding in graph.bindings.items():
        if isinstance(binding, Constant) and not binding.source:
            raise NotSerializableError(f"{name} is a tensor that tracing created")
        bindings[name] = binding.source if isinstance(binding, Constant) else binding
    try:
        table, rows = _flatten_nodes(graph.module)
        with _without_guards(graph.fake_mode):
            values = _serialize_values(graph)
        module = GraphPickler.dumps((table, rows, *values), Options(ops_filter=None))
        output = (pytree.treespec_dumps(graph.output.spec), graph.output.leaves)
        symbols = (graph.symbols, graph.size_names)
        rest = (module, graph.inputs, bindings, output, symbols, graph.sources, graph.unused_inputs)
        return pickle.dumps(rest)
    except Exception as error:  # the pickler may raise anything
        raise NotSerializableError(f"{type(error).__name__}: {error}") from error


def deserialize_graph(payload: bytes, module: nn.Module, device: torch.device) -> CapturedGraph:
    """The graph that `serialize_graph` wrote, bound to `module`.

    Args:
        device: to run on; of the kind that the graph was captured on.

    Raises whatever unpickling raises, and SourceError.
    """
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler

    pickled, inputs, stored, output, symbols, sources, unused_inputs = pickle.loads(payload)
    mode = FakeTensorMode(shape_env=_without_guard_locations())
    with _without_guards(mode):
        table, rows, geometries, values = GraphPickler.loads(pickled, mode)  # type: ignore[misc]
    restored = _unflatten_nodes(table, rows)
    rename_device(restored.graph, device)
    with _without_guards(mode):
        _deserialize_values(restored, geometries, values, mode, device)
    roots = module_roots(module)
    bindings: dict[str, Binding] = {}
    fakes = {node.name: value(node) for node in restored.graph.nodes if node.op == "placeholder"}
    for name, binding in stored.items():
        if isinstance(binding, (Input, Size)):
            bindings[name] = binding
            continue
        tensor = resolve(binding, roots)
        fake = fakes[name]
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (fake.shape, fake.dtype):
            raise SourceError(f"{binding} has another shape or dtype than the stored graph")
        bindings[name] = Constant(tensor, binding)
    tree = OutputTree(pytree.treespec_loads(output[0]), output[1])
    names, size_names = symbols
    return CapturedGraph(restored, inputs, bindings, tree, names, size_names, sources, unused_inputs)


def _without_guards(mode: Any) -> contextlib.AbstractContextManager[None]:
    """Fake tensors are copied, not computed: which sizes a copy of one asks for is no condition of the graph."""
    return contextlib.nullcontext() if mode.shape_env is None else mode.shape_env.suppress_guards()


def _without_guard_locations() -> Any:
    """A shape environment whose guards have no source line: it is not read for a loaded graph, and to separate it from torch's
    own lines, torch imports 400 modules."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class Sizes(ShapeEnv):
        def _get_sloc(self, framework_loc: str | None = None) -> Any:
            return super()._get_sloc(framework_loc or "a graph of the compile cache")

    return Sizes()


def module_roots(module: nn.Module) -> dict[str, Any]:
    """The roots of the sources of a module's constants."""
    forward = getattr(module.forward, "__func__", module.forward)
    return {"L": {"self": module}, "G": forward.__globals__}


def _serialize_values(graph: CapturedGraph) -> tuple[list[Tensor], list[Any]]:
    """The distinct geometries of a graph's fake values, and the value of each node: a fake tensor as `("tensor", number of its
    geometry, number of its storage)`. Geometries are few, and slow to rebuild from bytes."""
    numbers: dict[tuple[Hashable, ...], int] = {}
    geometries: list[Tensor] = []
    storages: dict[int, int] = {}

    def dump(thing: Any) -> Any:
        if isinstance(thing, Tensor):
            kind = geometry(thing)
            if kind not in numbers:
                numbers[kind] = len(numbers)
                geometries.append(_compact_copy(thing))
            return ("tensor", numbers[kind], storages.setdefault(thing.untyped_storage()._cdata, len(storages)))
        if isinstance(thing, (tuple, list)):
            return (type(thing), *map(dump, thing))
        return thing

    return geometries, [dump(value(node)) for node in graph.graph.nodes]


def _deserialize_values(
    module: fx.GraphModule, geometries: Sequence[Tensor], values: Sequence[Any], mode: Any, device: torch.device
) -> None:
    storages = FakeTensorFactory(mode)

    def load(thing: Any) -> Any:
        if not isinstance(thing, tuple):
            return thing
        kind, *items = thing
        if kind == "tensor":
            like = geometries[items[0]]
            return storages.make(like, items[1], device if like.device.type == device.type else like.device)
        return kind(map(load, items))

    for node, stored in zip(module.graph.nodes, values, strict=True):
        if stored is not None:
            node.meta["example_value"] = load(stored)


def _compact_copy(thing: Tensor) -> Tensor:
    """A fake tensor of the same geometry in the smallest storage that holds it."""
    mode: Any = getattr(thing, "fake_mode", None)
    with mode:
        alone = torch.empty_strided(thing.size(), thing.stride(), dtype=thing.dtype, device=thing.device)
        if isinstance(offset := thing.storage_offset(), int) and offset == 0:
            return alone
        whole = torch.empty(offset + alone.untyped_storage().nbytes() // thing.element_size(), dtype=thing.dtype)
        bare = torch.empty(0, dtype=thing.dtype, device=thing.device)
        return bare.set_(whole.to(thing.device).untyped_storage(), offset, thing.size(), thing.stride())


def serialize_piece(built: BuiltPiece) -> bytes:
    """A built piece as bytes: Inductor's code, or its whole artifact when calls need AOTAutograd's wrapper.

    Raises:
        NotSerializableError: Inductor's result cannot be loaded again.
    """
    inner = compiled_fx_graph(built.artifact)
    try:
        if inner is not None and built.call is inner.current_callable:
            artifacts, _ = built.artifact._artifacts or (None, None)
            return _CODE + serialize_code(inner, artifacts)
        with _scratch() as path:
            built.artifact.save(path=str(path), format="binary")
            return path.read_bytes()
    except Exception as error:  # Inductor, the pickler and the disk may raise anything
        raise NotSerializableError(f"{type(error).__name__}: {error}") from error


def deserialize_piece(payload: bytes, piece: Piece, built_on: int = 0, runs_on: int = 0) -> BuiltPiece:
    """The piece that `serialize_piece` wrote, for the same GPU or another of its kind. Raises whatever Inductor raises.

    Args:
        built_on, runs_on: indices of the GPUs.
    """
    with load_kernels_in_process(kernels=any(isinstance(each, Tensor) and each.is_cuda for each in piece.examples())):
        if payload.startswith(_CODE):
            code = deserialize_code(payload.removeprefix(_CODE), built_on, runs_on)
            return BuiltPiece(piece.digest, code.current_callable, "cache", 0.0, code=code.source_code)
        from torch._inductor.standalone_compile import CompiledArtifact

        with _scratch() as path, retarget_on_load(built_on, runs_on):
            path.write_bytes(payload)
            artifact = CompiledArtifact.load(path=str(path), format="binary")
    code = generated_code(artifact)
    return BuiltPiece(piece.digest, fast_callable(artifact, piece.module), "cache", 0.0, code=code)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="torchweave-") as folder:
        yield Path(folder) / "artifact"


def _flatten_nodes(module: fx.GraphModule) -> tuple[fx.GraphModule, list[NodeRow]]:
    """The table of a graph's distinct operations, and its nodes as `(operation, kind, name, args, kwargs)`."""
    table, numbers, rows = fx.Graph(), dict[Any, int](), list[NodeRow]()
    argument = table.placeholder("argument")
    positions = {node: position for position, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        target: int | str = str(node.target)
        if node.op not in _NAMED:
            target = numbers.setdefault((node.op, node.target), len(table.nodes))
            if target == len(table.nodes):
                table.node_copy(node, lambda _: argument).meta = {}
        rows.append((target, node.op, node.name, _write(node.args, positions), _write(node.kwargs, positions)))
    table.output(argument)  # a graph of methods only has no other node, and an empty graph generates invalid code
    return fx.GraphModule(module, table, "Captured"), rows


def _unflatten_nodes(table: fx.GraphModule, rows: Sequence[NodeRow]) -> fx.GraphModule:
    """The inverse of `_flatten_nodes`."""
    targets = [node.target for node in table.graph.nodes]
    graph, nodes = fx.Graph(), list[fx.Node]()
    for target, kind, name, args, kwargs in rows:
        function = targets[target] if isinstance(target, int) else target
        nodes.append(graph.create_node(kind, function, _read(args, nodes), _read(kwargs, nodes), name))
    return _LazyGraphModule(table, graph, "Captured")


def _write(thing: Any, positions: Mapping[fx.Node, int]) -> Any:
    """A tuple with a leading tag, or a leaf."""
    if isinstance(thing, fx.Node):
        return ("%", positions[thing])
    if isinstance(thing, tuple):
        return ("(", *[_write(item, positions) for item in thing])
    if isinstance(thing, list):
        return ("[", *[_write(item, positions) for item in thing])
    if isinstance(thing, dict):
        return ("{", *[(key, _write(item, positions)) for key, item in thing.items()])
    if isinstance(thing, slice):
        return (":", *[_write(item, positions) for item in (thing.start, thing.stop, thing.step)])
    return thing


def _read(thing: Any, nodes: Sequence[fx.Node]) -> Any:
    if not isinstance(thing, tuple):
        return thing
    kind, *items = thing
    if kind == "%":
        return nodes[items[0]]
    if kind == "{":
        return {key: _read(item, nodes) for key, item in items}
    values = [_read(item, nodes) for item in items]
    if kind == ":":
        return slice(*values)
    return values if kind == "[" else tuple(values)
