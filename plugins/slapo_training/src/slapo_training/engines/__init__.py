"""Building blocks of engines and dialects beside the step itself.

The base of dialects for other projects' engines and their ``Limit``s, the files that Slapo writes beside an
engine's own checkpoint, checks of initial weights across ranks, stages of torch's pipelines with exact gradients,
and clean-up of engines that share parameters or outlive their process group. Programs, parameters and engines
enter; checks raise the same ``BuildError`` on all ranks. It may import ``slapo_core`` and all rooms below it:
``ema``, ``checkpoint``, ``options``, ``losses``, ``batches``, ``model`` and ``distributed``. It knows no engine by
name.
"""

from ..checkpoint.plain_data import Position
from . import checkpoint_files, open_engines
from .checkpoint_files import EngineExtras, bytes_of, check_shapes
from .dialect import ALL_RANKS, NO_CLIPPED_COPIES, NO_PLATEAU, EngineDialect, Limit, odd_dtype
from .engine_output import log_fields, without_warnings
from .gradient_unaliasing import GradientUnaliasing
from .initial_weights import check_same_start
from .stages import Tie, microbatch_plans, release_others, tied_groups

__all__ = [
    "ALL_RANKS",
    "EngineExtras",
    "EngineDialect",
    "GradientUnaliasing",
    "Limit",
    "NO_CLIPPED_COPIES",
    "NO_PLATEAU",
    "Position",
    "Tie",
    "bytes_of",
    "check_same_start",
    "check_shapes",
    "checkpoint_files",
    "log_fields",
    "microbatch_plans",
    "odd_dtype",
    "open_engines",
    "release_others",
    "tied_groups",
    "without_warnings",
]
