"""Fusion: compilation of modules and of subgraphs, and decomposition of layers for it."""
