"""Whether a scheduled model computes what the unmodified one does, and which step broke it."""

from __future__ import annotations

from .report import Report
from .verify import Verify, verify

__all__ = ["Report", "Verify", "verify"]
