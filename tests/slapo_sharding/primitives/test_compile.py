"""``torch.compile(fullgraph=True)`` of a sharded transformer block gives one graph and the same results."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import slapo_tracing.plugin
import slapo_training.plugin
from benchmarks.gpu.blocks import COMPILED, WAYS, Sizes, measure, report
from slapo_core import Registry, build, create_schedule
from slapo_sharding import plugin
from slapo_testing import run_distributed
from tests.slapo_sharding.planning.local_sizes.test_handwritten import net, tokens

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


def _llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa"
    )
    positions = LlamaRotaryEmbedding(config)(torch.zeros(2, 8, 32), torch.arange(8)[None])
    return LlamaDecoderLayer(config, 0), {"position_embeddings": positions}


def _gpt2() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = GPT2Config(n_embd=32, n_head=4, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0, attn_implementation="sdpa")
    return GPT2Block(config, 0), {}


def _compiled(rank: int, make: str, backend: str) -> list[int]:
    torch.manual_seed(0)
    model, others = {"llama": _llama, "gpt2": _gpt2}[make]()
    x = torch.randn(2, 8, 32)
    before = copy.deepcopy(model)
    sch = create_schedule(
        model,
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]),
        example_inputs={"hidden_states": x, **others},
    )
    sch.tensor_parallel()
    build(sch)
    counters.clear()
    outputs, slopes = [], []
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    compiled(x, **others)  # the first run after build looks at every operation and so is not compiled
    for call in (before, compiled):
        given = x.clone().requires_grad_()
        output = call(given, **others)
        output = output[0] if isinstance(output, tuple) else output
        output.pow(2).sum().backward()
        outputs.append(output)
        slopes.append(given.grad)
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(slopes[1], slopes[0], atol=1e-4, rtol=1e-5)
    expected = {name: parameter.grad for name, parameter in before.named_parameters()}
    torch.testing.assert_close(sch.full_state("grad"), expected, atol=1e-4, rtol=1e-5)
    return [counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())]


@pytest.mark.parametrize("make", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_one_graph(make: str):
    assert run_distributed(_compiled, 2, make, "aot_eager", timeout=200) == [[1, 0], [1, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("make", ["llama", "gpt2"])
def test_one_graph_through_inductor(make: str):
    assert run_distributed(_compiled, 2, make, "inductor", timeout=280) == [[1, 0], [1, 0]]


def _of_several_lengths(rank: int, kind: str, num_compiled: int) -> None:
    """Compile blocks around a module that runs from graphs, and call them with other shapes."""
    expected, model = net(kind), net(kind)
    sch = create_schedule(model, example_inputs=(tokens(2, 8),))
    sch.tensor_parallel()
    for index in range(num_compiled):
        sch[f"blocks.{index}"].compile(backend="aot_eager")
    build(sch)
    for number, shape in enumerate(((2, 8), (2, 8), (2, 12), (3, 6))):
        given = tokens(*shape, seed=number)
        for each in (expected, model):
            each.zero_grad()
            each(given).square().mean().backward()
        torch.testing.assert_close(model(given), expected(given), atol=1e-5, rtol=1e-4)
        for name, gradient in sch.full_state("grad").items():
            torch.testing.assert_close(gradient, expected.get_parameter(name).grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "num_compiled"),
    [("SplitByWidth", 1), ("SplitByWidth", 2), ("ListOfHeads", 2)],
)
@pytest.mark.slow
def test_compiled_code_by_hand_runs_with_other_shapes(kind: str, num_compiled: int):
    run_distributed(_of_several_lengths, 2, kind, num_compiled, timeout=200)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_benchmark_for_gpus_runs_without_one(ranks: int):
    sizes = Sizes(16, 2, 1, 1, 4, torch.float32, warm_up=2, rounds=1, backend="eager")
    for found in run_distributed(measure, ranks, "cpu", sizes, timeout=200):
        assert len(found) == len(WAYS) + len(COMPILED)
        assert found["hand-written"].ratio == 1
        assert f"| slapo, compiled | {found['slapo, compiled'].milliseconds:.2f} |" in report(found, ranks, sizes)
