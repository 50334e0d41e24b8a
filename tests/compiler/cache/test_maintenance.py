"""Maintenance of the compile cache: damaged files are never loaded, and entries can be exported and imported."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.toy import BOUNDARY, DYNAMIC, example, toy
from torchweave.cli.main import main
from torchweave.compiler import CompileCache, compile_graph
from torchweave.compiler.cache import store
from torchweave.compiler.cache.maintenance import export, find, import_archive, summaries, to_prune
from torchweave.compiler.cache.store import (
    BYTECODE_FOLDER,
    CODE_FOLDER,
    FORMAT,
    MAGIC,
    READABLE_FOLDER,
    UNFINISHED,
    key_of,
)
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    made = CompileCache(tmp_path / "cache", Report(show=False))
    for number in range(3):
        made.store("piece", {"number": number, "device": "cpu"}, bytes(100 * (number + 1)), {"device_index": 0})
    return made


def test_a_flipped_byte_anywhere_is_a_miss_with_one_warning(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "cache", Report(show=False))
    cache.store("piece", {"a": 1}, b"payload", {"device_index": 0})
    (path,) = cache.entries()
    whole = path.read_bytes()
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 0x20]) + whole[index + 1 :])
        cache.report = Report(show=False)
        assert cache.load("piece", {"a": 1}) is None, f"byte {index}"
        assert len(cache.report.select("warning")) == 1, f"byte {index}"
    path.write_bytes(whole)
    assert cache.load("piece", {"a": 1}) is not None


@pytest.mark.parametrize("moment", ["mkstemp", "write", "replace"])
def test_kill_during_a_write_leaves_no_partial_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A killed process runs no clean-up: no file is removed, no exception is handled."""

    class Killed(BaseException):
        pass

    class Half:
        def __init__(self, handle: int, mode: str) -> None:
            self.file = open(handle, mode)  # noqa: SIM115  closed by the kill

        def __enter__(self) -> Half:
            return self

        def __exit__(self, *exc: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            raise Killed

    def killed(*_: object, **__: object) -> None:
        raise Killed

    cache = CompileCache(tmp_path / "cache", Report(show=False))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        if moment == "write":
            patch.setattr(store.os, "fdopen", Half)
        else:
            patch.setattr(store.tempfile if moment == "mkstemp" else store.os, moment, killed)
        with pytest.raises(Killed):
            cache.store("piece", {"a": 1}, b"payload" * 100)
    after = CompileCache(tmp_path / "cache", Report(show=False))
    assert after.load("piece", {"a": 1}) is None and not after.report.select("warning"), (
        "as if nothing had been written"
    )
    after.store("piece", {"a": 1}, b"payload")
    assert after.load("piece", {"a": 1}) is not None
    assert len(list(after.entries())) == 1


def test_unpacked_writes_code_to_read_and_still_loads(tmp_path: Path) -> None:
    config = TorchCompileConfig(compile_cache_format="unpacked")
    cache = CompileCache(tmp_path / "cache", Report(show=False))
    compile_graph(toy(), example(), DYNAMIC, boundary_ops=BOUNDARY, config=config, cache=cache)
    folders = list((cache.folder / READABLE_FOLDER).iterdir())
    assert folders and all((folder / "factors.json").exists() for folder in folders)
    assert all("def forward" in (folder / "fx.py").read_text() for folder in folders)
    assert all("def call" in (folder / "inductor.py").read_text() for folder in folders)
    for folder in folders:  # nothing of it is ever run
        (folder / "inductor.py").write_text("raise SystemExit")
    report = Report(show=False)
    cache.report = report
    again = compile_graph(toy(), example(), DYNAMIC, boundary_ops=BOUNDARY, config=config, cache=cache, report=report)
    assert {built.built for built in again.built.values()} == {"cache"} and not report.select("warning")


# -- tools ---------------------------------------------------------------------------------------------------------------


def test_archive_round_trips_entries(cache: CompileCache, tmp_path: Path) -> None:
    file, elsewhere = tmp_path / "e.tar", CompileCache(tmp_path / "elsewhere", Report(show=False))
    assert export(cache, file, summaries(cache)) == 3
    assert import_archive(elsewhere, file) == (3, []) and import_archive(elsewhere, file) == (0, [])
    entry = elsewhere.load("piece", {"number": 2, "device": "cpu"})
    assert entry is not None and entry.payload == bytes(300)


def test_archive_paths_outside_the_cache_are_rejected(cache: CompileCache, tmp_path: Path) -> None:
    good = next(iter(cache.entries())).read_bytes()
    with tarfile.open(tmp_path / "e.tar", "w") as archive:
        for name, data in (("../../evil.weave", good), ("piece/x.weave", good[:-1]), ("notes.txt", b"")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    elsewhere = CompileCache(tmp_path / "deep" / "elsewhere", Report(show=False))
    added, faults = import_archive(elsewhere, tmp_path / "e.tar")
    assert added == 1 and len(faults) == 2 and "payload is damaged" in faults[0]
    assert not list(tmp_path.glob("*.weave")) and not list((tmp_path / "deep").glob("*.weave"))
    with pytest.raises(ValueError, match="not an archive"):
        import_archive(elsewhere, next(iter(cache.entries())))


@pytest.mark.parametrize("kind", ["../outside", "/outside", 5, None, ["piece"]])
def test_archive_entry_of_unknown_kind_is_rejected(tmp_path: Path, kind: Any) -> None:
    """The kind names the entry's folder, and the archive's author can forge a matching key."""
    kind = str(tmp_path / "outside") if kind == "/outside" else kind
    factors = {"a": 1}
    header = {"format": FORMAT, "kind": kind, "key": key_of(kind, factors), "factors": factors, "facts": {}}
    text = json.dumps({**header, "sha256": hashlib.sha256(b"").hexdigest(), "bytes": 0}).encode()
    entry = MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
    with tarfile.open(tmp_path / "e.tar", "w") as archive:
        member = tarfile.TarInfo("piece/e.weave")
        member.size = len(entry)
        archive.addfile(member, io.BytesIO(entry))
    added, (fault,) = import_archive(CompileCache(tmp_path / "cache", Report(show=False)), tmp_path / "e.tar")
    assert added == 0 and "is unknown" in fault and not list(tmp_path.rglob("*.weave"))


def test_truncated_archive_gives_a_one_line_error(cache: CompileCache, tmp_path: Path) -> None:
    export(cache, tmp_path / "e.tar", summaries(cache))
    packed = gzip.compress((tmp_path / "e.tar").read_bytes())
    (tmp_path / "e.tgz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match="is not an archive of a compile cache"):
        import_archive(cache, tmp_path / "e.tgz")


def test_pruning_removes_damaged_old_and_excess_entries(cache: CompileCache) -> None:
    paths = list(cache.entries())
    now = time.time()
    for age, path in enumerate(paths):
        os.utime(path, (now, now - 100 * age))
    every = list(summaries(cache))
    size = sum(each.num_bytes for each in every)
    pruned = lambda **asked: [  # noqa: E731
        each.path
        for each in to_prune(every, **{"older_than": None, "max_bytes": None, "everything": False, **asked}, now=now)
    ]
    assert pruned() == [] and pruned(older_than=150) == [paths[2]] and len(pruned(everything=True)) == 3
    assert pruned(max_bytes=size - 1) == [paths[2]], "the least recently used goes first"
    paths[0].write_bytes(b"damaged")
    every = list(summaries(cache))
    assert pruned() == [paths[0]]


def test_key_prefix_selects_an_entry(cache: CompileCache) -> None:
    (one,) = find(cache, [next(iter(cache.entries())).stem[:10]])
    assert one.entry is not None and one.entry.factors["device"] == "cpu"
    with pytest.raises(ValueError, match="no entry begins"):
        find(cache, ["zz"])
    with pytest.raises(ValueError, match="3 entries begin"):
        find(cache, [""])


def test_the_command_line(cache: CompileCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        code = main(["cache", *words, "--compile-cache-dir", str(cache.folder)])
        said = capsys.readouterr()
        return code, said.out, said.err

    assert "3 entries" in run("list")[1]
    listed = json.loads(run("list", "--json")[1])
    assert [entry["bytes"] > 100 for entry in listed["entries"]] == [True] * 3
    assert '"device": "cpu"' in run("inspect", listed["entries"][0]["key"][:8], "--json")[1]
    assert run("verify")[0] == 0
    assert run("export", str(tmp_path / "a.tar"))[:2] == (0, f"3 entries written to {tmp_path / 'a.tar'}\n")
    path = next(iter(cache.entries()))
    path.write_bytes(b"damaged")
    code, out, _ = run("verify")
    assert code == 1 and "2 of 3 entries are valid" in out
    (path.parent / f"{UNFINISHED}x").write_bytes(b"")
    os.utime(path.parent / f"{UNFINISHED}x", (0, 0))
    assert "1 entries" in run("prune", "--dry-run")[1] and path.exists()
    run("prune")
    assert not path.exists() and not (path.parent / f"{UNFINISHED}x").exists()
    assert run("import", str(tmp_path / "a.tar"))[1].startswith("1 new entries")
    for name in (CODE_FOLDER, BYTECODE_FOLDER):
        (cache.folder / name / "torch").mkdir(parents=True)
        (cache.folder / name / "torch" / "file").write_bytes(bytes(3 << 19))
    beside = ", and 3.0 MiB of compiled CPU code and bytecode"
    assert f"{beside}, in {cache.folder}\n" in run("list")[1]
    assert json.loads(run("list", "--json")[1])["side_bytes"] == 3 << 20
    assert beside not in run("prune", "--older_than", "1d")[1]
    assert f"{beside} would be removed\n" in run("prune", "--all", "--dry_run")[1]
    pruned = run("prune", "--all")[1]
    assert pruned.startswith("3 entries") and pruned.endswith(f"{beside} removed\n")
    assert not (cache.folder / CODE_FOLDER).exists() and not (cache.folder / BYTECODE_FOLDER).exists()
    for words, sentence in (
        (("prune", "--max-size", "many"), "--max_size='many' is not valid"),
        (("inspect",), "name an entry"),
        (("import", "nowhere.tar"), "there is no file nowhere.tar"),
        (("inspect", "00ff00ff"), "no entry begins"),
    ):
        code, _, err = run(*words)
        assert code == 2 and sentence in err and err.count("\n") == 1
    for action, folder, sentence in (
        ("list", tmp_path / "a.tar", "is not a folder; name the compile cache"),
        ("list", tmp_path / ("a" * 300), "File name too long; fix that, or choose another folder"),
        ("list", Path("~nobody-of-this-name/cache"), "there is no home folder ~nobody-of-this-name"),
        ("import", tmp_path / "a.tar" / "below", "Not a directory; fix that, or choose another folder"),
    ):
        file = [str(tmp_path / "a.tar")] if action == "import" else []
        assert main(["cache", action, *file, "--compile-cache-dir", str(folder)]) == 2
        err = capsys.readouterr().err
        assert sentence in err and err.count("\n") == 1
    (cache.folder / "graph").mkdir(exist_ok=True)
    (cache.folder / "graph" / f"{UNFINISHED}gone").symlink_to(
        "nowhere"
    )  # found, and no more there when it is looked at
    assert run("prune")[0] == 0
    assert main(["cache", "list", "--compile-cache-dir", str(tmp_path / "none")]) == 2
    assert "there is no compile cache" in capsys.readouterr().err
