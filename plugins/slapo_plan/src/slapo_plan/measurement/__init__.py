"""Runs of stages on fake tensors, and what they record."""
