"""Hardware files: ready ones, own ones, and bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slapo_core import SlapoError, UnknownNameError
from slapo_plan.hardware import Curve, Hardware, Link, Measurements

GPUS = ["a100-40", "a100-80", "b200", "h100", "h200", "l40s", "mi300x"]


def test_the_ready_files_are_listed() -> None:
    assert Hardware.names() == sorted([*GPUS, "this-machine"])


@pytest.mark.parametrize("name", GPUS)
def test_a_ready_file_has_sensible_figures(name: str) -> None:
    gpu = Hardware.load(name)
    assert gpu.name == name
    assert 30e9 < gpu.usable_bytes < gpu.memory_bytes < 250e9
    assert gpu.peak_flops(torch.bfloat16) > 4 * gpu.peak_flops(torch.float32) or name in ("l40s",)
    assert gpu.network.bandwidth < gpu.link.bandwidth < gpu.bandwidth
    assert gpu.busy_measurements is None


def test_an_alias_names_the_same_file() -> None:
    assert Hardware.load("h100-80g").name == "h100"


def test_this_machine_has_its_own_memory() -> None:
    here = Hardware.load("this-machine")
    assert here.device_type == "cpu"
    assert here.usable_bytes < here.memory_bytes


def test_an_unknown_name_is_refused_with_a_near_one() -> None:
    with pytest.raises(UnknownNameError, match="no hardware 'h101'; did you mean 'h100'"):
        Hardware.load("h101")


def _measured() -> Hardware:
    curve = Curve([[1e3, 1e9], [1e6, 1e10]])
    seconds = Curve([[1e3, 1e-4], [1e6, 1e-3]], rises=True)
    found = [
        Measurements(
            ranks, 1e-5, {"float32": curve}, {"float32 forward": curve}, curve, curve, {"aten.tanh": 2.5}, {"send 2": seconds}
        )
        for ranks in (1, 2)
    ]
    link = Link(1e9, 1e-5)
    return Hardware("mine", 2**34, 2**33, {"float32": 1e11}, 1e10, 1e-5, 4, link, link, "cpu", measurements=tuple(found))


def test_a_saved_file_is_read_back(tmp_path: Path) -> None:
    _measured().save(tmp_path / "a.toml")
    found = Hardware.load(tmp_path / "a.toml")
    found.save(tmp_path / "b.toml")
    assert (tmp_path / "a.toml").read_text() == (tmp_path / "b.toml").read_text()
    assert found.measurements[1].collectives["send 2"].at(2e6) == pytest.approx(2e-3)
    assert found.measurements[0].operators == {"aten.tanh": 2.5}


def test_the_measurements_of_as_many_busy_ranks_are_read() -> None:
    hardware = _measured()
    ranks = [hardware.with_busy(busy).busy_measurements for busy in (1, 2, 4)]
    assert [each.ranks for each in ranks if each is not None] == [1, 2, 2]


def test_a_file_needs_its_ending(tmp_path: Path) -> None:
    with pytest.raises(SlapoError, match=r"give a path that ends in \.toml"):
        _measured().save(tmp_path / "mine.json")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth = 3.35e12", "bandwith = 3.35e12", r"device\.bandwidth is missing"),
        ("devices = 8", 'devices = "8"', r"node\.devices is '8'; give a whole number from 1 on"),
        ("float32 = 66.9e12", "float32 = -1", r"device\.flops\.float32 is -1; give a positive number"),
        ("usable_bytes = 8", "usable_bytes = 98", r"device\.usable_bytes is \d+, more than memory_bytes"),
        ('topology = "switched"', 'topology = "swiched"', "no topology 'swiched'; did you mean 'switched'"),
        ("devices = 8", "devices = 8\ncolour = 1", r"no key 'node\.colour'"),
        ("[node]", "[node", "is not TOML"),
        ("[network]", "[net]", "network is missing"),
    ],
)
def test_a_bad_file_is_one_sentence_with_its_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    import slapo_plan.hardware

    text = (Path(slapo_plan.hardware.__file__).parent / "files/h100.toml").read_text()
    path = tmp_path / "bad.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(SlapoError, match=rf"hardware file '.*bad\.toml': .*{message}|.*{message}") as caught:
        Hardware.load(path)
    assert "bad.toml" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SlapoError, match=r"hardware file '.*none\.toml' cannot be read: No such file"):
        Hardware.load(tmp_path / "none.toml")


@pytest.mark.parametrize("points", [[], [[1, 2], [1, 3]], [[2, 1], [1, 1]], [[1, 0]], [[1]], 3])
def test_a_curve_needs_increasing_positive_points(points: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        Curve(points)  # type: ignore[arg-type]


def test_a_curve_is_straight_in_logarithms() -> None:
    curve = Curve([[1, 1], [100, 100]])
    assert [curve.at(size) for size in (0, 0.5, 10, 1000)] == pytest.approx([1, 1, 10, 100])
    assert Curve([[1, 1], [100, 100]], rises=True).at(1000) == pytest.approx(1000)
