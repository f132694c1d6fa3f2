"""Testing kit for Slapo and for plugin authors: worker processes, numerical comparison, isolated plugins."""

from slapo_verify.comparison import assert_equivalent

from .plugin_isolation import isolated_plugins
from .workers.pool import MAX_WORKERS, DistributedError, clean_up_with, preload, run_distributed, shutdown_workers

__all__ = [
    "MAX_WORKERS",
    "DistributedError",
    "assert_equivalent",
    "clean_up_with",
    "isolated_plugins",
    "preload",
    "run_distributed",
    "shutdown_workers",
]
