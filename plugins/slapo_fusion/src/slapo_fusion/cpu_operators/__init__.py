"""Custom operators for compiled regions on a CPU: dropout, GELU and layer norm that are faster than what inductor
generates. In: the arguments of torch's functions of the same names. Out: the same values and gradients. Lowest
room: imports torch only.
"""
