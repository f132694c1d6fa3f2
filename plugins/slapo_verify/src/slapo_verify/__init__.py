"""Comparison of a scheduled model with the unmodified one, which blames the step that broke it."""

from __future__ import annotations

from .engines import verify_engine
from .plain_steps import Trained
from .report import Report
from .threads import run_as_threads
from .verify import Verify, verify

__all__ = ["Report", "Trained", "Verify", "run_as_threads", "verify", "verify_engine"]
