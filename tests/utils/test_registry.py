"""Registries of plug points: names, likeness, entry points of packages, and errors that name the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchweave.utils.registry import PluginError, Registry

GROUP = "torchweave.test_things"


def install(folder: Path, package: str, points: str, code: str = "") -> None:
    """A package as pip would leave it: a module and the metadata of its entry points."""
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("acme_things", "acme_broken", "first", "second"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def registry(**builtin: str) -> Registry:
    return Registry("thing", GROUP, builtin, needs=("upper",))


def test_builtin_registered_and_installed_entries_are_found_by_name(site: Path) -> None:
    install(site, "acme-things", "remote = acme_things:VALUE", "VALUE = 'remote'")
    things = registry(own="string:digits")
    things.register("local", "here")
    assert (things.get("own"), things.get("local"), things.get("remote")) == ("0123456789", "here", "remote")
    assert things.names() == ("own", "local", "remote") and things.names(packages=[]) == ("own", "local")
    assert list(things.installed()) == [("local", "here"), ("remote", "remote")]
    assert things.get("string:hexdigits") == "0123456789abcdefABCDEF"
    things.unregister("local")
    assert not things.has("local") and things.has("string:hexdigits") and things.has("remote")


def test_entries_are_imported_only_when_they_are_asked_for(site: Path) -> None:
    install(site, "acme-broken", "broken = acme_broken:VALUE", "raise RuntimeError('no such driver')")
    things = registry(own="string:digits")
    assert things.has("broken") and things.get("own")
    with pytest.raises(PluginError, match=r"thing 'broken' of the package acme-broken .*RuntimeError: no such driver"):
        things.get("broken")


def test_packages_left_out_are_not_loaded_and_the_message_says_so(site: Path) -> None:
    install(site, "acme-things", "remote = acme_things:VALUE", "VALUE = 'remote'")
    things = registry()
    assert things.get("remote", packages=["Acme_Things"]) == "remote"
    assert not things.has("remote", packages=["other"])
    with pytest.raises(ValueError, match="the package acme-things has it, which the option plugins leaves out"):
        things.get("remote", packages=["other"])


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (
            "x = acme_things:MISSING",
            "package acme-things cannot be loaded: module acme_things has no attribute MISSING",
        ),
        ("x = acme_nothing:VALUE", "package acme-things cannot be imported .*acme_nothing.*update it or leave it out"),
        ("x = acme_things:NUMBER", "'x' of the package acme-things is no thing: it lacks upper"),
    ],
)
def test_errors_name_the_package(site: Path, points: str, message: str) -> None:
    install(site, "acme-things", points, "NUMBER = 1")
    with pytest.raises(PluginError, match=message):
        registry().get("x")


def test_two_packages_with_one_name_are_told_apart_by_the_option(site: Path) -> None:
    install(site, "first", "x = first:VALUE", "VALUE = 'a'")
    install(site, "second", "x = second:VALUE", "VALUE = 'b'")
    with pytest.raises(PluginError, match="in the packages first and second; uninstall one, or name it in plugins"):
        registry().get("x")
    assert registry().get("x", packages=["second"]) == "b"


def test_unknown_and_taken_names(site: Path) -> None:
    things = registry(digits="string:digits")
    with pytest.raises(ValueError, match=r"unknown thing 'digit'; did you mean digits\?"):
        things.get("digit")
    with pytest.raises(ValueError, match="'digits' exists already, of torchweave"):
        things.register("digits", "other")

    @things.register("decorated")
    class Decorated:
        upper = None

    assert things.get("decorated") is Decorated
