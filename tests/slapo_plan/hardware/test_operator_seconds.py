"""Seconds of operators: roofline, and measured curves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slapo_plan.hardware import Curve, Hardware, Measurements, operator_seconds, work_seconds
from slapo_plan.records import CollectiveRecord, OperatorRecord

H100 = Hardware.load("h100")
FLAT = Curve([[1, 1e10]])
MEASURED = Measurements(
    ranks=1,
    launch_seconds=1e-5,
    matmul={"float32": Curve([[1e6, 1e10], [1e9, 1e11]])},
    attention={"float32 forward": Curve([[1, 2e10]]), "float32 backward": Curve([[1, 1e10]])},
    pointwise=FLAT,
    in_place=Curve([[1, 2e10]]),
    operators={"aten.tanh": 3.0},
    collectives={"all_reduce 2": Curve([[1, 1e-3]], rises=True)},
)
HERE = replace(Hardware.load("this-machine"), measurements=(MEASURED,), flops={"float32": 1e11, "bfloat16": 2e11})


def _product(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> OperatorRecord:
    nbytes = batch * (m * k + k * n + m * n) * dtype.itemsize
    return OperatorRecord("aten.mm", "matmul", dtype, 2 * batch * m * n * k, nbytes, (batch, m, n, k))


def _pointwise(name: str, nbytes: int) -> OperatorRecord:
    return OperatorRecord(name, "pointwise", torch.float32, 0, nbytes)


def test_a_large_product_reaches_the_assumed_share_of_the_peak() -> None:
    record = _product(8192, 8192, 8192)
    assert record.flops / operator_seconds(record, H100) == pytest.approx(0.68 * 989.4e12, rel=0.02)


def test_a_thin_product_is_bound_by_memory() -> None:
    record = _product(1, 8192, 8192)
    assert operator_seconds(record, H100) == pytest.approx(4e-6 + (record.nbytes + 8e6) / (0.85 * 3.35e12))


def test_a_tiny_operator_takes_its_launch() -> None:
    assert H100.launch_seconds < operator_seconds(_pointwise("aten.add", 12), H100) < 2 * H100.launch_seconds


def test_a_measured_rate_is_interpolated() -> None:
    record = _product(100, 100, 5000, torch.float32)  # 1e8 FLOPs
    assert operator_seconds(record, HERE) == pytest.approx(1e-5 + 1e8 / 10 ** (10 + 2 / 3))


def test_the_products_of_a_batch_run_at_the_rate_of_one() -> None:
    one, many = (operator_seconds(_product(10, 100, 500, torch.float32, batch), HERE) - 1e-5 for batch in (1, 64))
    assert many == pytest.approx(64 * one)


def test_a_type_that_was_not_measured_is_scaled_by_its_peak() -> None:
    whole, half = (
        operator_seconds(_product(1000, 1000, 1000, dtype), HERE) - 1e-5 for dtype in (torch.float32, torch.bfloat16)
    )
    assert half == pytest.approx(whole / 2)


def test_directions_of_attention_have_their_own_rates() -> None:
    forward, backward = (
        operator_seconds(
            OperatorRecord(f"aten.attention{end}", "attention", torch.float32, 10**8, 1000, (2, 4, 64, 64, 64)), HERE
        )
        for end in ("", "_backward")
    )
    assert backward - 1e-5 == pytest.approx(2 * (forward - 1e-5))


def test_a_causal_attention_skips_half_where_nothing_was_measured() -> None:
    full = OperatorRecord("aten.attention", "attention", torch.bfloat16, 10**14, 1000, (2, 4, 64, 64, 64))
    whole, half = (operator_seconds(full._replace(name=name), H100) for name in ("aten.attention", "aten.attention.causal"))
    assert half == pytest.approx(whole / 2, rel=0.01)


def test_element_wise_operators_have_their_own_factors() -> None:
    seconds = [operator_seconds(_pointwise(name, 10**7), HERE) - 1e-5 for name in ("aten.add", "aten.tanh", "aten.add_")]
    assert seconds == pytest.approx([1e-3, 3e-3, 0.5e-3])


def test_work_is_split_into_compute_and_communication() -> None:
    collective = CollectiveRecord("all_reduce", 100, (0, 1))
    work = [_pointwise("aten.add", 10**7), collective, collective._replace(overlapped=True), _pointwise("aten.add", 10**7)]
    found = work_seconds(work, replace(HERE, devices_per_node=2))
    assert found == pytest.approx((2 * (1e-5 + 1e-3), 0.1, 0.1))
