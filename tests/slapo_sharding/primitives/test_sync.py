"""Syncs handle positional and keyword inputs, tuples and dataclasses, and refuse anything else."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, ScheduleError, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc


class Inputs(nn.Module):
    """Multiplies its inputs, so that each input's gradient is the product of the others."""

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None, pair: Any = None) -> torch.Tensor:
        for factor in (mask, *(pair or ())):
            x = x if factor is None else x * factor
        return x


def _schedule(module: nn.Module) -> Schedule:
    return create_schedule(module, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))


def _input_gradients(rank: int) -> None:
    model = _schedule(Inputs()).sync("bwd_post", "all_reduce").mod
    tensors = {name: torch.full((2,), 2.0, requires_grad=True) for name in ("x", "mask", "first", "second")}
    still = torch.ones(2)
    calls = (
        lambda x, mask, first, second: model(x, mask=mask, pair=(first, second, still)),
        lambda x, mask, first, second: model(x=x, mask=mask, pair=[first, second, still]),
        lambda x, mask, first, second: model(pair=(first, second), mask=mask, x=x),
    )
    for call in calls:
        for tensor in tensors.values():
            tensor.grad = None
        call(**tensors).sum().backward()
        for name, tensor in tensors.items():
            assert torch.equal(tensor.grad, torch.full((2,), 16.0)), name  # 2 * 2 * 2 from each of two ranks


def test_correctness_04_bwd_post_reaches_positional_keyword_and_nested_inputs():
    run_distributed(_input_gradients, 2)


def _gathered_input(rank: int) -> None:
    model = _schedule(Inputs()).sync("fwd_pre", "all_gather", axis=0).mod
    piece, mask = torch.full((1, 2), float(rank)), torch.tensor([[1.0], [10.0]])
    expected = torch.tensor([[0.0, 0.0], [10.0, 10.0]])
    assert torch.equal(model(piece, mask=mask), expected)
    assert torch.equal(model(x=piece, mask=mask), expected)


def test_correctness_04_fwd_pre_takes_the_first_input_and_leaves_the_others():
    run_distributed(_gathered_input, 2)


def _both_kinds_reach_a_function(rank: int) -> list[Any]:
    seen: list[Any] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append((len(args), sorted(kwargs)))
        return args, {**kwargs, "mask": kwargs["mask"] * 2}

    def after(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append((len(args), sorted(kwargs)))
        return output + 1

    model = _schedule(Inputs()).sync("fwd_pre", before).sync("fwd_post", after).mod
    return [*seen, model(torch.ones(1), mask=torch.ones(1)).item(), model(x=torch.ones(1), mask=torch.ones(1)).item(), *seen]


def test_correctness_04_a_function_sees_positional_and_keyword_inputs():
    assert run_distributed(_both_kinds_reach_a_function, 2) == [[3.0, 3.0, *[(1, ["mask"])] * 2, *[(0, ["mask", "x"])] * 2]] * 2


def test_functions_with_torch_s_shorter_signatures():
    model = _schedule(nn.Sequential(Inputs()))
    model["0"].sync("fwd_pre", lambda module, args: args[0] * 3).sync("fwd_post", lambda module, args, output: None)
    model["0"].sync("bwd_post", lambda module, grad_input, grad_output: (grad_input[0] * 5,))
    x = torch.ones(1, requires_grad=True)
    y = model.mod(x)
    y.backward()
    assert (y.item(), x.grad.item()) == (3.0, 15.0)


@dataclasses.dataclass
class Output:
    loss: None
    hidden: torch.Tensor
    other: torch.Tensor


class Returns(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(x)


def _outputs(rank: int) -> None:
    x = torch.ones(2)
    wraps = {
        "tensor": (lambda x: x, lambda out: (out, None)),
        "tuple": (lambda x: (None, x, x), lambda out: (out[1], out[2])),
        "list": (lambda x: [x, x], lambda out: (out[0], out[1])),
        "dict": (lambda x: {"a": 1, "b": x, "c": x}, lambda out: (out["b"], out["c"])),
        "dataclass": (lambda x: Output(None, x, x), lambda out: (out.hidden, out.other)),
    }
    for kind, (wrap, unwrap) in wraps.items():
        first, second = unwrap(_schedule(Returns(wrap)).sync("fwd_post", "all_reduce").mod(x))
        assert torch.equal(first, 2 * x), kind
        assert second is None or torch.equal(second, x), kind


def test_fwd_post_takes_the_first_tensor_of_any_output():
    run_distributed(_outputs, 2)


def _model_output(rank: int) -> None:
    from transformers.modeling_outputs import CausalLMOutput

    model = _schedule(Returns(lambda x: CausalLMOutput(logits=x))).sync("fwd_post", "all_gather", axis=-1).mod
    output = model(torch.full((1, 1), float(rank)))
    assert isinstance(output, CausalLMOutput)
    assert output.logits.tolist() == output["logits"].tolist() == output[0].tolist() == [[0.0, 1.0]]


def test_fwd_post_takes_transformers_outputs():
    run_distributed(_model_output, 2)


def _copied(rank: int) -> float:
    model = _schedule(nn.Sequential(Inputs())).sync("fwd_post", "all_reduce").sync("bwd_post", "all_reduce").mod
    return copy.deepcopy(model)(torch.ones(1)).item()


def test_a_copied_module_syncs_as_well_and_once():
    assert run_distributed(_copied, 2) == [2.0, 2.0]


def _undone(rank: int) -> float:
    sch = _schedule(nn.Sequential(Inputs())).sync("fwd_post", "all_reduce")
    sch.undo()
    return sch.mod(torch.ones(1)).item()


def test_undo_takes_the_hook_away():
    assert run_distributed(_undone, 2) == [1.0, 1.0]


def test_undo_leaves_a_hook_that_was_registered_since():
    sch = _schedule(Inputs()).sync("fwd_post", lambda module, args, output: output * 2)
    own = sch.mod.register_forward_hook(lambda module, args, kwargs, output: output + 1, with_kwargs=True)
    sch.undo()
    assert sch.mod(torch.ones(1)) == 2.0
    own.remove()
    assert sch.mod(torch.ones(1)) == 1.0


def test_on_one_rank_an_operation_leaves_the_module_alone():
    model = _schedule(Inputs()).sync("fwd_post", "all_reduce").mod
    assert not model._forward_hooks
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("backward", "all_reduce"), r"sync\(''\): no mode 'backward'; available: fwd_pre, fwd_post, bwd_post"),
        (("fwd_post", "all_sum"), "no operation 'all_sum'; available: all_reduce"),
        (("fwd_post", "RR->RX"), "no scheme 'RR->RX'; each side is one of RR, RS, SR"),
        (("fwd_post", "RR->RS", 1), "'RR->RS' with mode 'fwd_post' and axis=1; it goes with 'fwd_pre' or 'fwd_post'"),
        (("bwd_post", "RR->RS"), "'RR->RS' with mode 'bwd_post'"),
        (("bwd_post", "all_gather", 0), "bwd_post takes all_reduce or a function, not 'all_gather'"),
        (("fwd_post", "all_gather"), "axis is None; all_gather needs the dimension"),
        (("fwd_post", "all_gather", "last"), "axis is 'last'"),
        (("fwd_post", "all_reduce", 1), "axis is 1; all_reduce takes none"),
        (("fwd_post", 7), "7 is neither an operation nor a function"),
        (("fwd_post", lambda module: None), r"the function takes \(module\); a fwd_post function is called with 3 or 4"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    sch = _schedule(Inputs())
    with pytest.raises(ScheduleError, match=message):
        sch.sync(*arguments)
    assert not sch.journal


def test_bad_backward_is_refused():
    with pytest.raises(ScheduleError, match="backward is 'sum'; all_gather takes"):
        _schedule(Inputs()).sync("fwd_post", "all_gather", axis=0, backward="sum")


def _wrong_at_run_time(rank: int) -> list[str]:
    messages = []
    sch = _schedule(Returns(lambda x: x)).sync("fwd_post", "all_gather", axis=2)
    odd = _schedule(Returns(lambda x: torch.ones(2, 3))).sync("fwd_post", "reduce_scatter", axis=-1)
    for call in (sch.mod, odd.mod, _schedule(Returns(lambda x: "text")).sync("fwd_post", "all_reduce").mod):
        with pytest.raises(ScheduleError) as caught:
            call(torch.ones(2))
        messages.append(str(caught.value))
    with pytest.raises(ScheduleError) as caught:
        _schedule(Inputs()).sync("fwd_pre", "all_reduce").mod(torch.ones(2, dtype=torch.int64))
    return [*messages, str(caught.value)]


def test_faults_that_show_only_in_a_run_are_errors():
    axis, size, text, integers = run_distributed(_wrong_at_run_time, 2)[0]
    assert axis == "sync(''): fwd_post all_gather along axis 2 of a tensor with 1 dimensions; give another axis"
    assert size.startswith(
        "sync(''): fwd_post reduce_scatter: the 3 along dimension 1 in [2, 3] cannot be split over 2 ranks; pad"
    )
    assert "no tensor in an output of type str" in text
    assert "no floating-point tensor among the inputs" in integers


class Users(nn.Module):
    """Three layers on one value, one on another; ``between`` may modify the value in place or disable gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(4, 8)
        self.between = "nothing"

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        if self.between == "no_grad":
            with torch.no_grad():
                self.q(x)
            return self.k(x) + self.v(x)
        q = self.q(x)
        if self.between == "in place":
            q = q.detach()
            x.mul_(2.0)
        return q + self.k(other if self.between == "another" else x) + self.v(x)


def _sums(model: nn.Module, *inputs: torch.Tensor) -> int:
    """Count the all-reduces in a backward."""
    loss = model(*inputs).pow(2).sum()
    with torch.profiler.profile() as profile:
        loss.backward()
    return sum(event.count for event in profile.key_averages() if event.key == "_c10d_functional::all_reduce")


def _one_sum(rank: int) -> dict[str, int]:
    found = {}
    for between in ("nothing", "another", "in place", "no_grad"):
        model = Users()
        model.between = between
        before = copy.deepcopy(model)
        sch = _schedule(model)
        for name in "qkv":
            sch[name].shard("weight", axis=0, gathered=True).sync("fwd_post", "all_gather", axis=-1)
        sch.sync("bwd_post", "all_reduce", of=["q", "k", "v"]).undo()
        assert not any(module._forward_pre_hooks for module in model.modules())
        sch.sync("bwd_post", "all_reduce", of=["q", "k", "v"])
        assert "sync('bwd_post', 'all_reduce', of=['q', 'k', 'v'])" in str(sch.journal.steps[-1])
        build(sch)
        inputs = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
        assert_equivalent(before, model, *inputs)
        found[between] = _sums(model, *inputs)
        shared = [hook.shared for module in model.modules() for hook in module._forward_pre_hooks.values()]
        assert shared[0].current is None or between != "nothing"
    return found


def test_layers_that_use_one_value_reduce_its_gradient_once():
    found = run_distributed(_one_sum, 2)[0]
    assert found == {"nothing": 1, "another": 3, "in place": 1, "no_grad": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"of": ["q", "w"]}, r"sync\(''\): of names 'w', which is not a module below"),
        ({"of": ["q", "q"]}, "of names a module twice: q, q"),
        ({"of": "q"}, "of is 'q'; give a list of paths"),
        ({"of": []}, r"of is \[\]; give a list of paths"),
        ({"of": ["q"], "mode": "fwd_post"}, "of goes with 'bwd_post' and 'all_reduce', not with 'fwd_post'"),
    ],
)
def test_bad_members_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ScheduleError, match=message):
        _schedule(Users()).sync(arguments.pop("mode", "bwd_post"), "all_reduce", **arguments)


LAYOUTS = {"RR": None, "RS": -1, "SR": -2}
SCHEMES = [f"{before}->{after}" for before in LAYOUTS for after in LAYOUTS]


def _laid_out(whole: torch.Tensor, layout: str, rank: int) -> torch.Tensor:
    dim = LAYOUTS[layout]
    return whole if dim is None else whole.chunk(dist.get_world_size(), dim)[rank].contiguous()


def _whole() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return input, output, loss weights and input gradient of the unmodified model."""
    x, weight = (torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    x.requires_grad_()
    y = nn.Tanh()(x)
    (y * weight).sum().backward()
    assert x.grad is not None
    return x.detach(), y.detach(), weight, x.grad


def _reshard(rank: int) -> None:
    whole, result, weight, grad = _whole()
    for mode in ("fwd_pre", "fwd_post"):
        for scheme in SCHEMES:
            before, after = scheme.split("->")
            gathers = before != after == "RR"
            for backward in (None, "split", "reduce_scatter") if gathers else (None,):
                model = _schedule(nn.Tanh()).sync(mode, scheme, **({"backward": backward} if backward else {})).mod
                x = _laid_out(whole, before, rank).clone().requires_grad_()
                y = model(x)
                label = f"{mode} {scheme} {backward}"
                torch.testing.assert_close(y, _laid_out(result, after, rank), msg=label)
                loss = y * _laid_out(weight, after, rank)
                own = gathers and (backward or ("reduce_scatter" if mode == "fwd_pre" else "split")) == "reduce_scatter"
                (loss.chunk(dist.get_world_size())[rank] if own else loss).sum().backward()
                torch.testing.assert_close(x.grad, _laid_out(grad, before, rank), msg=label)


@pytest.mark.parametrize("ranks", [2, 4])
def test_reshard_before_and_after_a_module(ranks: int):
    """Ranks that gather with a reduce-scatter in the backward continue with examples of their own."""
    run_distributed(_reshard, ranks)


def _reduce(rank: int) -> None:
    whole, result, weight, grad = _whole()
    ranks = dist.get_world_size()
    shares = torch.arange(1.0, ranks + 1).div(ranks * (ranks + 1) / 2)
    for op, arguments, after in (("all_reduce", {}, "RR"), ("reduce_scatter", {"axis": -1}, "RS")):
        before = _schedule(nn.Tanh()).sync("fwd_pre", op, **arguments).mod
        behind = nn.Sequential(_schedule(nn.Identity()).sync("fwd_post", op, **arguments).mod, nn.Tanh())
        for model in (before, behind):
            x = (whole * shares[rank]).requires_grad_()
            y = model(x)
            torch.testing.assert_close(y, _laid_out(result, after, rank), msg=op)
            (y * _laid_out(weight, after, rank)).sum().backward()
            torch.testing.assert_close(x.grad, grad, msg=op)


@pytest.mark.parametrize("ranks", [2, 4])
def test_reductions_before_and_after_a_module(ranks: int):
    run_distributed(_reduce, ranks)


def _reshard_a_vector(rank: int) -> str:
    with pytest.raises(ScheduleError) as caught:
        _schedule(nn.Identity()).sync("fwd_post", "RS->SR").mod(torch.ones(4))
    return str(caught.value)


def test_a_scheme_needs_two_dimensions():
    assert "all_to_all along axis -1 of a tensor with 1 dimensions" in run_distributed(_reshard_a_vector, 2)[0]
