"""Comparison of a scheduled model with the unmodified one, which blames the step that broke it."""

from __future__ import annotations

from .comparison.report import Report
from .ranks.thread_ranks import run_as_threads
from .training_runs.reference_run import Trained
from .verify import Verify, verify
from .verify_engine import verify_engine

__all__ = ["Report", "Trained", "Verify", "run_as_threads", "verify", "verify_engine"]
