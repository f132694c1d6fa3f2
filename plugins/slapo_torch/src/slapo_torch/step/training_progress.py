"""State of training beside the optimizer: the learning rate's schedule, and with fp16 the scale of the loss."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import ReduceLROnPlateau

from slapo_core import BuildError, all_reduce
from slapo_training.checkpoint import StateLoading, check_plain
from slapo_training.optimizers import rate_kind

from .microbatch_weights import LabelCount

_LR_SCHEDULE = "learning-rate schedule"


def step_lr_scheduler(schedule: Any, loss: float | torch.Tensor) -> None:
    """Step the learning rate's schedule; only one that looks at the loss waits for its device."""
    if isinstance(schedule, ReduceLROnPlateau):
        schedule.step(float(loss))
    elif schedule is not None:
        schedule.step()


class DeferredLRSteps:
    """Steps of the learning rate's schedule on a rank that has nothing to train yet, by the loss of each."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    def add(self, loss: float) -> None:
        """Note a step."""
        self._losses.append(loss)

    def catch_up(self, schedule: Any) -> None:
        """Bring a new schedule to where those of the other ranks are."""
        with warnings.catch_warnings():  # the new optimizer has not stepped, and torch takes that for a mistake
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for loss in self._losses if schedule is not None else ():
                step_lr_scheduler(schedule, loss)
        self._losses.clear()

    def state(self) -> list[float]:
        """Return the state for a checkpoint."""
        return list(self._losses)

    def restore(self, state: list[float]) -> None:
        """Go on from ``state``."""
        self._losses = list(state)


class LossScale:
    """The factor that keeps small gradients from vanishing in fp16: halved after an overflow, doubled after many steps without.

    Args:
        value: What it is at first.
        mesh: The ranks that have to agree on it.

    Attributes:
        value: The factor, equal on all ranks.
    """

    def __init__(self, value: float, mesh: DeviceMesh | None) -> None:
        self.value, self._mesh, self._good = value, mesh, 0

    def update(self, parameters: Iterable[nn.Parameter], device: torch.device) -> bool:
        """Return whether some rank has a gradient that is not finite, and adapt the scale. Collective."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        values = [grad.coalesce().values() if grad.is_sparse else grad for grad in gradients]
        bad = not all(torch.stack([value.isfinite().all() for value in values]).tolist()) if values else False
        found = all_reduce(torch.tensor([int(bad)], device=device), self._mesh, dist.ReduceOp.MAX)
        self._good = 0 if found.item() else self._good + 1
        if found.item():
            self.value = max(self.value / 2, 1.0)
        elif self._good == _GROWTH_INTERVAL:
            self.value, self._good = self.value * 2, 0
        return bool(found.item())

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "good": self._good}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.value, self._good = state["value"], state["good"]


_GROWTH_INTERVAL = 2000
"""Steps, as in ``torch.amp.GradScaler``."""


class TrainingProgress:
    """State for checkpoints of the learning rate's schedule, the loss scale, and the number of labels.

    Args:
        rate: A schedule of torch, or the steps that one is yet to make, or None.
        scale: The loss scale, or None.
        labels: Of a micro-batch.
        trains: Whether the engine does; one that only evaluates takes what it has a part for.

    Attributes:
        depends_on_group_order: True with a schedule, whose state has lists with one entry per parameter group.
    """

    def __init__(self, rate: Any, scale: LossScale | None, labels: LabelCount, trains: bool = True) -> None:
        self._trains = trains
        self.depends_on_group_order = rate is not None and not isinstance(rate, DeferredLRSteps)
        self._parts: dict[str, tuple[Any, Callable[[], Any], Callable[[Any], Any]]] = {}
        self._parts["number of labels"] = (labels, labels.state, labels.restore)
        if isinstance(rate, DeferredLRSteps):
            self._parts[_LR_SCHEDULE] = (rate, rate.state, rate.restore)
        elif rate is not None:
            self._parts[_LR_SCHEDULE] = (rate, rate.state_dict, rate.load_state_dict)
        if scale is not None:
            self._parts["loss scale"] = (scale, scale.state, scale.restore)

    def state(self) -> dict[str, Any]:
        """Return the states to write.

        Raises:
            BuildError: a state is more than plain data.
        """
        states = {what: {"class": rate_kind(part), "state": state()} for what, (part, state, _) in self._parts.items()}
        for what, state in states.items():
            check_plain(state, f"the state of the {what}")
        return states

    def state_for_rank(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the packed states of other ranks that are for this one: for each part that of its class, where one has it."""
        found: dict[str, Any] = {}
        for each in ranks:
            for what, saved in each.items():
                is_own = what in self._parts and saved["class"] == rate_kind(self._parts[what][0])
                if what not in found or (is_own and found[what]["class"] != saved["class"]):
                    found[what] = saved
        return found

    def check_same(self, saved: Mapping[str, Any]) -> None:
        """Refuse what was packed of other parts.

        Raises:
            BuildError: the checkpoint has no state for what there is, that of another class, or that of other groups.
        """
        if not self._trains:
            return
        if _LR_SCHEDULE in saved and _LR_SCHEDULE not in self._parts:
            raise BuildError(
                f"the checkpoint's {_LR_SCHEDULE} is {saved[_LR_SCHEDULE]['class']}, the engine's is none; build with the same"
            )
        for what, (part, _, _) in self._parts.items():
            name = saved.get(what, {}).get("class", "none")
            if name != (own := rate_kind(part)):
                raise BuildError(f"the checkpoint's {what} is {name}, the engine's is {own}; build with the same")
            rates = saved[what]["state"].get("base_lrs") if isinstance(saved[what]["state"], dict) else None
            if rates is not None and len(rates) != len(part.optimizer.param_groups):
                raise BuildError(
                    f"the checkpoint's {what} is of {len(rates)} parameter groups, and this rank's optimizer has "
                    f"{len(part.optimizer.param_groups)}; load it on the same layout"
                )

    def restore(self, saved: Mapping[str, Any], loading: StateLoading) -> None:
        """Go on from what was saved."""
        for what, (part, state, put) in self._parts.items():
            if what in saved and saved[what]["class"] == (kind := rate_kind(part)):
                loading.load(kind, put, saved[what]["state"], lambda state=state: copy.deepcopy(state()))  # type: ignore[misc]
