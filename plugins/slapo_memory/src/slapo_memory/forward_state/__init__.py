"""State that a forward starts from and that a recomputation needs again: arguments, buffers and attributes of modules,
random states. In: modules and the arguments of a call. Out: objects that restore that state for a block. Lowest
room: imports core only; it holds ``_torch_private``.
"""
