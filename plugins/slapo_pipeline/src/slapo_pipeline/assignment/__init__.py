"""The assignment of the nodes of a flat graph to stages. A flat graph and its cuts enter; an `Assignment` leaves: the
nodes that each stage runs, and the values that each stage receives. A cut across a mutation, an alias or the path of
a `torch.autograd.grad` is refused here, as is a buffer that two stages change. The room imports `tracing`.

Values that are cheaper to recompute than to send are recomputed behind the boundary (`min_cut.py`). Values that
need the batch alone, such as masks and positions, are computed in every stage that uses them. If several results of
a block cross a boundary, as the position bias of T5 does, blocks of its class are inlined, and several stages hold
the small embedding as a tied parameter (`block_inlining.py`).
"""
