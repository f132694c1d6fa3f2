"""``Space``, ``Symbol`` and ``Database``, of the reference's page ``slapo``."""

from __future__ import annotations

from pathlib import Path

import pytest

import slapo
from tests.slapo.reference_pages import Page, each_name

TUNER = Page(slapo)


@TUNER.row("Database", "db_file_name=None")
def _(tmp_path: Path) -> None:
    memory = slapo.Database()
    memory.commit("a", {"throughput": 1.5})
    kept = slapo.Database(str(tmp_path / "results.json"))
    kept.commit("b", {"throughput": 2.5})
    assert (tmp_path / "results.json").exists()


@TUNER.row("Database.load", "self")
def _(tmp_path: Path) -> None:
    first, second = (slapo.Database(str(tmp_path / "results.json")) for _ in range(2))
    first.commit("a", {"throughput": 1.5})
    second.load()
    second.commit("b", {"throughput": 2.5})
    third = slapo.Database(str(tmp_path / "results.json"))
    third.load()
    assert {"a", "b"} <= set(third.db)


@TUNER.row("Database.commit", "self, key, data")
def _(tmp_path: Path) -> None:
    database = slapo.Database(str(tmp_path / "results.json"))
    database.commit("a", 1)
    database.commit("a", 2)
    assert database.db["a"] == 2


@TUNER.row("Space", "")
def _(tmp_path: Path) -> None:
    assert slapo.Space().next() is None


@TUNER.row("Space.create_symbol", "self, name, vals")
def _(tmp_path: Path) -> None:
    space = slapo.Space()
    size = space.create_symbol("size", [8, 16])
    assert not size.is_fixed()
    size = space.create_symbol("size", [32, 64])  # open: made anew, as its values may depend on what is fixed
    size.fix_at(1)
    space.create_symbol("size", [1, 2])  # fixed: nothing
    assert space.to_dict() == {"size": 64}


@TUNER.row("Space.next", "self")
def _(tmp_path: Path) -> None:
    space = slapo.Space()
    for name in ("size", "ratio"):
        space.create_symbol(name, [1, 2])
    found = []
    while (symbol := space.next()) is not None:
        found.append(symbol.name)
        symbol.fix_at(0)
    assert found == ["size", "ratio"]


@TUNER.row("Space.reset", "self")
def _(tmp_path: Path) -> None:
    space = slapo.Space()
    space.create_symbol("size", [1, 2]).fix_at(0)
    space.reset()
    with pytest.raises(Exception, match="size"):
        space.to_dict()


@TUNER.row("Space.to_dict", "self")
def _(tmp_path: Path) -> None:
    space = slapo.Space()
    space.create_symbol("size", [1, 2]).fix_at(1)
    assert space.to_dict() == {"size": 2}
    space.create_symbol("ratio", [0.5])
    with pytest.raises(Exception, match="ratio"):
        space.to_dict()


@TUNER.row("Space.clone", "self")
def _(tmp_path: Path) -> None:
    space = slapo.Space()
    space.create_symbol("size", [1, 2])
    other = space.clone()
    other.next().fix_at(1)
    assert other.to_dict() == {"size": 2}
    assert space.next().name == "size"


@TUNER.row("Space.cfg_dict_to_str", "cfg_dict")
def _(tmp_path: Path) -> None:
    text = slapo.Space.cfg_dict_to_str({"size": 8, "ratio": 0.5})
    assert all(part in text for part in ("size", "8", "ratio", "0.5"))


@TUNER.row("Space.log_space", "self, training_script_args, update_space_fn")
def _(tmp_path: Path) -> None:
    space = slapo.Space()

    def update(args: object, space: slapo.Space) -> slapo.Space:
        space.create_symbol("size", [8, 16])
        return space

    space.log_space({"model": "gpt2"}, update)
    space.create_symbol("size", [8, 16]).fix_at(0)
    assert space.to_dict() == {"size": 8}  # logging has left the space as it was


@TUNER.row("Symbol", "name, vals")
def _(tmp_path: Path) -> None:
    symbol = slapo.Symbol("size", [8, 16])
    assert symbol.name == "size"
    assert list(symbol.vals) == [8, 16]


@TUNER.row("Symbol.add", "self, val")
def _(tmp_path: Path) -> None:
    symbol = slapo.Symbol("size", [8])
    symbol.add(16)
    symbol.add(8)
    assert list(symbol.vals) == [8, 16]


@TUNER.row("Symbol.fix_at", "self, idx")
def _(tmp_path: Path) -> None:
    space = slapo.Space()
    space.create_symbol("size", [8, 16]).fix_at(1)
    assert space.to_dict() == {"size": 16}


@TUNER.row("Symbol.is_fixed", "self")
def _(tmp_path: Path) -> None:
    symbol = slapo.Symbol("size", [8])
    assert not symbol.is_fixed()
    symbol.fix_at(0)
    assert symbol.is_fixed()


SPACE = "create_symbol next reset to_dict clone cfg_dict_to_str log_space".split()


def test_no_name_is_waived() -> None:
    members = {"Database.load", "Database.commit", *(f"Space.{name}" for name in SPACE)}
    assert TUNER.calls.keys() == {"Database", "Space", "Symbol", "Symbol.add", "Symbol.fix_at", "Symbol.is_fixed", *members}


@each_name(TUNER)
def test_the_documented_arguments_are_taken(name: str) -> None:
    TUNER.check_arguments(name)


@each_name(TUNER)
def test_what_the_page_says_is_so(name: str, tmp_path: Path) -> None:
    TUNER.show(name, tmp_path)
