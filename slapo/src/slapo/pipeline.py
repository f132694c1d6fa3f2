"""Models in stages."""

from slapo_core import analyze_tie_weights, build_program

__all__ = ["analyze_tie_weights", "build_program"]
