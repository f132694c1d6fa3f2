"""Batches as people give them, read as arguments by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from slapo_core import BuildError
from slapo_training.batch_arguments import arguments_of
from slapo_training.options import CommonOptions

X, Y, Z = "x", "y", "z"


class Two(nn.Module):
    def forward(self, idx: Any, targets: Any = None) -> Any: ...


class Both(nn.Module):
    def forward(self, image: Any, text: Any) -> Any: ...


class One(nn.Module):
    def forward(self, x: Any) -> Any: ...


class Images(nn.Module):
    def forward(self, images: list[torch.Tensor], targets: Any = None) -> Any: ...


class Keywords(nn.Module):
    def forward(self, ids: Any, mask: Any = None, **others: Any) -> Any: ...


class Several(nn.Module):
    def forward(self, *xs: Any) -> Any: ...


class Positional(nn.Module):
    def forward(self, x: Any, scale: Any = 1, /, *, mask: Any = None) -> Any: ...


OWN, LOSS = CommonOptions(), CommonOptions(loss_fn=F.mse_loss)
OVER = CommonOptions(loss_fn=F.mse_loss, loss_over="replicas")


@pytest.mark.parametrize(
    ("model", "options", "args", "kwargs", "expected"),
    [
        # a model that computes its loss
        (Two, OWN, (X, Y), {}, {"idx": X, "targets": Y}),
        (Two, OWN, (X,), {"targets": Y}, {"idx": X, "targets": Y}),
        (Two, OWN, ((X, Y),), {}, {"idx": X, "targets": Y}),
        (Two, OWN, ([X, Y],), {}, {"idx": X, "targets": Y}),
        (Two, OWN, ({"idx": X, "targets": Y},), {}, {"idx": X, "targets": Y}),
        (Two, OWN, ({"a": X},), {}, {"idx": {"a": X}}),
        (Two, OWN, ([X, Y],), {"targets": Z}, {"idx": [X, Y], "targets": Z}),
        (Two, OWN, (({"a": X}, Y),), {}, {"idx": {"a": X}, "targets": Y}),
        (Two, OWN, ([{"idx": X, "targets": Y}],), {}, {"idx": X, "targets": Y}),
        (One, OWN, ([X, Y],), {}, {"x": [X, Y]}),
        (One, OWN, ({"a": X},), {}, {"x": {"a": X}}),
        (One, OWN, ({0: X},), {}, {"x": {0: X}}),
        (Images, OWN, ([X, Y],), {}, {"images": [X, Y]}),
        (Images, OWN, ([X, Y], Z), {}, {"images": [X, Y], "targets": Z}),
        (Keywords, OWN, ({"ids": X, "labels": Y},), {}, {"ids": X, "labels": Y}),
        (Several, OWN, ([X, Y],), {}, {"xs": ([X, Y],)}),
        (Positional, OWN, ([X, Y],), {}, {"x": X, "scale": Y}),
        # a loss function, which gets the labels
        (One, LOSS, (X, Y), {}, {"x": X, "labels": Y}),
        (One, LOSS, ([X, Y],), {}, {"x": X, "labels": Y}),
        (One, LOSS, (X,), {"labels": Y}, {"x": X, "labels": Y}),
        (One, LOSS, (X,), {"y": Y}, {"x": X, "labels": Y}),
        (One, LOSS, (), {"x": X, "y": Y}, {"x": X, "labels": Y}),
        (One, LOSS, ({"x": X, "y": Y},), {}, {"x": X, "labels": Y}),
        (One, LOSS, ([X, [Y, Z]],), {}, {"x": X, "labels": [Y, Z]}),
        (One, LOSS, ([X, Y],), {"labels": Z}, {"x": [X, Y], "labels": Z}),
        (Two, LOSS, (X, Y), {}, {"idx": X, "labels": Y}),
        (Two, LOSS, (X, Y, Z), {}, {"idx": X, "targets": Y, "labels": Z}),
        (Both, LOSS, ([X, Y, Z],), {}, {"image": X, "text": Y, "labels": Z}),
        (Both, LOSS, (({"image": X, "text": Y}, Z),), {}, {"image": X, "text": Y, "labels": Z}),
        (Images, LOSS, ([[X, Y], Z],), {}, {"images": [X, Y], "labels": Z}),
        (Keywords, LOSS, (X, Y), {}, {"ids": X, "labels": Y}),
        (Several, LOSS, (X, Y), {}, {"xs": (X,), "labels": Y}),
        # the labels are left out, or may be
        (One, LOSS, (X,), {}, {"x": X}),
        (Both, LOSS, (X, Y), {}, {"image": X, "text": Y}),
        (Keywords, LOSS, (X,), {"targets": Y}, {"ids": X, "targets": Y}),
        (Both, OVER, (X, Y), {}, {"image": X, "text": Y}),
        (Both, OVER, ([X, Y],), {}, {"image": X, "text": Y}),
        (Both, OVER, ([X, Y, Z],), {}, {"image": X, "text": Y, "labels": Z}),
        (Two, OVER, (X, Y), {}, {"idx": X, "targets": Y}),
        (Images, OVER, ([X, Y],), {}, {"images": [X, Y]}),
    ],
)
def test_a_batch_has_its_arguments_by_name(
    model: type[nn.Module], options: CommonOptions, args: Any, kwargs: Any, expected: Any
) -> None:
    assert arguments_of(model(), args, kwargs, options) == expected


def test_a_batch_of_a_data_loader() -> None:
    x, y = torch.arange(4.0), torch.arange(4)
    for options, name in ((OWN, "targets"), (LOSS, "labels")):
        batches = [arguments_of(Two(), (batch,), {}, options) for batch in DataLoader(TensorDataset(x, y), batch_size=2)]
        assert [batch["idx"].tolist() for batch in batches] == [[0.0, 1.0], [2.0, 3.0]]
        assert [batch[name].tolist() for batch in batches] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("model", "options", "args", "kwargs", "message"),
    [
        (
            Two,
            OWN,
            ([X, Y, Z],),
            {},
            "is a list of 3, but the forward takes idx, targets by position; a sequence",
        ),
        (One, LOSS, ((X, Y, Z),), {}, "is a tuple of 3, but the forward takes x by position beside labels; "),
        (
            One,
            OWN,
            (X, Y),
            {},
            "2 values are given, but the forward of One takes x; if the last one has labels, build with loss_fn=",
        ),
        (One, OWN, (X, Y, Z), {}, "3 positional arguments are given, but the forward of One takes x by position"),
        (Two, OWN, (DataLoader([X]),), {}, "a DataLoader is given; give one batch of it"),
        (One, LOSS, (), {"data_iter": iter([X])}, "a list_iterator is given; give one batch of it"),
        (Two, OWN, (X,), {"idx": Y}, "'idx' is given by position and by keyword; give it once"),
    ],
)
def test_what_the_forward_does_not_take_is_refused(
    model: type[nn.Module], options: CommonOptions, args: Any, kwargs: Any, message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        arguments_of(model(), args, kwargs, options)
