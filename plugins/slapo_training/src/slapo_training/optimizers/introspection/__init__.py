"""Reading and rewriting of the tables of a ``torch.optim.Optimizer``.

Optimizers nested in wrappers and composites, tables keyed by parameters or their ids, options of parameter groups
that two optimizers share, and step counters. An optimizer of any class enters; its parts leave, or the optimizer with
its tables rewritten in place. It imports torch alone.
"""

from .nested_optimizers import groups_in
from .parameter_tables import replace_parameters
from .step_counters import OneStep

__all__ = ["OneStep", "groups_in", "replace_parameters"]
