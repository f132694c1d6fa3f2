"""Communication in a sharded model: hooks at module boundaries, and autograd nodes in their backward.

What enters is a module that was split by a rule. What leaves is the same module, which now gathers, scatters or
reduces its inputs, outputs or gradients. The room imports ``rules``, ``communication`` and ``slapo_core``.

A column-parallel layer overlaps the reduction of its input's gradient with the computation of its weight's gradient.
``nn.Linear`` computes both gradients in one autograd node, so the all-reduce would wait for the weight.
``overlapped_linear`` uses two nodes: the layer's own node passes the gradient of its output to a second node that
stands for the weight. The reduction has two nodes as well (``overlapped_reduction``): one starts it, and one,
recorded earlier, waits for it. Autograd runs the node with the highest sequence number first, and the numbers of the
start node and the weight node are exchanged. The order in the backward is therefore: inputs of all layers that share
the tensor, start of the reduction, weights, wait. The gradients are right in any order; only the overlap depends on it.

Under sequence parallelism the input was gathered, and the reduction is a reduce-scatter. ``overlapped_reduction``
records the shard each gathered tensor came from, so the weight node keeps the shard and gathers it again in the
backward. A tensor that was modified, cut or copied since is kept as it is. So is a tensor that was gathered outside a
checkpoint and is used inside it. Writes through ``.data``, which torch does not count, are not noticed.
"""
