"""The cost of a step does not depend on the number of layers, and the hot path has plain tensors only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import slapo_tracing.plugin
import slapo_training.plugin
from benchmarks.planning import plan_ours
from slapo_core import Registry, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed

IDS = torch.arange(8)[None]


def _llama(layers: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, attn_implementation="sdpa", use_cache=False, **sizes))


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of two ranks; this process is the first, and the other does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def _published(model: LlamaForCausalLM, mesh: Any) -> None:
    create_schedule(
        model,
        mesh=mesh,
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]),
        example_inputs={"input_ids": IDS},
    ).tensor_parallel()


def _calls(plan: Any, layers: int, mesh: Any) -> int:
    """Count the calls of Python and C functions."""
    with torch.device("meta"):
        model = _llama(layers)
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        plan(model, mesh)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", [plan_ours, _published])
def test_the_work_for_a_layer_does_not_grow_with_their_number(plan: Any, mesh: Any):
    _calls(plan, 2, mesh)  # what is imported and remembered once for all
    ten, hundred, many = (_calls(plan, layers, mesh) for layers in (10, 100, 200))
    assert (many - hundred) / 100 <= 1.02 * (hundred - ten) / 90


class _Kinds(TorchDispatchMode):
    """Mode that records the classes of all tensors of operators, and the operators' names."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: set[type] = set()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        self.classes |= {type(leaf) for leaf in pytree.tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
        return result


def _runs(model: torch.nn.Module) -> _Kinds:
    """Record the tensors and operators of a step of a model that has run before."""
    for _ in range(2):
        with _Kinds() as kinds:
            model(input_ids=IDS, labels=IDS).loss.backward()
    return kinds


def _ours(rank: int, sequence_parallel: bool) -> tuple[set[type], set[str]]:
    sch = create_schedule(
        _llama(2), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]), example_inputs={"input_ids": IDS}
    )
    kinds = _runs(build(sch.tensor_parallel(sequence_parallel=sequence_parallel)).module)
    return kinds.classes, kinds.names


@pytest.mark.sampled(1)
@pytest.mark.multiproc
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_hot_path_has_only_plain_tensors(sequence_parallel: bool):
    for classes, names in run_distributed(_ours, 2, sequence_parallel):
        assert classes == {torch.Tensor, torch.nn.Parameter}
        assert "wait_tensor" in names


def test_a_tensor_subclass_is_noticed(mesh: Any):
    layer = parallelize_module(torch.nn.Linear(4, 4), mesh, ColwiseParallel())
    with _Kinds() as kinds:
        layer(torch.ones(2, 4))
    assert DTensor in kinds.classes
