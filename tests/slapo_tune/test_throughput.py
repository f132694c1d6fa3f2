"""The throughput of a trial, from lines of JSON and from what frameworks log."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slapo_core import Dialect, hookimpl
from slapo_testing import isolated_plugins
from slapo_tune.trial.throughput import error_tail, invalid_throughput, logged_result, printed_result

MEGATRON = (
    " [2026-01-01 00:00:00] iteration  {step}/ 100 | consumed samples: 320 | elapsed time per iteration (ms): {ms} | "
    "learning rate: 1.5E-04 | global batch size:    32 | lm loss: 4.125E+00 | grad norm: 2.5 |"
)
DEEPSPEED = "steps: {step} loss: 4.5 iter time (s): 0.5 samples/sec: {speed}"


def test_the_last_line_of_json_counts() -> None:
    lines = ["{", '{"loss": 4.5}', '{"throughput": 1}', ' {"throughput": 2.5, "loss": 3.5} ', '{"epoch": 2}', "[1]", "done"]
    assert printed_result(lines) == {"throughput": 2.5, "loss": 3.5}


def test_samples_per_second_are_a_throughput() -> None:
    assert printed_result(['{"samples_per_second": 12}']) == {"samples_per_second": 12, "throughput": 12}


def test_other_lines_are_none() -> None:
    assert printed_result(["", "throughput: 3", "{throughput: 3}", '{"throughput": 3']) is None


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "0", "-1.5", '"3"', "null", "true", "[1]"])
def test_a_throughput_that_is_no_number_above_0_is_unusable(value: str) -> None:
    result = printed_result([f'{{"throughput": {value}}}'])
    assert result is not None
    assert invalid_throughput(result["throughput"]).startswith("the throughput is ")
    json.dumps(result, allow_nan=False)


def test_numbers_above_0_are_usable() -> None:
    assert invalid_throughput(10**400)
    assert invalid_throughput(1) == invalid_throughput(0.5) == ""


def test_the_log_of_megatron_gives_the_median_of_all_steps_but_the_first() -> None:
    pytest.importorskip("slapo_megatron")
    lines = [MEGATRON.format(step=step, ms=ms) for step, ms in enumerate([4000, 500, 400, 800], 1)]
    assert logged_result(["loading", *lines], {}) == {"throughput": 32 / 0.5, "log_parser": "megatron"}
    without = [line.replace("global batch size", "size") for line in lines[:1]]
    assert logged_result(without, {}) is None
    assert logged_result(without, {"batch_size": 8}) == {"throughput": 2.0, "log_parser": "megatron"}


def test_the_log_of_deepspeed_gives_samples_a_second() -> None:
    pytest.importorskip("slapo_deepspeed")
    lines = [DEEPSPEED.format(step=step, speed=speed) for step, speed in enumerate([1.0, 10.0, 12.0], 1)]
    assert logged_result(lines, {"batch_size": 3}) == {"throughput": 11.0, "log_parser": "deepspeed"}
    assert logged_result(["nothing of the kind", "steps: many"], {"batch_size": 3}) is None


class Parser:
    """A log parser that does not understand some lines."""

    @staticmethod
    def parse(lines: list[str]) -> list[Any]:
        return [float(line.removeprefix("speed ")) for line in lines]


class Odd(Dialect):
    """A dialect with the parser above."""

    name = "odd"
    classes = {"log_parser": Parser}

    @classmethod
    def build(cls, program: Any, **config: Any) -> Any:
        raise NotImplementedError


class Plugin:
    @hookimpl
    def slapo_dialects(self) -> dict[str, type]:
        return {"odd": Odd}


def test_a_parser_that_does_not_understand_a_line_finds_nothing() -> None:
    with isolated_plugins(Plugin()):
        assert logged_result(["speed of light"], {}) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        (" \n\n", ""),
        ("a\n\n  b \nc\nd\ne\n", "c | d | e"),
        ("Traceback:\n  File x, line 1\n    f()\nRuntimeError: out of memory\n", "RuntimeError: out of memory"),
        ("one line", "one line"),
        ("x" * 500, "..." + "x" * 400),
    ],
)
def test_the_end_of_an_output_is_one_line(text: str, words: str) -> None:
    assert error_tail(text) == words
