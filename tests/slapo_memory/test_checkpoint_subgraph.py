"""``sch.checkpoint(match)``: a part of a traced module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import Schedule, ScheduleError, create_schedule
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.usefixtures("only_memory")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(self.q(x), self.k(x).transpose(-1, -2)) * self.scale
        return self.out(torch.matmul(self.drop(F.softmax(scores, dim=-1)), self.v(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def traced() -> tuple[Model, Schedule]:
    before = Model()
    sch = create_schedule(copy.deepcopy(before), example_inputs=(torch.randn(2, 4, 8),))
    return before, sch.trace(flatten=True, leaf_modules=["Linear", "Dropout"])


def core(q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.softmax(torch.matmul(q, k.transpose(-1, -2)) * scale, dim=-1)


def kept(model: nn.Module, x: torch.Tensor) -> int:
    """Number of tensors autograd keeps."""
    count: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: count.append(tensor) or tensor, lambda tensor: tensor):
        assert model(x).requires_grad
    return len(count)


def test_every_match_is_checkpointed_and_the_numbers_stay() -> None:
    before, sch = traced()
    names = list(sch.mod.state_dict())
    matches = sch.find(core)
    assert len(matches) == 2
    x = torch.randn(2, 4, 8)
    saved = kept(sch.mod, x)
    sch.checkpoint(matches)
    assert_equivalent(before, sch.mod, x, atol=0, rtol=0)
    assert list(sch.mod.state_dict()) == names
    assert kept(sch.mod, x) < saved


def test_dropout_in_the_subgraph_has_the_same_mask_in_the_recompute() -> None:
    before, sch = traced()
    dropouts = sch.find(r"layers\.\d\.drop")
    assert len(dropouts) == 2
    sch.checkpoint([[dropout] for dropout in dropouts])
    assert_equivalent(before, sch.mod, torch.randn(2, 4, 8), atol=0, rtol=0)


def test_undo_gives_the_graph_back() -> None:
    before, sch = traced()
    code = str(sch.mod.graph)
    sch.checkpoint(sch.find(core))
    sch.undo()
    assert str(sch.mod.graph) == code
    assert "checkpointed" not in dict(sch.mod.named_modules())
    assert_equivalent(before, sch.mod, torch.randn(2, 4, 8), atol=0, rtol=0)


def test_a_part_with_weights_is_refused_as_their_names_would_change() -> None:
    _, sch = traced()
    code = str(sch.mod.graph)
    with pytest.raises(ScheduleError, match=r"checkpoint\(''\): the weights of 'layers.0.out' .* would change their names"):
        sch.checkpoint(sch.find(r"layers\.0\.out"))
    assert str(sch.mod.graph) == code


@pytest.mark.parametrize("nothing", [[], [[]], "x", lambda x: x.tan().tan()])
def test_an_empty_match_is_an_error(nothing: object) -> None:
    _, sch = traced()
    with pytest.raises(ScheduleError, match="matches nothing; print|nothing was found"):
        sch.checkpoint(nothing)


@pytest.mark.parametrize("subgraph", [3, ["x"], [3], ("", 3), [("a", "b")], {"a": 1}, object], ids=str)
def test_what_is_no_match_is_refused(subgraph: object) -> None:
    _, sch = traced()
    with pytest.raises(ScheduleError, match=r"checkpoint\(''\): .* is not a subgraph; give what sch.find\(\) returned"):
        sch.checkpoint(subgraph)


class Interleaved(nn.Module):
    """Draws a mask between two operations that are checkpointed together."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.checkpointed = nn.Linear(8, 8), nn.Linear(8, 8), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            right = F.dropout(self.b(x), 0.3, self.training)
            return torch.tanh(F.dropout(self.a(x), 0.5, self.training)) * right
        left = F.dropout(self.a(x), 0.5, self.training)
        right = F.dropout(self.b(x), 0.3, self.training)
        return torch.tanh(left) * right


def test_dropouts_draw_in_the_order_in_which_the_checkpointed_graph_runs() -> None:
    sch = create_schedule(Interleaved(), example_inputs=(torch.randn(2, 8),)).trace()
    sch.checkpoint(sch.find(lambda x: torch.tanh(F.dropout(x, 0.5, True))))
    by_hand = Interleaved(checkpointed=True)
    by_hand.load_state_dict(sch.mod.state_dict())
    assert_equivalent(by_hand, sch.mod, torch.randn(2, 8), atol=0, rtol=0)
