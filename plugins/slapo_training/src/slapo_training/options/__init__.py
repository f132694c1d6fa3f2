"""Options of ``build`` that mean the same for every engine, and their validation.

A configuration of keyword arguments enters; a frozen ``CommonOptions`` leaves, or a ``BuildError`` that names the
value and a value that works. The environment variable ``SLAPO_DISABLE_CHECKS`` and the option ``optimizer_blocks``
have a module each. It may import ``slapo_core``, ``batches`` and ``losses``, whose options it validates.
"""

from .check_switches import disabled_checks, log_disabled_checks, register_checks
from .common_options import DTYPES, CommonOptions, EngineOptions, is_lr_scheduler

__all__ = [
    "DTYPES",
    "CommonOptions",
    "EngineOptions",
    "disabled_checks",
    "is_lr_scheduler",
    "log_disabled_checks",
    "register_checks",
]
