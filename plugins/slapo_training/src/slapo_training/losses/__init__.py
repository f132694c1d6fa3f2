"""The loss of a micro-batch, and the information needed to combine micro-batches into the loss of the whole batch.

``microbatch_loss`` calls the model and the loss function, ``output_loss`` finds the loss in a model's output (option
``loss``), and ``reductions`` records over how many labels a loss is a mean. ``weighted_terms`` and ``replica_loss``
implement the options ``loss_weights`` and ``loss_over``. Outputs and labels enter; scalar losses and their reductions
leave. It may import ``slapo_core``, ``slapo_tracing``, ``batches`` and ``distributed``.

The loss is the part that ``loss=`` names, the part called ``loss``, or the only scalar with a gradient. Its position
in the output is remembered for evaluation, where nothing has a gradient. A loss that consists of one
``cross_entropy``, changed only by operations that keep its value, is weighted by its number of labels. With
``loss_weights=`` each term is weighted by its count, which follows from the batch and is known before the step. With
``loss_over="replicas"`` all micro-batches first run forward, the loss of all outputs is computed once, and a second
pass runs backward from the gradients of the outputs.
"""

from .fake_replica_loss import FakeReplicaLoss
from .microbatch_loss import NO_GRADIENT, CountedLoss, MicroBatchLoss, check_has_gradient, note_failure, run_stage
from .reductions import EQUAL_PARTS, UNKNOWN_REDUCTION, CombinedMeans, LabelMean, LossReduction, is_label_mean
from .replica_loss import ReplicaFailedError

__all__ = [
    "CombinedMeans",
    "LabelMean",
    "CountedLoss",
    "EQUAL_PARTS",
    "FakeReplicaLoss",
    "LossReduction",
    "MicroBatchLoss",
    "NO_GRADIENT",
    "ReplicaFailedError",
    "UNKNOWN_REDUCTION",
    "check_has_gradient",
    "is_label_mean",
    "note_failure",
    "run_stage",
]
