"""The attention interface of Transformers, which selects an attention function by name in a model's config. A model
and the names of attention functions enter; the model's config changes, and a function leaves that restores it.
`fully_masked_queries.py` registers attention functions that keep the model's result for queries whose mask hides
every key. The room imports `implementations` for its access to private torch functions.

Transformers' `sdpa` returns zeros for such a query. Its eager attention adds the smallest number to all scores, and
so returns the mean of all values.
"""
