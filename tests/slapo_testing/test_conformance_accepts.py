"""The conformance kit: what is right in its own way passes, such as new parameters that begin at random."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import Primitive, Schedule, ScheduleError, hookimpl
from slapo_testing.conformance import ConformanceError, Example, Refused, check_primitive, primitive_checks

HERE = __name__
X = torch.linspace(-1, 1, 8).view(2, 4)


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class Overwrites(Model):
    """Works in place of its input, which a leaf that requires gradients does not stand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.add_(1))


class Sparse(Model):
    """Has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self[0], self[1], self[2]):
            x = layer(x)
        return x + self.embed(torch.tensor([0, 2]))


class Adapted(nn.Module):
    """A Linear with a change of low rank, which begins with none."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.empty(2, base.in_features, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2, dtype=base.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Adapts(Primitive):
    """Freeze a Linear, and train
    a change of low rank.
    """

    name = "adapts"

    @staticmethod
    def check(schedule: Schedule) -> None:
        if not isinstance(schedule.mod, nn.Linear):
            raise ScheduleError("no Linear; name one", path=schedule.path, primitive="adapts")

    @staticmethod
    def apply(schedule: Schedule) -> None:
        new = Adapted(schedule.mod)
        nn.init.normal_(new.down, std=0.1)
        schedule.mod.requires_grad_(False)
        schedule.apply("replace", new)


class AdaptsByRank(Adapts):
    """Begins otherwise on each rank."""

    name = "adapts_by_rank"

    @staticmethod
    def apply(schedule: Schedule) -> None:
        new = Adapted(schedule.mod)
        with torch.random.fork_rng():
            torch.manual_seed(schedule.rank)
            nn.init.normal_(new.down, std=0.1)
        schedule.apply("replace", new)


class DoesNothing(Primitive):
    """Leaves all as it is."""

    name = "does_nothing"

    @staticmethod
    def apply(schedule: Schedule) -> None:
        pass


class Marks(Primitive):
    """Set any attributes of the module.

    Args:
        **marks: Name to value.
    """

    name = "marks"

    @staticmethod
    def check(schedule: Schedule, **marks: Any) -> None:
        if "forward" in marks:
            raise ScheduleError("forward is not a free name; give another one", path=schedule.path, primitive="marks")

    @staticmethod
    def apply(schedule: Schedule, **marks: Any) -> None:
        for name, value in marks.items():
            setattr(schedule.mod, name, value)


@hookimpl
def slapo_primitives() -> dict[str, Any]:
    return {cls.name: f"{HERE}:{cls.__name__}" for cls in (Adapts, AdaptsByRank, DoesNothing, Marks)}


AT_LINEAR = Example(Model, (X,), "2", plugins=(HERE,))


@pytest.mark.multiproc
def test_parameters_that_ranks_draw_otherwise_are_told() -> None:
    sentence = "the parameter '2.down', which is not sharded, differs between rank 0 and rank 1"
    checks = primitive_checks("adapts_by_rank", [replace(AT_LINEAR, ranks=2, changes=["state_dict"])])
    (found,) = [check for check in checks if check.name == "contracts"]
    with pytest.raises(ConformanceError, match=sentence):
        found()


def test_new_parameters_may_begin_at_random() -> None:
    check_primitive("adapts", [replace(AT_LINEAR, changes=["requires_grad", "state_dict"])])


def test_a_model_may_work_in_place_of_its_input() -> None:
    check_primitive("does_nothing", [replace(AT_LINEAR, model=Overwrites)])


def test_gradients_may_be_sparse() -> None:
    for check in primitive_checks("does_nothing", [replace(AT_LINEAR, model=Sparse)]):
        if check.name in ("process", "numerics"):
            check()


def test_any_keyword_may_be_an_argument() -> None:
    check_primitive(
        "marks", [replace(AT_LINEAR, kwargs={"owner": "me"}, refused=[Refused("not a free name", kwargs={"forward": 1})])]
    )
