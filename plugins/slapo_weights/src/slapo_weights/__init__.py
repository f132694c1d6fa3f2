"""Weights in and out: from Hugging Face safetensors into any layout, and out of any layout again."""

from __future__ import annotations

from .export import export_weights

__all__ = ["export_weights"]
