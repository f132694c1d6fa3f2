"""Reports of memory and time, FLOPs, and hooks; a documented path. ``common`` and ``report`` re-export under the
classic names. In: models and their inputs. Out: printed lines, numbers and hooks. Imports core only.
"""

from .common import get_hooks, has_hook, transfer_hooks
from .report import decoder_flops, profile_perf, report_memory, report_time

__all__ = [
    "decoder_flops",
    "get_hooks",
    "has_hook",
    "profile_perf",
    "report_memory",
    "report_time",
    "transfer_hooks",
]
