"""The documented paths beside ``slapo`` itself: what their names do."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import slapo
import slapo_tracing.plugin
import slapo_training.plugin
from slapo import sharding, utils
from slapo.op.cross_entropy import vocab_parallel_cross_entropy
from slapo_sharding import plugin as sharding_plugin
from slapo_testing import isolated_plugins, run_distributed

X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def collectives(rank: int) -> None:
    """Each function beside what it stands for, forward and backward; the group is the whole world where none is given."""
    ranks, weight = dist.get_world_size(), torch.arange(1.0, 7.0)
    for group in (None, dist.group.WORLD):
        part, piece = leaf(X * (rank + 1)), leaf(X.chunk(ranks, 1)[rank])
        total = sharding.reduce_forward_output(part, group)
        torch.testing.assert_close(total, X * 3)
        (total * weight).sum().backward()
        torch.testing.assert_close(part.grad, weight.expand_as(X))

        whole = leaf(X)
        passed = sharding.reduce_backward_grad(whole, group)
        torch.testing.assert_close(passed, X)
        (passed * weight * (rank + 1)).sum().backward()
        torch.testing.assert_close(whole.grad, 3 * weight.expand_as(X))

        for flag, times in ((False, rank + 1), (True, 3)):
            piece.grad = None
            gathered = sharding.all_gather_forward_output(piece, 1, group, tensor_parallel_output_grad=flag)
            torch.testing.assert_close(gathered, X)
            (gathered * weight * (rank + 1)).sum().backward()
            torch.testing.assert_close(piece.grad, times * weight.expand_as(piece))

        part.grad = None
        summed = sharding.sync_ops.reduce_scatter_forward_output(part, dim=1, group=group)
        torch.testing.assert_close(summed, 3 * X.chunk(ranks, 1)[rank])
        (summed * weight).sum().backward()
        torch.testing.assert_close(part.grad, weight.expand_as(X))

        whole.grad = None
        kept = sharding.scatter_forward_output(whole, dim=1, group=group)
        torch.testing.assert_close(kept, X.chunk(ranks, 1)[rank])
        (kept * weight).sum().backward()
        torch.testing.assert_close(whole.grad, weight.expand_as(X))


def losses(rank: int) -> None:
    """Logits of which each rank has some columns."""
    logits, target = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)), torch.arange(15).view(3, 5) % 8
    for smoothing in (0.0, 0.2):
        whole, part = leaf(logits), leaf(logits.chunk(2, -1)[rank])
        expected = F.cross_entropy(whole.flatten(0, 1), target.flatten(), label_smoothing=smoothing, reduction="none")
        found = vocab_parallel_cross_entropy(part, target, smoothing)
        torch.testing.assert_close(found, expected.view(3, 5))
        for each in (found, expected):
            each.mean().backward()
        torch.testing.assert_close(part.grad, whole.grad.chunk(2, -1)[rank])
    for group in (None, dist.group.WORLD):
        loss = slapo.op.ParallelCrossEntropy(group=group)(logits.chunk(2, -1)[rank], target)
        torch.testing.assert_close(loss.contiguous().mean(), F.cross_entropy(logits.flatten(0, 1), target.flatten()))


def on_two_ranks(rank: int) -> None:
    collectives(rank)
    losses(rank)


@pytest.mark.multiproc
def test_sync_functions_and_parallel_losses() -> None:
    run_distributed(on_two_ranks, 2)


def test_in_one_process_they_pass_what_they_are_given() -> None:
    ops = sharding.sync_ops
    for found in (ops.reduce_forward_output(X), ops.scatter_forward_output(X, 1), ops.all_gather_forward_output(X, 1, None)):
        assert found is X
    loss = slapo.op.ParallelCrossEntropy()
    torch.testing.assert_close(loss(X[0], torch.arange(4)).mean(), F.cross_entropy(X[0], torch.arange(4)))


class Scale(nn.Module):
    """A layer that no rule knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.weight = width, nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], self.width) * self.weight


def with_scale(rank: int) -> list[str]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 8), Scale(8), nn.Linear(8, 6))
    with isolated_plugins(slapo_tracing.plugin, slapo_training.plugin, sharding_plugin) as registry:

        @sharding.register_shard_method(Scale)
        class ShardScale(sharding.ShardMethod):
            cuts = (sharding.Cut({"weight": 0}, "sharded", "sharded", ("width",)),)

        sch = slapo.create_schedule(copy.deepcopy(reference), plugins=registry)
        sch["0"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        sch["1"].shard("weight", axis=0)
        sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        assert (sch["1"].mod.width, ShardScale.__name__) == (4, "ShardScale")
        model, _ = slapo.build(sch)
    for each in (reference, model):
        each(X).square().sum().backward()
    found = sch.full_state("grad")
    return [name for name, each in reference.named_parameters() if not torch.allclose(found[name], each.grad, atol=1e-5)]


@pytest.mark.multiproc
def test_a_rule_by_decorator_splits_a_class_of_ones_own() -> None:
    assert run_distributed(with_scale, 2) == [[], []]


def test_what_is_no_rule_is_refused_and_a_class_that_is_not_there_passed_over() -> None:
    with isolated_plugins(slapo_tracing.plugin, slapo_training.plugin, sharding_plugin):

        class Nothing(sharding.ShardMethod):
            pass

        with pytest.raises(
            slapo.PluginError, match=r"sharding rule 'Scale' of .*Nothing cannot be used: cuts is \(\); give a tuple"
        ):
            sharding.register_shard_method(Scale)(Nothing)
        with pytest.raises(slapo.PluginError, match="is not a ShardingRule"):
            sharding.register_shard_method(Scale)(nn.Linear)  # type: ignore[type-var]
        assert sharding.register_shard_method(None)(Nothing) is Nothing
        sch = slapo.create_schedule(nn.Sequential(Scale(4)))
        with pytest.raises(slapo.ScheduleError, match="is in a Scale, which no sharding rule covers"):
            sch["0"].shard("weight", axis=0)


MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
NAMES = ["auto", "eager", "native", "native_xformers", "native_flash_attn", "cutlass", "triton", "cuda"]


@pytest.mark.parametrize("mask", [None, MASK, (1.0 - MASK[:, None, None]) * -1e9], ids=["none", "padding", "added"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_attention_between_a_models_own_projections(name: str, causal: bool, mask: torch.Tensor | None) -> None:
    heads = [leaf(torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(seed))) for seed in range(3)]
    out = slapo.op.FlashAttentionOp(name, causal, scale=0.3)(*heads, mask, 0.0)
    q, k, v = (each.transpose(1, 2) for each in heads)
    scores = q @ k.transpose(-1, -2) * 0.3
    seen = torch.ones(4, 4).tril().bool() if causal else torch.ones(4, 4).bool()
    scores = scores.masked_fill(~seen, -1e9) + (0 if mask is None else (1.0 - MASK[:, None, None]) * -1e9)
    expected = (scores.softmax(-1) @ v).transpose(1, 2)
    shown = (seen & (MASK if mask is not None else torch.ones(2, 4)).bool()[:, None]).any(-1)  # rows that see anything
    torch.testing.assert_close(out[shown], expected[shown], atol=1e-5, rtol=1e-4)
    grads = [torch.autograd.grad(each[shown].square().sum(), heads) for each in (out, expected)]
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


def test_attention_drops_out_in_training_alone_and_refuses_what_is_not_there() -> None:
    op, heads = slapo.op.FlashAttentionOp("eager", False), [torch.randn(1, 4, 2, 8) for _ in range(3)]
    assert not torch.equal(op(*heads, None, 0.5), op(*heads, None, 0.5))
    op.eval()
    assert torch.equal(op(*heads, None, 0.5), op(*heads, None, 0.0))
    with pytest.raises(ValueError, match="p has to be a probability, not 2"):
        op(*heads, None, 2)
    with pytest.raises(slapo.ScheduleError, match="no implementation 'flsh' of kernel 'attention'; did you mean 'flash'"):
        slapo.op.FlashAttentionOp("flsh", True)
    assert slapo.op.FlashAttention(8, 2, attn_op_name="triton").choice is None


def test_the_bias_is_added_to_what_the_sync_function_returns() -> None:
    layer = slapo.op.linear.LinearWithSyncFunc(6, 3, True, None, None, torch.neg)
    torch.testing.assert_close(layer(X), layer.bias - X @ layer.weight.T)
    assert "sync_fn=neg" in repr(layer)
    with pytest.raises(ValueError, match="'sum' is not a function"):
        slapo.op.LinearWithSyncFunc(6, 3, sync_fn="sum")


@pytest.mark.parametrize("use_torchscript", [True, False])
def test_an_mlp_computes_the_same_whichever_compiler_a_script_names(use_torchscript: bool) -> None:
    torch.manual_seed(0)
    made = [
        slapo.op.mlp.FusedMLP(6, 12, "gelu_new", 0.2, use_torchscript=use_torchscript),
        slapo.op.FusedMLP(6, 12, "gelu_new", 0.2),
    ]
    made[1].load_state_dict(made[0].state_dict())
    found = []
    for mlp in made:
        torch.manual_seed(3)
        found.append(mlp(X))
    assert torch.equal(*found)


def test_options_of_an_mlp_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match="use_torchscript is 'nvfuser'; give a bool, or choose by SLAPO_KERNELS=bias_act"):
        slapo.op.FusedMLP(6, 12, "gelu", use_torchscript="nvfuser")
    with pytest.raises(ValueError, match="resid_pdrop has to be a probability, not 1.5"):
        slapo.op.FusedMLP(6, 12, "gelu", 1.5)


def test_memory_is_reported_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = utils.report_memory()
    kept = torch.ones(2**25)  # 128 MiB
    used = utils.report.report_memory("after it", report_gc=True)
    assert used - before > 2**26
    first, second, *tensors = capsys.readouterr().out.splitlines()
    assert first.startswith("CPU memory ")
    assert second.startswith("after it: CPU memory ")
    assert f"Tensor [{kept.numel()}] torch.float32 on cpu" in tensors


def test_time_is_reported_and_gradients_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(6, 3)
    model(X).sum().backward()
    grad = model.weight.grad
    times = utils.report_time(model, {"input": X}, backward=True, repeat=2)
    assert times.forward > 0
    assert times.backward > 0
    assert utils.report_time(model, (X,)).backward is None
    assert model.weight.grad is grad
    assert "Linear: forward " in capsys.readouterr().out
    assert "aten::linear" in utils.profile_perf(model, X, backward=True)
    assert model.weight.grad is grad
    with pytest.raises(ValueError, match="repeat is 0; give at least 1"):
        utils.report_time(model, X, repeat=0)
    with pytest.raises(ValueError, match="no output of Identity has a gradient; leave backward out"):
        utils.report_time(nn.Identity(), X, backward=True)


def test_hooks_come_to_another_module() -> None:
    calls: list[str] = []
    old, new = nn.Linear(6, 3), nn.Linear(6, 3)
    old.register_forward_pre_hook(lambda module, args, kwargs: calls.append("pre"), with_kwargs=True)
    old.register_forward_hook(lambda module, args, out: calls.append("post"))
    handle = old.register_full_backward_hook(lambda module, grad_in, grad_out: calls.append("back"))
    assert {kind: len(found) for kind, found in utils.get_hooks(old).items()} == {
        "fwd_pre": 1,
        "fwd_post": 1,
        "bwd_pre": 0,
        "bwd_post": 1,
    }
    utils.transfer_hooks(old, new, ["fwd_post"])
    new(X)
    assert (calls, utils.common.has_hook(new, "fwd_pre")) == (["post"], False)
    calls.clear()
    utils.common.transfer_hooks(old, new)
    new(leaf(X)).sum().backward()
    assert calls == ["pre", "post", "back"]
    handle.remove()
    assert utils.has_hook(new, "bwd_post")
    with pytest.raises(ValueError, match="no type of hook 'fwd'; available: fwd_pre, fwd_post, bwd_pre, bwd_post"):
        utils.transfer_hooks(old, new, ["fwd"])


def test_random_numbers_by_rank() -> None:
    before = torch.get_rng_state()
    try:
        seeds = [slapo.random.model_parallel_cuda_manual_seed(7, rank) for rank in (0, 1)]
        drawn = []
        for rank in (0, 1):
            slapo.random.model_parallel_cuda_manual_seed(7, rank)
            with slapo.random.get_cuda_rng_tracker().fork():
                inside = torch.rand(3)
            drawn.append((torch.rand(3), inside))
    finally:
        torch.set_rng_state(before)
    assert seeds[0] != seeds[1]
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][1], drawn[1][1])
    assert isinstance(slapo.random.get_cuda_rng_tracker(), slapo.random.CudaRNGStatesTracker)


def test_all_dialects_that_have_a_class() -> None:
    found = slapo.framework_dialect.registry.get_all_dialects("runtime_engine")
    assert found["torch"] is slapo.get_dialect_cls("runtime_engine", "torch")
    assert slapo.framework_dialect.get_all_dialects("nothing") == {}
