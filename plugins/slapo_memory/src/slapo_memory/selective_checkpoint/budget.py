"""``sch.checkpoint(budget=...)``: choice of the outputs to keep within a number of bytes per module.

Cost and saved memory of each operator come from one forward of the model on fake tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from slapo_core import (
    MODEL_PARALLEL_RNG,
    Schedule,
    ScheduleError,
    SlapoError,
    failure_reason,
    get_cuda_rng_tracker,
    split_inputs,
)
from slapo_tracing.nodes import wrap_forward
from slapo_tracing.recording import Sandbox

from ..forward_state._torch_private import completed_work, is_about_fake_tensors, storage_key
from ..forward_state.arguments import Arguments
from ..forward_state.random_state import GeneratorState, RandomState, generators_in
from .kept_outputs import CallPolicy, CountingMode, has_own_storage, mutated_tensors, tensors_in

_UNITS = {"B": 1} | {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)} | {"kB": 1000}
# mixed case such as Mb means bits and is refused
_UNITS |= {change(unit): size for unit, size in _UNITS.items() for change in (str.upper, str.lower)}
_SIZE_PATTERN = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")


def parse_budget(budget: Any) -> int | float:
    """Return bytes as an int, or a share as a float; raise ``ValueError`` for anything else."""
    if isinstance(budget, str) and (match := _SIZE_PATTERN.fullmatch(budget)):
        return int(float(match[1]) * _UNITS[match[2]])
    if isinstance(budget, float) and 0 <= budget <= 1:
        return budget
    if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0:
        return budget
    advice = "give bytes as 2147483648 or '2GiB', or a share from 0.0 to 1.0 of what can be kept"
    raise ValueError(f"budget is {budget!r}; {advice}")


def call_policies(schedule: Schedule, chosen: list[Schedule], budget: int | float) -> list[CallPolicy]:
    """Return the policy of each of the chosen modules.

    Raises:
        ScheduleError: no example inputs, a model that does not run on fake tensors, a module that it does not call with
            gradients, weights that are DTensors, or a module whose inputs exceed the budget.
    """
    if schedule.example_inputs is None:
        what = "a budget is solved over a run of the model; give create_schedule example_inputs"
        raise ScheduleError(what, path=schedule.path, primitive="checkpoint")
    tensors = [*schedule.root_module.named_parameters(), *schedule.root_module.named_buffers()]
    if (spread := next((path for path, tensor in tensors if hasattr(tensor, "to_local")), None)) is not None:
        what = f"{spread!r} is a DTensor, and a budget is solved over a run on plain tensors"
        advice = "call checkpoint(budget=...) before the model is parallelized, or give a policy"
        raise ScheduleError(f"{what}; {advice}", path=schedule.path, primitive="checkpoint")
    try:
        calls = measure_calls(schedule.root_module, [each.mod for each in chosen], schedule.example_inputs)
    except SlapoError:
        raise
    except Exception as err:  # the model's code and fake tensors may raise anything
        is_fake = is_about_fake_tensors(err)
        what = "the model does not run on fake tensors" if is_fake else "the model does not run on the example inputs"
        advice = "give a policy" if is_fake else "give create_schedule such as it takes, or a policy"
        what = f"{what}, so a budget cannot be solved: {failure_reason(err)}; {advice}"
        raise ScheduleError(what, path=schedule.path, primitive="checkpoint") from err
    return [_call_policy(each, call, budget) for each, call in zip(chosen, calls, strict=True)]


def _call_policy(schedule: Schedule, call: CallCost | None, budget: int | float) -> CallPolicy:
    if call is None:
        what = "the model does not call it with gradients on the example inputs, so what it keeps is not known; give a policy"
        raise ScheduleError(what, path=schedule.path, primitive="checkpoint")
    if isinstance(budget, float):
        budget = call.inputs + int(budget * max(call.saved - call.inputs, 0))
    if call.inputs > budget:
        what = f"a budget of {budget} bytes is less than the inputs, {call.inputs} bytes, which a checkpoint always keeps"
        raise ScheduleError(f"{what}; give more", path=schedule.path, primitive="checkpoint")
    calls: dict[str, set[int]] = {}
    for operator in select_operators(call.operators, budget - call.inputs):
        calls.setdefault(operator.name, set()).add(operator.index)
    return CallPolicy({name: frozenset(indices) for name, indices in calls.items()})


FLOPS_PER_BYTE = 100
"""FLOPs that count as much as moving a byte: in that time a CPU does about 10, an H100 300 in bf16."""


@dataclass
class Operator:
    """One call of an operator whose output can be kept.

    Args:
        name: Name of the operator, such as ``"aten.mm.default"``.
        index: Index of the call among the operator's calls in the module's forward.
        size: Bytes of the output.
        cost: FLOPs of a recomputation, including those that count for memory traffic.
    """

    name: str
    index: int
    size: int
    cost: int


@dataclass
class CallCost:
    """Memory and operators of one call of a module.

    Args:
        inputs: Bytes of its tensor arguments, which a checkpoint always keeps, without those that an earlier call had, too.
        saved: Bytes that autograd saves without a checkpoint, except parameters and buffers.
        operators: Operators that a recomputation runs, in order.
    """

    inputs: int = 0
    saved: int = 0
    operators: list[Operator] = field(default_factory=list)


def measure_calls(root: nn.Module, modules: Iterable[nn.Module], example_inputs: Any) -> list[CallCost | None]:
    """Return per module the call that saves most bytes, or None if the module is not called.

    The model runs in train mode on the example inputs and is restored afterwards.
    """
    sandbox = Sandbox(root, example_inputs, fake=True)
    held = GeneratorState(each for module in root.modules() for each in generators_in(vars(module)))
    with held.restore_for_block(), _tracked_random_states(), sandbox.open(grad=True):
        own = {storage_key(tensor) for tensor in [*root.parameters(), *root.buffers()]}
        for module in root.modules():
            module.training = True
        known: dict[int, torch.Tensor] = {}
        meters = [_Meter(own, known) for _ in modules]
        for module, meter in zip(modules, meters, strict=True):
            wrap_forward(module, meter)
        args, kwargs = tree_map_only(torch.Tensor, sandbox.enter_input, split_inputs(example_inputs, root))
        with _NoCommunicationMode():  # type: ignore[no-untyped-call]
            root(*args, **kwargs)
    return [max(meter.calls, key=lambda call: call.saved, default=None) for meter in meters]


@contextmanager
def _tracked_random_states() -> Iterator[None]:
    """Provide a tracked random state in the block, and restore all of them afterwards."""
    tracker = get_cuda_rng_tracker()
    if tracker.get_states():
        with RandomState().restore_for_block():
            yield
        return
    tracker.add(MODEL_PARALLEL_RNG, 0)
    try:
        yield
    finally:
        tracker.reset()


class _NoCommunicationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which collectives return at once, as fake tensors cannot be sent."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return completed_work(func, args) if func.namespace == "c10d" else func(*args, **(kwargs or {}))


class _Meter:
    """Forward wrapper that records each call, outside other wrappers as a checkpoint is."""

    def __init__(self, own: set[int], known: dict[int, torch.Tensor]) -> None:
        self.own, self.known, self.calls = own, known, list[CallCost]()

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        inputs = {storage_key(tensor): tensor for tensor in Arguments(args, kwargs).tensors}
        new = sum(_bytes(tensor) for key, tensor in inputs.items() if key not in self.known and key not in self.own)
        self.known.update(inputs)  # while the tensors live the keys stay theirs
        found = _Recorder(self.own, new)
        with saved_tensors_hooks(found.save, lambda tensor: tensor), found:
            result = call(*args, **kwargs)
        self.calls.append(found.finish())
        return result


class _Recorder(CountingMode):  # type: ignore[no-untyped-call]
    """Mode that records the operators of one call."""

    def __init__(self, own: set[int], inputs: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = own
        added = dict.fromkeys(_ATTENTION_OPERATORS, _attention_flops)
        self.formulas = FlopCounterMode(display=False, custom_mapping=added).flop_registry
        self.operators: list[tuple[Operator, set[int]]] = []
        self.ran = 0  # operators before the last saved tensor: a recomputation stops there
        self.saved: dict[int, torch.Tensor] = {}  # by memory
        self.written: set[int] = set()
        self.held: list[Any] = []
        self.inputs = inputs

    def finish(self) -> CallCost:
        kept = [operator for operator, places in self.operators[: self.ran] if places.isdisjoint(self.written)]
        saved = sum(map(_bytes, self.saved.values()))
        self.held.clear()  # they hold autograd's graph, which holds us by the hook: a cycle that no collector finds
        self.saved.clear()
        return CallCost(self.inputs, saved, kept)

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        self.ran = len(self.operators)
        if storage_key(tensor) not in self.own:
            self.saved[storage_key(tensor)] = tensor
        return tensor.detach()  # a node that holds its own output is a cycle that no collector finds

    def run(self, func: Any, index: int, args: Any, kwargs: Any) -> Any:
        """Run an operator and record it."""
        output = func(*args, **kwargs)
        self.held.append(output)
        self.written |= {storage_key(tensor) for tensor in mutated_tensors(func, args, kwargs)}
        # ranks with other sizes may choose differently, and a collective that only some ranks repeat would hang
        if "c10d" not in func.namespace and has_own_storage(func, args, kwargs, output):
            places = {storage_key(tensor): _bytes(tensor) for tensor in tensors_in(output)}
            if cost := self._cost(func, args, kwargs, output):
                self.operators.append((Operator(str(func), index, sum(places.values()), cost), set(places)))
        return output

    def _cost(self, func: Any, args: Any, kwargs: Any, output: Any) -> int:
        formula = self.formulas.get(getattr(func, "overloadpacket", None))
        flops = 0 if formula is None else formula(*args, **kwargs, out_val=output)
        moved = sum(_own_bytes(tensor) for tensor in tensors_in((args, kwargs, output)))
        return int(flops) + FLOPS_PER_BYTE * moved


def select_operators(operators: list[Operator], budget: int) -> list[Operator]:
    """Select the most expensive operators within ``budget`` bytes; exact up to sizes rounded to 1/4096 of the budget."""
    if sum(operator.size for operator in operators) <= budget:
        return operators
    fitting = [operator for operator in operators if operator.size <= budget]
    return max(_greedy(fitting, budget), _knapsack(fitting, budget), key=lambda some: sum(operator.cost for operator in some))


def _greedy(operators: list[Operator], budget: int) -> list[Operator]:
    """Select by cost per byte."""
    chosen = []
    for operator in sorted(operators, key=lambda operator: -operator.cost / max(operator.size, 1)):
        if operator.size <= budget:
            chosen.append(operator)
            budget -= operator.size
    return chosen


def _knapsack(operators: list[Operator], budget: int, steps: int = 4096) -> list[Operator]:
    """Select by dynamic programming over steps of the budget."""
    unit = max(1, math.ceil(budget / steps))
    steps = budget // unit
    best = torch.zeros(steps + 1, dtype=torch.float64)
    taken: list[torch.Tensor] = []
    for operator in operators:
        size = math.ceil(operator.size / unit)
        more = torch.full_like(best, -math.inf)
        if size <= steps:
            more[size:] = best[: steps + 1 - size] + operator.cost
        taken.append(more > best)
        best = torch.maximum(best, more)
    chosen = []
    for operator, take in zip(reversed(operators), reversed(taken), strict=True):
        if take[steps]:
            chosen.append(operator)
            steps -= math.ceil(operator.size / unit)
    return chosen


_ATTENTION_OPERATORS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
)
"""Operators that the table of torch's ``FlopCounterMode`` lacks."""


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of an attention on shapes ``[batch, heads, sequence, width]``."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the memory that the tensor keeps alive."""
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else _own_bytes(tensor)


def _own_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements that the tensor shows; of a sparse tensor, of those that are stored."""
    return tensor.nbytes if tensor.layout is torch.strided else tensor._nnz() * tensor.element_size()
