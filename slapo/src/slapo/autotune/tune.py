"""``python -m slapo.autotune.tune``: run a training script with every configuration of a space, and print the fastest."""

from __future__ import annotations

from ..launch.signals import exit_immediately, signal_handler

with signal_handler(exit_immediately):
    import sys

    from slapo_tune import Database, Space, Symbol
    from slapo_tune.command import main

__all__ = ["Database", "Space", "Symbol", "main"]

if __name__ == "__main__":
    sys.exit(main())
