"""Settings of ``slapo plan``, and which of them contradict each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from slapo_report import format_count

from ..run_data.settings import Settings, SettingsError

MOST_RANKS = 16384
_CONSTRAINTS = ("tp", "pp", "dp", "rows", "data_parallel", "sequence_parallel", "pipeline_schedule", "parallel_loss", "kernels")
_UNCHANGED = ("hardware", "target", "precision", "top", "check", "save", "report", "as_json")
"""Flags that are settings as they are."""

_ANSWERS = {"max_seq": ("seq",), "max_batch": ("rows", "global_batch")}
"""Flags that a question of size chooses."""


@dataclass(frozen=True)
class PlanSettings:
    """The flags of ``slapo plan``.

    Args:
        model: Settings of the model alone, as for ``slapo train``; ``seq`` among them.
        gpus: Number of devices.
        global_batch: Sequences in an optimizer step, over all devices; 0 with ``"fit"``: as many as devices.
        constraints: Values that layouts must have, by the names of ``slapo_plan.plan``.
        hardware: Name or file.
        target: Name of the engine's dialect.
        precision: Precision of the computation.
        top: Number of layouts to print.
        check: Number of best layouts whose real schedule is estimated.
        save: Schedule file to write; empty writes none.
        report: Page to write; empty writes none.
        question: ``"layouts"``, ``"fit"``, ``"max_seq"`` or ``"max_batch"``.
        as_json: True to print data.
    """

    model: Settings
    gpus: int
    global_batch: int
    constraints: Mapping[str, Any]
    hardware: str
    target: str
    precision: str
    top: int
    check: int
    save: str
    report: str
    question: str
    as_json: bool

    @classmethod
    def of(cls, given: Mapping[str, Any], named: Collection[str] = ()) -> PlanSettings:
        """Return the settings of the command's flags.

        Args:
            given: Values of all flags.
            named: Flags that the user gave.

        Raises:
            SettingsError: a flag cannot work, or flags contradict each other; says which, and the nearest that works.
        """
        asked = [name for name in ("fit", "max_seq", "max_batch") if given[name]]
        if len(asked) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
            raise SettingsError(f"{flags}: one question at a time; give one of them")
        question = asked[0] if asked else "layouts"
        if answered := [name for name in _ANSWERS.get(question, ()) if name in named]:
            flag, other = (f"--{name.replace('_', '-')}" for name in (answered[0], question))
            raise SettingsError(f"{flag} {given[answered[0]]}: {other} chooses it; leave one of them out")
        for name in ("gpus", "global_batch", *_CONSTRAINTS[:4], "top", "check"):
            least = 0 if name in ("gpus", "global_batch", "check") else 1
            if given[name] is not None and given[name] < least:
                raise SettingsError(f"--{name.replace('_', '-')} {given[name]}: not a positive number; use 1 or more")
        sizes = {
            each.name: given[each.name]
            for each in fields(Settings)
            if each.name in ("model", "layers", "hidden", "heads", "seq")
        }
        model = Settings(**sizes)
        model.check()
        gpus = given["gpus"] or (MOST_RANKS if question == "fit" else 1)
        settings = cls(
            model=model,
            gpus=gpus,
            global_batch=given["global_batch"] or (0 if question == "fit" else gpus),
            constraints={name: given[name] for name in _CONSTRAINTS if given[name] is not None},
            question=question,
            **{name: given[name] for name in _UNCHANGED},
        )
        if question == "fit":
            return settings
        check_constraints(settings)
        return settings


def check_constraints(settings: PlanSettings) -> None:
    """Raise ``SettingsError`` if no layout has all of the given numbers; the sentence names the flag that binds."""
    given, gpus = settings.constraints, settings.gpus
    degrees = {name: given[name] for name in ("tp", "pp", "dp") if name in given}
    product = 1
    for value in degrees.values():
        product *= value
    words = " x ".join(f"--{name} {value}" for name, value in degrees.items())
    devices = format_count(gpus, "device")
    if gpus % product or (len(degrees) == 3 and gpus != product):
        near = product if len(degrees) == 3 else max(product, round(gpus / product) * product)
        verb = "is" if len(degrees) == 3 else "does not divide"
        found = f"{words} is {product} devices, and --gpus is {gpus}" if verb == "is" else f"{words} does not divide {devices}"
        raise SettingsError(f"{found}; the nearest is --gpus {near}")
    layers = settings.model.layers
    if given.get("pp", 1) > layers:
        raise SettingsError(
            f"--pp {given['pp']}: the model has {format_count(layers, 'layer')} to cut between; use at most {layers}"
        )
    replicas = sorted({dp for _, _, dp in _degrees(gpus, given)})
    if given.get("data_parallel") == "fsdp" and replicas == [1]:
        raise SettingsError(f"--data-parallel fsdp: {words or devices} leaves one replica; use more devices, or leave it out")
    if given.get("pipeline_schedule") and {pp for _, pp, _ in _degrees(gpus, given)} == {1}:
        what = f"--pipeline-schedule {given['pipeline_schedule']}: {words or devices} leaves one pipeline rank"
        raise SettingsError(f"{what}; use --pp 2 or more, or leave it out")
    if given.get("sequence_parallel") and {tp for tp, _, _ in _degrees(gpus, given)} == {1}:
        raise SettingsError("--sequence-parallel: there is nothing to split among one tensor-parallel rank; use --tp 2 or more")
    _check_batch(settings, replicas)


def _check_batch(settings: PlanSettings, replicas: list[int]) -> None:
    rows, batch = settings.constraints.get("rows", 1), settings.global_batch
    if any(batch % (dp * rows) == 0 for dp in replicas):
        return
    parts = min(replicas) * rows
    near = max(parts, round(batch / parts) * parts)
    what = format_count(min(replicas), "replica") + (f" x --rows {rows}" if rows > 1 else "")
    raise SettingsError(f"--global-batch {batch}: not divisible by {what}; the nearest is {near}")


def _degrees(gpus: int, given: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Iterate over the ``tp``, ``pp`` and ``dp`` that the constraints allow."""
    for tp in [each for each in range(1, gpus + 1) if gpus % each == 0 and given.get("tp", each) == each]:
        for pp in [each for each in range(1, gpus // tp + 1) if gpus // tp % each == 0 and given.get("pp", each) == each]:
            dp = gpus // tp // pp
            if given.get("dp", dp) == dp:
                yield tp, pp, dp
