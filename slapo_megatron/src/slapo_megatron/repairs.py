"""What Megatron-Core 0.16 does wrong as it writes or reads checkpoints, set right for the time of one; tests tell when it has.

Private names of Megatron's that this package uses are in this file alone.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def repaired() -> Iterator[None]:
    """Set these right inside:

    A save starts another process to hand results to itself, which costs seconds and fails in a script without a main guard.
    Without Apex and Transformer Engine, loading into the distributed optimizer asks for a ``step`` that was not saved, and
    gives all parameters one tensor for their step, which each of them then counts up.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.optimizer import distrib_optimizer

    with ExitStack() as stack:
        _put(stack, filesystem_async, "_results_queue", queue.Queue())
        if not distrib_optimizer.HAVE_APEX_OR_TE:
            kind = distrib_optimizer.DistributedOptimizer
            load = kind.load_state_dict
            _put(stack, kind, "_set_main_param_and_optimizer_states", _put_states)

            def load_state_dict(self: Any, state: Any) -> None:
                load(self, state)
                for held in self.optimizer.state.values():
                    if isinstance(held.get("step"), torch.Tensor):
                        held["step"] = held["step"].clone()

            _put(stack, kind, "load_state_dict", load_state_dict)
        yield


def _put(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@torch.no_grad()
def _put_states(self: Any, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy what was read of one parameter: its weights in fp32, and its optimizer's state but for the step."""
    group, order = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][order]
    for name, held in {"param": main, **self.optimizer.state[main]}.items():
        if name in tensors:
            held.copy_(tensors[name])
