"""The first step's checks on one process: which losses and models are refused, named or left alone."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, build, create_schedule, get_logger
from slapo_tracing.nodes import wrap_forward
from slapo_training.first_step.row_mixing import over_replicas
from slapo_training.options.check_switches import CHECKS, VARIABLE
from tests.first_step_cases import MEANS, MIXING, NO_MEANS, QUIET, UNEVEN, WIDTH, Loss, Routed, Towers, WithLoss, batch
from tests.slapo.gradient_injection import WAYS, Attach, Net, batches

SGD = partial(torch.optim.SGD, lr=0.1)
PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin])


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Return the log without debug lines."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Kept()
    get_logger().addHandler(handler)
    yield lines
    get_logger().removeHandler(handler)


def engine_of(model: nn.Module, microbatches: int = 2, **options: Any) -> Any:
    sch = create_schedule(model, plugins=PLUGINS)
    return build(sch, "torch", optimizer=SGD, microbatches=microbatches, **options)


def trained(model: nn.Module, rows: dict[str, torch.Tensor], **options: Any) -> float:
    return float(engine_of(model, **options).train_batch(**rows))


def models_of(loss: Loss) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """A model with the loss in it, and one with a loss function."""
    torch.manual_seed(0)
    model = Towers()
    yield WithLoss(copy.deepcopy(model), loss), {}
    yield model, {"loss_fn": loss}


@pytest.mark.parametrize("rows", [8, 6, 2])
def test_means_over_rows_pass(log: list[str], rows: int) -> None:
    for name, loss in MEANS.items():
        for model, options in models_of(loss):
            expected = loss((model.model if isinstance(model, WithLoss) else model)(batch(rows)["x"]), batch(rows)["labels"])
            assert trained(model, batch(rows), **options) == pytest.approx(expected.item(), abs=1e-5), name
    assert log == []


@pytest.mark.parametrize("rows", [8, 6])
def test_other_losses_are_refused(rows: int) -> None:
    for name, loss in NO_MEANS.items():
        for model, options in models_of(loss):
            with pytest.raises(BuildError, match="the loss is not a mean over rows.*loss_over='replicas'.*loss_weights="):
                pytest.fail(f"{name}: {trained(model, batch(rows), **options)}")


def test_one_micro_batch_may_have_any_loss(log: list[str]) -> None:
    for loss in NO_MEANS.values():
        for model, options in models_of(loss):
            trained(model, batch(), microbatches=1, **options)
    assert log == []


class TwoHeads(nn.Module):
    """Predicts two kinds of labels, of which rows have other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1).expand(-1, labels.shape[1], -1)
        first = F.cross_entropy(self.one(x).flatten(0, 1), labels.flatten())
        return first + F.cross_entropy(self.other(x).flatten(0, 1), later.flatten())


class Masked(nn.Module):
    """A mean by hand over what an argument marks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ((self.head(x) - x).square() * mask).sum() / mask.sum()


def test_labels_and_masks_of_other_numbers_are_seen_where_totals_are_equal() -> None:
    torch.manual_seed(0)
    labels = torch.randint(5, (8, 6))
    later = labels.flip(1).clone()
    labels[::2, 4:] = later[1::2, 4:] = -100  # six and four labels of each row, in turn
    x = torch.randn(8, 6)
    order = torch.arange(8).view(4, 2).T.flatten()
    model = TwoHeads()
    alike = {"x": x, "labels": labels, "later": later}  # each micro-batch has as many of both
    assert trained(copy.deepcopy(model), alike) == pytest.approx(model(**alike).item(), abs=1e-5)
    with pytest.raises(BuildError, match="not a mean over rows"):
        trained(model, {name: value[order] for name, value in alike.items()})
    mask = torch.ones(8, 6)
    mask[5:] = mask[5:].tril()
    with pytest.raises(BuildError, match="not a mean over rows"):
        trained(Masked(), {"x": x, "mask": mask})
    assert trained(Masked(), {"x": x, "mask": torch.ones(8, 6)}) > 0


@pytest.mark.parametrize("masked", [[1], [2, 3], [0, 1, 2, 3], [1, 6], [5], [4, 5, 6]])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_masks_without_any_element_are_seen(masked: list[int], microbatches: int) -> None:
    torch.manual_seed(0)
    rows = {"x": torch.randn(8, 6), "mask": torch.ones(8, 6)}
    rows["mask"][masked] = 0  # some part has a loss of 0 / 0
    model = Masked()
    expected = model(**rows).item()
    if len(set(rows["mask"].view(microbatches, -1).sum(1).tolist())) > 1:
        with pytest.raises(BuildError, match="not a mean over rows"):
            trained(model, rows, microbatches=microbatches)
    else:
        assert trained(copy.deepcopy(model), rows, microbatches=microbatches) == pytest.approx(expected, abs=1e-6)
    assert trained(model, rows, microbatches=microbatches, loss_weights="mask") == pytest.approx(expected, abs=1e-6)


class MaskedTokens(nn.Module):
    """A mean by hand over what a mask marks, or over what is not a padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 6), nn.Linear(6, 12)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        scores, target = self.head(self.embedding(ids[:, :-1])).log_softmax(-1), ids[:, 1:]
        weights = (target != 11).float() if mask is None else mask[:, 1:].float()
        return -(scores.gather(-1, target.unsqueeze(-1))[..., 0] * weights).sum() / weights.sum()


def later_batches() -> Iterator[tuple[str, list[dict[str, torch.Tensor]]]]:
    """A harmless batch, and one whose halves have other numbers."""
    torch.manual_seed(2)
    ids, lengths = torch.randint(11, (8, 6)), torch.tensor([6, 6, 6, 6, 3, 4, 3, 2])
    mask = torch.arange(6) < lengths[:, None]
    for dtype in (torch.bool, torch.float32, torch.int64):
        yield f"mask {dtype}", [{"ids": ids, "mask": torch.ones_like(mask, dtype=dtype)}, {"ids": ids, "mask": mask.to(dtype)}]
    yield "weights", [{"ids": ids, "mask": torch.ones(8, 6)}, {"ids": ids, "mask": 0.1 + 2 * torch.rand(8, 6) * mask}]
    yield "padding", [{"ids": ids}, {"ids": ids.masked_fill(~mask, 11)}]
    yield "padding in front", [{"ids": ids}, {"ids": ids.masked_fill(~mask.flip(1), 11)}]


def test_a_later_step_is_looked_at_where_numbers_first_differ() -> None:
    for name, (even, uneven) in later_batches():
        model = MaskedTokens()
        engine = engine_of(model)
        for _ in range(2):
            expected = model(**even).item()
            assert float(engine.train_batch(**even)) == pytest.approx(expected, abs=1e-5), name
        with pytest.raises(BuildError, match="not a mean over rows"):
            pytest.fail(f"{name}: {float(engine.train_batch(**uneven))}")
        if "mask" in even:
            counted = engine_of(MaskedTokens(), loss_weights=lambda mask: mask[:, 1:].sum())
            for rows in (even, uneven):
                expected = counted.module(**rows).item()
                assert float(counted.train_batch(**rows)) == pytest.approx(expected, abs=1e-5), name


def test_means_over_rows_go_on_where_numbers_differ_later(log: list[str]) -> None:
    for name in UNEVEN:
        for model, options in models_of(MEANS[name]):
            engine = engine_of(model, **options)
            for even in (True, False, True):
                towers, rows = model.model if isinstance(model, WithLoss) else model, batch(even=even)
                expected = MEANS[name](towers(rows["x"]), rows["labels"]).item()
                if name == "per row" and not even:  # other numbers of labels, and not known what is a mean over them
                    with pytest.raises(BuildError, match="loss_weights="):
                        engine.train_batch(**rows)
                    break
                assert float(engine.train_batch(**rows)) == pytest.approx(expected, abs=1e-5), name
    assert log == []


class Codebook(nn.Module):
    """Moves its codes to the rows nearest to them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        out = x + (self.codes[nearest] - x).detach()
        self.codes.index_add_(0, nearest, 0.1 * (x - self.codes[nearest]).detach())
        return out


class Whole(nn.Module):
    """Gives rows beside a loss, and another loss, as models do that log them."""

    def __init__(self, model: nn.Module, loss: Loss, other: Loss | None = None, factor: float = 1e-6) -> None:
        super().__init__()
        self.model, self.loss, self.other, self.factor = model, loss, other, factor

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.model(x)
        beside = {} if self.other is None else {"aux_loss": self.other(out, labels)}
        return {"loss": self.loss(out, labels) + self.factor * beside.get("aux_loss", 0.0), "rows": out["one"], **beside}


def test_losses_of_models_that_give_rows_beside_are_refused() -> None:
    for loss in NO_MEANS.values():
        for wrap in (lambda model: model, lambda model: WrappedWhole(model)):
            with pytest.raises(BuildError, match="not a mean over rows"):
                trained(wrap(Whole(Towers(), loss)), batch())


class WrappedWhole(nn.Module):
    """Only hands on what a model gives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.model(x, labels)  # type: ignore[no-any-return]


def test_a_small_term_and_buffers_made_of_rows_are_told(log: list[str]) -> None:
    torch.manual_seed(0)
    entropy = MEANS["cross entropy"]
    trained(Whole(Towers(), entropy, MEANS["per row"]), batch())
    assert log == []
    trained(Whole(Towers(), entropy, NO_MEANS["clip"]), batch())
    assert ["'aux_loss' is not a mean over rows" in line for line in log] == [True]
    log.clear()
    engine = engine_of(WithLoss(Towers(Codebook()), entropy))
    for even in (True, False):
        engine.train_batch(**batch(even=even))
    assert ["updates the buffer 'model.middle.codes'" in line for line in log] == [True]
    with pytest.raises(BuildError, match="updates the buffer"):
        trained(WithLoss(Towers(Codebook()), entropy), batch(), strict=True)


@pytest.mark.parametrize("factor", [1e-6, 1e-3, 0.02])
def test_a_small_term_that_is_returned_is_told(log: list[str], factor: float) -> None:
    torch.manual_seed(0)
    model = Whole(Towers(), MEANS["cross entropy"], NO_MEANS["clip"], factor)
    trained(copy.deepcopy(model), batch())
    assert ["'aux_loss' is not a mean over rows" in line for line in log] == [True]
    with pytest.raises(BuildError, match="'aux_loss' is not a mean over rows"):
        trained(copy.deepcopy(model), batch(), strict=True)


def test_another_difference_is_refused_beside_such_a_term() -> None:
    torch.manual_seed(0)
    for loss, factor in (("cross entropy", 2.0), ("clip", 0.02), ("clip", 0.0)):
        made = {**MEANS, **NO_MEANS}[loss]
        with pytest.raises(BuildError, match="the loss is not a mean over rows"):
            trained(Whole(Towers(), made, NO_MEANS["clip"], factor), batch())


def test_models_of_independent_rows_are_left_alone(log: list[str]) -> None:
    for name, make in QUIET.items():
        torch.manual_seed(0)
        trained(WithLoss(Towers(make()), MEANS["cross entropy"]), batch())
        assert log == [], name


@pytest.mark.parametrize("own", [True, False])
def test_modules_that_mix_rows_are_named(log: list[str], own: bool) -> None:
    for name, (make, path) in MIXING.items():
        log.clear()
        torch.manual_seed(0)
        model, loss = Towers(make()), MEANS["cross entropy"]
        trained(WithLoss(model, loss) if own else model, batch(), **({} if own else {"loss_fn": loss}))
        path = path if own else path.replace("model.middle", "middle")
        assert len(log) == 1, (name, log)
        assert log[0].startswith(f"{path} mixes the rows of a micro-batch"), (name, log)
        assert ("microbatches=1" if "batch norm" in name else "one micro-batch on one replica") in log[0]
        with pytest.raises(BuildError, match="mixes the rows"):
            trained(copy.deepcopy(model), batch(), loss_fn=loss, strict=True)


def test_a_balance_loss_of_a_batch_is_named(log: list[str]) -> None:
    trained(Routed(), batch())
    assert [line[:15] for line in log] == ["Balanced 'route"]


def test_a_loss_is_refused_behind_a_batch_norm() -> None:
    for loss in (NO_MEANS["clip"], NO_MEANS["sum"]):
        for model, options in models_of(loss):
            (model.model if isinstance(model, WithLoss) else model).middle = nn.BatchNorm1d(12)
            with pytest.raises(BuildError, match="not a mean over rows"):
                trained(model, batch(), **options)


class Counting(nn.Module):
    """Keeps a number, a list and buffers, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.head = nn.Linear(6, 5)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.steps.add_(1)
        return F.cross_entropy(self.head(self.drop(self.norm(x))), labels[:, 0])


def test_a_check_leaves_nothing_behind() -> None:
    ends = []
    for check in (True, False):
        torch.manual_seed(0)
        model = Counting()
        loss = trained(model, batch(), check=check)
        ends.append((loss, model.calls, model.seen, *model.state_dict().values(), torch.get_rng_state()))
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_checks_are_switched_off(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clip = NO_MEANS["clip"]
    assert trained(Towers(), batch(), loss_fn=clip, check=False) > 0
    assert len(log) == 1
    assert all(f"{name!r}, {unseen}" in log[0] for name, unseen in CHECKS.items())
    log.clear()
    monkeypatch.setenv(VARIABLE, "rows")
    assert trained(Towers(), batch(), loss_fn=clip) > 0
    assert len(log) == 1
    assert "losses that are not means over rows" in log[0]
    monkeypatch.setenv(VARIABLE, "all")
    assert trained(Towers(), batch(), loss_fn=clip) > 0
    monkeypatch.setenv(VARIABLE, "row")
    with pytest.raises(BuildError, match="'row', which is not a check"):
        engine_of(Towers(), loss_fn=clip)
    monkeypatch.delenv(VARIABLE)
    for name in ("check", "strict"):
        with pytest.raises(BuildError, match=f"{name} is 1; give True or False"):
            engine_of(Towers(), **{name: 1})
    assert trained(Towers(), batch(), loss_fn=clip, check={"rows": False}) > 0
    with pytest.raises(BuildError, match="check= has 'row', which is not a check; available: rows"):
        engine_of(Towers(), check={"row": False})


def test_a_step_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counting()
    calls: list[int] = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    engine = engine_of(model)
    engine.train_batch(**batch())
    first = len(calls)
    engine.train_batch(**batch())
    assert len(calls) - first == 2 < first


def test_half_precision_and_double(log: list[str]) -> None:
    for precision, dtype in (("bf16", torch.float32), ("fp32", torch.float64), ("fp32", torch.bfloat16)):
        for name in ("cross entropy", "pairs", "negatives in the row"):
            torch.manual_seed(0)
            rows = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch().items()}
            trained(WithLoss(Towers().to(dtype), MEANS[name]), rows, precision=precision)
        with pytest.raises(BuildError, match="not a mean over rows"):
            trained(WithLoss(Towers().to(dtype), NO_MEANS["clip"]), rows, precision=precision)
    assert log == []


def test_rows_that_go_in_groups_pass() -> None:
    def pairs(out: Any, labels: torch.Tensor) -> torch.Tensor:
        """Loss of pairs of neighbouring rows: the first should have the larger number."""
        chosen, rejected = out["one"].sum(-1).unflatten(0, (-1, 2)).unbind(1)
        return -F.logsigmoid(chosen - rejected).mean()

    for rows, microbatches in ((8, 2), (8, 4), (12, 2)):
        for model, options in models_of(pairs):
            assert trained(model, batch(rows), microbatches=microbatches, **options) > 0


def test_one_micro_batch_on_replicas_with_the_statistics_of_all_is_right() -> None:
    """The wrapper of ``sync_batch_norm`` declares that it is over replicas."""

    def around(module: nn.Module, args: Any, kwargs: Any, forward: Any) -> Any:
        return forward(*args, **kwargs)

    layer = nn.BatchNorm1d(4)
    assert not over_replicas(layer)
    around.over_replicas = True  # type: ignore[attr-defined]
    wrap_forward(layer, around)
    assert over_replicas(layer)
    assert over_replicas(nn.SyncBatchNorm(4))


def test_a_failing_model_fails_in_its_step() -> None:
    class Failing(Towers):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            raise ValueError("the model's own error")

    with pytest.raises(ValueError, match="the model's own error"):
        trained(Failing(), batch(), loss_fn=MEANS["per row"])


@pytest.mark.parametrize("way", [*WAYS])
def test_injected_gradients_are_found_and_refused_in_fp16(way: str) -> None:
    rows = batches()[0]
    engine = engine_of(Net(way), 4)
    engine.train_batch(**rows)
    assert engine._first.injects
    with pytest.raises(BuildError, match="injects gradients into its backward.*fp16.*use precision='bf16'"):
        trained(Net(way), rows, precision="fp16", microbatches=1)
    trained(Net(way, ()), rows, precision="fp16", microbatches=1)


def test_what_gives_no_gradient_of_its_own_is_not_taken_for_it() -> None:
    """Functions of one's own, hooks on parameters, and zeros times infinity."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.unused = nn.Linear(6, 5), nn.Linear(2, 2)
            self.head.weight.register_hook(lambda grad: grad + 0.1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            roots = (x[:, :1] * 0 * self.head.bias[0]).sqrt().nan_to_num()
            return F.cross_entropy(Doubled.apply(self.head(x)) + roots, labels[:, 0])

    engine = engine_of(Model())
    engine.train_batch(**batch())
    assert engine._first._is_done
    assert not engine._first.injects


def test_injected_gradients_that_are_no_means_over_rows_are_named(log: list[str]) -> None:
    class Statistics(Net):
        def __init__(self) -> None:
            super().__init__("attached", ())
            self.gate = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            probs = self.gate(self.first(x)).softmax(-1)
            balance = 4 * (probs > 0.25).float().mean((0, 1)) @ probs.mean((0, 1))
            return Attach.apply(super().forward(x, labels), balance)

    trained(Statistics(), batches()[0])
    assert len(log) == 1
    assert log[0].startswith("the gradients that the model injects into its backward for some rows are not the mean")
    with pytest.raises(BuildError, match="are not the mean of those for their parts"):
        trained(Statistics(), batches()[0], strict=True)
    log.clear()
    trained(Net("attached"), batches()[0])
    assert log == []


def test_reentrant_checkpoints_are_looked_into() -> None:
    class Reentrant(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            for block in self.blocks:
                h = torch.utils.checkpoint.checkpoint(block, h, use_reentrant=True)
            return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    model, rows = Reentrant("penalty"), batches()[0]
    reference = copy.deepcopy(model)
    reference(**rows).backward()
    engine = engine_of(model, 4)
    engine.train_batch(**rows)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
