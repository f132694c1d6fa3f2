"""Memory primitives for Slapo: recompute activations instead of keeping them."""

from __future__ import annotations

from .recompute import checkpoint

__all__ = ["checkpoint"]
