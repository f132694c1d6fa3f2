"""``sch.checkpoint()`` on a module: the same numbers, less kept."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from slapo_core import Schedule, ScheduleError, create_schedule, get_cuda_rng_tracker, set_random_seed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.usefixtures("only_memory")


class Tally:
    """A count that is not a state of the module, so that a recompute counts as well."""

    count = 0


class Block(nn.Module):
    """Counts how often its forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(4, 16), nn.Linear(16, 4), nn.Dropout(0.5)
        self.tally = Tally()

    @property
    def runs(self) -> int:
        return self.tally.count

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.tally.count += 1
        y = self.drop(self.fc2(torch.relu(self.fc1(x)))) * scale
        return x + y if bias is None else x + y + bias


class Model(nn.Module):
    def __init__(self, call: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x) if self.call else block(x)
        return x


def checkpointed(call: Any = None) -> tuple[Model, Model, Schedule]:
    before = Model(call)
    after = copy.deepcopy(before)
    sch = create_schedule(after)
    for block in sch.select("blocks.*"):
        block.checkpoint()
    return before, after, sch


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes autograd keeps for the backward, each storage once, without parameters and the input."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), x]}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    assert out.requires_grad
    return sum(kept.values())


def test_outputs_and_gradients_are_equal_with_dropout_on() -> None:
    before, after, _ = checkpointed()
    assert_equivalent(before, after, torch.randn(3, 4, requires_grad=True), atol=0, rtol=0)
    assert [block.runs for block in after.blocks] == [2, 2]


def test_state_dict_names_do_not_change() -> None:
    before, after, _ = checkpointed()
    assert list(before.state_dict()) == list(after.state_dict())


@pytest.mark.parametrize(
    "call",
    [
        lambda block, x: block(x=x),
        lambda block, x: block(x, 2.0, bias=torch.ones(4)),
        lambda block, x: block(bias=x * 2, x=x, scale=0.5),
    ],
)
def test_correctness_13_keyword_arguments_stay_keywords(call: Any) -> None:
    before, after, _ = checkpointed(call)
    assert_equivalent(before, after, torch.randn(3, 4, requires_grad=True))


class Options(nn.Module):
    """Arguments called like torch's own options are the module's."""

    def forward(self, x: torch.Tensor, use_reentrant: float, debug: float, preserve_rng_state: float) -> torch.Tensor:
        return x * use_reentrant * debug * preserve_rng_state


def test_torchs_options_are_not_taken_from_the_call() -> None:
    module = Options()
    create_schedule(module).checkpoint()
    assert module(torch.ones(1, requires_grad=True), use_reentrant=2.0, debug=3.0, preserve_rng_state=5.0).item() == 30


def test_less_is_kept() -> None:
    before, after, _ = checkpointed()
    x = torch.randn(64, 4)
    assert saved_bytes(after, x) < saved_bytes(before, x) / 4


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_without_gradients_the_forward_just_runs(mode: str) -> None:
    _, after, _ = checkpointed()
    with getattr(torch, mode)():
        after(torch.randn(3, 4))
    assert [block.runs for block in after.blocks] == [1, 1]


def test_eval_mode_still_gives_gradients() -> None:
    before, after, _ = checkpointed()
    assert_equivalent(before.eval(), after.eval(), torch.randn(3, 4))


def test_correctness_13_autocast_is_as_in_the_forward() -> None:
    seen: list[torch.dtype] = []

    def call(block: Block, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)

    before, after, _ = checkpointed(call)
    after.blocks[0].fc1.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    assert_equivalent(before, after, torch.randn(3, 4), atol=0, rtol=0)
    assert seen == [torch.bfloat16] * 2


def test_correctness_13_non_reentrant_checkpoints_nest() -> None:
    before, after, sch = checkpointed()
    sch["blocks.0.fc1"].checkpoint()
    sch.checkpoint()
    assert_equivalent(before, after, torch.randn(3, 4, requires_grad=True), atol=0, rtol=0)


class Forked(nn.Module):
    """Draws from the tracked state, from the default one, and from the tracked one again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tracker = get_cuda_rng_tracker()
        with tracker.fork():
            x = nn.functional.dropout(self.fc(x), 0.5)
        x = nn.functional.dropout(x, 0.5)
        with tracker.fork():
            return nn.functional.dropout(torch.sigmoid(x), 0.5)


def test_correctness_13_tracked_random_states_are_those_of_the_forward() -> None:
    set_random_seed(3, tp_rank=1)
    before = nn.Sequential(Forked(), Forked())
    after = copy.deepcopy(before)
    create_schedule(after)["0"].checkpoint()
    create_schedule(after)["1"].checkpoint()
    assert_equivalent(before, after, torch.randn(8, 4), atol=0, rtol=0)


def test_correctness_13_the_recompute_leaves_the_random_state_alone() -> None:
    set_random_seed(3, tp_rank=1)
    module = Forked()
    create_schedule(module).checkpoint()
    out = module(torch.randn(8, 4)).sum()
    torch.rand(3)
    default, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    out.backward()
    assert torch.equal(default, torch.get_rng_state())
    assert torch.equal(tracked["model-parallel-rng"]["cpu"], get_cuda_rng_tracker().get_states()["model-parallel-rng"]["cpu"])


def test_correctness_14_hooks_stay_outside() -> None:
    """A collective on the module, as ``sync`` puts it there, runs once, whichever comes first."""
    calls: list[str] = []
    first, second = Block(), Block()
    hook = lambda module, args, out: calls.append("hook") or out * 1  # noqa: E731
    first.register_forward_hook(hook)
    create_schedule(first).checkpoint()
    create_schedule(second).checkpoint()
    second.register_forward_hook(hook)
    for block in (first, second):
        block(torch.randn(2, 4, requires_grad=True)).sum().backward()
        assert block.runs == 2
    assert calls == ["hook"] * 2


class Cache:
    """State that a layer appends to, as key-value caches do."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


class Appending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.seen.append(self.fc(x))
        return torch.cat(cache.seen).sum(0)


def test_an_argument_that_the_forward_changes_is_as_it_was_in_the_recompute() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Appending(), Appending()])

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Cache]:
            cache = Cache()
            return sum(layer(x, cache=cache) for layer in self.layers), cache

    before = Two()
    after = copy.deepcopy(before)
    for layer in create_schedule(after).select("layers.*"):
        layer.checkpoint()
    assert_equivalent(before, after, torch.randn(3, 4))
    assert len(after(torch.randn(3, 4))[1].seen) == 2


def test_an_input_written_to_in_place_is_noticed() -> None:
    module = nn.Linear(4, 4)
    create_schedule(module).checkpoint()
    x = torch.randn(2, 4)
    out = module(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Growing(nn.Module):
    """Breaks the promise to compute the same again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.tally = nn.Linear(4, 4), Tally()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tally.count += 1
        return torch.tanh(self.fc(x.repeat(self.tally.count, 1)))


def test_a_forward_that_does_not_repeat_itself_is_noticed() -> None:
    module = Growing()
    create_schedule(module).checkpoint()
    with pytest.raises(CheckpointError, match="different metadata"):
        module(torch.randn(2, 4)).sum().backward()


def test_nothing_is_kept_after_the_backward() -> None:
    module = nn.Linear(4, 4)
    create_schedule(module).checkpoint()
    x = torch.randn(2, 4)
    module(x).sum().backward()
    alive = [obj for obj in gc.get_referrers(x) if type(obj).__name__ in ("_RecomputedRegion", "Arguments")]
    assert alive == []


def test_a_checkpointed_model_can_be_pickled_and_copied() -> None:
    before, after, _ = checkpointed()
    pickled = pickle.loads(pickle.dumps(after))  # noqa: S301  our own
    for again in (pickled, copy.deepcopy(after)):
        assert_equivalent(before, again, torch.randn(3, 4))
        assert [block.runs for block in again.blocks] == [2, 2]


def test_undo_gives_the_plain_module_back() -> None:
    _, after, sch = checkpointed()
    sch.undo()
    after(torch.randn(3, 4)).sum().backward()
    assert [block.runs for block in after.blocks] == [2, 1]


def test_twice_is_an_error() -> None:
    _, _, sch = checkpointed()
    with pytest.raises(ScheduleError, match=r"checkpoint\('blocks.0'\): is checkpointed already"):
        sch["blocks.0"].checkpoint()


def test_a_container_that_is_no_list_is_an_error() -> None:
    model = Model()
    model.both = nn.Module()
    model.both.add_module("blocks", model.blocks)
    with pytest.raises(ScheduleError, match=r"checkpoint\('both'\): a Module has no forward"):
        create_schedule(model)["both"].checkpoint()


class Calls(nn.Module):
    """Gives its block keyword arguments in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(scale=2.0, x=x)


def by_position(x: torch.Tensor, scale: float = 1.0) -> tuple[Any, ...]:
    return x, scale


def test_the_order_of_arguments_is_given() -> None:
    model = Calls().eval()
    expected = copy.deepcopy(model)
    sch = create_schedule(model)
    sch["block"].checkpoint(order_args_fn=by_position)
    assert_equivalent(expected, model, torch.randn(2, 4))
    runs = model.block.runs
    model(torch.randn(2, 4)).sum().backward()
    assert model.block.runs == runs + 2
    assert pickle.dumps(model)
    with pytest.raises(ScheduleError, match="order_args_fn is 'x'; give a function of the forward's arguments"):
        create_schedule(Calls())["block"].checkpoint(order_args_fn="x")
