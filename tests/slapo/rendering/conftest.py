"""The facade's plugin, and a terminal of known width, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slapo.rendering.small_models import rendering_plugins


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "100")
    with rendering_plugins():
        yield
