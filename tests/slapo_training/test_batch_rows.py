"""Rows of a batch in its arguments: given, found, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slapo_core import BuildError
from slapo_training.batches.rows import BatchRows, check_dims

IMAGE = 60


class Model(nn.Module):
    config = SimpleNamespace(image_token_id=IMAGE)


def rows_of(dims: Any = None) -> BatchRows:
    rows = BatchRows(dims)
    rows.learn_tokens(Model())
    return rows


def ids_of(tokens: list[int]) -> torch.Tensor:
    """Return a row for each number, with so many image tokens."""
    ids = torch.ones(len(tokens), 16, dtype=torch.int64)
    for row, number in zip(ids, tokens, strict=True):
        row[:number] = IMAGE
    return ids


def images(grids: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Return patches, four to a token, and the grids of images."""
    number = sum(height * width for height, width in grids)
    return {"pixel_values": torch.arange(number)[:, None] + 0.0, "image_grid_thw": torch.tensor([(1, *grid) for grid in grids])}


def test_images_follow_their_tokens() -> None:
    batch = {"input_ids": ids_of([4, 1, 0, 3]), **images([(4, 4), (2, 2), (2, 2), (2, 4)])}
    first, second = rows_of().split(batch, 2)
    assert [len(part["pixel_values"]) for part in (first, second)] == [20, 12]
    assert second["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]


def test_an_image_is_not_cut_between_rows() -> None:
    with pytest.raises(BuildError, match="where the entries of 'image_grid_thw' are cut between rows cannot be told"):
        rows_of().split({"input_ids": ids_of([3, 5]), **images([(4, 4), (4, 4)])}, 2)


def test_tensors_of_a_tuple_have_their_rows_where_the_option_says() -> None:
    state = torch.arange(8.0).reshape(1, 4, 2), torch.arange(12.0).reshape(1, 4, 3)
    rows = rows_of({"state": 1})
    parts = rows.split({"x": torch.ones(4, 5), "state": state}, 2)
    assert [[tuple(each.shape) for each in part["state"]] for part in parts] == [[(1, 2, 2), (1, 2, 3)]] * 2
    assert all(torch.equal(own, whole) for own, whole in zip(rows.join(parts)["state"], state, strict=True))


POSITIONS = torch.arange(3 * 2 * 5).reshape(3, 2, 5)
TEXT = {"input_ids": torch.ones(2, 5, dtype=torch.int64), "labels": torch.ones(2, 5, dtype=torch.int64)}


@pytest.mark.parametrize("dims", [None, {"position_ids": 1}, {"position_ids": -2}])
def test_sections_of_positions_have_the_rows_in_dimension_1(dims: Any) -> None:
    first, second = rows_of(dims).split({**TEXT, "position_ids": POSITIONS}, 2)
    assert torch.equal(torch.cat([first["position_ids"], second["position_ids"]], 1), POSITIONS)


def test_what_has_the_rows_in_two_dimensions_is_refused_until_a_batch_shows_it() -> None:
    rows, square = rows_of(), torch.ones(3, 5, dtype=torch.int64)
    with pytest.raises(BuildError, match=r"'position_ids' has the shape \(3, 3, 5\), where dimension 0 or 1 .*batch_dims="):
        rows.split({"input_ids": square, "position_ids": torch.ones(3, 3, 5).long()}, 3)
    rows.split({**TEXT, "position_ids": POSITIONS}, 2)
    parts = rows.split({"input_ids": square, "position_ids": torch.arange(3).expand(3, 5, 3).mT}, 3)
    assert [part["position_ids"].shape for part in parts] == [(3, 1, 5)] * 3
    assert [part["position_ids"].unique().item() for part in parts] == [0, 1, 2]


def test_activations_have_the_rows_in_dimension_0_whatever_their_other_sizes() -> None:
    first, *_ = rows_of().split({"x": torch.ones(6, 6, 4), "labels": torch.ones(6, 6)}, 3)
    assert first["x"].shape == (2, 6, 4)


@pytest.mark.parametrize("patches", [torch.ones(6, 7), torch.ones(1, 7)])
def test_rows_that_were_in_dimension_0_by_chance_are_noticed_later(patches: torch.Tensor) -> None:
    rows = rows_of()
    rows.split({**TEXT, "patches": torch.ones(2, 7)}, 2)
    with pytest.raises(BuildError, match="'patches' had its rows in dimension 0 before, and now has the shape"):
        rows.split({**TEXT, "patches": patches}, 2)


@pytest.mark.parametrize("value", [torch.ones(1, 5), torch.ones(1, 3, 8, 8), torch.ones(1, 3).long()])
def test_one_image_is_not_taken_for_a_broadcast_argument(value: torch.Tensor) -> None:
    with pytest.raises(BuildError, match="'images' has the shape .* in a batch of 2 rows"):
        rows_of().split({**TEXT, "images": value}, 2)


def test_a_mask_of_heads_is_not_taken_for_sections() -> None:
    square = torch.ones(5, 5, dtype=torch.int64)
    with pytest.raises(BuildError, match=r"'mask' has the shape \(10, 5, 5\) in a batch of 5 rows"):
        rows_of().split({"input_ids": square, "mask": torch.ones(10, 5, 5)}, 5)


@pytest.mark.parametrize("value", [torch.ones(1, 1, 5, 5), torch.arange(5)[None], torch.tensor(3.0)])
def test_what_is_broadcast_goes_whole(value: torch.Tensor) -> None:
    assert all(torch.equal(part["mask"], value) for part in rows_of().split({**TEXT, "mask": value}, 2))


def test_the_option_says_what_goes_whole_and_who_counts() -> None:
    dims = {"table": None, "parts": "numbers", "pieces": lambda numbers: numbers * 2, "names": 0}
    batch = {
        **TEXT,
        "table": torch.ones(2, 3),
        "numbers": torch.tensor([3, 1]),
        "names": ["a", "b"],
        "parts": torch.arange(4),
        "pieces": torch.arange(8),
    }
    first, second = rows_of(dims).split(batch, 2)
    assert torch.equal(first["table"], batch["table"])
    assert [each["parts"].tolist() for each in (first, second)] == [[0, 1, 2], [3]]
    assert [each["pieces"].tolist() for each in (first, second)] == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert (first["names"], second["names"]) == (["a"], ["b"])


@pytest.mark.parametrize(
    ("dims", "extra", "told"),
    [
        (None, {"patches": torch.ones(7, 4)}, r"'patches' has the shape \(7, 4\) in a batch of 2 rows.*batch_dims="),
        (
            {"patches": 0},
            {"patches": torch.ones(7, 4)},
            r"'input_ids' has the shape \(2, 5\) in a batch of 7 rows",
        ),
        ({"patches": "numbers"}, {"patches": torch.ones(7, 4)}, "is 'numbers', which is not another tensor of the batch"),
        ({"patches": lambda counts: counts}, {"patches": torch.ones(7, 4)}, "takes 'counts'; the batch has"),
        ({"patches": lambda labels: [3, 3]}, {"patches": torch.ones(7, 4)}, "has 7 entries, but by batch_dims the rows have 6"),
        ({"patches": lambda labels: [7]}, {"patches": torch.ones(7, 4)}, "counts the entries of 1 rows, but the batch has 2"),
        ({"patches": lambda labels: 0.5}, {"patches": torch.ones(7, 4)}, "gives no whole number for each row"),
    ],
)
def test_what_is_not_certain_is_refused_by_name(dims: Any, extra: dict[str, Any], told: str) -> None:
    rows = rows_of(dims)
    assert len(rows.split({**TEXT, **extra}, 1)) == 1 if dims is None else True
    with pytest.raises(BuildError, match=told):
        rows.split({**TEXT, **extra}, 2)


def test_an_option_that_cannot_work_is_refused() -> None:
    check_dims({"a": None, "b": 1, "c": "counts", "d": len})
    for wrong in ([0], {"a": 0.5}, {1: 0}, {"a": True}):
        with pytest.raises(BuildError, match="batch_dims"):
            check_dims(wrong)


@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from([(2, 2), (2, 4), (4, 4)]), max_size=2), min_size=4, max_size=4))
def test_parts_of_parts_are_the_batch_when_they_are_joined(grids: list[list[tuple[int, int]]]) -> None:
    tokens = [sum(height * width // 4 for height, width in row) for row in grids]
    flat = [grid for row in grids for grid in row]
    batch = {
        "input_ids": ids_of(tokens),
        "position_ids": torch.arange(3 * 4 * 16).reshape(3, 4, 16),
        **(images(flat) if flat else {}),
    }
    rows = rows_of()
    parts = rows.split(batch, 2)
    for part, own in zip(parts, (grids[:2], grids[2:]), strict=True):
        if flat:
            left = part["image_grid_thw"].tolist() if "image_grid_thw" in part else []
            assert left == [[1, *grid] for row in own for grid in row]
        assert all(torch.equal(rows.join(rows.cut(part, [1, 1]))[name], value) for name, value in part.items())
    joined = rows.join(parts)
    assert all(torch.equal(joined[name], value) for name, value in batch.items())
