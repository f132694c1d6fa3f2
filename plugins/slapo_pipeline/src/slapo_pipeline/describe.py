"""A partition as text: the modules, parameters and code of each stage, and the bytes that cross each boundary."""

from __future__ import annotations

import math
import operator
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from slapo_core import Boundary, BuildError, Program, Schedule
from slapo_tracing.nodes import function_name

from .analysis import analyze_pipeline_module, program_of

_SPACES = {"torch": torch, "F": F, "operator": operator}


def describe(partitioned: Program | Schedule, code: bool = False) -> str:
    """Return a text of the stages: modules, parameters, received values, batch arguments, sent values, bytes and ties.

    Shapes and bytes are those of one transfer, for the inputs the program was made for.

    Args:
        partitioned: A program, or any handle of a schedule, which is partitioned first.
        code: Also show each stage's code; see ``stage_code``.

    Raises:
        BuildError: the argument is neither of the two.
        BuildError, ScheduleError, TraceError: see ``generate_pipeline_partition``.
    """
    program = program_of(partitioned, "describe", "a Program or a schedule")
    found, traffic = analyze_pipeline_module(program), boundary_bytes(program)
    whole = f"{type(program.module).__name__}: {_with_count(len(program.stages), 'stage')}, {_parameters(program.module)}"
    nothing = "no whole module" if len(program.stages) > 1 else "the whole model"
    blocks = [whole]
    for stage in program.stages:
        last = stage is program.stages[-1]
        sent, both_ways = ", ".join(found.results[stage.index]), ""
        if not last:
            crossed, sent = traffic.boundaries[stage.index], _values(program.stages[stage.index + 1].inputs)
            both_ways = f"{_bytes(crossed.forward)} forward, {_bytes(crossed.backward)} backward"
        rows = {
            "runs": ", ".join(_join_consecutive(stage.paths)) or nothing,
            "holds": _parameters(stage.module),
            "receives": _values(stage.inputs),
            "from the batch": ", ".join(stage.batch_inputs),
            "returns" if last else "sends": sent,
            "per micro-batch": both_ways,
            "shares": ", ".join(" = ".join(tie.names) for tie in program.ties if stage.index in tie.stages),
        }
        lines = [f"  {name:<16}{text}" for name, text in rows.items() if text]
        blocks.append("\n".join([f"stage {stage.index}", *lines]))
        if code:
            blocks.append(textwrap.indent(stage_code(program, stage.index), "  "))
    return "\n\n".join(blocks)


def stage_code(program: Program, stage: int) -> str:
    """Return the operations of one stage as Python-like text, one per line, with shape and dtype of each result.

    Args:
        program: The stages.
        stage: Index of the stage.

    Raises:
        BuildError: no such stage.
    """
    if not 0 <= stage < len(program.stages):
        raise BuildError(f"no stage {stage}; the program has stages 0 to {len(program.stages) - 1}")
    module = program.stages[stage].module
    if not isinstance(module, fx.GraphModule):
        return f"def stage_{stage}(...):\n    return {type(module).__name__}.forward(...)  # not taken apart"
    inputs = ", ".join(str(node.target) for node in module.graph.find_nodes(op="placeholder"))
    lines = [f"def stage_{stage}({inputs}):"]
    for node in module.graph.nodes:
        if node.op == "output":
            lines.append(f"    return {_text(node.args[0])}")
        elif node.op not in ("placeholder", "get_attr"):
            value = node.meta.get("val")
            shape = f"  # {_shape_and_dtype(value.shape, value.dtype)}" if isinstance(value, torch.Tensor) else ""
            lines.append(f"    {node.name} = {_call(node)}{shape}")
    return "\n".join(lines)


def _join_consecutive(paths: Iterable[str]) -> list[str]:
    """Return the paths with consecutive members of a list joined: ``h.0``, ``h.1``, ``h.2`` become ``h.0-2``."""
    runs: list[tuple[str, list[str]]] = []
    for path in paths:
        prefix, _, name = path.rpartition(".")
        follows = runs and runs[-1][0] == prefix and name.isdecimal() and runs[-1][1][-1].isdecimal()
        if follows and int(name) == int(runs[-1][1][-1]) + 1:
            runs[-1][1].append(name)
        else:
            runs.append((prefix, [name]))
    return [f"{prefix}{'.' if prefix else ''}{names[0]}{f'-{names[-1]}' if names[1:] else ''}" for prefix, names in runs]


def _parameters(module: nn.Module) -> str:
    found = [*module.parameters()]
    frozen = sum(tensor.numel() for tensor in found if not tensor.requires_grad)
    count = sum(tensor.numel() for tensor in found)
    size = f"{_with_count(count, 'parameter')}, {_bytes(sum(tensor.nbytes for tensor in found))}"
    return f"{size}, {frozen:,} frozen" if frozen else size


def _values(values: Iterable[Boundary]) -> str:
    return ", ".join(map(_value, values))


def _value(value: Boundary) -> str:
    text = f"{value.name} {_shape_and_dtype(value.shape, value.dtype)} {_bytes(value_bytes(value))}"
    return text if value.requires_grad else f"{text}, no gradient"


def _shape_and_dtype(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _with_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _bytes(count: float) -> str:
    if count < 1024:
        return f"{count} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def _call(node: fx.Node) -> str:
    if node.target is operator.getitem:
        key = node.args[1]
        return f"{_text(node.args[0])}[{', '.join(map(_text, key)) if isinstance(key, tuple) and key else _text(key)}]"
    if node.target is getattr:
        return f"{_text(node.args[0])}.{node.args[1]}"
    args = [*map(_text, node.args), *(f"{key}={_text(value)}" for key, value in node.kwargs.items())]
    if node.op == "call_module":
        return f"{_attribute(str(node.target))}({', '.join(args)})"
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    home = next((f"{short}." for short, space in _SPACES.items() if vars(space).get(function_name(node)) is node.target), "")
    return f"{home}{function_name(node)}({', '.join(args)})"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return _attribute(str(value.target)) if value.op == "get_attr" else value.name
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(part)}" for key, part in value.items()) + "}"
    if isinstance(value, slice):
        parts = (value.start, value.stop) if value.step is None else (value.start, value.stop, value.step)
        return ":".join("" if part is None else _text(part) for part in parts)
    return "..." if value is Ellipsis else repr(value)


def _attribute(path: str) -> str:
    """Return a path as a Python expression: ``h.0.attn`` becomes ``self.h[0].attn``."""
    return "self" + "".join(f"[{name}]" if name.isdecimal() else f".{name}" for name in path.split("."))


@dataclass(frozen=True)
class BoundaryValues:
    """The values that cross one boundary with every micro-batch.

    Args:
        values: Sent by one stage to the next, in order.
    """

    values: tuple[Boundary, ...]

    @property
    def forward(self) -> int:
        """Bytes of the values."""
        return sum(map(value_bytes, self.values))

    @property
    def backward(self) -> int:
        """Bytes of their gradients."""
        return sum(value_bytes(value) for value in self.values if value.requires_grad)


@dataclass(frozen=True)
class Traffic:
    """The values that cross the boundaries of a program; ``str`` gives a table.

    Args:
        boundaries: In order; the first lies between stages 0 and 1.
    """

    boundaries: tuple[BoundaryValues, ...]

    def __str__(self) -> str:
        rows = [("stages", "forward", "backward", "values")]
        for index, crossed in enumerate(self.boundaries):
            values = ", ".join(f"{value.name}{list(value.shape)}" for value in crossed.values)
            rows.append((f"{index} -> {index + 1}", f"{crossed.forward:,} B", f"{crossed.backward:,} B", values))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            f"{name:<{widths[0]}}  {forward:>{widths[1]}}  {backward:>{widths[2]}}  {values}"
            for name, forward, backward, values in rows
        )


def boundary_bytes(program: Program) -> Traffic:
    """Return the bytes that one micro-batch of the program's input shapes sends over each boundary, forward and backward."""
    return Traffic(tuple(BoundaryValues(stage.inputs) for stage in program.stages[1:]))


def value_bytes(value: Boundary) -> int:
    return math.prod(value.shape) * value.dtype.itemsize


__all__ = ["Traffic", "boundary_bytes", "describe", "stage_code"]
