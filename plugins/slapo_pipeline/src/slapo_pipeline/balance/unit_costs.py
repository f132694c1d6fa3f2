"""Costs of a model's units, measured on fake tensors or counted from its parameters."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from slapo_core import ScheduleError, SlapoError
from slapo_tracing.graphs import argument_values, guard_of
from slapo_tracing.nodes import current_modes, leave_modes
from slapo_tracing.recording import Sandbox

from .cut_candidates import Units
from .optimal_cuts import SharedAmounts

BALANCES = ("parameters", "flops", "memory")
TENSORS_PER_PARAMETER = 4
"""Tensors of a trained parameter's size and dtype: the parameter, its gradient and two optimizer states."""

_ATTENTION_OPERATORS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
)
"""Operators that the table of torch's ``FlopCounterMode`` lacks."""

Use = tuple[int, Hashable, int]


class Costs:
    """Costs of the units; ``costs(stage, begin, end)`` is the balanced cost of a stage."""

    def __init__(self, units: Units, balance: str, stages: int, microbatches: int) -> None:
        size = len(units)
        self.balance = balance
        self.in_flight = [min(stages - stage, microbatches) for stage in range(stages)]
        """Per stage the micro-batches whose activations it keeps at a time, under 1F1B."""
        uses = _parameter_uses(units)
        self.parameters = SharedAmounts(size, [(unit, key, p.numel()) for unit, key, p in uses])
        self.bytes = SharedAmounts(size, [(unit, key, p.nbytes) for unit, key, p in uses])
        self.flops = self.saved = self._states = SharedAmounts(size, ())
        first_uses = {key: (unit, key, p.nbytes) for unit, key, p in reversed(uses)}
        self._owned = SharedAmounts(size, [*first_uses.values()][::-1])
        if balance == "memory":
            self._states = SharedAmounts(
                size, [(unit, key, p.nbytes * (TENSORS_PER_PARAMETER if p.requires_grad else 1)) for unit, key, p in uses]
            )
        if balance == "flops":
            self.flops = SharedAmounts(size, _FlopsMeter(units).measure())
        elif balance == "memory":
            self.saved = SharedAmounts(size, _SavedBytesMeter(units).measure())

    def __call__(self, stage: int, begin: int, end: int) -> int:
        """Return the bytes of the parameters that are used first in these units, FLOPs, or bytes of memory."""
        if self.balance == "parameters":
            return self._owned.of(begin, end)
        if self.balance == "flops":
            return self.flops.of(begin, end)
        return self._states.of(begin, end) + self.in_flight[stage] * self.saved.of(begin, end)


def _parameter_uses(units: Units) -> list[tuple[int, int, nn.Parameter]]:
    places = {node: index for index, node in enumerate(units.nodes)}
    tables = {path: module._parameters for path, module in units.root.named_modules(remove_duplicate=False)}
    found: list[tuple[int, int, nn.Parameter]] = []
    for index, node in enumerate(units.nodes):
        if node.op == "call_module":
            used = units.root.get_submodule(str(node.target)).parameters()
            found += [(units.unit_of(index), id(parameter), parameter) for parameter in used]
        elif node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            parameter = tables.get(path, {}).get(name)
            for user in node.users if parameter is not None else ():
                found.append((units.unit_of(places[user]), id(parameter), parameter))
    return sorted(found, key=lambda use: use[0])


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of an attention on shapes ``[batch, heads, sequence, width]``."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


class _Meter(fx.Interpreter):
    """Interpreter that runs the graph on fake tensors and records the cost of each node."""

    def __init__(self, units: Units) -> None:
        super().__init__(units.root, graph=units.flat.graph)
        self.extra_traceback = False  # else fx prints the node for every error
        self.units = units
        self.places = {node: index for index, node in enumerate(units.nodes)}
        self.unit = 0
        self.found: list[Use] = []

    def watch(self) -> AbstractContextManager[Any]:
        """Return the context manager that records costs while it is open."""
        raise NotImplementedError

    def measure(self) -> list[Use]:
        """Return unit, key and amount of all recorded costs.

        Raises:
            ScheduleError: a module reads the values of a tensor, or an operator has no fake kernel.
        """
        units = self.units
        guard = guard_of(units.flat)
        assert guard is not None
        values = argument_values(guard.parameters, (), units.inputs)
        inputs = [values[str(node.target)] for node in units.nodes if node.op == "placeholder"]
        sandbox, before = Sandbox(units.root, inputs, fake=True, keeps_values=True), current_modes()
        try:
            with sandbox.open(grad=True), self.watch():
                self.run(*tree_map_only(torch.Tensor, sandbox.enter_input, inputs))
        except SlapoError:
            raise
        except Exception as err:  # the model's code and fake tensors may raise anything
            what = f"the model does not run on fake tensors, so its FLOPs and memory are not known: {err}"
            raise ScheduleError(f"{what}; use balance='parameters'", primitive="pipeline") from err
        finally:
            if current_modes() != before:  # the run failed inside a region
                leave_modes(before)
        return self.found

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and note its unit."""
        self.unit = self.units.unit_of(self.places[n])
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a weight, or a constant of the graph."""
        return self.fetch_attr(target) if "." in target or hasattr(self.module, target) else getattr(self.units.flat, target)


class _FlopsMeter(_Meter):
    """Meter of FLOPs."""

    def watch(self) -> AbstractContextManager[Any]:
        self.counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(_ATTENTION_OPERATORS, _attention_flops))
        return self.counter

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; its FLOPs are the increase of the counter."""
        before = self.counter.get_total_flops()
        result = super().run_node(n)
        self.found.append((self.unit, n, self.counter.get_total_flops() - before))
        return result


class _SavedBytesMeter(_Meter):
    """Meter of bytes saved for the backward, without parameters and buffers."""

    def watch(self) -> AbstractContextManager[Any]:
        self.kept: list[Any] = []  # keeps the objects alive, so that their ids stay unique
        self.state = {self._key(tensor) for tensor in [*self.units.root.parameters(), *self.units.root.buffers()]}
        return saved_tensors_hooks(self._save, lambda tensor: tensor)

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        key = self._key(tensor)
        if key not in self.state:
            size = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else tensor.nbytes
            self.found.append((self.unit, key, size))
        return tensor.detach()  # a node that holds its own output is a cycle that no collector finds

    def _key(self, tensor: torch.Tensor) -> int:
        thing = tensor.untyped_storage() if tensor.layout is torch.strided else tensor
        self.kept.append(thing)
        return id(thing)
