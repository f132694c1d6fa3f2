"""Files of an estimate: the page, and the simulated step as a trace."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slapo_core import SlapoError
from slapo_report import plan_page
from slapo_torch.timeline import chrome_trace


def write_page(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Write the page of a plan.

    Args:
        path: File to write.
        data: As for ``plan_page``.

    Raises:
        SlapoError: the file cannot be written.
    """
    _write("report", path, plan_page(data))


def write_trace(path: str | os.PathLike[str], actions: Sequence[Mapping[str, Any]]) -> None:
    """Write a trace for https://ui.perfetto.dev or Chrome.

    Args:
        path: File to write, JSON.
        actions: Actions of all ranks, as of ``engine.timeline``.

    Raises:
        SlapoError: the file cannot be written.
    """
    _write("save_trace", path, json.dumps(chrome_trace(actions)))


def trace_path(page: str | os.PathLike[str]) -> Path:
    """Return the path of the trace beside a page: ``plan.trace.json`` for ``plan.html``."""
    return Path(os.path.splitext(page)[0] + ".trace.json")


def _write(name: str, path: str | os.PathLike[str], text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as err:
        what = f"{name}: {os.fspath(path)!r} cannot be written, {err.strerror}; give a file in a folder that exists"
        raise SlapoError(what) from err
