"""Logits that are computed on first use. A language-model head returns `LazyLogits`, a tensor subclass that holds the
hidden states and the weight of the head. Their cross entropy is one kernel, which never forms the logits; any other
operation computes them first. `head_inputs.py` detects hidden states or weights that were modified in between,
which is an error. The room imports `dispatch` and `implementations`.
"""
