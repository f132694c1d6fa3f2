"""Building blocks of engines and dialects beside the step itself.

The base of dialects for other projects' engines and their ``Limit``s, the files that Slapo writes beside an engine's
own checkpoint, checks of initial weights and gradients across ranks, and clean-up of engines that share parameters or
outlive their process group. Programs, parameters and engines enter; checks raise the same ``BuildError`` on all
ranks. It may import ``slapo_core`` and all rooms below it: ``ema``, ``checkpoint``, ``batches``, ``model`` and
``distributed``. It knows no engine by name.
"""

from . import checkpoint_files, parameter_ownership, stale_engines
from .checkpoint_files import Beside, Position, bytes_of
from .dialect import ALL_RANKS, NO_PLATEAU, EngineDialect, Limit, holds_copies
from .gradient_comparison import GradientComparison
from .initial_weights import check_same_start, different
from .microbatch_plans import microbatch_plans
from .stage_parameters import copies, release_others
from .unused_parameters import UnusedParameters
from .warning_filter import without_warnings

__all__ = [
    "ALL_RANKS",
    "Beside",
    "EngineDialect",
    "GradientComparison",
    "Limit",
    "NO_PLATEAU",
    "Position",
    "UnusedParameters",
    "bytes_of",
    "check_same_start",
    "checkpoint_files",
    "copies",
    "different",
    "holds_copies",
    "microbatch_plans",
    "parameter_ownership",
    "release_others",
    "stale_engines",
    "without_warnings",
]
