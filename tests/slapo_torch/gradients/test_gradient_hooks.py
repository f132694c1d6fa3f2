"""Hooks that a user put on parameters have the effect that they have in one process on the whole batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import build, create_schedule
from slapo_testing import run_distributed
from tests import gradient_hooks as hooked
from tests.gradient_hooks import SGD, batches, differences, expected, made, scheduled

from ..layouts import gpt2, mesh_of, message_of

pytestmark = pytest.mark.multiproc

CASES = [*((family, False) for family in ("masks", "norms", "weights", "after", "noise")), ("norms", True), ("after", True)]
FEW = [("masks", False), ("norms", True), ("after", False)]
FSDP = {"data_parallel": "fsdp", "clip": 0.05}
Ways = list[tuple[dict[str, int], dict[str, Any]]]


def _differences(rank: int, ways: Ways, cases: list[tuple[str, bool]]) -> list[str]:
    return [
        f"{layout}, {config}: {wrong}"
        for layout, config in ways
        for wrong in differences(rank, "torch", layout, [*cases, ("steps", False)], **config)
    ]


@pytest.mark.parametrize(
    ("ways", "cases"),
    [
        ([({"tp": 2}, {})], CASES),
        ([({"dp": 2}, FSDP)], FEW),
        pytest.param([({"dp": 2}, FSDP), ({"dp": 2}, {"clip": 0.05}), ({"pp": 2}, {})], CASES, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_kind_of_hook_on_two_ranks(ways: Ways, cases: list[tuple[str, bool]]) -> None:
    assert run_distributed(_differences, 2, ways, cases, timeout=100) == [[]] * 2


@pytest.mark.slow
def test_every_kind_of_hook_on_four_ranks() -> None:
    ways = [({"dp": 2, "tp": 2}, FSDP), ({"dp": 2, "tp": 2}, {}), ({"pp": 2, "tp": 2}, {}), ({"pp": 2, "dp": 2}, FSDP)]
    assert run_distributed(_differences, 4, ways, CASES, timeout=100) == [[]] * 4


def _hooked(model: nn.Module) -> nn.Module:
    """Masked and scaled by the norm; of every third parameter the weight is added."""
    for index, parameter in enumerate(model.parameters()):
        mask = (torch.rand(parameter.shape, generator=torch.Generator().manual_seed(index)) > 0.3).float()
        parameter.register_hook(lambda gradient, mask=mask: gradient * mask / (1e-3 + gradient.norm()))
        if index % 3 == 0:
            parameter.register_post_accumulate_grad_hook(lambda q: (q.grad.add_(q, alpha=0.05), None)[1])
    return model


def _llama(key_heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 38, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": key_heads}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


def _model_is_right(make: Any, layout: dict[str, int], **config: Any) -> list[str]:
    ids = torch.randint(3, 38, (8, 8), generator=torch.Generator().manual_seed(3))
    reference, model, mesh = _hooked(make()), _hooked(make()), mesh_of(**layout)
    start = {name: p.detach().clone() for name, p in reference.named_parameters()}
    optimizer = SGD(reference.parameters())
    example = {"input_ids": ids[:2], "labels": ids[:2]}
    schedule = create_schedule(model, mesh=mesh, example_inputs=example, plugins=hooked.PLUGINS)
    if mesh["tp"].size() > 1:
        schedule.tensor_parallel()
    if mesh["pp"].size() > 1:
        schedule.pipeline(4)
    engine = build(schedule, "torch", optimizer=SGD, **config)
    for _ in range(2):
        reference(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.train_batch(input_ids=ids, labels=ids)
    engine.close()
    full = schedule.full_state()
    wants = {name: (p, (p - start[name]).abs().max()) for name, p in reference.named_parameters()}
    return [name for name, (want, change) in wants.items() if (full[name] - want).abs().max() > 2e-3 * change + 1e-7]


def _models(rank: int) -> list[list[str]]:
    zbv = {"pipeline_schedule": "zbv", "microbatches": 4}
    return [
        _model_is_right(partial(_llama, 1), {"tp": 2}, microbatches=2),  # copies of a key head
        _model_is_right(partial(gpt2, layers=4), {"tp": 2}),  # fused blocks, and a tied embedding
        _model_is_right(partial(gpt2, layers=4), {"pp": 2}, **zbv),  # a backward in two parts
    ]


@pytest.mark.slow
def test_models_with_a_hook_on_every_parameter() -> None:
    assert run_distributed(_models, 2, timeout=100) == [[[]] * 3] * 2


def _per_backward(rank: int) -> list[str]:
    """A shard without an engine: each backward is that of one process."""
    wrong = []
    for family in ("masks", "norms", "weights", "after", "steps", "noise"):
        states, _ = expected(family, False, 0.0)
        model: Any = made(family)
        handle, schedule = getattr(model, "handle", None), scheduled(model, {"tp": 2}, False)
        module, _ = build(schedule)
        optimizer = SGD(module.parameters())
        for index, batch in enumerate(batches()):
            if index == 1 and handle is not None:
                handle.remove()
            torch.manual_seed(index)
            module(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        full = schedule.full_state()
        for name, want in states[-1].items():
            if (full[name] - want).abs().max() > 1e-3 * (want - states[0][name]).abs().max() + 1e-7:
                wrong.append(f"{family}: {name}")
    return wrong


def test_a_shard_without_an_engine_has_the_hooks_of_the_whole_parameter() -> None:
    assert run_distributed(_per_backward, 2) == [[]] * 2


def _counted(rank: int, layout: dict[str, int], config: dict[str, Any]) -> tuple[list[tuple[int, ...]], list[str]]:
    """Return gradients that hooks of two parameters got in a step of two micro-batches, and the owner of a returned hook."""
    model, seen = made("nothing"), list[tuple[int, ...]]()
    weight = model.get_parameter("norm.weight")
    model.get_parameter("blocks.0.0.weight").register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    weight.register_post_accumulate_grad_hook(lambda q: seen.append(tuple(q.grad.shape)))
    schedule = scheduled(model, layout, False)
    engine = build(schedule, "torch", optimizer=SGD, microbatches=2, **config)
    engine.train_batch(**batches(1)[0])
    engine.close()
    left = [name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    return seen, left


def test_a_hook_runs_once_in_a_step_or_where_asked_in_each_micro_batch() -> None:
    left = ["blocks.0.0.weight", "norm.weight"]
    shapes = [(hooked.WIDTH,), (2 * hooked.WIDTH, hooked.WIDTH)]
    for layout in ({"tp": 2}, {"dp": 2}):
        assert run_distributed(_counted, 2, layout, {}) == [(shapes, left)] * 2
        assert run_distributed(_counted, 2, layout, {"gradient_hooks": "microbatch"}) == [(shapes * 2, left)] * 2


def _micro_batches_differ(rank: int) -> bool:
    return bool(differences(rank, "torch", {"dp": 2}, [("norms", False)], gradient_hooks="microbatch"))


def test_hooks_in_micro_batches_see_other_norms() -> None:
    assert run_distributed(_micro_batches_differ, 2) == [True] * 2


def _fails(hook: Any) -> str:
    model = made("nothing")
    if hook is not None:
        model.get_parameter("blocks.0.0.weight").register_hook(hook)
    engine = build(scheduled(model, {"tp": 2}, False), "torch", optimizer=SGD)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    said = message_of(lambda: engine.train_batch(**batches(1)[0]))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    engine.close()
    return said


def _failures(rank: int) -> list[str]:
    def fails_here(gradient: torch.Tensor) -> None:
        if rank == 1:
            raise ValueError("only here")

    own = (lambda gradient: gradient * 2) if rank == 0 else None
    return [_fails(lambda gradient: gradient[:3]), _fails(lambda gradient: 3), _fails(fails_here), _fails(own)]


def test_what_a_hook_may_not_do_fails_on_all_ranks() -> None:
    first, second = run_distributed(_failures, 2)
    shape = "BuildError: a hook of 'blocks.0.0.weight' returns a gradient of {}, where it got one of shape (32, 16); return a "
    shape += "tensor of that shape, or None"
    some = "'blocks.0.0.weight' has a hook on some ranks only, and it changes the gradient; register it on all ranks"
    assert first == [
        *(shape.format(what) for what in ("shape (3, 16)", "type int")),
        "BuildError: rank 1 failed: ValueError: only here",
        f"BuildError: {some}",
    ]
    assert second == [*first[:2], "ValueError: only here", f"BuildError: rank 0 failed: {some}"]


class _Masked(torch.optim.SGD):
    """Reads a mask that is kept at the parameter."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(getattr(parameter, "mask", 1.0))
        return super().step(closure)


def _marked(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mask = (torch.arange(parameter.numel()).view(parameter.shape) % 7 < 3).float()  # type: ignore[attr-defined]
    wide = model.get_parameter("blocks.0.0.weight")
    wide.mask = torch.arange(len(wide))[:, None] % 2  # type: ignore[attr-defined]
    model.get_parameter("blocks.0.2.weight").mask = torch.arange(len(wide))[None] % 2  # type: ignore[attr-defined]


def _attributes(rank: int, layouts: list[tuple[dict[str, int], dict[str, Any]]]) -> list[str]:
    hooked.FAMILIES["marked"], hooked.SGD = _marked, partial(_Masked, lr=0.1)  # type: ignore[assignment]
    try:
        return [
            each for layout, config in layouts for each in differences(rank, "torch", layout, [("marked", False)], **config)
        ]
    finally:
        hooked.SGD = SGD


def test_a_mask_kept_at_a_parameter_is_cut_with_it() -> None:
    layouts = [({"tp": 2}, {}), ({"dp": 2}, {"data_parallel": "fsdp"})]
    assert run_distributed(_attributes, 2, layouts) == [[]] * 2


def _undone(rank: int) -> bool:
    model = made("masks")
    parameter = model.get_parameter("blocks.0.0.weight")
    before = list((parameter._backward_hooks or {}).items())
    schedule = scheduled(model, {"tp": 2}, False)
    while len(schedule.journal):
        schedule.undo()
    return model.get_parameter("blocks.0.0.weight") is parameter and list((parameter._backward_hooks or {}).items()) == before


def test_undo_gives_the_whole_parameter_its_hooks() -> None:
    assert run_distributed(_undone, 2) == [True] * 2


def test_a_hook_runs_after_unfreezing_and_not_on_what_has_no_gradient() -> None:
    model, calls = made("nothing"), list[str]()
    for name in ("emb.weight", "blocks.0.0.weight"):
        parameter = model.get_parameter(name)
        parameter.register_hook(lambda gradient, name=name: calls.append(name))
    model.get_parameter("emb.weight").requires_grad_(False)
    engine = build(create_schedule(model, plugins=hooked.PLUGINS), "torch", optimizer=SGD, microbatches=2)
    engine.train_batch(**batches(1)[0])
    assert calls == ["blocks.0.0.weight"]
    model.get_parameter("emb.weight").requires_grad_(True)
    engine.train_batch(**batches(1)[0])
    assert calls == ["blocks.0.0.weight"] * 2 + ["emb.weight"]


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(Exception, match="gradient_hooks is 'often'; give 'step' or 'microbatch'"):
        build(create_schedule(made("nothing"), plugins=hooked.PLUGINS), "torch", optimizer=SGD, gradient_hooks="often")
