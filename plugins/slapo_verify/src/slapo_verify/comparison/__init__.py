"""Comparison of two models: outputs, and the gradient of each parameter under its original name.

May import nothing else of this package; the testing kit builds on it.
"""
