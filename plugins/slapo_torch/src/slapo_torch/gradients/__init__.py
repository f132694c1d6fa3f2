"""Gradients of one rank: their memory, and their reduction over replicas and tied stages.

``ddp`` averages gradients over replicas during the backward pass, ``reduction`` after it. ``aliasing`` gives
gradients that share memory a memory of their own. Parameters with local gradients enter; reduced gradients leave.
This is the lowest room of the package: it imports ``slapo_core`` and torch alone. The private torch names of the
package are in ``_torch_private.py``, except those of pipelining.
"""
