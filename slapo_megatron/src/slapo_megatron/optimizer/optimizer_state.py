"""State of Megatron's optimizers by parameter: in the shape of this rank's shard, or the range that a replica holds.

Megatron's own format loses elements behind the padding between buckets of its distributed optimizer, and supports only
Adam.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from slapo_core import BuildError, gather_objects
from slapo_training.optimizers import WholeTensorOptimizer

from ..configuration.options import MegatronOptions
from ..process_state._megatron_private import main_param, optimizer_range
from .local_tensors import LocalTensors
from .optimizer_wrappers import initialize_state

MASTER = "fp32"
"""State name of the optimizer's fp32 weights if the model's are bf16."""


class _Part(NamedTuple):
    """Part of a parameter that this rank's optimizer steps: a tensor, and its range of the parameter's elements."""

    parameter: torch.Tensor
    main: torch.Tensor | None
    start: int
    stop: int


class OptimizerState:
    """The state of Megatron's optimizer by the names of parameters; ``replicas`` share it if it is distributed."""

    def __init__(self, outer: Any, replicas: dist.ProcessGroup, options: MegatronOptions, held: LocalTensors) -> None:
        self._inner: torch.optim.Optimizer = outer.optimizer
        self._outer, self._held, self._replicas, self._mesh = outer, held, replicas, held.program.mesh
        self._is_shared_out = options.distributed_optimizer
        self._has_masters = options.precision == "bf16"
        trained = ((key, tensor) for key, tensor in held.tensors.items() if tensor.requires_grad)
        self._parts = {key: self._part(parameter) for key, parameter in trained}

    def _part(self, parameter: torch.Tensor) -> _Part:
        if not self._is_shared_out:
            return _Part(parameter, main_param(parameter), 0, parameter.numel())
        return _Part(parameter, *(optimizer_range(self._outer, parameter) or (None, 0, 0)))

    def check(self) -> None:
        """Raise ``BuildError`` for a state that is neither a scalar nor of its parameter's shape."""
        kind = type(self._inner).__name__
        for main, state in self._inner.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape in (main.shape, torch.Size()):
                    continue
                raise BuildError(
                    f"{kind} keeps {name!r} in another shape than its parameter's, which cannot be written here; use another "
                    "optimizer, or target='torch'"
                )

    def state_names(self) -> list[str]:
        """Return the names of the parameters' states. Collective."""
        whole, single = self._names()
        return sorted([*whole, *single])

    def check_across_ranks(self) -> None:
        """Refuse a state of some parameters only, and a scalar that differs between the ranks with parts of its parameter.

        Collective.

        Raises:
            BuildError: the same on every rank.
        """
        kinds = sorted({tuple(sorted(state)) for state in self._inner.state.values()})
        own: dict[tuple[str, str], str] = {}
        for key, (_, main, _, _) in self._parts.items():
            if main is not None and main.dim():
                state = self._inner.state.get(main, {})
                own |= {(key, name): repr(value.item()) for name, value in state.items() if value.dim() == 0}
        everyone = gather_objects((kinds, own), self._mesh)
        if len(kinds := sorted({kind for kinds, _ in everyone for kind in kinds})) > 1:
            odd = sorted(set(kinds[0]) ^ set(kinds[1]))[0]
            raise BuildError(
                f"{type(self._inner).__name__} keeps {odd!r} for some parameters and not for others, which Megatron does not "
                "write; give all groups the same options of that kind, or use target='torch'"
            )
        found: dict[tuple[str, str], str] = {}
        for _, each in everyone:
            for (key, name), number in each.items():
                if (other := found.setdefault((key, name), number)) != number:
                    raise BuildError(
                        f"{type(self._inner).__name__} keeps {other} on one rank and {number} on another as {name!r} of "
                        f"{key!r}, which Megatron writes once; use another optimizer, or target='torch'"
                    )

    def groups(self) -> dict[str, int]:
        """Return the index of each parameter's optimizer group. Collective."""
        places = {id(main): number for number, group in enumerate(self._inner.param_groups) for main in group["params"]}
        own = {key: places[id(part.main)] for key, part in self._parts.items() if id(part.main) in places}
        return {key: number for each in gather_objects(own, self._mesh) for key, number in each.items()}

    def main_params(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Iterate over the tensors that this rank's optimizer steps: key, values, and number of elements before them."""
        for key, (_, main, start, stop) in self._parts.items():
            if main is not None and start < stop:
                yield key, main, start

    def masters(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's fp32 weights; empty unless the precision is bf16. Collective over the replicas."""
        return self._whole(MASTER) if self._has_masters else {}

    def sharded_state(self, has_state: bool, is_loading: bool) -> dict[str, Any]:
        """Return the sharded state that Megatron writes, or reads for ``take``. Collective.

        With ``has_state`` there is a state beside the weights; with ``is_loading`` the tensors are new ones to read into.
        """
        if is_loading and has_state and not isinstance(self._inner, WholeTensorOptimizer):
            initialize_state(self._inner)
        whole, single = self._names() if has_state else ([], [])
        state: dict[str, Any] = {}
        for name in [*whole, *([MASTER] if self._has_masters else [])]:
            prefix = f"optimizer.{name}."
            if is_loading:
                fresh = {key: torch.zeros_like(part.parameter, dtype=torch.float32) for key, part in self._parts.items()}
                state[name] = self._held.sharded_tensors(fresh, prefix)
            elif self._is_shared_out:
                state[name] = self._held.range_tensors(self._ranges(name), prefix)
            else:
                state[name] = self._held.sharded_tensors(self._whole(name), prefix)
        state |= {name: self._held.replicated_tensors(self._scalar_tensors(name), f"optimizer.{name}.") for name in single}
        return state

    def _names(self) -> tuple[list[str], list[str]]:
        """Return the names of states of their parameter's shape, and of scalar states. Collective; the same on every rank."""
        own = {
            (name, value.dim() == 0 and main.dim() > 0)
            for main, state in self._inner.state.items()
            for name, value in state.items()
        }
        found = {each for names in gather_objects(sorted(own), self._mesh) for each in names}
        numbers = {name for name, is_single in found if is_single}  # any state of a 0-dim parameter is 0-dim
        return sorted({name for name, _ in found} - numbers), sorted(numbers)

    def _ranges(self, name: str) -> dict[str, tuple[torch.Tensor, int]]:
        """Return this rank's range of a state for each parameter, flat in fp32, and the offset of the range."""
        found = {}
        for key, (_, main, start, stop) in self._parts.items():
            if main is not None and start < stop:
                kept = main if name == MASTER else self._inner.state[main][name]
                found[key] = kept.detach().to(torch.float32).reshape(-1), start
        return found

    def _whole(self, name: str) -> dict[str, torch.Tensor]:
        """Return a state in each parameter's shape, in fp32. Collective over the replicas with the distributed optimizer."""
        ranges, whole = self._ranges(name), {}
        for key, (parameter, _, _, _) in self._parts.items():
            values, start = ranges.get(key, (parameter.new_zeros(0, dtype=torch.float32), 0))
            if self._is_shared_out:
                full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
                full[start : start + values.numel()] = values
                dist.all_reduce(full, group=self._replicas)
                values = full
            whole[key] = values.view(parameter.shape)
        return whole

    def _scalar_tensors(self, name: str) -> dict[str, torch.Tensor]:
        parts = self._parts.values()
        own = [0.0 if part.main is None else float(self._inner.state[part.main][name]) for part in parts]
        numbers = torch.tensor(own, dtype=torch.float64, device=next((part.parameter.device for part in parts), None))
        if self._is_shared_out:  # a replica without a part contributes 0
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._replicas)
        return {key: numbers[index : index + 1] for index, key in enumerate(self._parts)}

    @torch.no_grad()
    def take(self, read: dict[str, Any]) -> None:
        """Copy a state that was read into the optimizer's."""
        for name, each in read.items():
            for key, value in each.items():
                _, main, start, stop = self._parts[key]
                if main is None:
                    continue
                kept = main if name == MASTER else self._inner.state[main][name]
                own = value if kept.dim() == 0 else value.reshape(-1)[start:stop]
                kept.copy_(own.reshape(kept.shape))
