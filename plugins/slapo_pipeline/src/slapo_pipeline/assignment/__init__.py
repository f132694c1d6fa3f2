"""The assignment of the nodes of a flat graph to stages. A flat graph and its cuts enter; an `Assignment` leaves: the
nodes that each stage runs, and the values that each stage receives. A cut that cannot be right is refused here: a
mutation, an alias or a call of `torch.autograd.grad` across a boundary, or a buffer that two stages change. The
room imports `tracing`.

What a minimum cut finds cheaper to recompute than to send runs again behind the boundary (`min_cut.py`). Values
that need the batch alone, such as masks and positions, run in every stage that reads them. Where a block returns
several values that cross, as the position bias of T5 does, blocks of its class are inlined, and several stages hold
the small table as a tied parameter (`block_inlining.py`).
"""
