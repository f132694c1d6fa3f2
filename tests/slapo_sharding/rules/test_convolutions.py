"""Convolutions and norms that are split along channels equal the unmodified ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, ScheduleError, build, create_schedule, shard_spec
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc

CONVOLUTIONS = {1: (nn.Conv1d, nn.ConvTranspose1d), 2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}
BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def _build_split(model: nn.Module, steps: Callable[[Schedule], object]) -> tuple[nn.Module, nn.Module]:
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    steps(sch)
    build(sch)
    return before, model


def _column(sch: Schedule, path: str = "0") -> None:
    sch[path].shard(["weight"], axis=1 if sch[path].mod.transposed else 0).sync("bwd_post", "all_reduce")


def _row(sch: Schedule, path: str) -> None:
    sch[path].shard("weight", axis=0 if sch[path].mod.transposed else 1).sync("fwd_post", "all_reduce")


def _images(spatial: int, channels: int = 4) -> Iterator[torch.Tensor]:
    yield torch.randn(3, channels, *(6,) * spatial, requires_grad=True)
    yield torch.randn(channels, *(6,) * spatial, requires_grad=True)


def _pair(rank: int, spatial: int) -> None:
    """A column and a row convolution, with and without a batch."""
    plain, transposed = CONVOLUTIONS[spatial]
    settings: list[dict[str, Any]] = [
        {"padding": 1},
        {"padding": "same", "padding_mode": "circular"},
        {"stride": 2, "padding": 1, "bias": False},
        {"dilation": 2, "padding": 2, "padding_mode": "reflect" if spatial < 3 else "replicate"},
    ]
    models = [nn.Sequential(plain(4, 8, 3, **kw), nn.Tanh(), plain(8, 6, 3, **kw)) for kw in settings]
    for kw in ({"stride": 2, "output_padding": 1}, {"padding": 1, "bias": False}):
        models.append(nn.Sequential(transposed(4, 8, 3, **kw), nn.Tanh(), transposed(8, 6, 3, **kw)))
    for model in models:
        for images in _images(spatial):

            def steps(sch: Schedule) -> None:
                _column(sch)
                _row(sch, "2")

            before, after = _build_split(copy.deepcopy(model), steps)
            assert_equivalent(before, after, images)
            assert (after[0].out_channels, after[2].in_channels) == (8 // sch_size(after), 8 // sch_size(after))
            assert after[0].weight.numel() * sch_size(after) == before[0].weight.numel()


def sch_size(model: nn.Module) -> int:
    spec = shard_spec(model[0].weight)
    assert spec is not None
    return spec.num_shards


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("spatial", "ranks"), [(1, 2), pytest.param(1, 4, marks=pytest.mark.slow), (2, 2), (2, 4), (3, 2)])
def test_correctness_02_output_channels_then_input_channels(spatial, ranks):
    run_distributed(_pair, ranks, spatial)


def _compare_gathered(rank: int) -> None:
    for axis, shape in ((-3, (2, 4, 5, 5)), (1, (2, 4, 5, 5)), (0, (4, 5, 5))):

        def steps(sch: Schedule, axis: int = axis) -> None:
            _column(sch)
            sch["0"].sync("fwd_post", "all_gather", axis=axis)
            sch["1"].sync("fwd_pre", "scatter", axis=axis)
            _row(sch, "1")

        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3))
        assert_equivalent(*_build_split(model, steps), torch.randn(shape, requires_grad=True))


def test_channels_are_gathered_and_scattered():
    run_distributed(_compare_gathered, 2)


def _reduce_scatter(rank: int) -> None:
    for axis in (0, 1, 2, -1, -3):

        def steps(sch: Schedule, axis: int = axis) -> None:
            _column(sch)
            sch["1"].shard("weight", axis=1)
            sch["1"].sync("fwd_post", "reduce_scatter", axis=axis).sync("fwd_post", "all_gather", axis=axis)

        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3))
        assert_equivalent(*_build_split(model, steps), torch.randn(2, 4, 8, 8, requires_grad=True))


def test_correctness_02_bias_and_its_gradient_under_reduce_scatter():
    run_distributed(_reduce_scatter, 2)


def _wrong_axis(rank: int) -> list[str]:
    messages = []
    for mode, op, path in (("fwd_post", "all_gather", "0"), ("fwd_pre", "scatter", "1")):
        sch = create_schedule(
            nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)),
            plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]),
        )
        _column(sch)
        _row(sch, "1")
        sch[path].sync(mode, op, axis=-1)
        with pytest.raises(ScheduleError) as caught:
            sch.mod(torch.randn(2, 4, 4, 4))
        messages.append(str(caught.value))
    return messages


def test_correctness_03_channels_are_not_gathered_along_the_width():
    first, second = run_distributed(_wrong_axis, 2)[0]
    assert first.endswith("fwd_post all_gather: a Conv2d is sharded along -3 there, not along -1; give axis=-3")
    assert "fwd_pre scatter: a Conv2d is sharded along -3" in second


def _block(spatial: int, groups: int = 1, norm: nn.Module | None = None) -> nn.Sequential:
    plain, _ = CONVOLUTIONS[spatial]
    model = nn.Sequential(
        plain(4, 8, 3, padding=1, bias=False),
        norm if norm is not None else BATCH_NORMS[spatial](8),
        nn.ReLU(),
        plain(8, 8, 3, padding=1, groups=groups) if groups > 1 else nn.Identity(),
        plain(8, 4, 1),
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def _split_block(sch: Schedule) -> None:
    _column(sch)
    sch["1"].shard("weight", axis=0)
    if isinstance(sch["3"].mod, nn.Module) and list(sch["3"].mod.parameters()):
        sch["3"].shard(["weight", "bias"], axis=0)
    _row(sch, "4")


def _batch_norm(rank: int, spatial: int) -> None:
    before, after = _build_split(_block(spatial), _split_block)
    images = torch.randn(5, 4, *(6,) * spatial, requires_grad=True)
    assert_equivalent(before, after, images, atol=1e-4)
    for name in ("running_mean", "running_var"):
        part, whole = after.get_buffer(f"1.{name}"), before.get_buffer(f"1.{name}")
        spec = shard_spec(part)
        assert spec is not None
        assert part.shape != whole.shape
        torch.testing.assert_close(part, spec.local(whole))
    assert after[1].num_features == 8 // spec.num_shards
    assert after[1].num_batches_tracked == before[1].num_batches_tracked == 1
    before.eval()
    after.eval()
    assert_equivalent(before, after, images, atol=1e-4)


@pytest.mark.parametrize(("spatial", "ranks"), [(1, 2), (2, 2), (2, 4), (3, 2)])
def test_batch_norm_behind_a_convolution(spatial, ranks):
    run_distributed(_batch_norm, ranks, spatial)


def _batch_norm_variants(rank: int) -> None:
    images = torch.randn(5, 4, 6, 6, requires_grad=True)
    for options in ({"affine": False}, {"track_running_stats": False}, {"momentum": None}):

        def steps(sch: Schedule) -> None:
            _column(sch)
            sch["1"].shard("weight" if sch["1"].mod.affine else "running_mean", axis=0)
            _row(sch, "4")

        before, after = _build_split(_block(2, norm=nn.BatchNorm2d(8, **options)), steps)
        for _ in range(2):
            assert_equivalent(before, after, images, atol=1e-4)

    def linear(sch: Schedule) -> None:
        sch["0"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        sch["1"].shard("weight", axis=0)
        sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")

    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    assert_equivalent(*_build_split(model, linear), torch.randn(6, 4, requires_grad=True))


def test_batch_norm_without_weights_or_statistics_and_behind_a_linear():
    run_distributed(_batch_norm_variants, 2)


def _groups(rank: int, ranks: int) -> None:
    for groups in (4, 8):  # 8: depthwise
        before, after = _build_split(_block(2, groups, nn.GroupNorm(4, 8)), _split_block)
        assert_equivalent(before, after, torch.randn(3, 4, 6, 6, requires_grad=True), atol=1e-4)
        assert (after[3].groups, after[3].in_channels, after[1].num_groups) == (groups // ranks, 8 // ranks, 4 // ranks)

    def steps(sch: Schedule) -> None:
        _column(sch)
        sch["1"].shard("weight", axis=0).shard("bias", axis=0)
        _row(sch, "2")

    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ConvTranspose2d(8, 16, 3, groups=4), nn.Conv2d(16, 4, 1))
    assert_equivalent(*_build_split(model, steps), torch.randn(3, 4, 6, 6, requires_grad=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_of_channels_are_distributed(ranks):
    run_distributed(_groups, ranks, ranks)


def _refusals(rank: int) -> list[str]:
    model = nn.ModuleList(
        [nn.Conv2d(6, 6, 3, groups=3), nn.GroupNorm(3, 6), nn.SyncBatchNorm(6), nn.Conv2d(6, 5, 3), nn.Conv2d(6, 6, 3)]
    )
    sch, messages = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin])), []
    for index, axis in ((0, 0), (1, 0), (2, 0), (3, 0), (4, 2), (0, 1)):
        with pytest.raises(ScheduleError) as caught:
            sch[str(index)].shard("weight", axis=axis)
        messages.append(str(caught.value))
    sch["4"].shard("weight", axis=0)
    with pytest.raises(BuildError, match="'4': the gradient of its input is partial"):
        build(sch)
    return messages


def test_unsplittable_convolutions_say_why():
    groups, norm, sync_norm, channels, kernel, inputs = run_distributed(_refusals, 2)[0]
    assert groups == "shard('0'): groups of the Conv2d is 3, not divisible by 2 ranks; use fewer ranks"
    assert norm == "shard('1'): num_groups of the GroupNorm is 3, not divisible by 2 ranks; use fewer ranks"
    assert "'weight' is in a SyncBatchNorm, which no sharding rule covers" in sync_norm
    assert "dim 0 of 'weight' has size 5, not divisible by 2 ranks" in channels
    assert kernel.endswith(
        "of a Conv2d cannot be split along 2; it can split 'bias' along 0, 'weight' along 0, 'weight' along 1"
    )
    assert inputs.endswith("of a grouped Conv2d cannot be split along 1; it can split 'bias' along 0, 'weight' along 0")


def _plan(rank: int) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 1))
    plan = {"0": "colwise", "2": "rowwise", "3": "colwise_gather_output", "4": "rowwise_split_input"}
    before, after = _build_split(model, lambda sch: sch.tensor_parallel(plan))
    assert_equivalent(before, after, torch.randn(2, 4, 8, 8, requires_grad=True))


def test_a_plan_may_name_convolutions():
    run_distributed(_plan, 2)


def _training(rank: int) -> None:
    before, after = _block(2, 4), None
    sch = create_schedule(copy.deepcopy(before), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    _split_block(sch)
    build(sch)
    after, images = sch.mod, torch.randn(5, 4, 6, 6)
    for model in (before, after):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
    whole = sch.full_state()
    torch.testing.assert_close(whole, {name: p.detach() for name, p in before.named_parameters()}, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sch.full_state("buffer"), dict(before.named_buffers()), atol=1e-5, rtol=1e-5)


def test_three_steps_give_the_weights_and_statistics_of_the_unmodified_model():
    run_distributed(_training, 2)
