"""Fixtures of the command line's tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def launcher_state() -> Iterator[None]:
    """The launcher sets environment variables and signal handlers of its process; give the tests' own back."""
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    yield
    os.environ.clear()
    os.environ.update(environment)
    for number, handler in handlers.items():
        signal.signal(number, handler)
