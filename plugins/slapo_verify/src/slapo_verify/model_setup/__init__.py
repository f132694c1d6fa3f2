"""Preparation of models for a comparison: copies, values for meta parameters, dropout off, replayed steps, rollback.

Functions take the unmodified model and a schedule, and return models that can be run and compared. These are restored
afterwards. This sub-package imports only core.
"""
