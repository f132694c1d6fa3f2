"""Primitives of core, one per file."""
