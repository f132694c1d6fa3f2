"""Each check has a name; its fault passes with that name off, and is an error with any other name off."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, Schedule, build, create_schedule, set_random_seed
from slapo_sharding.checks.check_list import CHECKS
from slapo_testing import run_distributed
from slapo_training.options.check_switches import VARIABLE

pytestmark = pytest.mark.multiproc

PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin])


class Block(nn.Module):
    """Two layers with something between and after them."""

    def __init__(
        self,
        between: Callable[[Any, torch.Tensor], torch.Tensor] = lambda block, x: x.tanh(),
        after: Callable[[Any, torch.Tensor], torch.Tensor] = lambda block, x: x,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.gate = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 1)
        self.between, self.after = between, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        return self.after(self, self.down(self.between(self, self.up(x))))


class TwoViews(Block):
    """A parameter that is a view of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.view = nn.Parameter(self.gate.weight.detach().view(4))


class DifferentOnRanks(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.gate.weight, torch.distributed.get_rank())


def _split(sch: Schedule, is_summed: bool = True) -> Schedule:
    sch["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1)
    if is_summed:
        sch["down"].sync("fwd_post", "all_reduce")
    return sch


FAULTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "syncs": (Block, "its output is partial"),
    "shared_memory": (TwoViews, "ranks would train copies apart"),
    "weights": (DifferentOnRanks, "the ranks do not split the same model"),
    "shard_reads": (lambda: Block(after=lambda block, x: x + block.up.bias.mean()), "uses 'up.bias' in mean"),
    "values": (lambda: Block(lambda block, x: x.softmax(-1)), "softmax"),
    "random": (lambda: Block(lambda block, x: nn.functional.dropout(x)), "draws the same random numbers"),
    "gradients": (lambda: Block(lambda block, x: x * block.gate(block.x)), "puts a value whose gradient is the same"),
    "comparison": (lambda: Block(lambda block, x: x * x.shape[-1] ** -0.5), "from here on it computes something else"),
    "sizes": (lambda: Block(lambda block, x: block.x.repeat(1, 2)), "it is split along its input and is given all 8 of it"),
}


def _message(name: str, check: Any = True, **environment: str) -> str:
    """Build and run the model with the fault of this name; return the error."""
    set_random_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environment.items():
            patch.setenv(variable, value)
        sch = _split(create_schedule(FAULTS[name][0](), plugins=PLUGINS), is_summed=name != "syncs")
        try:
            build(sch, check=check).module(torch.ones(3, 4))
        except (BuildError, RuntimeError) as err:
            return f"{type(err).__name__}: {err}"
    return ""


def _faults(rank: int) -> dict[str, tuple[str, ...]]:
    return {
        name: (
            _message(name),
            _message(name, {other: other == name for other in CHECKS}),
            _message(name, {name: False}),
            _message(name, **{VARIABLE: f" {name},rows"}),
            _message(name, **{VARIABLE: ",".join(other for other in CHECKS if other != name)}),
        )
        for name in FAULTS
    }


def test_each_check_is_switched_off_by_its_name_alone() -> None:
    assert list(FAULTS) == list(CHECKS)
    for found in run_distributed(_faults, 2):
        for name, (checked, alone, off, off_by_variable, alone_by_variable) in found.items():
            for message in (checked, alone, alone_by_variable):
                assert message.startswith("BuildError"), (name, found[name])
                assert FAULTS[name][1] in message, (name, found[name])
            assert name == "shared_memory" or f"SLAPO_DISABLE_CHECKS={name} alone" in checked, checked
            for message in (off, off_by_variable):
                assert FAULTS[name][1] not in message, (name, message)
                assert f"{name} alone" not in message, (name, message)  # another check may see the fault


def test_the_guide_lists_each_check() -> None:
    text = (Path(__file__).parents[3] / "docs/guides/sharding.md").read_text(encoding="utf-8")
    assert [name for name in CHECKS if f"\n| `{name}` | " not in text] == []


def _log(rank: int) -> list[list[str]]:
    lines: list[list[str]] = []
    for check in (True, {"values": False, "sizes": False}, False):
        handler = logging.Handler()
        handler.emit = lambda record, found=lines: found[-1].append(record.getMessage())  # type: ignore[method-assign, misc]
        lines.append([])
        logging.getLogger("Slapo").addHandler(handler)
        try:
            build(_split(create_schedule(Block(), plugins=PLUGINS)), check=check)
        finally:
            logging.getLogger("Slapo").removeHandler(handler)
    return lines


def test_one_line_says_what_is_not_seen() -> None:
    none, two, all_off = run_distributed(_log, 2)[0]
    assert none == []
    assert two == [f"checks are off: 'values', {CHECKS['values']}; 'sizes', {CHECKS['sizes']}"]
    assert len(all_off) == 1
    assert all(what in all_off[0] for what in CHECKS.values())


@pytest.mark.parametrize(
    ("check", "variable", "message"),
    [
        (
            {"value": False},
            "",
            "check= has 'value', which is not a check; available: rows, .*, sizes; check=False turns all off",
        ),
        (True, "values,sums", "SLAPO_DISABLE_CHECKS has 'sums', which is not a check; available: rows, injected, syncs"),
        ("values", "", "check is 'values'; give True or False, or a dict such as"),
    ],
)
def test_an_unknown_name_is_an_error(check: Any, variable: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, variable)
    with pytest.raises(BuildError, match=message):
        build(create_schedule(Block(), plugins=PLUGINS), check=check)


def test_the_option_reaches_an_engine() -> None:
    engine = build(create_schedule(Block(), plugins=PLUGINS), "torch", check={"values": False, "rows": False})
    assert engine is not None
