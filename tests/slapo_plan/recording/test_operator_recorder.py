"""Records of the operators and collectives that run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from slapo_plan.recording import OperatorRecorder
from slapo_plan.recording.collective_calls import _CALLS, _FUNCTIONAL
from slapo_plan.records import CollectiveRecord, OperatorRecord


def _recorded(run: Callable[[], Any]) -> list[Any]:
    with OperatorRecorder() as recorder:
        run()
    return recorder.records


def _gpt2(attention: str = "eager") -> tuple[nn.Module, Callable[[], Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 1}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation=attention, loss_type="ForCausalLMLoss")).eval()
    ids = torch.ones(2, 16, dtype=torch.long)
    return model, lambda: model(input_ids=ids, labels=ids).loss.backward()


def test_flops_are_those_of_torchs_counter() -> None:
    _, run = _gpt2()
    with FlopCounterMode(display=False) as counter:
        run()
    assert sum(record.flops for record in _recorded(run)) == counter.get_total_flops()


def test_attention_has_the_flops_of_its_products() -> None:
    query = torch.ones(2, 3, 8, 4, requires_grad=True)
    attend = nn.functional.scaled_dot_product_attention
    forward, backward = (r for r in _recorded(lambda: attend(query, query, query).sum().backward()) if r.kind == "attention")
    assert forward.shape == backward.shape == (2, 3, 8, 8, 4)
    assert (forward.flops, backward.flops) == (2 * 2 * 2 * 3 * 8 * 8 * 4, 5 * 2 * 2 * 3 * 8 * 8 * 4)


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_attention_says_so(causal: bool) -> None:
    query = torch.ones(1, 1, 8, 4, requires_grad=True)
    attend = nn.functional.scaled_dot_product_attention
    records = _recorded(lambda: attend(query, query, query, is_causal=causal).sum().backward())
    names = [record.name for record in records if record.kind == "attention"]
    assert [name.endswith(".causal") for name in names] == [causal, causal]


def test_real_and_fake_tensors_record_the_same() -> None:
    real = _recorded(_gpt2("sdpa")[1])
    with FakeTensorMode():
        assert _recorded(_gpt2("sdpa")[1]) == real


def test_a_product_has_its_sizes() -> None:
    (record,) = _recorded(
        lambda: torch.ones(2, 3, dtype=torch.bfloat16, device="meta") @ torch.ones(3, 5, device="meta").bfloat16()
    )[-1:]
    assert record == OperatorRecord("aten.mm", "matmul", torch.bfloat16, 60, 2 * (6 + 15 + 10), (1, 2, 5, 3))


X, ROW = torch.ones(4, 8), torch.ones(8)


@pytest.mark.parametrize(
    ("run", "nbytes"),
    [
        (lambda: X + X, 256),  # read once
        (lambda: X + ROW, 128 + 32 + 128),
        (lambda: X + ROW.expand(4, 8), 128 + 32 + 128),  # a broadcast tensor has the size of its row
        (lambda: X.add_(0), 256),
        (lambda: X.clone().zero_(), 256 + 128),  # written only
        (lambda: nn.functional.embedding(torch.tensor([1, 1]), X), 64 + 64 + 16),  # rows
    ],
)
def test_bytes_are_counted_once(run: Callable[[], Any], nbytes: int) -> None:
    assert sum(record.nbytes for record in _recorded(run)) == nbytes


def test_views_and_allocations_are_left_out() -> None:
    assert _recorded(lambda: torch.empty(4, 2).t().view(2, 4).detach().unsqueeze(0)) == []


def test_equal_calls_on_other_shapes_differ() -> None:
    with OperatorRecorder() as recorder:
        for rows in (2, 4, 2):
            torch.ones(rows).mul(2)
    assert [record.nbytes for record in recorder.records if record.name == "aten.mul"] == [16, 32, 16]


@pytest.fixture
def rank_1_of_4() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_1_of_4")
def test_collectives_have_kind_bytes_and_ranks() -> None:
    pair, everyone, given = dist.new_group([1, 3]), (0, 1, 2, 3), torch.ones(8, 4)
    calls = [
        (lambda: dist.all_reduce(given), CollectiveRecord("all_reduce", 128, everyone)),
        (lambda: dist.all_reduce(given, async_op=True), CollectiveRecord("all_reduce", 128, everyone, overlapped=True)),
        (lambda: dist.all_reduce(given, group=pair), CollectiveRecord("all_reduce", 128, (1, 3))),
        (lambda: dist.all_gather([torch.empty(8, 4)] * 4, given), CollectiveRecord("all_gather", 512, everyone)),
        (lambda: dist.reduce_scatter(torch.empty(2, 4), [*given.split(2)]), CollectiveRecord("reduce_scatter", 128, everyone)),
        (lambda: dist.all_to_all_single(torch.empty(8, 4), given), CollectiveRecord("all_to_all", 128, everyone)),
        (lambda: dist.broadcast(given, 0), CollectiveRecord("broadcast", 128, everyone)),
        (lambda: dist.send(given, 2), CollectiveRecord("send", 128, (1, 2))),
        (lambda: dist.recv(given, 0), CollectiveRecord("send", 128, (0, 1))),
        (lambda: dist.send(given, group=pair, group_dst=1), CollectiveRecord("send", 128, (1, 3))),
    ]
    for call, expected in calls:
        assert [each for each in _recorded(call) if isinstance(each, CollectiveRecord)] == [expected]


@pytest.mark.usefixtures("rank_1_of_4")
def test_functional_collectives_are_recorded() -> None:
    given, name = torch.ones(8, 4), dist.group.WORLD.group_name  # type: ignore[union-attr]
    functional = torch.ops._c10d_functional
    gathered = _recorded(lambda: functional.wait_tensor(functional.all_gather_into_tensor(given, 4, name)))
    assert gathered == [CollectiveRecord("all_gather", 512, (0, 1, 2, 3))]


@pytest.mark.usefixtures("rank_1_of_4")
def test_coalesced_functional_collectives_are_recorded() -> None:
    given, name = torch.ones(8, 4), dist.group.WORLD.group_name  # type: ignore[union-attr]
    functional = torch.ops._c10d_functional
    gather = functional.all_gather_into_tensor_coalesced
    found = _recorded(lambda: [functional.wait_tensor(each) for each in gather([given, given], 4, name)])
    assert found == [CollectiveRecord("all_gather", 1024, (0, 1, 2, 3))]


def test_every_collective_of_torch_is_counted() -> None:
    """Those without tensors of other ranks are no collectives; messages of functional form are used by no engine."""
    known = {"c10d": _CALLS, "_c10d_functional": _FUNCTIONAL}
    left_out = {"barrier", "batch_p2p_ops", "check_for_nan", "irecv", "isend", "monitored_barrier_", "recv_any_source_"}
    left_out |= {"_wrap_tensor_autograd", "wait_tensor"}
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    found = {(room, name.split(".")[0]) for room, name in names if room in known}
    assert {name for room, name in found if name not in known[room]} <= left_out


def test_operators_under_a_checkpoint_are_hooked() -> None:
    model, given = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.ones(2, 4)
    with OperatorRecorder() as recorder:
        torch.autograd.backward(checkpoint(model, given, use_reentrant=False).sum())
    hooked = [(record.name, record.hooked) for record in recorder.records if isinstance(record, OperatorRecord)]
    assert hooked.count(("aten.addmm", True)) == 2, "forward and recomputation"
    assert ("aten.sum", False) in hooked
