"""Models without weights."""

from slapo_core import init_empty_weights

__all__ = ["init_empty_weights"]
