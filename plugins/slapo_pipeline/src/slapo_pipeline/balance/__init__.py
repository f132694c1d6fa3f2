"""The search for balanced cuts, for the primitive `pipeline`. A model, example inputs and a number of stages enter;
the paths of the modules that end a stage leave, in a `StageTable`, with the trace that the next build reuses.
`unit_costs.py` measures parameters, FLOPs or memory on fake tensors, and `optimal_cuts.py` minimises the largest
cost. The room imports `partition`, `assignment` and `tracing`.
"""
