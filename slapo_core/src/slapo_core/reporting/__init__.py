"""Errors, the logger, and one-line reasons for failures of plugins.

Every other package of Slapo may import this one; it imports torch and pluggy alone.
"""
