"""Reduction of one rank's gradients over replicas and tied stages. Parameters with local gradients enter; reduced gradients
leave. This is the lowest room of the package: it imports ``slapo_core`` and torch alone. The private torch names of the
package are in ``_torch_private.py``, except those of pipelining.
"""
