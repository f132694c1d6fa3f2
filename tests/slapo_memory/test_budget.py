"""``sch.checkpoint(budget=...)``: what is kept fits, is what costs most, and the numbers are the same."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import weakref
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_core import Schedule, ScheduleError, create_schedule, get_cuda_rng_tracker, load_schedule, set_random_seed
from slapo_memory.selective_checkpoint.budget import Operator, parse_budget, select_operators
from slapo_memory.selective_checkpoint.kept_outputs import _KeptOutput, tensors_in
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.usefixtures("only_memory")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down, self.norm = nn.Linear(8, 24), nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return x + self.drop(self.down(F.gelu(self.up(x)) * 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.unused = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.randn(4, 16, 8)
INPUTS = X.nbytes


def make_schedule(**inputs: Any) -> tuple[nn.Module, Schedule]:
    before = Model()
    return before, create_schedule(copy.deepcopy(before), example_inputs=inputs or (X,))


class Ran(TorchDispatchMode):
    """Counts operators as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


def ran_in(model: nn.Module) -> int:
    """Operators in a step."""
    with Ran() as ran:
        model(X).sum().backward()
    return ran.count


def entries() -> list[_KeptOutput]:
    """All that are alive."""
    return [value for value in gc.get_objects() if type(value) is _KeptOutput]


def kept_in(model: nn.Module) -> int:
    """Bytes of outputs that a forward keeps, each memory once."""
    others = entries()  # of other models, held so that no new one is taken for one of them
    out = model(X)
    new = [entry for entry in entries() if all(entry is not other for other in others)]
    found = [tensor.untyped_storage() for entry in new for tensor in tensors_in(entry.output)]
    assert out.requires_grad
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def test_kept_bytes_stay_in_the_budget_and_less_runs_again_with_more() -> None:
    before, _ = make_schedule()
    ran, plain = [], ran_in(copy.deepcopy(before))
    for budget in (INPUTS, 3 * INPUTS, 8 * INPUTS, 10**6):
        sch = create_schedule(copy.deepcopy(before), example_inputs=(X,))
        sch["layers"].checkpoint(budget=budget)
        kept = kept_in(sch.mod)
        assert kept <= 3 * (budget - INPUTS)
        assert kept >= 3 * min(budget - INPUTS, 10 * INPUTS) * 0.6
        ran.append(ran_in(sch.mod))
        sch.mod.zero_grad()
        assert_equivalent(before, sch.mod, X, atol=0, rtol=0)
        before.zero_grad()
    assert ran[0] > ran[1] > ran[2] > ran[3] >= plain


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"budget": 0.5}, {"policy": "matmuls"}], ids=["budget", "policy"])
def test_what_is_kept_goes_with_the_backward_and_needs_no_garbage_collector(options: dict[str, Any]) -> None:
    _, sch = make_schedule()
    sch["layers"].checkpoint(**options)
    gc.collect()
    others = len(entries())
    gc.disable()
    try:
        loss = sch.mod(X).sum()
        assert len(entries()) > others
        loss.backward()
        assert len(entries()) == others
        unused = sch.mod(X)
        assert len(entries()) > others
        del unused
        assert len(entries()) == others
    finally:
        gc.enable()


def test_a_model_that_a_budget_was_solved_for_goes_when_nobody_holds_it() -> None:
    """The run on fake tensors leaves nothing behind, a checkpoint within it no entries."""
    _, sch = make_schedule()
    others = len(entries())
    sch["layers"].checkpoint(policy="matmuls")
    sch.checkpoint(budget=0.5)
    layer = weakref.ref(sch.mod.layers[0])
    del sch
    gc.collect()
    assert layer() is None
    assert len(entries()) <= others


def test_a_checkpoint_in_front_of_a_budget_goes_when_nobody_holds_it() -> None:
    _, sch = make_schedule()
    sch["layers.0"].checkpoint()
    sch["layers.1"].checkpoint(budget=0.5)
    sch["layers.2"].checkpoint(budget=0.5)
    weights = [weakref.ref(each) for each in sch.mod.parameters()]
    del sch
    gc.collect()
    assert not [each for each in weights if each() is not None]


def test_the_matmul_that_costs_most_per_byte_is_kept_first() -> None:
    _, sch = make_schedule()
    sch["layers.0"].checkpoint(budget=2 * INPUTS)
    again: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            again.append(str(func))
            return func(*args, **(kwargs or {}))

    out = sch["layers.0"].mod(X)
    with Names():
        out.sum().backward()
    assert again.count("aten.addmm.default") == 2  # down's is small and made from much; the others are above the budget


@pytest.mark.parametrize(
    ("written", "size"),
    [
        *[(0, 0), (5, 5), ("2GiB", 2**31), ("1.5 KiB", 1536), ("3MB", 3 * 10**6), ("7B", 7), (0.0, 0.0), (0.25, 0.25)],
        *[(1.0, 1.0), ("1kib", 1024), ("2 GIB", 2**31), ("3mb", 3 * 10**6), ("1 kB", 1000)],
    ],
)
def test_how_a_budget_is_written(written: Any, size: float) -> None:
    assert parse_budget(written) == size
    assert type(parse_budget(written)) is type(size)


def test_a_share_is_between_the_inputs_alone_and_all_that_autograd_keeps() -> None:
    _, sch = make_schedule()
    kept = []
    for share in (0.0, 0.5, 1.0):
        sch["layers"].checkpoint(budget=share)
        kept.append(kept_in(sch.mod))
        sch.undo()
    assert kept[0] == 0
    assert 0.35 * kept[2] < kept[1] < 0.65 * kept[2]


def test_it_is_solved_in_train_mode_and_leaves_the_model_alone() -> None:
    before, sch = make_schedule()
    sch.mod.eval()
    attributes = {path: dict(vars(module)) for path, module in sch.mod.named_modules()}
    state, x = torch.get_rng_state(), X.clone()
    with pytest.raises(
        ScheduleError, match=r"checkpoint\('layers.0'\): a budget of 5 bytes is less than the inputs, 2048 bytes"
    ):
        sch["layers"].checkpoint(budget=5)
    assert {path: dict(vars(module)) for path, module in sch.mod.named_modules()} == attributes
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(X, x)
    sch["layers"].checkpoint(budget=10**6)
    assert not sch.mod.training
    evaluating = sch.mod.layers[0]._slapo_wrappers
    sch.undo()
    sch.mod.train()
    sch["layers"].checkpoint(budget=10**6)
    assert vars(evaluating[0]._policy) == vars(sch.mod.layers[0]._slapo_wrappers[0]._policy)


class Forking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            return F.dropout(self.fc(x), 0.5)


@pytest.mark.parametrize("seeded", [True, False])
def test_tracked_random_states_are_left_alone(seeded: bool) -> None:
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    if seeded:
        set_random_seed(1, tp_rank=0)
        Forking()(X)
    before = {name: state["cpu"].clone() for name, state in tracker.get_states().items()}
    create_schedule(Forking(), example_inputs=(X,)).checkpoint(budget=10**6)
    after = {name: state["cpu"] for name, state in tracker.get_states().items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tracker.reset()


class Drawing(nn.Module):
    """Draws from generators that it holds in containers within containers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.deep = (
            nn.Linear(8, 8),
            {"noise": [random.Random(0), (random.Random(1),)], "late": deque([random.Random(2)])},
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, (second,) = self.deep["noise"]
        return self.fc(x) * (1 + first.random() + second.random() + self.deep["late"][0].random())


def test_generators_that_containers_hold_are_left_alone_and_draw_the_same_again() -> None:
    before = Drawing()
    sch = create_schedule(copy.deepcopy(before), example_inputs=(X,))
    sch.checkpoint(budget=10**6)
    assert_equivalent(before, sch.mod, X)


@pytest.mark.parametrize("shape", [(2, 5, 8), (8, 64, 8)], ids=str)
def test_other_shapes_and_autocast_train_the_same(shape: tuple[int, ...]) -> None:
    before, sch = make_schedule()
    sch["layers"].checkpoint(budget=0.5)
    assert_equivalent(before, sch.mod, torch.randn(shape), atol=0, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equivalent(before, sch.mod, torch.randn(shape), atol=0, rtol=0)


def test_copies_pickles_and_replays_keep_the_same(tmp_path: Any) -> None:
    before, sch = make_schedule()
    sch["layers"].checkpoint(budget="6KiB", ratio=0.7)
    kept = kept_in(sch.mod)
    assert kept > 0
    sch.save(tmp_path / "schedule.json")
    again = load_schedule(copy.deepcopy(before), tmp_path / "schedule.json", example_inputs=(X,))
    pickled = pickle.loads(pickle.dumps(sch.mod))  # noqa: S301  our own
    for model in (again.mod, copy.deepcopy(sch.mod), pickled):
        assert kept_in(model) == kept
        assert_equivalent(before, model, X, atol=0, rtol=0)
        before.zero_grad()


def test_weights_without_memory() -> None:
    with torch.device("meta"):
        sch = create_schedule(Model(), example_inputs={"x": X})
    sch["layers"].checkpoint(budget="6KiB")
    assert all("forward" in vars(layer) for layer in sch.mod.layers)


def test_a_module_inside_a_checkpoint_and_one_around() -> None:
    before, sch = make_schedule()
    sch["layers.1.up"].checkpoint(budget=0.5)
    sch["layers.1"].checkpoint(budget=0.5)
    sch.checkpoint(budget=0.3)
    assert_equivalent(before, sch.mod, X, atol=0, rtol=0)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("layers", {"budget": "2 gigs"}, "budget is '2 gigs'; give bytes as 2147483648 or '2GiB', or a share"),
        ("layers", {"budget": "2Mb"}, "budget is '2Mb'; give bytes"),  # megabits
        ("layers", {"budget": -1}, "budget is -1; give bytes"),
        ("layers", {"budget": 1.5}, "budget is 1.5; give bytes"),
        ("layers", {"budget": True}, "budget is True; give bytes"),
        ("layers", {"budget": 10**6, "policy": "matmuls"}, "a budget chooses what is kept; leave the policy out"),
        ("unused", {"budget": 10**6}, r"checkpoint\('unused'\): the model does not call it with gradients"),
    ],
)
def test_what_is_no_budget_is_refused(path: str, options: dict[str, Any], message: str) -> None:
    _, sch = make_schedule()
    with pytest.raises(ScheduleError, match=message):
        sch[path].checkpoint(**options)
    assert not any("forward" in vars(module) for module in sch.mod.modules())


def test_without_example_inputs() -> None:
    with pytest.raises(ScheduleError, match="a budget is solved over a run of the model; give create_schedule example_inputs"):
        create_schedule(Model())["layers"].checkpoint(budget=10**6)


def test_a_model_that_asks_for_values() -> None:
    sch = create_schedule(Branching(), example_inputs=(X,))
    with pytest.raises(ScheduleError, match="does not run on fake tensors, so a budget cannot be solved: .*; give a policy"):
        sch["fc"].checkpoint(budget=10**6)
    assert "forward" not in vars(sch["fc"].mod)


@pytest.mark.parametrize(
    ("inputs", "cause"),
    [
        ((X, X), r"TypeError: Model.forward\(\) takes 2 positional arguments but 3 were given"),
        ({"y": X}, "TypeError: .*unexpected keyword argument 'y'"),
        ((torch.randn(4, 16, 7),), "RuntimeError: .*7"),
    ],
    ids=["two", "name", "shape"],
)
def test_inputs_that_the_model_does_not_take_are_told_as_such(inputs: Any, cause: str) -> None:
    sch = create_schedule(Model(), example_inputs=inputs)
    with pytest.raises(ScheduleError, match=f"the model does not run on the example inputs, .*{cause}.*; give create_schedule"):
        sch["layers"].checkpoint(budget=0.5)


class Sparse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(torch.eye(4).to_sparse(), x.sin()).cos()


def test_sparse_tensors_have_a_size() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Sparse()), torch.randn(4, 8)
    before = copy.deepcopy(model)
    create_schedule(model, example_inputs=(x,)).checkpoint(budget=1.0)
    assert_equivalent(before, model, x, atol=0, rtol=0)


def test_a_subgraph_takes_no_budget() -> None:
    sch = create_schedule(Model(), example_inputs=(X,)).trace(flatten=True, leaf_modules=["Linear", "LayerNorm", "Dropout"])
    found = sch.find(lambda x: F.gelu(x) * 2)
    with pytest.raises(ScheduleError, match="a budget is of modules; leave it out beside a subgraph"):
        sch.checkpoint(found, budget=10**6)


operators = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 1000)), max_size=9)


@settings(max_examples=60, deadline=None)
@given(operators, st.integers(0, 8000))
def test_the_choice_fits_and_is_the_best(sizes: list[tuple[int, int]], budget: int) -> None:
    found = [Operator("aten.mm.default", index, size, cost) for index, (size, cost) in enumerate(sizes)]
    chosen = select_operators(found, budget)
    assert sum(operator.size for operator in chosen) <= budget
    assert len({operator.index for operator in chosen}) == len(chosen)
    everything = itertools.chain.from_iterable(itertools.combinations(found, count) for count in range(len(found) + 1))
    small = budget - len(found) * 2  # sizes are rounded up by less than two bytes each
    best = max((sum(o.cost for o in some) for some in everything if sum(o.size for o in some) <= small), default=0)
    assert sum(operator.cost for operator in chosen) >= best
