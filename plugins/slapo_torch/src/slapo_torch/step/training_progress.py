"""State of training beside the optimizer: the learning-rate schedule and the loss scale of fp16."""

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

from slapo_core import BuildError
from slapo_training.checkpoint import StateLoading, check_plain
from slapo_training.distributed import all_reduce
from slapo_training.optimizers import lr_scheduler_class

from .stage_call import LabelCount

_LR_SCHEDULE = "learning-rate schedule"


def step_lr_scheduler(schedule: Any, loss: float | torch.Tensor) -> None:
    """Step the learning-rate schedule; only ``ReduceLROnPlateau`` reads the loss and waits for its device."""
    if isinstance(schedule, ReduceLROnPlateau):
        schedule.step(float(loss))
    elif schedule is not None:
        schedule.step()


class DeferredLRSteps:
    """Steps of the learning-rate schedule on a rank without trainable parameters, recorded by their losses."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    def add(self, loss: float) -> None:
        self._losses.append(loss)

    def catch_up(self, schedule: Any) -> None:
        """Run the recorded steps on a new schedule."""
        with warnings.catch_warnings():  # torch warns because the new optimizer has not stepped
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for loss in self._losses if schedule is not None else ():
                step_lr_scheduler(schedule, loss)
        self._losses.clear()

    def state(self) -> list[float]:
        return list(self._losses)

    def restore(self, state: list[float]) -> None:
        self._losses = list(state)


class LossScale:
    """Factor of the loss that keeps small gradients representable in fp16.

    The factor is halved after an overflow, and doubled after ``_GROWTH_INTERVAL`` steps without one.

    Args:
        mesh: Mesh of the ranks that share the factor.
    """

    def __init__(self, value: float, mesh: DeviceMesh | None) -> None:
        self.value, self._mesh, self._good = value, mesh, 0

    def update(self, parameters: Iterable[nn.Parameter], device: torch.device) -> bool:
        """Adapt the scale; return True if a gradient on some rank is not finite. Collective."""
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
        return {"value": self.value, "good": self._good}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.value, self._good = state["value"], state["good"]


_GROWTH_INTERVAL = 2000
"""Steps, as in ``torch.amp.GradScaler``."""


class TrainingProgress:
    """States of the learning-rate schedule, the loss scale and the number of labels, for checkpoints.

    Args:
        rate: A learning-rate schedule of torch, its deferred steps, or None.
        trains: False for an engine that only evaluates; it accepts a checkpoint with other states.

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
        """Return the states to save.

        Raises:
            BuildError: a state has objects that are not plain data.
        """
        states = {what: {"class": lr_scheduler_class(part), "state": state()} for what, (part, state, _) in self._parts.items()}
        for what, state in states.items():
            check_plain(state, f"the state of the {what}")
        return states

    def state_for_rank(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return this rank's states from the saved states of all ranks: for each name a state of the same class if possible."""
        found: dict[str, Any] = {}
        for each in ranks:
            for what, saved in each.items():
                is_own = what in self._parts and saved["class"] == lr_scheduler_class(self._parts[what][0])
                if what not in found or (is_own and found[what]["class"] != saved["class"]):
                    found[what] = saved
        return found

    def check_same(self, saved: Mapping[str, Any]) -> None:
        """Refuse states of other objects.

        Raises:
            BuildError: a state is missing, or belongs to another class or to other parameter groups.
        """
        if not self._trains:
            return
        if _LR_SCHEDULE in saved and _LR_SCHEDULE not in self._parts:
            raise BuildError(
                f"the checkpoint's {_LR_SCHEDULE} is {saved[_LR_SCHEDULE]['class']}, the engine's is none; build with the same"
            )
        for what, (part, _, _) in self._parts.items():
            name = saved.get(what, {}).get("class", "none")
            if name != (own := lr_scheduler_class(part)):
                raise BuildError(f"the checkpoint's {what} is {name}, the engine's is {own}; build with the same")
            rates = saved[what]["state"].get("base_lrs") if isinstance(saved[what]["state"], dict) else None
            if rates is not None and len(rates) != len(part.optimizer.param_groups):
                raise BuildError(
                    f"the checkpoint's {what} is of {len(rates)} parameter groups, and this rank's optimizer has "
                    f"{len(part.optimizer.param_groups)}; load it on the same layout"
                )

    def restore(self, saved: Mapping[str, Any], loading: StateLoading) -> None:
        """Restore saved states of the same class."""
        for what, (part, state, restore) in self._parts.items():
            if what in saved and saved[what]["class"] == (kind := lr_scheduler_class(part)):
                loading.load(kind, restore, saved[what]["state"], lambda state=state: copy.deepcopy(state()))  # type: ignore[misc]
