"""Checkpoints of Megatron's."""

from __future__ import annotations

from typing import Any


def save(engine: Any, path: Any) -> None:
    raise NotImplementedError


def load(engine: Any, path: Any) -> None:
    raise NotImplementedError
