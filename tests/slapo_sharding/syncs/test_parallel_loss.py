"""``tensor_parallel(parallel_loss=True)``: the loss from sharded logits equals the model's own."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, ScheduleError, build, build_program, create_schedule, hookimpl
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_training.losses import CountedLoss
from slapo_verify.comparison import assert_equivalent
from tests.zoo.families import FAMILIES

pytestmark = pytest.mark.multiproc


class Gathers(TorchDispatchMode):
    """Mode that counts all-gathers."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "all_gather" in str(func)
        return func(*args, **(kwargs or {}))


def _model(name: str, config: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    family = FAMILIES[name]
    family = dataclasses.replace(family, config={**family.config, "loss_type": "ForCausalLMLoss", **config})
    batch = {**family.batch(), "use_cache": False}
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 3:7] = -100
    return family.model(depth=2), batch


def _compare(run: Any, before: nn.Module, state: Any, batch: dict[str, Any]) -> None:
    output, expected = run(**batch), before(**batch)
    assert output.logits is None
    assert "logits" not in output
    torch.testing.assert_close(output.loss, expected.loss)
    output.loss.backward()
    expected.loss.backward()
    for name, grad in state("grad").items():
        torch.testing.assert_close(grad, before.get_parameter(name).grad, atol=1e-6, rtol=1e-5)
    for parameter in [*before.parameters(), *run.parameters()] if isinstance(run, nn.Module) else ():
        parameter.grad = None


def _same(rank: int, name: str, given: dict[str, Any], config: dict[str, Any]) -> None:
    model, batch = _model(name, config)
    before, modules = copy.deepcopy(model), [*model.modules()]
    example = {"example_inputs": batch} if given else {}
    sch = create_schedule(model, **example)
    sch.tensor_parallel(parallel_loss=True, **given)
    sch.undo()
    assert [*model.modules()] == modules
    assert model.loss_function is before.loss_function
    assert_equivalent(before, model, **batch)
    sch = create_schedule(model, **example)
    sch.tensor_parallel(parallel_loss=True, **given)
    build(sch)
    _compare(model, before, sch.full_state, batch)
    _compare(model, before, sch.full_state, {**batch, "num_items_in_batch": torch.tensor(7)})
    shifted = {"shift_labels": batch["labels"].flip(1)}
    _compare(model, before, sch.full_state, {**batch, **shifted})
    copied = copy.deepcopy(model)
    assert copied.loss_function is not model.loss_function
    with Gathers() as gathers:
        torch.testing.assert_close(copied(**batch).loss, before(**batch).loss)
    assert given or not gathers.count
    counted = CountedLoss(None)(lambda: model(**batch), None)[1]
    assert counted is not None
    assert counted.labels == (batch["labels"][:, 1:] != -100).sum()
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    assert model(**nothing).loss.isnan()
    assert before(**nothing).loss.isnan()
    del batch["labels"]
    assert_equivalent(before, model, **batch)
    assert_equivalent(before, model, **batch, return_dict=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "given", "config"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"tie_word_embeddings": True, "vocab_size": 65}),
        ("gpt2", {}, {}),
        pytest.param("gemma3_text", {}, {}, marks=pytest.mark.slow),
        pytest.param("cohere", {}, {}, marks=pytest.mark.slow),
        pytest.param("granite", {}, {}, marks=pytest.mark.slow),
        pytest.param("mixtral", {}, {}, marks=pytest.mark.slow),
        pytest.param("gpt_neo", {"sequence_parallel": True}, {}, marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_that_of_the_unmodified_model(name, given, config):
    run_distributed(_same, 2, name, given, config)


def _staged(rank: int) -> None:
    model, batch = _model("llama", {})
    before = copy.deepcopy(model)
    sch = create_schedule(model, example_inputs=batch)
    sch.tensor_parallel(parallel_loss=True)
    sch["model.layers.0"].cut_pipeline_stage()
    program = build_program(sch)
    _compare(program, before, sch.full_state, batch)
    del batch["labels"]
    torch.testing.assert_close(program(**batch).logits, before(**batch).logits)


def test_in_the_last_of_two_stages():
    run_distributed(_staged, 2)


def _refusals(rank: int) -> list[str]:
    said = []
    own, batch = _model("llama", {})
    own.loss_function = nn.functional.cross_entropy
    models = [
        (own, {}),
        (FAMILIES["t5"].model(depth=1), {"example_inputs": FAMILIES["t5"].batch()}),
        (nn.Sequential(nn.Linear(4, 8)), {"plan": {"0": "colwise_gather_output"}}),
    ]
    for model, given in models:
        modules, plan = [*model.modules()], {key: given.pop(key) for key in [*given] if key == "plan"}
        with pytest.raises(ScheduleError) as caught:
            create_schedule(model, **given).tensor_parallel(parallel_loss=True, **plan)
        said.append(str(caught.value))
        assert [*model.modules()] == modules
    return said


def test_another_loss_and_a_whole_head_are_refused():
    remedy = "so its loss cannot be computed from parts of the logits; leave out parallel_loss"
    own = "the model's loss is computed in its forward, not ForCausalLMLoss"
    whole = "the plan does not split the model's head as 'colwise_gather_output'"
    expected = [
        f"tensor_parallel(''): {why}, {remedy}"
        for why in ("the model's loss is cross_entropy, not ForCausalLMLoss", own, whole)
    ]
    assert run_distributed(_refusals, 2) == [expected] * 2


def _one(rank: int) -> None:
    model, batch = _model("llama", {})
    before = copy.deepcopy(model)
    create_schedule(model).tensor_parallel(parallel_loss=True)
    assert_equivalent(before, model, **batch)


def test_one_rank_changes_nothing():
    run_distributed(_one, 1)


def _unequal(rank: int) -> None:
    model, batch = _model("llama", {})
    before = copy.deepcopy(model)
    create_schedule(model).tensor_parallel(parallel_loss=True)
    half = batch["labels"].shape[1] // 2
    with pytest.raises(ValueError, match="batch_size"):
        before(**batch, logits_to_keep=half)
    with pytest.raises(ValueError, match=rf"there are logits of {half * 2} tokens and {half * 4} labels"):
        model(**batch, logits_to_keep=half)


def test_fewer_logits_than_labels_are_refused_as_by_the_model():
    run_distributed(_unequal, 2)


class OwnLosses(nn.Module):
    """Another plugin's losses: twice the original ones."""

    def __init__(self, others: nn.Module) -> None:
        super().__init__()
        self.others = others

    def forward(self, logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
        assert logits.shape == (target.shape[0], 32)
        return 2 * self.others(logits, target, ignore_index)


class OwnColumns(nn.Module):
    """Another plugin's layer."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def _backend(module: Any, kind: str, spec: Any, *, sums_gradient: bool) -> nn.Module | str:
    if kind == "loss":
        return OwnLosses(module)
    return OwnColumns(module.weight) if kind == "columns" and not sums_gradient else "there is none"


def _strange(rank: int) -> None:
    @hookimpl
    def slapo_layer_backends() -> Any:
        return {"own": _backend}

    model, batch = _model("llama", {})
    before = copy.deepcopy(model)
    registry = Registry(
        [
            slapo_tracing.plugin,
            slapo_training.plugin,
            plugin,
            SimpleNamespace(__name__="stranger", slapo_layer_backends=slapo_layer_backends),
        ]
    )
    sch = create_schedule(model, plugins=registry)
    sch.tensor_parallel(backend="own", parallel_loss=True)
    build(sch)
    torch.testing.assert_close(model(**batch).loss, 2 * before(**batch).loss)


def test_a_backend_may_compute_the_losses_of_tokens():
    run_distributed(_strange, 2)
