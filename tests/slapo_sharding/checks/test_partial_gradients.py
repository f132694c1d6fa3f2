"""Replicated parameters on sharded values: a partial gradient is never taken for the whole, and a sync reduces it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import slapo_memory.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, ScheduleError, build, create_schedule
from slapo_testing import run_distributed
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
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Slope(nn.Module):
    """A scalar parameter for a hidden value, like PReLU's, zero at first on request."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, self.weight * x)


class HeadNorm(nn.Module):
    """A norm of heads of size 2."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (-1, 2))
        return (self.weight * heads / (heads.pow(2).mean(-1, keepdim=True) + 0.1).sqrt()).flatten(-2)


class Block(nn.Module):
    def __init__(self, inner: Callable[[float], nn.Module], start: float = 0.25, gate: float = 1.0) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(4, 8), inner(start), nn.Linear(8, 4)
        self.gate = nn.Parameter(torch.tensor(gate))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inner(self.up(x)) * self.gate)


class Model(nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.first, self.second = Block(*args), Block(*args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).pow(2).mean()


def _schedule(model: nn.Module, pp: int = 1, dp: int = 1) -> Schedule:
    mesh = init_device_mesh("cpu", (pp, dp, 2), mesh_dim_names=("pp", "dp", "tp"))
    sch = create_schedule(model, mesh=mesh, plugins=PLUGINS, example_inputs={"x": X})
    for path in ("first", "second"):  # by hand: a plan sums gradients where it can be shown right
        sch[f"{path}.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        sch[f"{path}.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if pp > 1:
        sch["first"].cut_pipeline_stage()
    return sch


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _engine_refusals(rank: int, pp: int, dp: int) -> list[str]:
    """The check of the first run is off; it would have found the fault."""
    messages = []
    for inner, config in ((Slope, {}), (HeadNorm, {"pipeline_schedule": "gpipe"}), (Slope, {"precision": "bf16"})):
        sch = _schedule(Model(inner), pp, dp)
        for block in ("first", "second"):
            sch[block].sync("grad", "all_reduce")
        engine = build(sch, "torch", optimizer=_sgd, microbatches=2, check=False, **config)
        before = copy.deepcopy(engine.module.state_dict())
        for _ in range(2):
            with pytest.raises(BuildError) as caught:
                engine.train_batch(x=X)
        messages.append(str(caught.value))
        assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
        engine.close()
    return messages


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("pp", "dp"), [(1, 1), (2, 1), (1, 2)])
def test_an_engine_refuses_partial_gradients_before_the_step(pp: int, dp: int) -> None:
    for rank in run_distributed(_engine_refusals, 2 * pp * dp, pp, dp):
        for message in rank:
            assert "the gradient of 'first.inner.weight', which is whole, differs" in message.replace("second", "first")
            assert "sync('grad', 'all_reduce') of its module sums" in message


def _late(rank: int) -> str:
    """A closed gate gives the layers behind it zero gradients in the first step."""
    sch = _schedule(Model(Slope, 0.25, 0.0))
    for block in ("first", "second"):
        sch[block].sync("grad", "all_reduce")
    engine = build(sch, "torch", optimizer=_sgd, check=False)
    engine.train_batch(x=X)
    with pytest.raises(BuildError) as caught:
        engine.train_batch(x=X)
    return str(caught.value)


def test_a_gradient_that_is_zero_at_first_is_compared_later() -> None:
    assert all("inner.weight', which is whole, differs" in message for message in run_distributed(_late, 2))


def _whole(rank: int, pp: int, dp: int) -> None:
    for inner in (Slope, HeadNorm):
        torch.manual_seed(1)
        model = Model(inner)
        reference = copy.deepcopy(model)
        sch = _schedule(model, pp, dp)
        for block in ("first", "second"):
            sch[block].sync("grad", "all_reduce")["inner"].sync("grad", "all_reduce")
        sch["second"].checkpoint()
        engine, optimizer = build(sch, "torch", optimizer=_sgd, microbatches=2, clip=0.5), _sgd(reference.parameters())
        for _ in range(3):
            engine.train_batch(x=X)
            optimizer.zero_grad()
            reference(X).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            optimizer.step()
        for name, value in sch.full_state().items():
            torch.testing.assert_close(value, reference.get_parameter(name).detach(), atol=1e-6, rtol=1e-5)
        engine.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("pp", "dp"), [(1, 1), (2, 1), (1, 2)])
def test_reduced_gradients_train_like_one_process(pp: int, dp: int) -> None:
    run_distributed(_whole, 2 * pp * dp, pp, dp)


def _by_plan(rank: int) -> None:
    torch.manual_seed(1)
    model = Model(HeadNorm)
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=PLUGINS, example_inputs={"x": X})
    sch.tensor_parallel({"*.up": "colwise", "*.down": "rowwise"})
    sch["first.inner"].sync("grad", "all_reduce")  # as schedules written before had to say
    build(sch)
    assert_equivalent(before, model, X)


def test_a_verified_plan_reduces_gradients_itself() -> None:
    run_distributed(_by_plan, 2)


def _plain(rank: int) -> str:
    model = Model(Slope)
    before = copy.deepcopy(model)
    sch = _schedule(model)
    sch["first"].sync("grad", "all_reduce")
    sch["second"].sync("grad", "all_reduce")
    build(sch, check=False)
    model(X).backward()
    with pytest.raises(ScheduleError) as caught:
        sch.full_state("grad")
    model.zero_grad()
    sch = _schedule(copied := copy.deepcopy(before))
    for path in ("first", "second", "first.inner", "second.inner"):
        sch[path].sync("grad", "all_reduce")
    build(sch)
    assert_equivalent(before, copied, X)
    return str(caught.value)


def test_full_state_refuses_partial_gradients() -> None:
    for message in run_distributed(_plain, 2):
        assert "full_state(''): the gradient of 'second.inner.weight'" in message.replace("first", "second")


def _refusals(rank: int) -> list[str]:
    sch = _schedule(Model(Slope))
    sch["first"].sync("grad", "all_reduce")
    messages = []
    for path, *arguments in (
        ("first", "grad", "all_reduce"),
        ("first.up", "grad", "all_reduce"),
        ("", "grad", "all_reduce"),
        ("first.inner", "grad", "reduce_scatter", 0),
        ("first.inner", "grad", print),
    ):
        count = len(sch.journal)
        with pytest.raises(ScheduleError) as caught:
            (sch[path] if path else sch).sync(*arguments)
        messages.append(str(caught.value))
        assert len(sch.journal) == count
    sch.undo()
    assert not sch["first"].mod.gate._backward_hooks
    bare = create_schedule(Model(Slope), plugins=PLUGINS)
    bare["first"].sync("grad", "all_reduce")
    with pytest.raises(BuildError) as unsharded:
        build(bare)
    return [*messages, str(unsharded.value)]


def test_illegal_gradient_syncs_are_refused() -> None:
    twice, sharded, bare, scattered, function, unsharded = run_distributed(_refusals, 2)[0]
    assert "sync('first'): the gradients of its parameters are summed already; sync them once" in twice
    assert "the module is sharded, so the gradients of its parameters are right already" in sharded
    assert "the module itself has no trainable parameters; take one inside of it" in bare
    assert "grad takes all_reduce, not 'reduce_scatter'" in scattered
    assert "grad takes all_reduce, not <built-in function print>" in function
    assert "the gradient of 'first.gate' is summed, but nothing is sharded" in unsharded


def _head_norms(rank: int) -> list[int]:
    """Phi's published plan does not mention its norms of heads."""
    from transformers import PhiConfig, PhiForCausalLM

    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 32}
    config = PhiConfig(**sizes, qk_layernorm=True, pad_token_id=0, bos_token_id=0, eos_token_id=0, max_position_embeddings=16)
    torch.manual_seed(0)
    model = PhiForCausalLM(config)
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=PLUGINS)
    sch.tensor_parallel()
    build(sch)
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    assert_equivalent(before, model, input_ids=ids, labels=ids, use_cache=False)
    layers = model.model.layers
    return [
        len(norm.weight._backward_hooks or ())
        for layer in layers
        for norm in (layer.self_attn.q_layernorm, layer.input_layernorm)
    ]


def test_tensor_parallel_reduces_the_gradients_of_head_norms() -> None:
    assert run_distributed(_head_norms, 2) == [[1, 0, 1, 0]] * 2


class Normed(nn.Module):
    """A norm of replicated values before the sharded layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(4), Block(Slope)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.norm(x)).pow(2).mean()


def _needless(rank: int) -> str:
    sch = create_schedule(model := Normed(), plugins=PLUGINS)
    sch.tensor_parallel({"block.up": "colwise", "block.down": "rowwise"})
    sch["norm"].sync("grad", "all_reduce")
    build(sch, check=False)
    with pytest.raises(ScheduleError) as caught:
        model(X).backward()
    return str(caught.value)


def test_a_replicated_gradient_is_not_reduced() -> None:
    (first, second) = run_distributed(_needless, 2)
    assert "the gradient of 'norm.bias' is the same on every rank" in first.replace("weight", "bias")
    assert "2 times too large" in first
    assert first == second
