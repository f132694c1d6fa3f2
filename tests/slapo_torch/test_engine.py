"""The engine in one process, its options, and what it relies on in torch."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo.framework_dialect import get_dialect_cls
from slapo_core import BuildError, Registry, build, create_schedule
from slapo_training.batches import split

from .layouts import adamw

PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin])
X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


class Classifier(nn.Module):
    """Gives its loss, when it has labels, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _engine(model: nn.Module, **config: Any) -> Any:
    return build(create_schedule(model, plugins=PLUGINS), "torch", **{"optimizer": adamw, **config})


@pytest.mark.parametrize("microbatches", [1, 2, 8])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_steps_equal_a_plain_loop(microbatches: int, clip: float) -> None:
    model = Classifier()
    reference = copy.deepcopy(model)
    engine, optimizer = _engine(model, microbatches=microbatches, clip=clip), adamw(reference.parameters())
    for _ in range(3):
        loss = engine.train_batch(x=X, labels=Y)
        optimizer.zero_grad()
        expected = reference(X, Y)["loss"]
        expected.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), clip or float("inf"))
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_a_loss_function_takes_the_labels_out_of_the_batch() -> None:
    model = Classifier()
    expected = model(X, Y)["loss"]
    engine = _engine(model, loss_fn=lambda outputs, labels: F.cross_entropy(outputs["logits"], labels), microbatches=4)
    torch.testing.assert_close(engine.eval_batch(x=X, labels=Y), expected.detach())


def test_it_unpacks_as_module_and_optimizer() -> None:
    model = Classifier()
    module, optimizer = _engine(model)
    assert module is model
    assert isinstance(optimizer, torch.optim.AdamW)


def test_frozen_parameters_stay_frozen() -> None:
    model = Classifier()
    model.net[0].weight.requires_grad_(False)
    before = model.net[0].weight.clone()
    engine = _engine(model)
    engine.train_batch(x=X, labels=Y)
    assert torch.equal(model.net[0].weight, before)
    assert len(engine.optimizer.param_groups[0]["params"]) == 3


def test_modes_are_set_and_parts_the_user_froze_stay_in_evaluation() -> None:
    model = Classifier()
    model.net[2].eval()
    engine = _engine(model)
    engine.eval_batch(x=X, labels=Y)
    assert not model.training
    engine.train_batch(x=X, labels=Y)
    assert model.net[0].training
    assert not model.net[2].training


def test_save_and_load_go_on_exactly(tmp_path: Path) -> None:
    engine = _engine(Classifier())
    engine.train_batch(x=X, labels=Y)
    engine.save(tmp_path)
    ahead = [engine.train_batch(x=X, labels=Y) for _ in range(2)]
    torch.manual_seed(7)
    other = _engine(Classifier())
    other.load(tmp_path)
    assert [other.train_batch(x=X, labels=Y) for _ in range(2)] == ahead


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    _engine(nn.Linear(4, 4)).save(tmp_path)
    engine = _engine(Classifier())
    before = copy.deepcopy(engine.module.state_dict())
    with pytest.raises(BuildError, match=r"'bias', 'weight' are not in the engine; load it into the model"):
        engine.load(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"micro_batches": 2}, "no option 'micro_batches' of target 'torch'; did you mean 'microbatches'"),
        ({"microbatches": 0}, "microbatches is 0; give a whole number from 1 on"),
        ({"clip": -1.0}, "clip is -1.0"),
        ({"ignore_index": "pad"}, "ignore_index is 'pad'; give the label value"),
        (
            {"pipeline_schedule": "zigzag"},
            "no pipeline_schedule 'zigzag'; available: 1f1b, a path that ends in .csv, dualpipev, gpipe",
        ),
        ({"precision": "fp8"}, "cannot do precision:fp8"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)},
            r"a parameter of shape \(1,\) that is not a parameter of the scheduled",
        ),
        ({"optimizer": "adamw"}, "optimizer is 'adamw'; give a torch.optim.Optimizer, or a factory"),
        ({"lr_scheduler": 0.1}, "lr_scheduler is 0.1; give optimizer=, and lr_scheduler= as one of"),
        ({"lr_scheduler": lambda optimizer: 0.1}, "lr_scheduler= gave a float; it must return one of torch.optim.lr_scheduler"),
        ({"loss_scale": 0.0}, "loss_scale is 0.0; give a number from 1 on"),
        ({"loss_fn": lambda outputs: outputs}, r"loss_fn does not take \(outputs, labels\)"),
    ],
)
def test_options_that_make_no_sense(config: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        _engine(Classifier(), **config)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": X, "labels": Y[:6]},
            r"'x' has the shape \(8, 4\) in a batch of 6 rows, x \(8, 4\), labels \(6,\); say with batch_dims=",
        ),
        ({"x": X}, r"the model returns no loss but 'logits' of shape \(4, 3\); give the model labels, or build with loss_fn="),
    ],
)
def test_batches_that_cannot_be_averaged(batch: dict[str, torch.Tensor], message: str) -> None:
    engine = _engine(Classifier(), microbatches=2)
    with pytest.raises(BuildError, match=message):
        engine.train_batch(**batch)


class Counted(nn.Module):
    """Takes what goes with its rows in any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor | None = None, extra: Any = None) -> torch.Tensor:
        given = tree_leaves(extra)
        rows = x if x is not None else given[0]
        return self.a(rows).mean() * sum(float(torch.as_tensor(value).float().sum()) for value in given)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (list(range(8)), "'extra' is a list with as many items as the batch has rows, 8, and would go whole"),
        (tuple(range(8)), "'extra' is a tuple with as many items"),
        (np.arange(8), "'extra' is a ndarray with as many items as the batch has rows, 8"),
        ({"inner": [1.0] * 8}, "'extra.inner' is a list with as many items"),
        ([torch.ones(8, 4)] * 8, "'extra' is a list with as many items as the batch has rows, 8"),
    ],
    ids=["list", "tuple", "array", "nested", "tensors"],
)
def test_values_per_row_that_are_no_tensor_take_one_micro_batch(extra: Any, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        _engine(Counted(), microbatches=2).train_batch(x=X, extra=extra)
    _engine(Counted()).train_batch(x=X, extra=extra)


def test_a_batch_of_lists_alone_may_be_cut_wrongly() -> None:
    images = [torch.ones(4, 4) * number for number in (1, 2, 3)]
    with pytest.raises(BuildError, match="'extra' is a list of tensors, which may be one per row; give tensors by name"):
        _engine(Counted(), microbatches=2).train_batch(extra=images)


@pytest.mark.parametrize(
    "extra",
    [
        [1.0, 2.0],
        {"mask": X, "size": (3, 4)},
        tuple((X, X) for _ in range(8)),
        [X, X],
        np.float32(2.0),
        "a word of",
    ],
    ids=["shorter", "nested", "pairs", "columns", "number", "text"],
)
def test_what_is_not_per_row_goes_to_each_micro_batch_and_tensors_are_cut(extra: Any) -> None:
    parts = split({"x": X, "extra": extra}, 2)
    for part, half in zip(parts, X.chunk(2), strict=True):
        for found, given in zip(tree_leaves(part), tree_leaves({"x": X, "extra": extra}), strict=True):
            assert torch.equal(found, half) if isinstance(given, torch.Tensor) else found is given


PADDED = torch.tensor([0, 1, 2, 1, 2, 2, 1, 2])
"""Labels of which one in the first half, none in the second is 0."""


@pytest.mark.parametrize(
    "config",
    [
        {"loss_fn": nn.CrossEntropyLoss(ignore_index=0)},
        {"loss_fn": partial(F.cross_entropy, ignore_index=0, label_smoothing=0.1)},
        {"loss_fn": lambda out, labels: F.nll_loss(out.log_softmax(-1), labels, ignore_index=0), "ignore_index": 0},
    ],
    ids=["module", "partial", "said"],
)
@pytest.mark.parametrize("labels", [PADDED, PADDED[[1, 2, 4, 5, 0, 0, 0, 0]], PADDED[[0, 1, 2, 3] * 2]])
def test_micro_batches_weigh_as_many_labels_as_they_have(config: dict[str, Any], labels: torch.Tensor) -> None:
    engine = _engine(nn.Linear(4, 3), microbatches=2, clip=1e9, **config)
    reference = copy.deepcopy(engine.module)
    expected = config["loss_fn"](reference(X), labels)
    expected.backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    torch.testing.assert_close(engine.eval_batch(input=X, labels=labels), expected.detach())
    torch.testing.assert_close(engine.train_batch(input=X, labels=labels), expected.detach())
    assert engine.grad_norm is not None
    assert abs(engine.grad_norm - norm.item()) < 1e-6
    for found, wanted in zip(engine.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


class Causal(nn.Module):
    """A language model that computes its own loss, and leaves out a label that it does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.table(ids)
        return {"loss": F.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=0)}


def test_a_loss_inside_the_model_weighs_by_the_labels_that_it_counts() -> None:
    engine = _engine(Causal(), microbatches=4)
    ids = torch.randint(5, (3, 8, 6), generator=torch.Generator().manual_seed(2))
    for batch in (*ids, ids[0].where(torch.arange(8)[:, None] < 6, 0)):
        reference = copy.deepcopy(engine.module)
        reference.zero_grad()
        expected = reference(batch, batch)["loss"]
        expected.backward()
        torch.testing.assert_close(engine.train_batch(ids=batch, labels=batch), expected.detach())
        torch.testing.assert_close(engine.module.table.weight.grad, reference.table.weight.grad)


def test_a_mean_that_cannot_be_told_is_refused() -> None:
    def loss_fn(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, labels) + out.square().mean()

    engine = _engine(nn.Linear(4, 3), microbatches=2, loss_fn=loss_fn)
    with pytest.raises(
        BuildError, match="the labels that the loss averages over are unknown, as it is not a plain cross_entropy"
    ):
        engine.train_batch(input=X, labels=torch.tensor([-100, 1, 2, 0, 1, 2, 0, 1]))


@pytest.mark.parametrize("rows", [1, 5, 6, 7])
def test_a_smaller_batch_has_the_loss_and_gradients_of_the_model(rows: int) -> None:
    engine = _engine(nn.Linear(4, 3), microbatches=4, loss_fn=F.cross_entropy)
    reference = copy.deepcopy(engine.module)
    expected = F.cross_entropy(reference(X[:rows]), Y[:rows])
    expected.backward()
    torch.testing.assert_close(engine.train_batch(input=X[:rows], labels=Y[:rows]), expected.detach())
    for found, wanted in zip(engine.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), "loss_fn weights its labels, so the mean over 2 parts"),
        (partial(F.cross_entropy, weight=torch.tensor([1.0, 2.0, 3.0])), "loss_fn weights its labels"),
        (nn.CrossEntropyLoss(reduction="sum"), "reduction='sum', but the losses of 2 parts are averaged"),
        (partial(F.cross_entropy, reduction="sum"), "reduction='sum'"),
    ],
    ids=["weights", "weights of a partial", "sum", "sum of a partial"],
)
def test_a_loss_that_is_no_plain_mean_takes_one_part(loss_fn: Any, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        _engine(nn.Linear(4, 3), microbatches=2, loss_fn=loss_fn)
    labels = PADDED % 3
    engine = _engine(nn.Linear(4, 3), loss_fn=loss_fn)
    torch.testing.assert_close(engine.eval_batch(input=X, labels=labels), loss_fn(engine.module(X), labels).detach())


def test_an_argument_with_zeros_is_no_label_even_where_zero_is_ignored() -> None:
    engine = _engine(nn.Embedding(4, 3), microbatches=2, ignore_index=0, loss_fn=F.cross_entropy)
    assert engine.train_batch(input=torch.tensor([0, 1, 2, 3]), labels=torch.tensor([1, 2, 1, 2])) > 0


def test_no_optimizer_only_evaluates() -> None:
    engine = _engine(Classifier(), optimizer=None)
    assert engine.eval_batch(x=X, labels=Y) > 0
    with pytest.raises(BuildError, match="built without an optimizer and only evaluates"):
        engine.train_batch(x=X, labels=Y)


def test_the_dialects_classes() -> None:
    assert get_dialect_cls("runtime_engine", "torch", plugins=PLUGINS).__name__ == "TorchEngine"
    assert get_dialect_cls("log_parser", "torch", plugins=PLUGINS).__name__ == "TorchLog"


def test_importing_the_dialect_leaves_torchs_pipelining_alone() -> None:
    code = "import slapo_torch.plugin, slapo_torch.dialect, sys; assert 'torch.distributed.pipelining' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_runtime_still_works_as_the_adapter_expects() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    forward = list(inspect.signature(PipelineStage.forward_one_chunk).parameters)
    assert forward == ["self", "fwd_chunk_id", "args", "kwargs", "save_forward_output"]
    backward = list(inspect.signature(PipelineStage.backward_one_chunk).parameters)
    assert backward == ["self", "bwd_chunk_id", "loss", "full_backward", "last_backward"]
    for schedule in (Schedule1F1B, ScheduleGPipe):
        source = inspect.getsource(schedule._step_microbatches)
        assert "stage.forward_one_chunk(" in source
        assert "stage.backward_one_chunk(" in source
    for method, cache in ((PipelineStage.get_fwd_send_ops, "fwd_cache"), (PipelineStage.get_bwd_send_ops, "bwd_cache")):
        assert f"self.{cache}" in inspect.getsource(method)


class Patched(nn.Module):
    """Rows of text, and patches of images whose number is another in each batch; ``counts`` says how many each row has."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.patch, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, patches: torch.Tensor, counts: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        owner = torch.repeat_interleave(torch.arange(len(x)), counts)
        mixed = self.text(x).index_add(0, owner, self.patch(patches))
        return nn.functional.cross_entropy(self.head(mixed.tanh()), labels)


def test_one_micro_batch_may_have_arguments_of_other_sizes() -> None:
    """Nothing is cut; the first step's checks, which would cut rows, leave such batches alone."""
    trains_patches(1)


def test_entries_are_cut_with_the_rows_that_count_them() -> None:
    trains_patches(2, batch_dims={"patches": "counts"})


def trains_patches(microbatches: int, **options: Any) -> None:
    model = Patched()
    reference = copy.deepcopy(model)
    engine = _engine(model, microbatches=microbatches, **options)
    optimizer = adamw(reference.parameters())
    for counts in ([1, 2, 0, 4], [3, 1, 1, 1], [2, 2, 2, 2], [0, 0, 4, 0]):
        batch = {"x": X[:4], "patches": torch.randn(sum(counts), 4), "counts": torch.tensor(counts), "labels": Y[:4]}
        loss = engine.train_batch(**batch)
        expected = reference(**batch)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert abs(loss.item() - expected.item()) < 1e-6
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, other)
    with pytest.raises(BuildError, match=r"'patches' has the shape \(6, 4\) in a batch of 4 rows, .*batch_dims="):
        _engine(model, microbatches=2).train_batch(
            **{**batch, "patches": torch.randn(6, 4), "counts": torch.tensor([3, 3, 0, 0])}
        )
