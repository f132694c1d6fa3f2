"""The part of the model that one rank holds: names, pieces, mode and rollback.

Parameters and persistent buffers are listed by their first names in the unmodified model. A ``Piece`` describes the
ranges of a whole tensor that a local tensor holds. Further modules switch between training and evaluation mode, and
restore buffers, attributes and random numbers after an extra run. Modules and tensors enter; names, pieces and
snapshots leave. It may import ``slapo_core`` and ``slapo_tracing`` alone.
"""
