"""Fixtures of this package's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import slapo_memory.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_testing import isolated_plugins


@pytest.fixture
def only_memory() -> Iterator[None]:
    """No plugin but this one."""
    with isolated_plugins(slapo_tracing.plugin, slapo_training.plugin, slapo_memory.plugin):
        yield
