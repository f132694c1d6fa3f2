"""``tensor_parallel(backend="megatron", parallel_loss=True)``: Megatron-Core's fused cross entropy from logits in bfloat16."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import ScheduleError, build, create_schedule
from slapo_testing import run_distributed
from slapo_training.engines import without_warnings
from tests.engine_models import batches, small
from tests.engines import PLUGINS, in_one_process
from tests.slapo_megatron.layers.test_layer_backend import CONV1D, UNEVEN, Collectives
from tests.slapo_sharding.logged_warnings import warnings_told
from tests.slapo_torch.layouts import adamw, mesh_of
from tests.zoo.families import FAMILIES

pytestmark = pytest.mark.multiproc

MEGATRON = {"_VocabParallelCrossEntropy", "_VocabParallelCrossEntropyBackward"}
"""Names of Megatron's function in autograd, forward and backward."""
OUTSIDE = "a target is outside of the vocabulary of 64 and is not ignore_index (-100)"


def _model(name: str, dtype: torch.dtype, **config: Any) -> tuple[Any, dict[str, Any]]:
    """A causal language model and its batch, some of whose labels are ignored."""
    family = FAMILIES[name]
    family = dataclasses.replace(family, config={**family.config, "loss_type": "ForCausalLMLoss", **config})
    batch = {**family.batch(), "use_cache": False}
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 3:7] = -100
    return family.model(depth=2).to(dtype), batch


def _split(model: Any, backend: str | None = "megatron") -> Any:
    schedule = create_schedule(model)
    schedule.tensor_parallel(backend=backend, parallel_loss=True)
    build(schedule)
    return schedule


def _calls(run: Callable[[], Any]) -> set[str]:
    """Names of the compiled functions, and of Megatron's functions, that run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    names = {event.name for event in profile.events() or ()}
    return {name for name in names if name in MEGATRON or "Compiled" in name}


def _gradients(model: Any, state: Callable[[], dict[str, Any]], batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss and all whole gradients."""
    loss = model(**batch).loss
    loss.backward()
    found = {name: grad.clone() for name, grad in state().items()}
    model.zero_grad()
    return loss.detach(), found


def _worst(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest distance of two gradients of one parameter, as a share of its gradient's norm."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - each).norm() / each.norm()) for name, each in expected.items())


def _same(rank: int, name: str, config: dict[str, Any]) -> list[list[str]]:
    model, batch = _model(name, torch.bfloat16, **config)
    before, ours = copy.deepcopy(model), copy.deepcopy(model)
    with warnings_told() as told:
        schedule = _split(model)
    own = _split(ours, None)
    for given in ({}, {"num_items_in_batch": torch.tensor(7)}, {"shift_labels": batch["labels"].flip(1)}):
        called = {**batch, **given}
        loss, found = _gradients(model, lambda: schedule.full_state("grad"), called)
        expected = _gradients(
            before, lambda: {key: each.grad for key, each in before.named_parameters(remove_duplicate=False)}, called
        )
        alike = _gradients(ours, lambda: own.full_state("grad"), called)
        torch.testing.assert_close(loss, expected[0], atol=2e-2, rtol=2e-2)
        assert _worst(found, expected[1]) < 2e-2
        torch.testing.assert_close(loss, alike[0], atol=1e-5, rtol=1e-5)
        assert _worst(found, alike[1]) < 4e-3
    copied = copy.deepcopy(model)
    calls = [_calls(lambda each=each: each(**batch).loss.backward()) for each in (model, copied, ours)]
    assert model(**{**batch, "labels": torch.full_like(batch["labels"], -100)}).loss.isnan()
    return [sorted(each) for each in calls] + [[line.partition(": not replaced by layers of 'megatron': ")[2] for line in told]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "config", "told", "fused"),
    [
        ("llama", {}, [], True),
        ("gpt2", {}, [CONV1D.replace("h.0", "h.*")], True),
        (
            "llama",
            {"tie_word_embeddings": True, "vocab_size": 65},
            [UNEVEN.replace("lm_head", "lm_head, loss_function")],
            False,
        ),
    ],
)
def test_a_bf16_model_has_the_loss_and_gradients_of_the_unmodified_one(name, config, told, fused):
    names = sorted(MEGATRON) if fused else []
    assert run_distributed(_same, 2, name, config, timeout=100) == [[names, names, [], told]] * 2


def _other_types(rank: int) -> None:
    """Logits in float32 and float16 are none for Megatron's, whoever made them."""
    model, batch = _model("llama", torch.float32)
    ours = copy.deepcopy(model)
    schedule, own = _split(model), _split(ours, None)
    loss, found = _gradients(model, lambda: schedule.full_state("grad"), batch)
    expected = _gradients(ours, lambda: own.full_state("grad"), batch)
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(grad, expected[1][name]) for name, grad in found.items())
    assert not _calls(lambda: model(**batch).loss.backward())
    logits, target = torch.randn(6, 32, generator=torch.Generator().manual_seed(rank)), torch.tensor([0, 63, -100, 31, 32, 5])
    for dtype in (torch.float32, torch.float16):
        each = [logits.to(dtype, copy=True).requires_grad_() for _ in range(2)]
        losses = [
            module(x, target, -100)
            for module, x in zip((model.loss_function.losses, ours.loss_function.losses), each, strict=True)
        ]
        torch.stack(losses).sum().backward()
        assert torch.equal(*losses)
        assert torch.equal(each[0].grad, each[1].grad)
    model.bfloat16()
    assert _calls(lambda: model(**batch).loss.backward()) == MEGATRON


def test_logits_of_another_type_are_computed_as_without_a_backend():
    run_distributed(_other_types, 2)


def _tokens(rank: int) -> None:
    """Each token's loss and gradient, of targets that are ignored, too; two collectives, and none in the backward."""
    model, _ = _model("llama", torch.bfloat16)
    _split(model)
    whole = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).mul(4).bfloat16().requires_grad_()
    for target, ignored in (([0, 63, -100, 31, 32, 5], -100), ([3, 63, 3, 31, 32, 5], 3), ([-100] * 6, -100)):
        ids, logits = torch.tensor(target), whole.detach().chunk(2, -1)[rank].clone().requires_grad_()
        kept = logits.detach().clone()
        with Collectives() as counted:
            losses = model.loss_function.losses(logits, ids, ignored)
            (losses * torch.arange(6)).sum().backward()
        expected = F.cross_entropy(whole.float(), ids, ignore_index=ignored, reduction="none")
        (grad,) = torch.autograd.grad((expected * torch.arange(6)).sum(), whole)
        assert counted.count == 2
        assert losses.dtype is torch.float32
        assert torch.equal(logits, kept)
        torch.testing.assert_close(losses, expected)
        torch.testing.assert_close(logits.grad, grad.chunk(2, -1)[rank], atol=1e-6, rtol=8e-3)
        assert not losses[ids == ignored].any()
        assert not logits.grad[ids == ignored].any()
    assert model.loss_function.losses(logits[:0], ids[:0], -100).shape == (0,)


def test_ignored_targets_have_no_loss_and_no_gradient():
    run_distributed(_tokens, 2)


def _refused(rank: int) -> list[str]:
    said = []
    model, batch = _model("llama", torch.bfloat16)
    _split(model)
    for outside in (64, -1):
        labels = batch["labels"].clone()
        labels[1, 2] = outside
        with pytest.raises(IndexError) as outside_of:
            model(**{**batch, "labels": labels})
        said.append(str(outside_of.value))
    logits = torch.zeros(2, 32, dtype=torch.bfloat16, requires_grad=True)
    total = model.loss_function.losses(logits, torch.tensor([0, 40]), -100).sum()
    with pytest.raises(ScheduleError) as caught:
        torch.autograd.grad(total, logits, create_graph=True)
    said.append(str(caught.value))
    total = model.loss_function.losses(logits, torch.tensor([0, 40]), -100).sum()
    total.backward(retain_graph=True)
    with pytest.raises(ScheduleError) as caught:
        total.backward()
    return [*said, str(caught.value)]


def test_what_megatron_would_get_wrong_is_an_error():
    expected = [
        OUTSIDE,
        OUTSIDE,
        "what Megatron-Core computes has no gradient of its gradient, as create_graph=True asks for; leave out backend",
        "Megatron-Core's loss has one backward, as retain_graph=True asks for two; leave out backend",
    ]
    assert run_distributed(_refused, 2) == [expected] * 2


def _undone(rank: int) -> None:
    for name, config in (("llama", {}), ("gpt2", {"vocab_size": 65})):
        model, _ = _model(name, torch.bfloat16, **config)
        before, loss = [*model.modules()], model.loss_function
        schedule = create_schedule(model)
        if config:
            with pytest.raises(
                ScheduleError, match="lm_head, loss_function: its parts are not equal on all ranks, .* leave out"
            ):
                schedule.tensor_parallel(backend="megatron", parallel_loss=True)
        else:
            schedule.tensor_parallel(backend="megatron", parallel_loss=True)
            assert model.loss_function is not loss
            schedule.undo()
        assert [*model.modules()] == before
        assert not model._forward_hooks
        assert model.loss_function is loss


def test_a_step_that_is_undone_or_fails_leaves_the_models_own_loss():
    run_distributed(_undone, 2)


def _trained(rank: int) -> set[str]:
    mesh, data = mesh_of(tp=2), batches(1)[:2]
    expected = [loss for loss, _ in in_one_process(small("llama"), data, 0.1)]
    schedule = create_schedule(small("llama"), mesh=mesh, example_inputs=data[0], plugins=PLUGINS)
    schedule.tensor_parallel(backend="megatron", parallel_loss=True)
    engine: Any = build(schedule, "megatron", optimizer=adamw, microbatches=2, clip=0.1, precision="bf16")
    found: list[float] = []
    called = _calls(lambda: found.extend(engine.train_batch(**batch).item() for batch in data))
    engine.close()
    assert found == pytest.approx(expected, abs=2e-2)
    return called


@pytest.mark.slow
def test_the_dialect_trains_with_it_in_bf16():
    assert run_distributed(_trained, 2, timeout=100) == [MEGATRON] * 2


def test_the_norm_megatron_chooses_here_is_the_one_models_have():
    """So there is none to put in its place."""
    with without_warnings():
        from megatron.core.models.backends import LocalSpecProvider
        from megatron.core.transformer import TransformerConfig
    own = _model("gpt2", torch.float32)[0].transformer.ln_f
    with without_warnings():
        config = TransformerConfig(num_layers=1, hidden_size=own.normalized_shape[0], num_attention_heads=1)
    norm: Any = LocalSpecProvider().layer_norm()(config, config.hidden_size, eps=own.eps)
    assert type(norm) is type(own) is nn.LayerNorm
    nn.init.normal_(own.weight)
    norm.load_state_dict(own.state_dict())
    x = torch.randn(3, config.hidden_size)
    assert torch.equal(norm(x), own(x))
