"""Symbols: candidates, the choice of one, and what an open symbol refuses."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slapo_tune import OpenSymbolError, Symbol, TuneError

COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
CONVERSIONS: list[Callable[[Any], Any]] = [
    bool,
    int,
    float,
    hash,
    abs,
    operator.neg,
    operator.pos,
    operator.index,
    round,
    math.sqrt,
]


def fixed(value: Any) -> Symbol:
    symbol = Symbol("batch_size", [value])
    symbol.fix_at(0)
    return symbol


@pytest.mark.parametrize("function", [*COMPARISONS, *ARITHMETIC])
def test_computing_with_an_open_symbol_names_it(function: Callable[[Any, Any], Any]) -> None:
    symbol = Symbol("batch_size", [8, 16])
    with pytest.raises(OpenSymbolError, match=r"symbol\('batch_size'\): it is open, .*\[8, 16\].*fix_at") as raised:
        function(symbol, 8)
    assert raised.value.name == "batch_size"
    with pytest.raises(OpenSymbolError, match="'batch_size'"):
        function(8, symbol)


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_converting_an_open_symbol_names_it(convert: Callable[[Any], Any]) -> None:
    with pytest.raises(OpenSymbolError, match="'batch_size'"):
        convert(Symbol("batch_size", [8, 16]))


@pytest.mark.parametrize("function", [*COMPARISONS, *ARITHMETIC])
@given(left=st.integers(1, 9), right=st.integers(1, 9))
def test_a_fixed_symbol_computes_as_its_value(function: Callable[[Any, Any], Any], left: int, right: int) -> None:
    expected = function(left, right)
    assert function(fixed(left), right) == expected
    assert function(left, fixed(right)) == expected
    assert function(fixed(left), fixed(right)) == expected


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_a_fixed_symbol_converts_as_its_value(convert: Callable[[Any], Any]) -> None:
    assert convert(fixed(16)) == convert(16)


def test_a_fixed_symbol_is_found_prints_and_counts_as_its_value() -> None:
    symbol = fixed(16)
    assert symbol in (8, 16)
    assert {16: "large"}[symbol] == "large"
    assert f"{symbol} {symbol:04d}" == "16 0016"
    assert list(range(symbol))[-1] == 15
    assert fixed("flash") == "flash"
    assert not fixed(None)


def test_an_open_symbol_shows_its_candidates() -> None:
    symbol = Symbol("batch_size", range(8, 17, 8))
    assert f"{symbol}" == repr(symbol) == "Symbol('batch_size', [8, 16])"
    with pytest.raises(OpenSymbolError, match="'batch_size'"):
        format(symbol, "04d")


def test_a_value_that_is_there_is_not_added_again() -> None:
    symbol = Symbol("ckpt_ratio", [1.0, 0.5, 1.0])
    symbol.add(0.5)
    symbol.add(0.0)
    assert symbol.vals == [1.0, 0.5, 0.0]


def test_a_fixed_symbol_keeps_its_value_when_another_is_added() -> None:
    symbol = fixed(8)
    symbol.add(fixed(4))
    assert symbol == 8
    assert symbol.vals == [8, 4]
    assert type(symbol.vals[1]) is int


def test_a_symbol_is_fixed_at_an_index() -> None:
    symbol = Symbol("batch_size", [8, 16])
    assert not symbol.is_fixed()
    symbol.fix_at(1)
    assert symbol.is_fixed()
    assert symbol.value == 16
    symbol.fix_at(0)
    assert symbol.value == 8


@pytest.mark.parametrize("idx", [2, -1, "0", 0.5, None])
def test_an_index_that_is_none_is_refused(idx: Any) -> None:
    symbol = Symbol("batch_size", [8, 16])
    with pytest.raises(TuneError, match=r"fix_at\('batch_size'\): .* from 0 to 1$"):
        symbol.fix_at(idx)
    assert not symbol.is_fixed()


def test_a_symbol_without_candidates_cannot_be_fixed() -> None:
    with pytest.raises(TuneError, match=r"fix_at\('batch_size'\): the symbol has no candidates; add one"):
        Symbol("batch_size", []).fix_at(0)


@pytest.mark.parametrize("vals", [8, "flash", b"flash", None])
def test_one_value_is_no_list_of_candidates(vals: Any) -> None:
    with pytest.raises(TuneError, match=r"symbol\('attention'\): the candidates are .*, one value; give a list, \["):
        Symbol("attention", vals)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_is_text(name: Any) -> None:
    with pytest.raises(TuneError, match="a name is a text"):
        Symbol(name, [1])
