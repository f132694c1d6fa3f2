"""Spaces: which symbol is next, and every configuration in the order of nested loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slapo_core import SlapoError
from slapo_tune import OpenSymbolError, Space, TuneError
from slapo_tune.search_space.space import Traversal


def space_of(**symbols: list[Any]) -> Space:
    space = Space()
    for name, vals in symbols.items():
        space.create_symbol(name, vals)
    return space


def test_a_fixed_symbol_is_kept_and_an_open_one_made_again() -> None:
    space = Space()
    symbol = space.create_symbol("batch_size", [8, 16])
    assert space.create_symbol("batch_size", [4, 2]) is symbol
    assert symbol.vals == [4, 2]
    symbol.fix_at(1)
    assert space.create_symbol("batch_size", [64]) == 2
    assert symbol.vals == [4, 2]


def test_next_is_the_first_open_symbol() -> None:
    space = space_of(batch_size=[8, 16], ckpt_ratio=[1.0])
    order = []
    while (symbol := space.next()) is not None:
        order.append(symbol.name)
        symbol.fix_at(0)
    assert order == ["batch_size", "ckpt_ratio"]
    assert space.to_dict() == {"batch_size": 8, "ckpt_ratio": 1.0}
    space.reset()
    assert (first := space.next()) is not None
    assert first.name == "batch_size"


def test_an_open_symbol_is_named_by_to_dict() -> None:
    space = space_of(batch_size=[8, 16], ckpt_ratio=[1.0, 0.5])
    space["batch_size"].fix_at(0)
    with pytest.raises(OpenSymbolError, match=r"to_dict\('ckpt_ratio'\): the symbol is open, .*\[1.0, 0.5\]"):
        space.to_dict()


def test_a_clone_is_fixed_alone() -> None:
    space = space_of(batch_size=[8, 16], ckpt_ratio=[1.0])
    space["batch_size"].fix_at(1)
    copied = space.clone()
    assert copied.fixed_values() == {"batch_size": 16}
    copied["ckpt_ratio"].fix_at(0)
    copied["ckpt_ratio"].add(0.5)
    assert not space["ckpt_ratio"].is_fixed()
    assert space["ckpt_ratio"].vals == [1.0]


def test_a_symbol_that_is_not_there_is_named() -> None:
    space = space_of(batch_size=[8])
    assert "batch_size" in space
    assert "bs" not in space
    with pytest.raises(SlapoError, match="no symbol 'batch_sise'; did you mean 'batch_size'"):
        space["batch_sise"]


def test_a_configuration_as_text() -> None:
    assert Space.cfg_dict_to_str({"batch_size": 8, "ckpt_ratio": 0.5}) == "(batch_size: 8, ckpt_ratio: 0.5)"
    assert Space.cfg_dict_to_str({}) == "()"


def classic(args: Mapping[str, Any], space: Space) -> Space:
    batch_size = space.create_symbol("batch_size", [8, int(args["largest"])])
    ckpt_ratio_cand = [1.0]
    if batch_size >= 32:
        ckpt_ratio_cand += [0.5]
    space.create_symbol("ckpt_ratio", ckpt_ratio_cand)
    return space


def test_the_space_is_printed_and_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    space = Space()
    space.log_space({"largest": "32"}, classic)
    assert capsys.readouterr().out.splitlines() == [
        "(batch_size: 8, ckpt_ratio: 1.0)",
        "(batch_size: 32, ckpt_ratio: 1.0)",
        "(batch_size: 32, ckpt_ratio: 0.5)",
        "space size: 3",
    ]
    assert space.next() is None


def test_symbols_made_by_hand_are_traversed_too() -> None:
    space = space_of(a=[1, 2], b=[3, 4])
    found = list(Traversal(space, {}, lambda args, space: None))
    assert found == [{"a": a, "b": b} for a, b in product([1, 2], [3, 4])]
    assert not space["a"].is_fixed()


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True), max_size=4))
def test_a_space_is_the_product_of_its_symbols(candidates: list[list[int]]) -> None:
    def update(args: Mapping[str, Any], space: Space) -> None:
        for place, vals in enumerate(candidates):
            space.create_symbol(f"s{place}", vals)

    found = [tuple(values.values()) for values in Traversal(Space(), {}, update)]
    assert found == list(product(*candidates))


VALUES = st.lists(st.integers(0, 5), min_size=1, max_size=3)
LEVEL = st.tuples(VALUES, st.integers(0, 3), st.integers(-1, 6), VALUES, st.booleans())
"""Candidates; the earlier symbol they depend on, counted back; above which value of it; the candidates added then; or the
symbol is there only then."""


def loops(levels: list[Any], chosen: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """The nested loops that a space stands for; -1 where a symbol is not there."""
    if len(chosen) == len(levels):
        yield chosen
        return
    vals, back, above, more, optional = levels[len(chosen)]
    met = bool(chosen) and chosen[max(0, len(chosen) - 1 - back)] > above
    present = [*vals, *(more if met else [])]
    for value in [-1] if chosen and optional and not met else dict.fromkeys(present):
        yield from loops(levels, (*chosen, value))


def dependent(levels: list[Any], space: Space) -> None:
    """The same as ``update_space``, which compares symbols."""
    symbols: list[Any] = []
    for place, (vals, back, above, more, optional) in enumerate(levels):
        met = bool(symbols) and symbols[max(0, place - 1 - back)] > above
        if symbols and optional and not met:
            symbols.append(-1)
        else:
            symbols.append(space.create_symbol(f"s{place}", [*vals, *(more if met else [])]))


@given(st.lists(LEVEL, min_size=1, max_size=4))
def test_candidates_may_depend_on_earlier_symbols(levels: list[Any]) -> None:
    found = list(Traversal(Space(), {}, lambda args, space: dependent(levels, space)))
    names = [f"s{place}" for place in range(len(levels))]
    assert [tuple(values.get(name, -1) for name in names) for values in found] == list(loops(levels))
    assert all(list(values) == sorted(values) for values in found)


@given(st.lists(LEVEL, min_size=1, max_size=3))
def test_a_script_that_asks_whether_a_symbol_is_fixed(levels: list[Any]) -> None:
    """Symbols made from open ones are forgotten where the fixed ones make others."""

    def update(args: Mapping[str, Any], space: Space) -> None:
        first = space.create_symbol("first", [0, 1])
        if not first.is_fixed():
            space.create_symbol("guess", [7])
        elif first == 1:
            dependent(levels, space)

    found = [tuple(values.values()) for values in Traversal(Space(), {}, update)]
    inner = [tuple(value for value in values if value != -1) for values in loops(levels)]
    assert found == [(0,), *((1, *values) for values in inner)]


@given(st.integers(1, 4), st.integers(1, 4), st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_the_rest_of_the_innermost_symbol_is_skipped(outer: int, inner: int, failing: set[tuple[int, int]]) -> None:
    expected = []
    for a in range(outer):
        for b in range(inner):
            expected.append((a, b))
            if (a, b) in failing:
                break
    traversal = Traversal(space_of(a=[*range(outer)], b=[*range(inner)]), {}, lambda args, space: space)
    found = []
    for values in traversal:
        found.append((values["a"], values["b"]))
        if found[-1] in failing:
            traversal.skip_rest()
    assert found == expected


def test_a_symbol_of_no_candidates_is_named_with_what_is_fixed() -> None:
    with pytest.raises(TuneError, match=r"symbol\('b'\): it has no candidates where \(a: 1\) is fixed; give it at least one"):
        list(Traversal(space_of(a=[1], b=[]), {}, lambda args, space: space))


def test_an_open_symbol_of_another_space_does_not_go_round_for_ever() -> None:
    foreign = space_of(other=[1])["other"]

    def update(args: Mapping[str, Any], space: Space) -> None:
        space.create_symbol("mine", [1, 2])
        if foreign > 1:
            raise AssertionError

    with pytest.raises(OpenSymbolError, match="'other'"):
        list(Traversal(Space(), {}, update))


def test_a_function_that_returns_something_else_is_refused() -> None:
    with pytest.raises(TuneError, match=r"update_space: it returned 3; return the space"):
        list(Traversal(Space(), {}, lambda args, space: 3))  # type: ignore[arg-type, return-value]
