"""Division of a batch into micro-batches.

The rows of a batch are located in its arguments (option ``batch_dims``), and the batch is split into micro-batches
with equally many rows. Labels are counted per micro-batch, and fingerprints show whether ranks were given the same
batch. A batch by argument names enters; micro-batches, label counts and fingerprints leave. It may import
``slapo_core`` alone.
"""

from .microbatches import (
    Batch,
    check_labels,
    content_fingerprint,
    fingerprint,
    label_count_range,
    signature,
    split,
    variadic_argument,
)

__all__ = [
    "Batch",
    "check_labels",
    "content_fingerprint",
    "label_count_range",
    "fingerprint",
    "signature",
    "split",
    "variadic_argument",
]
