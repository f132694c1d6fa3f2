"""A sharded parameter that other code than its module's uses is an error of the first run on every rank."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import slapo_memory.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, TraceError, build, create_schedule
from slapo_sharding.checks.first_run_check import install_first_run_check
from slapo_testing import run_distributed
from slapo_tracing import trace_module
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc

PLUGINS = Registry(
    [
        slapo_tracing.plugin,
        slapo_training.plugin,
        slapo_memory.plugin,
        slapo_pipeline.plugin,
        slapo_sharding.plugin,
        slapo_torch.plugin,
    ]
)
PLAIN_CALL = nn.Module._wrapped_call_impl


class Mlp(nn.Module):
    """Reads only metadata of a child's parameter, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x.to(self.up.weight.dtype).to(self.up.weight.device))))


class Multiplies(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.linear(x, self.up.weight, bias=self.up.bias))


class Penalty(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up.weight.pow(2).sum()


class Size(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.down.weight.shape[1]


class Mean(Mlp):
    """Divides by a number of elements, by an operation of Python or of torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = sum(p.numel() for p in self.parameters())
        return super().forward(x) * (1.0 / count)


class Scale(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).div(self.down.weight.numel())


class Offset(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (0.5 + self.down.weight.numel())


class Counted(Mlp):
    """Counts trainable parameters and freezes them for a while, as PEFT's ``disable_adapter`` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counted = sum(p.numel() for p in self.parameters() if p.numel() != 0)
        self.requires_grad_(False)
        x = super().forward(x)
        self.requires_grad_(True)
        return super().forward(x)


class Listed(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.cat([self.up.bias, self.down.bias])[:4]


class Recomputed(Penalty):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class InTraining(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (self.up.bias.sum() if torch.is_grad_enabled() else 0)


KINDS = (Multiplies, Penalty, Size, Mean, Scale, Offset, Listed)


def _plan(sch: Schedule, path: str = "") -> None:
    dot = f"{path}." if path else ""
    sch.tensor_parallel({f"{dot}up": "colwise", f"{dot}down": "rowwise"})


def _message(run: Any) -> str:
    with pytest.raises(BuildError) as caught:
        run()
    return str(caught.value)


def _built(model: nn.Module, **config: Any) -> nn.Module:
    sch = create_schedule(model, plugins=PLUGINS)
    _plan(sch)
    return build(sch, **config).module


def _reads(rank: int) -> list[str]:
    x = torch.ones(2, 4)
    messages = [_message(lambda cls=cls: _built(cls())(x)) for cls in (*KINDS, Recomputed)]
    model = _built(InTraining())
    with torch.no_grad():
        model(x)
    messages.append(_message(lambda: model(x)))
    assert _built(Penalty(), check=False)(x).shape == (2, 4)
    return messages


def _counts(rank: int) -> None:
    torch.manual_seed(0)
    plain = Counted()
    model = _built(copy.deepcopy(plain))
    assert_equivalent(plain, model, torch.randn(2, 4))
    assert model.counted < plain.counted


def test_shards_may_be_counted_and_frozen_by_outside_code() -> None:
    run_distributed(_counts, 2)


def test_a_shard_read_as_the_whole_is_refused_on_every_rank():
    first, second = run_distributed(_reads, 2)
    assert first == second
    for message, cls, name, use in zip(
        first,
        [*(kind.__name__ for kind in KINDS), "Recomputed", "InTraining"],
        ("up.weight", "up.weight", "down.weight", "up.weight", *["down.weight"] * 2, "up.bias", "up.weight", "up.bias"),
        ("linear", "pow", "shape", *["numel"] * 3, "cat", "pow", "sum"),
        strict=True,
    ):
        assert message.startswith(f"the model, {cls}, uses {name!r} in {use} at {__file__}:")
        assert "this rank has only its part of it" in message


def _owners(rank: int) -> None:
    """Modules may read their own parameters; after the first runs, calls are torch's own again."""
    gc.collect()  # models of earlier tests that have not run
    model = Mlp()
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=PLUGINS)
    _plan(sch)
    sch["up"].checkpoint()
    build(sch)
    other = _built(Mlp())
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert nn.Module.__call__ is not PLAIN_CALL
    assert_equivalent(before, model, torch.ones(2, 4))
    assert nn.Module.__call__ is not PLAIN_CALL  # the other model has not run
    other(torch.ones(2, 4))
    assert nn.Module.__call__ is PLAIN_CALL


def test_a_module_may_use_its_own_parameters_and_later_runs_cost_nothing():
    run_distributed(_owners, 2)


def _freed(rank: int) -> None:
    gc.collect()
    model = _built(Mlp())
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert nn.Module.__call__ is not PLAIN_CALL
    del model
    gc.collect()
    nn.Identity()(torch.ones(1))
    assert nn.Module.__call__ is PLAIN_CALL


def test_a_model_that_is_freed_before_it_trains_is_not_awaited():
    run_distributed(_freed, 2)


def _check_compiled(rank: int) -> None:
    """Compiled code runs eagerly in the first run."""
    x = torch.ones(2, 4)
    compiled = torch.compile(_built(Mlp()), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), compiled(x))
    assert "uses 'up.weight'" in _message(lambda: torch.compile(_built(Penalty()), backend="eager", fullgraph=True)(x))


def test_a_compiled_model_is_checked():
    run_distributed(_check_compiled, 2)


class Twice(nn.Module):
    """Two pipeline blocks; the second one, or the model itself, reads a shard."""

    def __init__(self, inside: type[Mlp], outside: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.outside = Mlp(), inside(), outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        x = F.linear(x, self.second.up.weight) if self.outside else x
        return x.pow(2).mean()


def _engine(model: nn.Module, pp: int, **config: Any) -> Any:
    mesh = init_device_mesh("cpu", (pp, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    sch = create_schedule(model, mesh=mesh, plugins=PLUGINS, example_inputs={"x": torch.ones(4, 4)})
    for block in ("first", "second"):
        _plan(sch, block)
    if pp > 1:
        sch["first"].cut_pipeline_stage()
    return build(sch, "torch", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), microbatches=2, **config)


def _engine_messages(rank: int, pp: int) -> list[str]:
    x = torch.ones(4, 4)
    models = (Twice(Penalty), Twice(Mlp, outside=True))
    engines = [_engine(model, pp) for model in models]
    messages = [_message(lambda engine=engine: engine.train_batch(x=x)) for engine in engines]
    assert _engine(Twice(Mlp), pp).train_batch(x=x) > 0
    if pp == 1:
        model = Twice(Mlp)
        penalty = lambda outputs, labels: outputs.mean() + model.first.up.weight.pow(2).sum()  # noqa: E731
        messages.append(_message(lambda: _engine(model, pp, loss_fn=penalty).train_batch(x=x, labels=x)))
    return messages


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pp", [1, 2])
def test_an_engine_fails_on_all_ranks(pp):
    for block, model, *loss in run_distributed(_engine_messages, 2 * pp, pp):
        assert "Penalty 'second' uses 'second.up.weight' in pow at" in block
        assert "uses 'second.up.weight' in linear at" in model
        assert all("the model, StageCall, uses 'first.up.weight' in pow at" in message for message in loss)


def _traced(rank: int) -> None:
    sch = create_schedule(Penalty(), plugins=PLUGINS, example_inputs={"x": torch.ones(2, 4)})
    _plan(sch)
    sch.trace()
    assert "the model, TracedPenalty, uses 'up.weight' in pow" in _message(lambda: build(sch).module(torch.ones(2, 4)))


def test_a_read_in_a_traced_forward():
    run_distributed(_traced, 2)


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            hidden = x * 2
        return self.fc(hidden)


def test_a_trace_names_the_models_line_while_a_first_run_is_awaited() -> None:
    awaited = nn.Linear(2, 2)
    install_first_run_check(awaited, [awaited])
    with pytest.raises(TraceError, match=r"code that tracing does not see.*test_foreign_reads.py:\d+"):
        trace_module(Hides(), torch.ones(2))
    awaited(torch.ones(2))
