"""The primitives of core, one per file."""
