"""The compile cache: keys depend on every factor and nothing else; a damaged file is a miss with one warning."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile

import torchweave
from tests.compiler import toy as toy_module
from tests.compiler.toy import BOUNDARY, DYNAMIC, example, step, toy
from torchweave import version
from torchweave.compiler import CompileCache, compile_graph, open_cache
from torchweave.compiler.cache.keys import (
    MISSING,
    describe_module,
    graph_factors,
    machine,
    piece_factors,
    source_digests,
)
from torchweave.compiler.cache.maintenance import clear_unfinished
from torchweave.compiler.cache.store import FORMAT, MAGIC, read_entry
from torchweave.compiler.codegen.inductor import start_inductor_workers
from torchweave.compiler.eager_semantics.copy_before_write import CopyBeforeWrite
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

FX = TorchCompileConfig(enable_inductor=False)


@pytest.fixture
def report() -> Report:
    return Report(show=False)


def test_entry_round_trips(tmp_path: Path, report: Report) -> None:
    cache = CompileCache(tmp_path / "cache", report)
    cache.store("piece", {"a": 1}, b"payload", {"device_index": 0})
    entry = cache.load("piece", {"a": 1})
    assert entry is not None and entry.payload == b"payload" and entry.facts == {"device_index": 0}
    assert cache.load("graph", {"a": 1}) is None and cache.load("piece", {"a": 2}) is None
    (path,) = cache.entries()
    assert json.loads(path.read_bytes()[len(MAGIC) + 8 + 32 :].split(b"payload")[0])["factors"] == {"a": 1}, (
        "factors are printed"
    )
    assert not report.select("warning")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "payload is damaged"),
        (lambda data: data[:-3], "payload is damaged"),
        (lambda data: b"another program's file", "not a file of this cache"),
        (lambda data: b"", "not a file of this cache"),
        (lambda data: data.replace(b'"format":%d' % FORMAT, b'"format":9'), "header is damaged"),
        (lambda data: data.replace(b'"a":1', b'"a":2'), "header is damaged"),
        (lambda data: data[: len(MAGIC) + 20], "header is damaged"),
    ],
)
def test_damaged_file_is_a_miss_with_one_warning(tmp_path: Path, report: Report, damage: Any, why: str) -> None:
    cache = CompileCache(tmp_path / "cache", report)
    cache.store("piece", {"a": 1}, b"payload")
    (path,) = cache.entries()
    path.write_bytes(damage(path.read_bytes()))
    assert cache.load("piece", {"a": 1}) is None
    assert [why in event["why"] for event in report.select("warning")] == [True]
    cache.store("piece", {"a": 1}, b"payload")
    assert cache.load("piece", {"a": 1}) is not None


def test_entry_with_a_different_key_is_a_miss(tmp_path: Path, report: Report) -> None:
    cache = CompileCache(tmp_path / "cache", report)
    cache.store("piece", {"a": 1}, b"one")
    cache.store("piece", {"a": 2}, b"two")
    one, two = (cache.path("piece", read_entry(path).key) for path in cache.entries())
    two.write_bytes(one.read_bytes())
    assert [cache.load("piece", {"a": number}) is None for number in (1, 2)].count(True) == 1


def test_a_miss_names_the_factors_that_differ_from_the_nearest_entry(tmp_path: Path, report: Report) -> None:
    cache = CompileCache(tmp_path / "cache", report)

    def why(factors: dict[str, Any]) -> str:
        assert cache.load("piece", factors) is None
        return report.select("cache")[-1]["why"]

    now = {"torch": "2.11", "triton": "3.6", "piece": "a", "sizes": [1, 8], "more": {"b": (1, 2)}}
    assert why(now) == "not found"
    cache.store("graph", now, b"of another kind")
    assert why(now) == "not found"
    cache.store("piece", now | {"torch": "2.10", "triton": "3.5", "piece": "b"}, b"far")
    assert why(now) == "not found (the nearest entry has another piece, torch, triton)"
    cache.store("piece", now | {"torch": "2.10"}, b"near")
    assert why(now) == "not found (the nearest entry has another torch)"
    assert why(now | {"torch": "2.10", "streams": 2}) == "not found (the nearest entry has another streams)"
    for path in cache.entries():  # damaged files are not compared
        path.write_bytes(path.read_bytes()[: len(MAGIC)] + b"\xff" * 80)
    assert why(now | {"torch": "2.12"}) == "not found"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs file modes")
def test_world_writable_folder_is_rejected(tmp_path: Path, report: Report) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="chmod go-w"):
        CompileCache(folder, report)
    folder.chmod(0o700)
    for name in ("piece", "graph", "inductor"):
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
        with pytest.raises(ValueError, match=f"chmod go-w {folder / name}"):
            CompileCache(folder, report)
        (folder / name).chmod(0o700)
    fresh = CompileCache(tmp_path / "fresh", report)
    assert fresh.folder.stat().st_mode & 0o777 == 0o700


def test_config_selects_the_cache_folder(tmp_path: Path, report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    assert open_cache(TorchCompileConfig(compile_cache=False), report) is None
    cache = open_cache(TorchCompileConfig(compile_cache_dir=str(tmp_path / "here")), report)
    assert cache is not None and cache.folder == tmp_path / "here"
    (tmp_path / "file").write_text("")
    assert open_cache(TorchCompileConfig(compile_cache_dir=str(tmp_path / "file" / "below")), report) is None
    assert report.select("warning")
    assert "compile cache: disabled, so that every start compiles again" in capsys.readouterr().err


def test_without_a_home_folder_there_is_no_cache(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: str) -> str:
        return path  # as without HOME and without a passwd entry of the user id

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", homeless)
    assert open_cache(TorchCompileConfig(), report) is None
    assert ["no home folder" in each["why"] for each in report.select("warning")] == [True]
    with pytest.raises(ValueError, match="there is no home folder ~nobody; write the absolute path"):
        open_cache(TorchCompileConfig(compile_cache_dir="~nobody/cache"), report)


def test_unwritable_folder_gives_one_warning(tmp_path: Path, report: Report) -> None:
    cache = CompileCache(tmp_path / "cache", report)
    for kind in ("graph", "piece"):
        (tmp_path / "cache" / kind).write_text("")
    for number in range(3):
        cache.store("piece", {"a": number}, b"payload")
    cache.store("graph", {}, b"payload")
    assert len(report.select("warning")) == 1


def test_a_cache_that_is_removed_while_it_is_used_gives_one_warning(tmp_path: Path, report: Report) -> None:
    cache = CompileCache(tmp_path / "cache", report)
    cache.store("piece", {"a": 1}, b"payload")
    shutil.rmtree(tmp_path / "cache")
    assert cache.load("piece", {"a": 1}) is None
    for number in range(3):
        cache.store("piece", {"a": number}, b"payload")
    assert len(report.select("warning")) == 1 and not list(cache.entries())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_gives_one_warning_and_leaves_no_part(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    fdopen = os.fdopen

    def full(handle: int, mode: str) -> Any:
        os.dup2(os.open("/dev/full", os.O_WRONLY), handle)
        return fdopen(handle, mode)

    cache = CompileCache(tmp_path / "cache", report)
    monkeypatch.setattr("torchweave.compiler.cache.store.os.fdopen", full)
    for number in range(3):
        cache.store("piece", {"a": number}, b"payload" * 10_000)
    assert ["No space left" in each["why"] for each in report.select("warning")] == [True]
    assert list((tmp_path / "cache" / "piece").iterdir()) == []


KILLED_WRITER = """
import os, signal, sys
from torchweave.compiler.cache.store import CompileCache
from torchweave.report import Report
cache = CompileCache(sys.argv[1], Report(show=False))
cache.store("piece", {"a": 1}, b"payload")
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
cache.store("piece", {"a": 2}, b"payload")
"""


def test_a_killed_writer_leaves_whole_entries_only(tmp_path: Path, report: Report) -> None:
    folder = tmp_path / "cache"
    killed = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(folder)], timeout=60)
    assert killed.returncode == -signal.SIGKILL and len(list((folder / "piece").iterdir())) == 2
    cache = CompileCache(folder, report)
    assert cache.load("piece", {"a": 1}) is not None and cache.load("piece", {"a": 2}) is None
    cache.store("piece", {"a": 2}, b"payload")
    assert cache.load("piece", {"a": 2}) is not None and len(list(cache.entries())) == 2
    assert clear_unfinished(cache, older_than=-1) == 1 and not report.select("warning")


def test_concurrent_writers_leave_one_complete_entry(tmp_path: Path, report: Report) -> None:
    cache = CompileCache(tmp_path / "cache", report)
    payload = os.urandom(1 << 18)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: cache.store("piece", {"a": 1}, payload), range(32)))
    entry = cache.load("piece", {"a": 1})
    assert entry is not None and entry.payload == payload and not report.select("warning")
    assert [path.suffix for path in (tmp_path / "cache" / "piece").iterdir()] == [".weave"]


# -- factors -----------------------------------------------------------------------------------------------------------


def _factors(module: nn.Module, inputs: Any = None, dynamic: Any = DYNAMIC, **config: Any) -> str:
    factors = graph_factors(module, inputs or example(), dynamic, TorchCompileConfig(**config))
    return json.dumps(factors, sort_keys=True)


def test_factors_do_not_depend_on_weights() -> None:
    assert _factors(toy(seed=1)) == _factors(toy(seed=2))


def test_every_graph_factor_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    base = _factors(toy())
    changed = toy()
    changed.layers[1].heads = 8
    wider = {**example(), "logits_index": example()["logits_index"].int()}
    variants = [
        _factors(changed),
        _factors(toy(layers=2)),
        _factors(toy().to(torch.bfloat16)),
        _factors(toy().train()),
        _factors(toy(), wider),
        _factors(toy(), dynamic={**DYNAMIC, "logits_index": {0: "T"}}),
        _factors(toy(), dynamic_shapes="unbacked"),
    ]
    hooked = toy()
    hooked.norm.register_forward_hook(lambda module, args, output: output)
    variants.append(_factors(hooked))
    monkeypatch.setattr(torch, "__version__", "9.9")
    variants.append(_factors(toy()))
    assert len({base, *variants}) == len(variants) + 1


class _Settings:
    """Objects that a forward can read."""

    __slots__ = ("inner",)

    def __init__(self, inner: float) -> None:
        self.inner = inner

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.inner


def _scaling(by: float) -> Any:
    return lambda x: x * by


def _scaling_by_default(by: float) -> Any:
    def scaled(x: Tensor, by: float = by) -> Tensor:
        return x * by

    return scaled


class Pair(NamedTuple):
    one: int
    other: int


def _deep(inner: Any) -> Any:
    """A setting in nine nested lists and dicts, beside a list that contains itself."""
    around: list[Any] = []
    around.append(around)
    for level in range(9):
        inner = [inner] if level % 2 else {"next": inner, "itself": around}
    return inner


def _hidden(by: float) -> list[nn.Module]:
    module = nn.Module()
    module.scale = by  # type: ignore[assignment]
    return [module]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"_scale": 2.0}, {"_scale": 3.0}),
        ({"num_path": 2}, {"num_path": 3}),
        ({"act": partial(F.gelu, approximate="none")}, {"act": partial(F.gelu, approximate="tanh")}),
        ({"act": _scaling(2.0)}, {"act": _scaling(3.0)}),
        ({"act": _scaling_by_default(2.0)}, {"act": _scaling_by_default(3.0)}),
        ({"act": lambda x: x * 2}, {"act": lambda x: x * 3}),
        ({"act": _Settings(2.0).scaled}, {"act": _Settings(3.0).scaled}),
        ({"settings": _Settings(2.0)}, {"settings": _Settings(3.0)}),
        ({"order": range(3)}, {"order": range(4)}),
        ({"order": deque([1, 2])}, {"order": deque([2, 1])}),
        ({"part": slice(0, 2)}, {"part": slice(0, 3)}),
        ({"table": {1: 2.0}}, {"table": {"1": 2.0}}),
        ({"table": {"a": 1, "b": 2}}, {"table": {"b": 2, "a": 1}}),
        ({"path": "left"}, {"path": "right"}),
        ({"path": ["left"]}, {"path": ["right"]}),
        ({"order": [1, 2]}, {"order": (1, 2)}),
        ({"order": Pair(1, 2)}, {"order": (1, 2)}),
        ({"memory": torch.channels_last}, {"memory": torch.contiguous_format}),
        ({"deep": _deep([2])}, {"deep": _deep([3])}),
        ({"deep": _deep({"a": 2})}, {"deep": _deep({"a": 3})}),
        ({"modules_": _hidden(2.0)}, {"modules_": _hidden(3.0)}),
        ({"modules_": {"a": _hidden(2.0)}}, {"modules_": {"a": _hidden(3.0)}}),
    ],
)
def test_module_attributes_change_the_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    def factors(settings: dict[str, Any]) -> str:
        module = toy()
        for name, setting in settings.items():
            setattr(module.layers[0], name, setting)
        return _factors(module)

    assert factors(one) == factors(one) != factors(other)


class _Twice(nn.Module):
    def __init__(self, tie: Any) -> None:
        super().__init__()
        self.one, self.other, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(8)
        tie(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x)) * self.scale


@pytest.mark.parametrize(
    "tie",
    [
        lambda module: setattr(module.other, "weight", module.one.weight),
        lambda module: setattr(module, "other", module.one),
        lambda module: setattr(module, "scale", module.one.bias),
    ],
    ids=["weight", "module", "attribute"],
)
def test_tied_tensors_change_the_key(tie: Any, tmp_path: Path) -> None:
    """A graph reads one of two tied weights; a module of the same shapes may have two separate weights."""
    cache, x = CompileCache(tmp_path / "cache", Report(show=False)), torch.randn(3, 8)
    config = TorchCompileConfig(enable_inductor=False)
    for module in (_Twice(tie), _Twice(lambda _: None)):
        compiled_graph = compile_graph(module, {"x": torch.zeros(5, 8)}, {"x": {0: "T"}}, config=config, cache=cache)
        assert torch.equal(compiled_graph(call_op, x), module(x))


def test_global_torch_state_changes_the_key() -> None:
    cpu = torch.device("cpu")
    base = machine(cpu)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert machine(cpu) != base
    torch.set_default_dtype(torch.float64)
    try:
        assert machine(cpu) != base
    finally:
        torch.set_default_dtype(torch.float32)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert machine(cpu) != base
    finally:
        torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(True)
    try:
        assert machine(cpu) != base
    finally:
        torch.use_deterministic_algorithms(False)
    assert machine(cpu) == base


def test_edited_package_source_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash covers every file of the folders, so that new modules need not be listed."""
    folder = tmp_path / "compile"
    (folder / "nested").mkdir(parents=True)
    (folder / "nested" / "pass.py").write_text("a = 1\n")
    base = version.hash_folders([folder])
    for name, text in (("nested/pass.py", "a = 2\n"), ("new.py", ""), ("table.json", "{}")):
        before = version.hash_folders([folder])
        (folder / name).write_text(text)
        assert version.hash_folders([folder]) != before
    assert base != version.hash_folders([folder])
    with pytest.raises(FileNotFoundError, match="reinstall torchweave"):
        version.hash_folders([tmp_path / "nothing"])

    cpu, compiled_graph = (
        torch.device("cpu"),
        compile_graph(toy(), example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX),
    )
    graph, piece = _factors(toy()), piece_factors(compiled_graph.pieces[0], FX, cpu)
    monkeypatch.setattr("torchweave.version.package_source_hash", lambda: "edited")
    assert CopyBeforeWrite().uuid() == "edited", "Inductor has a cache of its own"
    assert _factors(toy()) != graph and piece_factors(compiled_graph.pieces[0], FX, cpu) != piece
    monkeypatch.undo()
    monkeypatch.setattr("torchweave.version.__version__", "9.9")
    assert _factors(toy()) != graph and piece_factors(compiled_graph.pieces[0], FX, cpu) != piece


def test_every_own_source_that_tracing_runs_is_hashed() -> None:
    package = Path(torchweave.__file__).parent
    assert all(any((package / folder).rglob("*.py")) for folder in version.HASHED_FOLDERS)
    with pytest.raises(ImportError, match=r"torchweave\.compiler\.no_such_module is part of torchweave"):
        source_digests(["torchweave.compiler.no_such_module"])
    assert source_digests(["no_such_package"]) == {"no_such_package": MISSING}


def test_every_piece_factor_changes_the_key() -> None:
    compiled_graph = compile_graph(toy(), example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX)
    cpu = torch.device("cpu")
    base = piece_factors(compiled_graph.pieces[0], TorchCompileConfig(), cpu)
    assert base == piece_factors(compiled_graph.pieces[0], TorchCompileConfig(), cpu)
    assert base != piece_factors(compiled_graph.pieces[1], TorchCompileConfig(), cpu)
    assert base != piece_factors(compiled_graph.pieces[0], TorchCompileConfig(debug=True), cpu)
    assert base != piece_factors(compiled_graph.pieces[0], TorchCompileConfig(dynamic_shapes="unbacked"), cpu)
    with torch._inductor.config.patch(max_autotune=True):
        assert base != piece_factors(compiled_graph.pieces[0], TorchCompileConfig(), cpu)
    assert {"torch", "triton", "python", "device"} <= set(machine(cpu))


def test_no_factor_holds_a_path_or_an_address() -> None:
    class Config:
        def __init__(self) -> None:
            self.hidden, self.name_or_path, self.nested = 3, "/somewhere/else", {"dir": "/x", "fn": torch.relu}
            self.cache_dir, self.log_file, self.where = ["/y/z"], {"a": "/w/x"}, Path("/v")
            self._original_object_hash = hash(object())  # transformers' configs keep theirs

    module = toy()
    module.config = Config()
    text = describe_module(module)
    assert (
        "hidden: 3" in text
        and "object_hash" not in text
        and not any(path in text for path in ("/somewhere", "/y", "/w", "/v"))
        and "/x" not in text
        and "0x" not in text
    )
    compiled_graph = compile_graph(toy(), example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX)
    assert str(Path(__file__).parent) not in json.dumps(
        piece_factors(compiled_graph.pieces[0], FX, torch.device("cpu"))
    )


# -- entries that compilation stores ------------------------------------------------------------------------------------


def _compile(
    cache: CompileCache, report: Report, module: nn.Module | None = None, config: TorchCompileConfig = FX
) -> Any:
    cache.report = report
    return compile_graph(
        module or toy(), example(), DYNAMIC, boundary_ops=BOUNDARY, config=config, cache=cache, report=report
    )


def test_a_warm_start_skips_dynamo_and_gives_the_same_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompileCache(tmp_path / "cache", Report(show=False))
    cold = _compile(cache, Report(show=False))
    monkeypatch.setattr("torchweave.compiler.backend.capture", lambda *args: pytest.fail("Dynamo ran"))
    report, module = Report(show=False), toy(seed=7)
    warm = _compile(cache, report, module)
    assert report.select("capture")[0]["source"] == "cache" and not report.select("warning")
    assert [piece.digest for piece in warm.pieces] == [piece.digest for piece in cold.pieces]
    assert torch.equal(warm(call_op, *step(7, 3)), toy(seed=7)(*step(7, 3))), "bound to the other module's weights"


def test_inductor_workers_start_during_capture_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[str] = []
    monkeypatch.setattr(AsyncCompile, "wakeup", lambda: woken.append("for a GPU"))
    with start_inductor_workers(torch.device("cpu")):
        pass
    assert woken == []
    with start_inductor_workers(torch.device("cuda")):
        pass
    assert woken == ["for a GPU"]

    def stop(*_: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(
        "torchweave.compiler.backend.start_inductor_workers", lambda device: nullcontext(woken.append(device.type))
    )
    monkeypatch.setattr("torchweave.compiler.backend.build_pieces", stop)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            compile_graph(
                toy(), example(), DYNAMIC, boundary_ops=BOUNDARY, cache=CompileCache(tmp_path, Report(show=False))
            )
    assert woken[1:] == ["cpu"]


def test_edited_source_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompileCache(tmp_path / "cache", Report(show=False))
    _compile(cache, Report(show=False))
    edited = tmp_path / "toy.py"
    edited.write_text(Path(str(toy_module.__file__)).read_text() + "\n# changed\n")
    monkeypatch.setattr(toy_module, "__file__", str(edited))
    report = Report(show=False)
    _compile(cache, report)
    assert report.select("capture")[0]["source"] == "dynamo"
    assert "source of tests.compiler.toy changed" in report.select("cache")[0]["why"]


def test_a_payload_that_does_not_load_is_a_miss(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "cache", Report(show=False))
    _compile(cache, Report(show=False))
    (path,) = cache.entries()
    entry = read_entry(path)
    cache.store("graph", entry.factors, b"no pickle", entry.facts)
    report = Report(show=False)
    compiled_graph = _compile(cache, report)
    assert report.select("capture")[0]["source"] == "dynamo" and len(report.select("warning")) == 1
    assert torch.equal(compiled_graph(call_op, *step(4, 1)), toy()(*step(4, 1)))


def test_unserializable_graph_is_compiled_without_an_entry(tmp_path: Path) -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, self.table

    report = Report(show=False)
    cache = CompileCache(tmp_path / "cache", report)
    compiled_graph = compile_graph(
        Loose(), {"x": torch.zeros(3, 4)}, {"x": {0: "T"}}, config=FX, cache=cache, report=report
    )
    assert torch.equal(compiled_graph(call_op, torch.zeros(2, 4))[1], torch.ones(4))
    assert any("not stored" in event.get("why", "") for event in report.select("cache"))


_PROCESS = """
import sys, torch
from tests.compiler.toy import *
from torchweave.compiler import CompileCache, compile_graph
from torchweave.compiler.runtime.forward import call_op
from torchweave.report import Report
report, module = Report(show=False), toy(layers=1, hidden=32)
want = module(*step(9, 4))
cache = CompileCache(sys.argv[1], report)
compiled_graph = compile_graph(module, example(), DYNAMIC, boundary_ops=BOUNDARY, cache=cache, report=report)
torch.testing.assert_close(compiled_graph(call_op, *step(9, 4)), want, rtol=2e-5, atol=2e-5)
print(report.select("capture")[0]["source"], [event["built"] for event in report.select("piece")], len(report.select("warning")))
generators = ("compile_fx", "decomposition", "lowering", "scheduler", "graph", "codegen.wrapper", "select_algorithm")
unwanted = (*(f"torch._inductor.{name}" for name in generators), "torch.export._trace", "networkx")
print([name for name in unwanted if name in sys.modules])
"""


def test_moved_folder_gives_a_warm_start_in_another_process(tmp_path: Path) -> None:
    """Built pieces come from the entries alone: the second process has another Inductor folder.

    Modules that generate code are not imported when code is only loaded.
    """

    def run(folder: Path, scratch: str) -> list[str]:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / scratch), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _PROCESS, str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip().splitlines()[-2:]

    how, generators = run(tmp_path / "cache", "one")
    assert how == "dynamo ['inductor', 'inductor'] 0" and "compile_fx" in generators
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    assert run(tmp_path / "elsewhere", "two") == ["cache ['cache', 'cache'] 0", "[]"]
