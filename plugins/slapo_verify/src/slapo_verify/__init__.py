"""Comparison of a scheduled model with the unmodified one, which blames the step that broke it.

``verify`` runs the unmodified and the scheduled model on equal inputs and random states and compares outputs and
gradients. In half precision it also runs the unmodified model in float32; that distance is the rounding error that is
allowed. If something differs, ``diagnosis`` replays the journal on fresh copies: blocks of layers by bisection, and
within the wrong block prefixes of its steps. A schedule with cuts runs as its program, on the parameters of the whole
model.

``verify_engine`` gives an engine a copy that is scheduled anew, SGD with a learning rate of 1, and the batch of the
unmodified model. Every copy of a parameter that a rank holds is compared. If something differs, the schedule is
verified without the engine, and then the engine without each of its options. Parameters are compared shard by shard
where they lie; only those that are far off on some rank are gathered.

Ranks of one process are threads with torch's threaded process groups, one at a time, with a random state each. Engines
keep processes of their own, because they have global state.
"""

from __future__ import annotations

from .comparison.equivalence import Tolerance
from .comparison.report import Report
from .ranks.thread_ranks import run_as_threads
from .training_runs.reference_run import TrainingResults
from .verify import Verify, verify
from .verify_engine import verify_engine

__all__ = ["Report", "Tolerance", "TrainingResults", "Verify", "run_as_threads", "verify", "verify_engine"]
