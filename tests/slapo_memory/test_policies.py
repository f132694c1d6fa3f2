"""``sch.checkpoint(policy=..., ratio=...)``: what is kept, which of a list, and the same numbers always."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from slapo_core import Schedule, ScheduleError, create_schedule, load_schedule
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
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Ran(TorchDispatchMode):
    """Counts operators as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def ran_in(model: nn.Module, x: torch.Tensor) -> dict[str, int]:
    """How often each operator of a forward ran in a step."""
    with Ran() as ran:
        model(x).sum().backward()
    return ran.counts


def make_schedule(layers: int = 4) -> tuple[Model, Schedule]:
    before = Model(layers)
    return before, create_schedule(copy.deepcopy(before))


X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
MATMULS, ATTENTION = "aten.addmm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"
CHEAP = ("aten.gelu.default", "aten.native_layer_norm.default")


def only_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if str(op) == ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (None, {MATMULS: 2, ATTENTION: 2, CHEAP[0]: 2, CHEAP[1]: 2}),
        ("matmuls", {MATMULS: 1, ATTENTION: 1, CHEAP[0]: 2, CHEAP[1]: 2}),
        ([torch.ops.aten.addmm.default], {MATMULS: 1, ATTENTION: 2, CHEAP[0]: 2, CHEAP[1]: 2}),
        (torch.ops.aten.addmm.default, {MATMULS: 1, ATTENTION: 2, CHEAP[0]: 2, CHEAP[1]: 2}),
        (torch.ops.aten.addmm, {MATMULS: 1, ATTENTION: 2, CHEAP[0]: 2, CHEAP[1]: 2}),
        ("aten.addmm", {MATMULS: 1, ATTENTION: 2, CHEAP[0]: 2, CHEAP[1]: 2}),
        (["aten.addmm.default", torch.ops.aten.gelu], {MATMULS: 1, ATTENTION: 2, CHEAP[0]: 1, CHEAP[1]: 2}),
        (only_attention, {MATMULS: 2, ATTENTION: 1, CHEAP[0]: 2, CHEAP[1]: 2}),
    ],
    ids=["all again", "matmuls", "operators", "one", "all overloads", "name", "names", "function"],
)
def test_what_is_kept_runs_once_and_the_rest_again(policy: Any, again: dict[str, int]) -> None:
    before, sch = make_schedule()
    plain = ran_in(copy.deepcopy(before), X)
    sch["layers"].checkpoint(policy=policy)
    found = ran_in(sch.mod, X)
    assert {op: found[op] for op in again} == {op: times * plain[op] for op, times in again.items()}
    sch.mod.zero_grad()
    assert_equivalent(before, sch.mod, X, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("ratio", "layers", "chosen"),
    [(0.5, 4, [1, 3]), (0.5, 5, [2, 4]), (0.25, 8, [3, 7]), (1, 3, [0, 1, 2]), (None, 3, [0, 1, 2]), (0.4, 5, [2, 4])],
)
def test_a_ratio_of_a_list_is_spread_evenly(ratio: float | None, layers: int, chosen: list[int]) -> None:
    before, sch = make_schedule(layers)
    sch["layers"].checkpoint(ratio=ratio)
    if ratio is not None:
        sequential = create_schedule(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))))
        sequential.checkpoint(ratio=ratio)
        assert [index for index, layer in enumerate(sequential.mod) if "forward" in vars(layer)] == chosen
    assert [index for index, layer in enumerate(sch["layers"].mod) if "forward" in vars(layer)] == chosen
    assert_equivalent(before, sch.mod, X, atol=0, rtol=0)
    sch.undo()
    assert not any("forward" in vars(layer) for layer in sch["layers"].mod)


def test_a_module_that_a_list_has_twice_is_checkpointed_once() -> None:
    before = Model(1)
    before.layers.append(before.layers[0])
    sch = create_schedule(copy.deepcopy(before))
    plain = ran_in(copy.deepcopy(before), X)
    sch["layers"].checkpoint()
    assert ran_in(sch.mod, X)[CHEAP[0]] == 2 * plain[CHEAP[0]]


@pytest.mark.parametrize(
    "policy", ["matmuls", [torch.ops.aten.addmm.default], only_attention], ids=["name", "list", "function"]
)
def test_a_model_with_a_policy_can_be_copied_and_pickled(policy: Any) -> None:
    before, sch = make_schedule(2)
    sch["layers"].checkpoint(policy=policy)
    kept = ran_in(sch.mod, X)
    sch.mod.zero_grad()
    for model in (copy.deepcopy(sch.mod), pickle.loads(pickle.dumps(sch.mod))):  # noqa: S301  our own
        assert ran_in(model, X) == kept
        model.zero_grad()
        assert_equivalent(before, model, X, atol=0, rtol=0)


@pytest.mark.parametrize("ending", ["json", "py"])
def test_a_schedule_with_operators_by_name_can_be_saved(ending: str, tmp_path: Path) -> None:
    before, sch = make_schedule(2)
    sch["layers"].checkpoint(policy=["aten.addmm", "aten.gelu.default"])
    sch.save(tmp_path / f"kept.{ending}")
    again = load_schedule(copy.deepcopy(before), tmp_path / f"kept.{ending}")
    assert ran_in(again.mod, X) == ran_in(sch.mod, X)


def test_a_policy_for_a_subgraph() -> None:
    before, sch = make_schedule(2)
    sch = create_schedule(sch.mod, example_inputs=(X,)).trace(flatten=True, leaf_modules=["Linear", "LayerNorm", "Dropout"])
    found = sch.find(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert len(found) == 2
    sch.checkpoint(found, policy="matmuls")
    assert ran_in(sch.mod, X)[ATTENTION] == 2
    sch.mod.zero_grad()
    assert_equivalent(before, sch.mod, X, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("layers", {"policy": "mats"}, "policy is 'mats'; give None, 'matmuls', a list of operators"),
        ("layers", {"policy": [torch.mm]}, r"policy is \[<built-in method mm"),
        ("layers", {"policy": []}, r"policy is \[\]; give"),
        ("layers", {"policy": nn.Linear(2, 2)}, "policy is Linear"),
        ("layers", {"policy": torch.mm}, "policy is <built-in method mm"),
        ("layers", {"policy": lambda: True}, "policy is <function <lambda>"),
        ("layers", {"policy": ["aten.mmm"]}, r"policy is \['aten.mmm'\]; give"),
        ("layers", {"policy": "aten.mm.defaults"}, "policy is 'aten.mm.defaults'; give"),
        ("layers", {"policy": 3}, "policy is 3; give"),
        ("layers", {"ratio": 0}, "ratio is 0; give a share above 0, up to 1"),
        ("layers", {"ratio": 1.5}, "ratio is 1.5; give a share"),
        ("layers", {"ratio": True}, "ratio is True; give a share"),
        ("layers", {"ratio": 0.1}, "a ratio of 0.1 is none of 4 modules"),
        ("empty", {}, "the list is empty"),
        ("layers.0", {"ratio": 0.5}, "a ratio is of a list of modules, and this is a Block"),
    ],
)
def test_what_is_no_policy_or_ratio_is_refused(path: str, options: dict[str, Any], message: str) -> None:
    model = Model()
    model.empty = nn.ModuleList()
    sch = create_schedule(model)
    with pytest.raises(ScheduleError, match=message):
        sch[path].checkpoint(**options)
    assert not any("forward" in vars(layer) for layer in sch["layers"].mod)


def test_the_recompute_runs_eagerly_where_the_forward_did() -> None:
    """This fails where torch has moved what ``runs_eagerly`` reads."""
    sch, compiling = create_schedule(Model(1)), []
    sch["layers.0.up"].mod.register_forward_hook(lambda *given: compiling.append(torch.compiler.is_compiling()))
    sch["layers.0.up"].mod.compile(backend="eager")
    sch["layers"].checkpoint()
    with torch.compiler.set_stance("force_eager"):
        loss = sch.mod(X.clone().requires_grad_()).sum()
    loss.backward()
    assert compiling == [False, False]
