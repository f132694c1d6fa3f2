"""The part of the model that one rank holds: names, pieces, mode and rollback.

Parameters and persistent buffers are listed by their first names in the unmodified model. A ``Piece`` describes the
ranges of a whole tensor that a local tensor holds. Further modules switch between training and evaluation mode, and
restore buffers, attributes and random numbers after an extra run. Modules and tensors enter; names, pieces and
snapshots leave. It may import ``slapo_core`` and ``slapo_tracing`` alone.
"""

from . import named_tensors
from .named_tensors import Tensors, buffers, copy_into, is_wrapper_subclass, make_dense, parameters
from .pieces import Chunk, Piece, Ranges, Span, boxes, chunks_of, piece_of, spans_of, with_dim
from .state_rollback import StateSnapshot, TrainingMode

__all__ = [
    "Chunk",
    "TrainingMode",
    "Piece",
    "Ranges",
    "Span",
    "StateSnapshot",
    "Tensors",
    "boxes",
    "buffers",
    "chunks_of",
    "is_wrapper_subclass",
    "named_tensors",
    "parameters",
    "piece_of",
    "spans_of",
    "with_dim",
    "make_dense",
    "copy_into",
]
