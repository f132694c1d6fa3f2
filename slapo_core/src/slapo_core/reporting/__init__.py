"""Errors, the logger, and one-line failure reasons. Every other package of Slapo may import this one."""
