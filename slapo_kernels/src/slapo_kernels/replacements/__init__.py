"""Modules that `use_kernels` puts in the place of a model's own. A replacement is an instance of a subclass of the
module's class with the same parameters and children. Its forward calls a kernel if the guard (`call_guard.py`)
admits the call, and the forward of the original class otherwise. The room imports `dispatch` and `implementations`.

The original forward also runs while the model is traced or compiled. A recomputation must take the same path as its
forward, because it would save other tensors otherwise (`slapo_memory.forward_wrappers`).
"""
