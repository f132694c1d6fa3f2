"""Primitives of tracing, one per file."""
