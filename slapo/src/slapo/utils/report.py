"""Reports of memory and time, and FLOPs."""

from .flops import decoder_flops
from .usage_report import profile_perf, report_memory, report_time

__all__ = ["decoder_flops", "profile_perf", "report_memory", "report_time"]
