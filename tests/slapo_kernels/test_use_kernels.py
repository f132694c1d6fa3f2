"""``use_kernels()`` on Transformers families: outputs and gradients of the unmodified model, with kernels that really ran."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import Schedule, ScheduleError, create_schedule, load_schedule
from slapo_verify.comparison import assert_equivalent
from tests.slapo_kernels.kernel_calls import COUNTED, Counted, counted_kernels
from tests.zoo.families import FAMILIES


@pytest.fixture
def counted() -> Iterator[Counted]:
    with counted_kernels() as found:
        yield found


SERVED = {
    "gpt2": {"layer_norm": 5, "bias_act": 2},
    "gpt2:mask": {"layer_norm": 5, "bias_act": 2},
    "bert": {"layer_norm": 6, "bias_dropout_residual": 4, "bias_act": 3},
    "opt": {"layer_norm": 5},
    "t5": {"rms_norm": 12, "bias_dropout_residual": 4, "bias_act": 4},
    "mt5": {"rms_norm": 12, "bias_dropout_residual": 4, "geglu": 4},
    "llama": {"rms_norm": 5, "swiglu": 2},
    "llama:mask": {"rms_norm": 5, "swiglu": 2},
    "qwen2": {"rms_norm": 5, "swiglu": 2},
    "qwen3": {"rms_norm": 9, "swiglu": 2},
    "gemma": {"rms_norm": 5, "geglu": 2},
    "gemma2": {"rms_norm": 9, "geglu": 2},
    "phi3": {"rms_norm": 5, "swiglu": 2},
    "mixtral": {"rms_norm": 5, "swiglu": 2},
    "vit": {"layer_norm": 5, "bias_act": 2},
    "clip": {"layer_norm": 11, "bias_act": 4},
    "modernbert": {"layer_norm": 6, "geglu": 2, "bias_act": 1},
    "nemotron": {"bias_act": 2},
}
"""Family to the modules that kernels serve, but for attention."""
FAST = ("gpt2", "bert", "t5", "llama", "gemma", "mixtral")


def served(schedule: Schedule) -> dict[str, int]:
    """Modules by kernel."""
    return {kernel: len(paths) for kernel, paths in schedule.metadata.primitives["use_kernels"].items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SERVED])
def test_correctness_15_families_compute_what_they_did(name: str, counted: Counted) -> None:
    """Correctness 15: dropout on in training alone and with the same masks, the exact activation, the mask."""
    for dropout, training in ((0.1, True), (0.1, False)):
        model, batch = FAMILIES[name].model(dropout=dropout).train(training), FAMILIES[name].batch()
        before, names = copy.deepcopy(model), list(model.state_dict())
        schedule = create_schedule(model, plugins=counted.plugins)
        schedule.use_kernels(force=COUNTED)
        found = served(schedule)
        found.pop("attention", None)
        assert found == SERVED[name]
        counted.calls.clear()
        model(**batch)
        assert counted.calls == SERVED[name]
        assert_equivalent(before, model, **batch, atol=5e-5, rtol=5e-4)
        assert list(model.state_dict()) == names


@pytest.mark.slow
@pytest.mark.parametrize("force", [COUNTED, None], ids=["eager", "default"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_computes_what_it_did(name: str, force: dict[str, str] | None, counted: Counted) -> None:
    model, batch = FAMILIES[name].model(dropout=0.1), FAMILIES[name].batch()
    before = copy.deepcopy(model)
    create_schedule(model, plugins=counted.plugins).use_kernels(force=force)
    assert_equivalent(before, model, **batch, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma"])
def test_compiled_kernels(name: str, counted: Counted) -> None:
    """Values, gradients and dropout's masks by inductor."""
    model, batch = FAMILIES[name].model(dropout=0.1), FAMILIES[name].batch()
    before = copy.deepcopy(model)
    create_schedule(model, plugins=counted.plugins).use_kernels(force={"*": "inductor"})
    assert_equivalent(before, model, **batch, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("gemma", marks=pytest.mark.slow)])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(name: str, autocast: bool, counted: Counted) -> None:
    model, batch = FAMILIES[name].model(), FAMILIES[name].batch()
    model = model if autocast else model.bfloat16()
    before = copy.deepcopy(model)
    create_schedule(model, plugins=counted.plugins).use_kernels(force=COUNTED)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, found = before(**batch), model(**batch)
    assert counted.calls
    assert found.logits.dtype == expected.logits.dtype
    torch.testing.assert_close(found.logits, expected.logits, atol=0.03, rtol=0.03)
    for each in (expected, found):
        each.loss.backward()
    for parameter, other in zip(before.parameters(), model.parameters(), strict=True):
        assert torch.dist(parameter.grad, other.grad) <= 0.03 * parameter.grad.norm() + 1e-3  # type: ignore[union-attr, arg-type]


def test_copies_pickles_and_undo(counted: Counted) -> None:
    model, batch = FAMILIES["bert"].model(dropout=0.1), FAMILIES["bert"].batch()
    before = copy.deepcopy(model)
    modules, ids = dict(model.named_modules()), {name: id(each) for name, each in model.named_parameters()}
    schedule = create_schedule(model, plugins=counted.plugins)
    schedule.use_kernels(force={"*": "eager"})
    assert {name: id(each) for name, each in model.named_parameters()} == ids
    assert isinstance(model.bert.encoder.layer[0].output, type(before.bert.encoder.layer[0].output))  # type: ignore[union-attr]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert other.bert.encoder.layer[0].output is not model.bert.encoder.layer[0].output  # type: ignore[union-attr]
        assert_equivalent(before, other, **batch)
    schedule.undo()
    assert dict(model.named_modules()) == modules
    assert_equivalent(before, model, **batch)


def test_saved_schedules_swap_again(counted: Counted, tmp_path: Path) -> None:
    model, batch = FAMILIES["llama"].model(), FAMILIES["llama"].batch()
    schedule = create_schedule(model, plugins=counted.plugins)
    schedule["model.layers.1"].use_kernels(["swiglu", "rms_norm"], force={"swiglu": "counted"})
    assert "name='swiglu'" in str(schedule.journal)
    schedule.save(tmp_path / "schedule.json")
    again = FAMILIES["llama"].model()
    load_schedule(again, tmp_path / "schedule.json", plugins=counted.plugins)
    counted.calls.clear()
    assert_equivalent(FAMILIES["llama"].model(), again, **batch)
    assert counted.calls == {"swiglu": 1}


def test_weights_on_the_meta_device(counted: Counted) -> None:
    with torch.device("meta"):
        model = FAMILIES["t5"].model()
    real, batch = FAMILIES["t5"].model(), FAMILIES["t5"].batch()
    schedule = create_schedule(model, plugins=counted.plugins)
    schedule.use_kernels(force=COUNTED)
    assert {kernel: number for kernel, number in served(schedule).items() if kernel != "attention"} == SERVED["t5"]
    model.load_state_dict(real.state_dict(), assign=True)
    model.tie_weights()  # type: ignore[operator]
    assert_equivalent(real, model, **batch, atol=5e-5, rtol=5e-4)


def test_one_kernel_alone(counted: Counted) -> None:
    model, batch = FAMILIES["t5"].model(dropout=0.1), FAMILIES["t5"].batch()
    before = copy.deepcopy(model)
    schedule = create_schedule(model, plugins=counted.plugins)
    schedule.use_kernels("bias_act", force=COUNTED)
    assert_equivalent(before, model, **batch)
    assert counted.calls == {"bias_act": 4}
    schedule.use_kernels("rms_norm", force=COUNTED)
    counted.calls.clear()
    assert_equivalent(before, model, **batch)
    assert counted.calls == {"bias_act": 4, "rms_norm": 12}


def test_attention_is_told_by_name_and_told_back(counted: Counted) -> None:
    import transformers

    config = FAMILIES["llama:mask"].make_config()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    before, batch = copy.deepcopy(model), FAMILIES["llama:mask"].batch()
    schedule = create_schedule(model, plugins=counted.plugins)
    schedule.use_kernels("attention")
    assert model.config._attn_implementation == "slapo_sdpa"
    assert_equivalent(before, model, **batch, atol=5e-5, rtol=1e-4)
    schedule.undo()
    assert model.config._attn_implementation == "eager"
    schedule.use_kernels("attention", force={"attention": "eager"})
    assert model.config._attn_implementation == "eager"


def test_attention_that_cannot_be_told(counted: Counted) -> None:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_config(FAMILIES["gemma2"].make_config())
    schedule = create_schedule(model, plugins=counted.plugins)
    schedule.use_kernels()
    assert "attention" not in served(schedule)
    with pytest.raises(ScheduleError, match="a Gemma2ForCausalLM caps its attention logits, which 'sdpa' does not"):
        schedule.use_kernels("attention")


def test_embeddings_when_named(counted: Counted) -> None:
    model, batch = FAMILIES["gpt2"].model(), FAMILIES["gpt2"].batch()
    before = copy.deepcopy(model)
    create_schedule(model, plugins=counted.plugins).use_kernels("embedding", force=COUNTED)
    assert_equivalent(before, model, **batch)
    assert counted.calls == {"embedding": 2}


def test_compiled_layers(counted: Counted) -> None:
    """A compiler sees the forward that was there, in one graph, but where an implementation is forced."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.act(self.up(self.norm(x))))  # type: ignore[no-any-return]

    for force in (None, {"*": "eager"}):
        block = Block()
        before = copy.deepcopy(block)
        schedule = create_schedule(block, plugins=counted.plugins)
        schedule.use_kernels(["bias_act", "layer_norm"], force=force)
        compiled = torch.compile(block, backend="eager", fullgraph=True)
        assert_equivalent(before, compiled, torch.randn(2, 3, 8), atol=1e-5)
