"""The logger attaches once, leaves the root logger alone, and says which rank speaks."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from slapo_core import get_logger
from slapo_testing import run_distributed


@pytest.fixture
def name() -> Iterator[str]:
    yield "SlapoTest"
    logger = logging.getLogger("SlapoTest")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)


def test_a_line_is_printed_once_however_often_the_logger_is_asked_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = list(logging.getLogger().handlers)
    for _ in range(3):
        get_logger(name).info("hello")
    assert capsys.readouterr().err == "INFO SlapoTest: hello\n" * 3
    assert logging.getLogger().handlers == root


def test_the_level_is_the_one_asked_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    get_logger(name, logging.WARNING).info("hidden")
    get_logger(name, logging.DEBUG).debug("shown")
    assert capsys.readouterr().err == "DEBUG SlapoTest: shown\n"


def line_of_rank(rank: int) -> str:
    record = logging.LogRecord("Slapo", logging.INFO, "", 0, "hello", None, None)
    return get_logger().handlers[0].format(record)


@pytest.mark.multiproc
def test_the_rank_is_shown_in_a_process_group() -> None:
    assert run_distributed(line_of_rank, 2) == [f"INFO Slapo: [rank {rank}] hello" for rank in range(2)]


@pytest.mark.parametrize("how", ["argument", "method"])
def test_a_level_lasts_until_another_one_is_given(name: str, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    get_logger(name, logging.DEBUG) if how == "argument" else get_logger(name).setLevel("DEBUG")
    get_logger(name).debug("shown")
    get_logger(name, logging.WARNING)
    get_logger(name).info("hidden")
    assert capsys.readouterr().err.endswith("shown\n")


def test_what_another_rank_shows_is_not_shown_twice(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for another in (False, True):
        get_logger(name).warning("of rank %d", another, extra={"another_rank": another})
    assert capsys.readouterr().err == "WARNING SlapoTest: of rank 0\n"
