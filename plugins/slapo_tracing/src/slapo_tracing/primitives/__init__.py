"""The primitives of tracing, one per file."""
