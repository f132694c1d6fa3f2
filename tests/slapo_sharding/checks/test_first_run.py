"""Syncs that turn out wrong when the model runs are an error of the first run that names the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc


class Block(nn.Module):
    """Two sharded layers beside replicated ones, which the forwards of subclasses combine."""

    frozen = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        self.heads, self.gate, self.scale = nn.LayerNorm(2), nn.Linear(4, 1), nn.Parameter(torch.full((4,), 0.5))


class Plain(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class Residual(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Normed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).tanh())


class Heads(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.heads(self.up(x).unflatten(-1, (-1, 2))).flatten(-2))


class Gated(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.gate(x))


class Scaled(Block):
    """A scale like Gemma's, computed from the parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x * (1 + self.scale)).tanh())


class Looks(Block):
    """Detaches values, and calls an autograd function of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, made = x.detach().abs().mean(), self.up(x)
        assert (made[..., :1] > self.gate(x)).shape == (*x.shape[:-1], 1)
        return self.down(Halved.apply(made.type_as(self.scale).tanh())) / size + x


class Frozen(Normed):
    """The first block after a frozen embedding: its input needs no gradient, and the norm's gradients are partial."""

    frozen = True


class Cross(nn.Module):
    """Takes a second value that has no sync."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.up(other))


class Crossed(Block):
    """Uses a second value that a replicated norm makes."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.memory = Cross(), torch.arange(24.0).view(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cross(x, self.norm(self.memory))


class Says(nn.Module):
    def forward(self, x: torch.Tensor) -> str:
        return "words"


class Talks(Block):
    """Calls a module that returns no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.says = Says()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.says(x).startswith("words")
        return self.down(self.up(x))


class Aside(Block):
    """Passes the gradient of its input around the sharded layers, like an auxiliary loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh()).detach()


class Slope(nn.Module):
    """A scalar parameter, such as a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Sloped(Block):
    def __init__(self) -> None:
        super().__init__()
        self.slope = Slope()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.slope(x)).tanh())


class Added(Sloped):
    """A weight that was added after the schedule was created, as adapters are."""

    frozen = True


class Beside(Block):
    """The gathered value goes elsewhere than into the layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh()) * self.norm(x)


class Asked(Block):
    """A frozen input that is set to require a gradient, as adapters under a checkpoint need."""

    frozen = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        return self.down(self.up(x).tanh() * self.gate(x))


class Recomputed(Residual):
    """A reentrant checkpoint, whose first forward has no gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return made


class Typed(Block):
    """Reads only the dtype of a sharded parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = self.up.weight.new_zeros(x.shape)
        return self.down(self.up(start + x.type_as(self.up.weight).to(self.up.weight)).tanh())


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / 2


class Model(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = nn.Linear(4, 4), block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        return self.block(made.detach() if self.block.frozen else made)


def _pair(sch: Schedule) -> Schedule:
    sch["block.up"].shard("weight", axis=0)
    sch["block.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    return sch


def _summed_at(*path: str) -> Callable[[Schedule], Any]:
    return lambda sch: _pair(sch)[".".join(("block", *path))].sync("bwd_post", "all_reduce")


def _gathered_at(*path: str) -> Callable[[Schedule], Any]:
    return lambda sch: (
        _pair(sch)["first"].sync("fwd_post", "scatter", axis=0),
        sch[".".join(("block", *path))].sync("fwd_pre", "all_gather", axis=0),
    )


def _and_sums(steps: Callable[[Schedule], Any], path: str) -> Callable[[Schedule], Any]:
    return lambda sch: (steps(sch), sch[path].sync("grad", "all_reduce"))


MIXED = "puts a value whose gradient is the same on every rank together with one of which each rank has its own part or use"
SILENT: dict[str, tuple[type[Block], Callable[[Schedule], Any], str]] = {
    "residual in bwd_post": (Residual, _summed_at(), f"Residual 'block' at {__file__}"),
    "residual in a reentrant checkpoint": (Recomputed, _summed_at(), f"Recomputed 'block' at {__file__}"),
    "residual after a gather": (Residual, _gathered_at(), MIXED),
    "gate": (Gated, _summed_at("up"), f"mul {MIXED}, so one gradient is wrong; give bwd_post or the gather to"),
    "norm in bwd_post": (Normed, _summed_at(), "LayerNorm 'block.norm' at"),
    "norm of heads": (
        Heads,
        _summed_at("up"),
        "layer_norm uses 'block.heads.weight' on a value of which each rank has its own",
    ),
    "norm of a part": (Normed, _gathered_at("up"), "needs sync('grad', 'all_reduce') of the module that holds it; check=False"),
    "scale in bwd_post": (Scaled, _summed_at(), f"mul {MIXED}"),
    "no gradient enters": (
        Frozen,
        _summed_at(),
        "Linear 'block.up' at",
    ),
    "reduced inside and outside": (
        Plain,
        lambda sch: (_summed_at("up")(sch), sch["block"].sync("fwd_post", "all_reduce")),
        "the same on every rank already: it was reduced or gathered inside",
    ),
    "a second input": (
        Crossed,
        lambda sch: (
            sch["first"].sync("fwd_post", "scatter", axis=0),
            sch["block.cross"].sync("fwd_pre", "all_gather", axis=0),
            sch["block.cross.up"].shard("weight", axis=0),
            sch["block.cross.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce"),
        ),
        "Linear 'block.cross.up' at",
    ),
    "nothing sharded": (
        Plain,
        lambda sch: (
            sch["first"].sync("fwd_pre", "scatter", axis=0),
            sch["block"].sync("fwd_pre", "all_gather", axis=0, backward="split"),
        ),
        "Linear 'first' at",
    ),
    "gathered beside": (
        Beside,
        lambda sch: (
            _pair(sch)["block.norm"].sync("fwd_pre", "scatter", axis=0),
            sch["block.norm"].sync("fwd_post", "all_gather", axis=0, backward="reduce_scatter"),
        ),
        "Linear 'block.up' at",
    ),
    "asked for a gradient": (Asked, _summed_at("up"), f"mul {MIXED}"),
    "gathered and leaves the model": (
        Aside,
        lambda sch: (
            _pair(sch)["first"].sync("fwd_post", "scatter", axis=0),
            sch["block"].sync("fwd_pre", "all_gather", axis=0),
        ),
        "the model, Model, at",
    ),
    "summed by the norm and by the layer": (
        Normed,
        lambda sch: (
            _summed_at("up")(sch),
            sch["first"].sync("fwd_post", "scatter", axis=0),
            sch["block.norm"].sync("fwd_post", "all_gather", axis=0, backward="reduce_scatter").sync("grad", "all_reduce"),
        ),
        "sums the gradient of its input, which an earlier sync sums already",
    ),
    "gathered and reduced": (
        Plain,
        lambda sch: (
            sch["block.up"].shard("weight", axis=0).sync("bwd_post", "all_reduce"),
            sch["block.up"].sync("fwd_post", "all_gather", axis=-1, backward="reduce_scatter"),
            sch["block.down"].mod.requires_grad_(False),
            sch["block"].sync("fwd_post", "all_reduce"),
        ),
        "the same on every rank already: it was reduced or gathered inside",
    ),
    "leaves the model": (Aside, _summed_at(), "the model, Model, at"),
    "one number": (
        Sloped,
        lambda sch: (_summed_at("up")(sch), sch["block.slope"].sync("grad", "all_reduce")),
        "mul uses 'block.slope.weight', whose gradient a sync sums, on a value whose gradient is the same on every rank",
    ),
    "a weight of its own": (
        Added,
        lambda sch: (_new_slope(sch), _summed_at()(sch)),
        "Linear 'block.up' at",
    ),
}


def _new_slope(sch: Schedule) -> None:
    slope = sch["block.slope"].mod
    slope.weight = nn.Parameter(slope.weight.detach().clone())


def _silent(rank: int) -> dict[str, str]:
    messages = {}
    for key, (block, steps, _) in SILENT.items():
        x, model = torch.randn(6, 4), Model(block)
        unchecked = copy.deepcopy(model)
        sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
        steps(sch)
        build(sch)
        model.block.up(x)  # a part that is called alone, and a run without gradients, are not what is waited for
        try:
            with torch.no_grad():
                model(x)
            model(x).sum().backward()
        except BuildError as err:
            messages[key] = str(err)
        else:
            raise AssertionError(key)
        before, sch = (
            copy.deepcopy(unchecked),
            create_schedule(unchecked, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin])),
        )
        steps(sch)
        build(sch, check=False)
        with pytest.raises(AssertionError, match="gradient of|output"):
            assert_equivalent(before, unchecked, x)
    return messages


def test_a_gradient_that_would_be_wrong_is_an_error_that_names_the_module():
    """Without the check each of these schedules gives wrong gradients."""
    messages = run_distributed(_silent, 2)[0]
    assert {key: message for key, message in messages.items() if SILENT[key][2] not in message} == {}


RIGHT: dict[str, tuple[type[Block], Callable[[Schedule], Any]]] = {
    "residual": (Residual, _summed_at("up")),
    "norm in bwd_post": (Normed, _and_sums(_summed_at(), "block.norm")),
    "norm of heads": (Heads, _and_sums(_summed_at("up"), "block.heads")),
    "norm of a part": (Normed, _and_sums(_gathered_at("up"), "block.norm")),
    "norm after a gather": (Normed, _and_sums(_gathered_at(), "block.norm")),
    "gathered by the norm": (
        Normed,
        lambda sch: (
            _pair(sch)["first"].sync("fwd_post", "scatter", axis=0),
            sch["block.norm"].sync("fwd_post", "all_gather", axis=0, backward="reduce_scatter").sync("grad", "all_reduce"),
        ),
    ),
    "no gradient enters": (Frozen, _and_sums(_summed_at(), "block.norm")),
    "nothing is sharded": (
        Normed,
        lambda sch: (
            sch["first"].sync("fwd_post", "scatter", axis=0),
            sch["block.norm"].sync("fwd_post", "all_gather", axis=0).sync("grad", "all_reduce"),
        ),
    ),
    "numbers": (Looks, _summed_at("up")),
    "types": (Typed, _summed_at("up")),
    "recomputed": (Recomputed, _summed_at("up")),
    "one number": (Sloped, _and_sums(_summed_at(), "block.slope")),
    "no gradient enters a sum": (Added, _and_sums(_summed_at(), "block.slope")),
    "gathered": (
        Gated,
        lambda sch: (
            sch["block.up"].shard("weight", axis=0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1),
        ),
    ),
    "words": (
        Talks,
        lambda sch: (_summed_at("up")(sch), sch["block.says"].sync("fwd_post", lambda module, args, output: output + "!")),
    ),
    "function": (Residual, lambda sch: (_summed_at("up")(sch), sch["block"].sync("fwd_pre", lambda module, args: None))),
}


def _right(rank: int) -> None:
    for block, steps in RIGHT.values():
        model = Model(block)
        before, sch = (
            copy.deepcopy(model),
            create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin])),
        )
        steps(sch)
        build(sch)
        assert_equivalent(before, model, torch.randn(6, 4))
        assert not any("note" in str(hook) for module in model.modules() for hook in module._forward_pre_hooks.values())


def test_right_gradients_are_no_error():
    run_distributed(_right, 2)


class Returns(Model):
    """A value made inside the block is used there, and also returned."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made: list[torch.Tensor] = []
        handle = self.block.norm.register_forward_hook(lambda module, args, output: made.append(output))
        output = super().forward(x)
        handle.remove()
        return output, made[0]


def _returned(rank: int) -> None:
    model, x = Returns(Normed), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    before, sch = (
        copy.deepcopy(model),
        create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin])),
    )
    _and_sums(_summed_at(), "block.norm")(sch)
    build(sch)
    output, beside = model(x)
    output.sum().backward(retain_graph=True)
    before(x)[0].sum().backward()
    assert torch.allclose(model.first.weight.grad, before.first.weight.grad, atol=1e-6)
    with pytest.raises(BuildError, match="it returns what is the same on every rank and was made inside of a bwd_post"):
        beside.sum().backward()


def test_only_a_gradient_for_what_is_returned_is_refused() -> None:
    run_distributed(_returned, 2)
