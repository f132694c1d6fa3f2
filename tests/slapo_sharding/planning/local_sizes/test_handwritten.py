"""Handwritten modules are split without a plan and correct for every shape, mode and engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from slapo_core import TraceError, build, create_schedule, set_random_seed
from slapo_sharding.planning.local_sizes.local_forward import LocalForward
from slapo_testing import run_distributed
from slapo_tracing.nodes import own_forward
from tests.slapo_sharding.handwritten import SPLIT, Net

pytestmark = pytest.mark.multiproc

SHAPES = ((2, 8), (3, 12), (2, 8))
FAST = ("SplitByWidth", "IndexedQkv", "GroupedByExpand", "EinopsFused", "RelativeTable", "Windows", "ParallelBlock")
FAST += ("FusedLinear", "LayerThenParameter", "StandardOverHeads", "OneKeyRepeated", "ListOfHeads", "ChunkedHeads")
FAST += ("FusedOneKey", "FusedHeads", "SplitterTwice", "CachedMask", "KeepsMap", "LengthFirstHeads")
FAST += ("ScoresInFloat32",)
"""One module for each way in which a graph is changed, and one with an unchanged graph."""


def net(kind: Callable[[], nn.Module] | str) -> Net:
    torch.manual_seed(0)
    return Net(SPLIT[kind] if isinstance(kind, str) else kind)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def split(model: nn.Module, **options: Any) -> Any:
    sch = create_schedule(model, example_inputs=(tokens(2, 8),))
    sch.tensor_parallel(**options)
    return sch


def compare(kind: str) -> float:
    """Compare outputs and gradients in three calls; return the share of parameters that this rank holds."""
    expected, model = net(kind), net(kind)
    sch = split(model)
    build(sch)
    for number, shape in enumerate(SHAPES):
        given = tokens(*shape, seed=number)
        with torch.no_grad():  # a graph traced without gradients must not serve a call with them
            model(given)
        for each in (expected, model):
            each.zero_grad()
            each(given).square().mean().backward()
        torch.testing.assert_close(model(given), expected(given), atol=1e-5, rtol=1e-4)
        gradients = sch.full_state("grad")
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(
                gradients[name], parameter.grad, atol=1e-5, rtol=1e-3, msg=lambda text, name=name: f"{kind}: {name}: {text}"
            )
    whole, own = (sum(p.numel() for p in each.blocks[0].part.parameters()) for each in (expected, model))
    return own / whole


def shares(rank: int, kinds: tuple[str, ...]) -> dict[str, float]:
    return {kind: compare(kind) for kind in kinds}


class Unbiased(SPLIT["Temperature"]):  # type: ignore[misc]
    """Module with a parameter that meets the output of layers without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q.bias = self.k.bias = self.v.bias = None


def compare_in_bfloat16(rank: int, kind: Callable[[], nn.Module] | str, casts: bool) -> None:
    """Compare outputs and gradients in bfloat16, by autocast or a cast of the split model."""
    expected, model = net(kind), net(kind)
    sch = split(model)
    build(sch)
    for each in (expected, model) if casts else ():
        each.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=not casts):
        found, wanted = (each(tokens(2, 8)) for each in (model, expected))
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.05)
    for each in (found, wanted):
        each.float().square().mean().backward()
    gradients = sch.full_state("grad")
    for name, parameter in expected.named_parameters():
        difference = (gradients[name] - parameter.grad).float().norm()
        assert difference <= 0.1 * parameter.grad.float().norm() + 1e-4, name


SLOW_HALVES = ("RotaryHalves", "FusedOneKey", "LongConvolution", "StandardOverHeads")


@pytest.mark.parametrize(
    ("kind", "casts"),
    [(Unbiased, False), (Unbiased, True), *(pytest.param(each, False, marks=pytest.mark.slow) for each in SLOW_HALVES)],
)
def test_half_precision(kind: Callable[[], nn.Module] | str, casts: bool) -> None:
    run_distributed(compare_in_bfloat16, 2, kind, casts, timeout=100)


def thirds() -> list[Any]:
    kinds = tuple(SPLIT)
    return [pytest.param(kinds[start::3], marks=pytest.mark.slow, id=f"part{start}") for start in range(3)]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kinds", [pytest.param(FAST, id="one of each"), *thirds()])
@pytest.mark.timeout(400)
def test_modules_are_split_and_correct_for_every_shape(kinds: tuple[str, ...], ranks: int) -> None:
    for found in run_distributed(shares, ranks, kinds, timeout=360):
        assert {kind: share for kind, share in found.items() if share > 0.5 / ranks + 0.5} == {}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


SGD = partial(torch.optim.SGD, lr=0.5)
BATCHES = [tokens(4, 8, 1), tokens(4, 12, 2), tokens(4, 8, 3)]


def expected_run(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = net(kind)
    optimizer, losses = SGD(model.parameters()), []
    for batch in BATCHES:
        loss = loss_of(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def engine_run(rank: int, kind: str, layout: tuple[int, int, int], sequence_parallel: bool, checkpoint: bool) -> None:
    mesh = init_device_mesh("cpu", layout, mesh_dim_names=("pp", "dp", "tp"))
    sch = create_schedule(net(kind), mesh=mesh, example_inputs={"tokens": tokens(3, 12)})  # no micro-batch has this shape
    sch.tensor_parallel(sequence_parallel=sequence_parallel)
    for index in range(2) if checkpoint else ():
        sch[f"blocks.{index}.part"].checkpoint()
    if layout[0] > 1 and checkpoint:
        sch.pipeline(layout[0])
    elif layout[0] > 1:
        sch["blocks.0"].cut_pipeline_stage()
    engine = build(sch, "torch", optimizer=SGD, loss_fn=loss_of, microbatches=2)
    replica, number = mesh["dp"].get_local_rank(), layout[1]
    parts = [batch.chunk(number)[replica] for batch in BATCHES]
    losses = [float(engine.train_batch(tokens=part, labels=part)) for part in parts]
    expected, weights = expected_run(kind)
    assert losses == pytest.approx(expected, abs=1e-5)
    for name, value in sch.full_state().items():
        torch.testing.assert_close(value, weights[name].detach(), atol=1e-5, rtol=1e-4)
    engine.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "layout", "sequence_parallel", "checkpoint"),
    [
        ("SplitByWidth", (1, 1, 2), True, False),
        ("RelativeTable", (1, 1, 2), False, True),
        ("FusedLinear", (1, 1, 2), False, True),
        ("ListOfHeads", (1, 1, 2), False, True),
        ("FusedOneKey", (1, 1, 2), True, True),
        ("RelativeTable", (1, 1, 2), True, False),
        pytest.param("Temperature", (1, 2, 2), True, True, marks=pytest.mark.slow),
        pytest.param("MemoryKeys", (2, 1, 2), True, False, marks=pytest.mark.slow),
        pytest.param("Alibi", (1, 1, 4), True, False, marks=pytest.mark.slow),
        pytest.param("SharedNormHeads", (2, 1, 2), False, False, marks=pytest.mark.slow),
        pytest.param("FusedWithGate", (1, 2, 2), False, True, marks=pytest.mark.slow),
        pytest.param("FusedOneKeyKernel", (2, 1, 2), False, False, marks=pytest.mark.slow),
        pytest.param("CrossHeads", (1, 2, 2), False, False, marks=pytest.mark.slow),
        pytest.param("GatedMatmul", (2, 1, 2), False, False, marks=pytest.mark.slow),
        pytest.param("FusedMatmul", (1, 2, 2), False, True, marks=pytest.mark.slow),
        pytest.param("IndexedQkv", (2, 1, 2), False, False, marks=pytest.mark.slow),
        pytest.param("SplitByWidth", (1, 2, 2), True, True, marks=pytest.mark.slow),
        pytest.param("GroupedByExpand", (1, 1, 2), True, False, marks=pytest.mark.slow),
        pytest.param("Temperature", (2, 1, 2), False, True, marks=pytest.mark.slow),
    ],
)
def test_modules_train_on_engines(kind: str, layout: tuple[int, int, int], sequence_parallel: bool, checkpoint: bool) -> None:
    ranks = layout[0] * layout[1] * layout[2]
    run_distributed(engine_run, ranks, kind, layout, sequence_parallel, checkpoint, timeout=100)


def changes(rank: int) -> None:
    model, expected = net("SplitByWidth"), net("SplitByWidth")
    part = model.blocks[0].part
    sch = split(model)
    assert isinstance(own_forward(part), LocalForward)
    assert type(part) is SPLIT["SplitByWidth"]
    sch.undo()
    assert own_forward(part) is None
    assert torch.equal(model(tokens(2, 8)), expected(tokens(2, 8)))
    sch.tensor_parallel()
    build(sch)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    torch.testing.assert_close(model(tokens(2, 8)), expected(tokens(2, 8)), atol=1e-5, rtol=1e-4)
    assert not copied(tokens(2, 8)).any()
    for each in (model, expected):
        each.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(tokens(1, 5)), expected(tokens(1, 5)), atol=0.05, rtol=0.05)
    seen = []
    handle = part.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model(tokens(1, 5))
    assert seen == [(1, 5, 32)]
    handle.remove()
    part.n_head = 2  # as an attribute of the unmodified module
    expected.blocks[0].part.n_head = 2
    torch.testing.assert_close(model(tokens(1, 5)), expected(tokens(1, 5)), atol=1e-5, rtol=1e-4)


def test_attributes_and_class_of_a_module_are_kept() -> None:
    run_distributed(changes, 2)


def traces(rank: int) -> list[int]:
    """Return the number of graphs traced in calls of two identical blocks with several shapes."""
    model, expected = net("SplitByWidth"), net("SplitByWidth")
    build(split(model))
    made, trace = [], LocalForward._trace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalForward, "_trace", lambda self, *args: made.append(self) or trace(self, *args))
        numbers = []
        for shape in ((2, 8), (3, 9), (3, 9), (1, 5), (2, 8)):
            torch.testing.assert_close(model(tokens(*shape)), expected(tokens(*shape)), atol=1e-5, rtol=1e-4)
            numbers.append(len(made))
        model.blocks[1].part.n_head = expected.blocks[1].part.n_head = 2
        torch.testing.assert_close(model(tokens(2, 8)), expected(tokens(2, 8)), atol=1e-5, rtol=1e-4)
        return [*numbers, len(made)]


def test_identical_modules_share_their_graphs() -> None:
    first, *others, last = run_distributed(traces, 2)[0]
    assert [number - first for number in others] == [1, 1, 2, 2]
    assert last - first == 3  # one of them has another attribute value


class Dropping(SPLIT["SplitByWidth"]):  # type: ignore[misc]
    """Attention with dropout of its weights, by a module or a function, and of its outputs."""

    def __init__(self, by_module: bool) -> None:
        super().__init__()
        self.by_module, self.weights, self.results = by_module, nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = (each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in self.c_attn(x).chunk(3, 2))
        weights = (q @ k.mT).softmax(-1)
        weights = self.weights(weights) if self.by_module else F.dropout(weights, 0.5, self.training)
        return self.results(self.c_proj((weights @ v).transpose(1, 2).reshape(B, T, C)))


class Core(nn.Module):
    """Module that drops attention weights, with shards of the heads as inputs."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.dropout((q @ k.mT).softmax(-1), 0.5, self.training) @ v


class DroppingInside(Dropping):
    def __init__(self) -> None:
        super().__init__(True)
        self.core = Core()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = (each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in self.c_attn(x).chunk(3, 2))
        return self.results(self.c_proj(self.core(q, k, v).transpose(1, 2).reshape(B, T, C)))


DROPPING = {"module": partial(Dropping, True), "function": partial(Dropping, False), "inner function": DroppingInside}


def drops(rank: int, kind: str) -> tuple[list[bool], list[bool]]:
    """Return the kept attention weights of the rank's heads, and the kept outputs."""
    model = net(DROPPING[kind])
    part = model.blocks[0].part
    with torch.no_grad():
        part.c_attn.weight.zero_()  # all attention weights are equal, and all values are one
        part.c_attn.bias.copy_(torch.ones(96))
        part.c_proj.weight.copy_(torch.eye(32))
    build(split(model))
    set_random_seed(1, tp_rank=rank)
    seen: list[torch.Tensor] = []
    part.c_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    part.results.register_forward_hook(lambda module, args, output: seen.append(output))
    model(tokens(2, 8))
    own, results = seen
    return [round(float(each), 3) for each in own[:, :, ::8].flatten()], (results != 0).flatten().tolist()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", DROPPING)
def test_dropout_masks_differ_for_weights_and_agree_for_outputs(kind: str) -> None:
    (first, results), (second, others) = run_distributed(drops, 2, kind)
    assert first != second
    assert results == others


class DroppingHead(nn.Module):
    def __init__(self, by_module: bool) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(32, 8, bias=False), nn.Linear(32, 8)
        self.weights, self.by_module = nn.Dropout(0.5), by_module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.q(x) @ x[..., :8].mT).softmax(-1)
        weights = self.weights(weights) if self.by_module else F.dropout(weights, 0.5, self.training)
        return weights @ self.v(x)


class DroppingHeads(nn.Module):
    def __init__(self, by_module: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList(DroppingHead(by_module) for _ in range(4))
        self.proj, self.results = nn.Linear(32, 32), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.results(self.proj(torch.cat([head(x) for head in self.heads], -1)))


def drops_in_branches(rank: int, by_module: bool) -> tuple[list[float], torch.Tensor, float]:
    """Return the outputs of this rank's equal heads, the results, and the next random number."""
    model = net(partial(DroppingHeads, by_module))
    part = model.blocks[0].part
    with torch.no_grad():
        for head in part.heads:
            head.q.weight.zero_()
            head.v.weight.zero_()
            head.v.bias.fill_(1.0)
    build(split(model))
    set_random_seed(1, tp_rank=rank)
    seen: list[torch.Tensor] = []
    part.proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    result = model(tokens(2, 8))
    return seen[0][:, :, ::8].flatten().tolist(), result.detach(), torch.rand(1).item()


@pytest.mark.parametrize("by_module", [True, False])
def test_dropout_masks_of_branches_differ_between_ranks(by_module: bool) -> None:
    (first, results, number), (second, others, same) = run_distributed(drops_in_branches, 2, by_module)
    assert len(first) == 2 * 2 * 8  # of two heads
    assert first != second
    assert torch.equal(results, others)
    assert number == same


class Behind(nn.Module):
    """Attention that takes its width from the output of a layer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.attn, self.behind = nn.Linear(32, 32), SPLIT["SplitByWidth"](), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.attn(self.before(x)))


def behind_a_layer(rank: int) -> set[str]:
    expected, model = net(Behind), net(Behind)
    build(split(model))
    torch.testing.assert_close(model(tokens(2, 8)), expected(tokens(2, 8)), atol=1e-5, rtol=1e-4)
    whole = dict(expected.named_parameters())
    return {name for name, each in model.blocks[0].named_parameters() if each.shape != whole[f"blocks.0.{name}"].shape}


def test_a_layer_stays_whole_for_the_attention_that_uses_its_width() -> None:
    assert (
        run_distributed(behind_a_layer, 2)
        == [{f"part.attn.{name}" for name in ("c_attn.weight", "c_attn.bias", "c_proj.weight")}] * 2
    )


class Branching(SPLIT["SplitByWidth"]):  # type: ignore[misc]
    """Attention with a data-dependent branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 8 and x.sum() > 0:
            x = x * 2
        return super().forward(x)


def cannot_run(rank: int) -> None:
    model = net(Branching)
    build(split(model))
    model(tokens(2, 8))
    with pytest.raises(TraceError, match=r"the Branching at 'blocks.0.part' uses whole sizes.*test_handwritten.py"):
        model(tokens(2, 9))


def test_a_call_that_cannot_be_traced_is_refused() -> None:
    run_distributed(cannot_run, 2)
