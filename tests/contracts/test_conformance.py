"""Every primitive and every dialect of ours passes the conformance kit that authors of plugins are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import Registry, Schedule, make, set_random_seed
from slapo_core.testing.conformance import (
    Check,
    EngineExample,
    Example,
    Refused,
    RefusedOption,
    dialect_checks,
    primitive_checks,
)
from slapo_pipeline.pipe_split import pipe_split

X = torch.linspace(-1, 1, 24).view(3, 8)


class Block(nn.Module):
    """A residual block with a dropout, an operation that is no module, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down, self.drop = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) + self.drop(self.norm(self.down(self.act(self.up(x)))))


class Net(nn.Module):
    """Two blocks between an embedding and a head that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(6, 8), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.tensor([0, 3, 5, 1])


class Mlp(nn.Module):
    """Without random numbers, in widths that two ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class Gated(nn.Module):
    """What a kernel serves."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Marked(nn.Module):
    """Says itself where a stage ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        pipe_split()
        return self.last(x)


def new_gelu(_: nn.Module) -> nn.Module:
    return nn.GELU()


def no_module(_: nn.Module) -> Any:
    return None


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def traced(sch: Schedule) -> None:
    sch["layers.0"].trace(recursive=False)


def activation(sch: Schedule) -> tuple[Any, ...]:
    return (sch["layers.0"].find("act"),)


def silu_for_the_function(sch: Schedule) -> tuple[Any, ...]:
    return silu, sch["layers.0"].find(lambda x: F.silu(x))


def seeded(sch: Schedule) -> None:
    set_random_seed(0, tp_rank=sch.rank)


def column(sch: Schedule) -> None:
    sch["up"].shard(["weight", "bias"], axis=0)
    sch["up"].sync("bwd_post", "all_reduce")


def row(sch: Schedule) -> None:
    sch["down"].shard("weight", axis=1)
    sch["down"].sync("fwd_post", "all_reduce")


def column_behind(sch: Schedule) -> None:
    sch["up"].sync("bwd_post", "all_reduce")
    row(sch)


def both_cut(sch: Schedule) -> None:
    column(sch)
    sch["down"].shard("weight", axis=1)


HERE = ("tests.contracts.test_conformance",)
PRIMITIVES: dict[str, list[Example]] = {
    "annotate": [
        Example(
            Net,
            (IDS,),
            "layers.0.up",
            ("weight", "kind", "wide"),
            refused=[
                Refused("no parameter or buffer 'wieght'", ("wieght", "kind", 1)),
                Refused("no free attribute name", ("bias", "grad", 1)),
            ],
        )
    ],
    "checkpoint": [
        Example(
            Net,
            (IDS,),
            "layers.0",
            refused=[
                Refused("ratio is 2.0", kwargs={"ratio": 2.0}, path="layers"),
                Refused("policy", kwargs={"policy": "everything"}),
            ],
        ),
        Example(Net, (IDS,), "layers", kwargs={"ratio": 0.5}, name="a share of a list"),
        Example(Net, (IDS,), "layers.0", activation, before=traced, name="a subgraph"),
    ],
    "compile": [
        Example(Mlp, (X,), "up", kwargs={"backend": "eager"}, refused=[Refused("dynamic is 'no'", kwargs={"dynamic": "no"})])
    ],
    "cut_at_marks": [Example(Marked, (X,), refused=[Refused("is no mark", (-1,))])],
    "cut_pipeline_stage": [Example(Net, (IDS,), "layers.0", refused=[Refused("where is 'behind'", ("behind",))])],
    "decompose": [
        Example(
            Net,
            (IDS,),
            "layers.0.up",
            refused=[Refused("a GELU has no bias", path="layers.0.act"), Refused("parts", kwargs={"parts": 5})],
        )
    ],
    "fork_rng": [
        Example(
            Net,
            (IDS,),
            "layers.0.drop",
            before=seeded,
            numerics="distribution",
            because="each rank has masks of its own",
            refused=[Refused("too many positional", (True,))],
        )
    ],
    "freeze": [Example(Net, (IDS,), "layers.0", changes=["requires_grad"])],
    "fuse": [
        Example(
            Net,
            (IDS,),
            "layers.0",
            activation,
            {"compiler": None},
            before=traced,
            refused=[Refused("compiler", activation, {"compiler": "gcc"}), Refused("", ([],))],
        )
    ],
    "offload": [
        Example(Net, (IDS,), "layers.0", kwargs={"min_bytes": 0}, refused=[Refused("min_bytes", kwargs={"min_bytes": -1})])
    ],
    "pipeline": [
        Example(Net, (IDS,), args=(2,), refused=[Refused("stages is 0", (0,)), Refused("balance", (2,), {"balance": "x"})])
    ],
    "replace": [
        Example(Net, (IDS,), "layers.0.act", lambda sch: (make(nn.GELU),), refused=[Refused("no module", (3,))]),
        Example(
            Net,
            (IDS,),
            "layers.0.up",
            lambda sch: (make(nn.Linear, 8, 16),),
            changes=["values"],
            numerics="none",
            because="the new layer has weights of its own",
            name="a layer by a new one",
        ),
        Example(Net, (IDS,), "layers.0", silu_for_the_function, before=traced, trust=HERE, name="a subgraph"),
    ],
    "replace_all": [
        Example(
            Net,
            (IDS,),
            args=(nn.GELU, new_gelu),
            trust=HERE,
            refused=[Refused("nothing below", (nn.Tanh, new_gelu)), Refused("no module", (nn.GELU, no_module))],
        )
    ],
    "shard": [
        Example(
            Mlp,
            (X,),
            "up",
            (["weight", "bias"], 0),
            after=column_behind,
            ranks=2,
            refused=[Refused("no parameter", ("wieght", 0)), Refused("axis", ("weight", 5))],
        )
    ],
    "sync": [
        Example(
            Mlp,
            (X,),
            "down",
            ("fwd_post", "all_reduce"),
            before=both_cut,
            ranks=2,
            refused=[Refused("no mode", ("fwd", "all_reduce")), Refused("no operation", ("fwd_post", "sum"))],
        )
    ],
    "tensor_parallel": [
        Example(
            Mlp,
            (X,),
            args=({"up": "colwise", "down": "rowwise"},),
            ranks=2,
            refused=[Refused("", ({"upp": "colwise"},)), Refused("", ({"up": "diagonal"},))],
        ),
        Example(Mlp, (X,), ranks=2, name="a derived plan"),
    ],
    "trace": [
        Example(
            Net, (IDS,), refused=[Refused("tracer", kwargs={"tracer": "eyes"}), Refused("", kwargs={"leaf_modules": ["no"]})]
        ),
        Example(Net, (IDS,), "layers.0", kwargs={"flatten": True}, name="one module, flat"),
    ],
    "trace_until": [Example(Net, (IDS,), args=("layers.*",), refused=[Refused("no module at 'layer'", ("layer",))])],
    "use_kernels": [
        Example(
            Gated,
            (X,),
            args=(["swiglu"], {"*": "eager"}),
            refused=[Refused("no kernel", ("swigly",)), Refused("nothing from here down", ("geglu",))],
        )
    ],
}


class Regression(nn.Module):
    """Gives its loss where it has labels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.down(F.relu(self.up(x)))
        return {"y": y} if labels is None else {"loss": F.mse_loss(y, labels), "y": y}


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 8, generator=generator), "labels": torch.randn(8, 8, generator=generator)}


def cut_behind_up(sch: Schedule) -> None:
    sch["up"].cut_pipeline_stage()


WRONG = (RefusedOption("microbatches", {"microbatches": 0}), RefusedOption("clip", {"clip": -1.0}))
DIALECTS: dict[str, list[EngineExample]] = {
    name: [
        EngineExample(Regression, batch, {"microbatches": 2}, refused=WRONG),
        EngineExample(Regression, batch, {"microbatches": 2}, mesh={"dp": 2}),
        EngineExample(Regression, batch, {"microbatches": 2}, mesh={"pp": 2}, before=cut_behind_up),
    ]
    for name in ("deepspeed", "megatron", "torch")
}
REGISTRY = Registry()


SLOW = {("use_kernels", "transactional")}
"""Recognition, under a debugger."""
ALWAYS = ("sync", "numerics")
"""The one check on several processes that runs always."""


def parameters(checks: list[Check]) -> list[Any]:
    """Those on several processes are slow, but for one."""
    found = []
    for check in checks:
        several = isinstance(check.example, EngineExample) or (check.example is not None and check.example.ranks > 1)
        word = (check.owner, check.name)
        marks = [pytest.mark.multiproc] * several
        if word in SLOW or (several and word != ALWAYS):
            marks.append(pytest.mark.slow)
        found.append(pytest.param(check, marks=marks, id=str(check)))
    return found


@pytest.mark.parametrize(
    "check", parameters([check for name, found in PRIMITIVES.items() for check in primitive_checks(name, found)])
)
def test_our_primitives_conform(check: Check) -> None:
    check()


@pytest.mark.parametrize(
    "check", parameters([check for name, found in DIALECTS.items() for check in dialect_checks(name, found)])
)
def test_our_dialects_conform(check: Check) -> None:
    check()


def test_no_primitive_is_missing() -> None:
    assert sorted(PRIMITIVES) == REGISTRY.primitive_names()


def test_no_dialect_is_missing() -> None:
    assert sorted(DIALECTS) == REGISTRY.dialect_names()
