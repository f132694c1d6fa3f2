"""Preparation of models for a comparison: copies, values for meta parameters, dropout off, steps of a schedule taken
again, rollback. In: the unmodified model and a schedule. Out: models that can be run and compared, left as they
were afterwards. Lowest room: imports core only.
"""
