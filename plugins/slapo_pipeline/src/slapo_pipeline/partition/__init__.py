"""The program in stages. A schedule with cuts enters, or a model and the paths of its cuts; a `Program` leaves, whose
stages are modules on the model's own parameters. `partitioner.py` caches its programs, and makes another one for
other input shapes, modes, attributes or values of the batch. The room imports `assignment` and `tracing`.

Without example inputs, `symbolic_stages.py` divides the graphs of `torch.fx`. Such stages have no shapes; the first
batch makes a program with shapes. If the forward branches on values, `program_validity.py` decides from the batch alone
whether a program serves it.

A forward takes the branches that it takes on the real batch: Transformers makes no attention mask if nothing is padded. A
padded batch then has a program of its own.
"""

from .partitioned_module import PartitionedModule, StageArguments
from .partitioner import for_any_values
from .stage_module import analyze_tie_weights

__all__ = ["PartitionedModule", "StageArguments", "analyze_tie_weights", "for_any_values"]
