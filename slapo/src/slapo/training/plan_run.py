"""Run of ``slapo plan``: the model on meta, the search, the questions of size, and the files."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core import ScheduleError, SlapoError, init_empty_weights
from slapo_plan import Estimate, Hardware, Plan, calibrate, plan
from slapo_report import format_bytes, format_count, plan_page
from slapo_tune import check_outputs

from ..run_data.settings import SettingsError, is_folder
from .model_folder import folder_config, most_positions
from .models import build_model
from .plan_limits import Probe, least_devices, longest_sequence, most_rows
from .plan_settings import PlanSettings as PlanSettings
from .plan_table import candidate_rows, plan_table, reasons

_STATES = 4
"""Parameters, gradients and the two states of AdamW, each of the parameters' size in fp32."""


class Answer(NamedTuple):
    """Result of the command.

    Args:
        fits: True if a layout fits.
        text: Table or data to print.
        problem: Sentence on a file that could not be written, or ``""``.
    """

    fits: bool
    text: str
    problem: str = ""


def run_calibration(path: str, ranks: int = 0) -> str:
    """Measure this machine, write the file, and return the sentence that says so.

    Args:
        path: File to write; ends in ``.toml``.
        ranks: Largest number of ranks that measure at the same time; 0 is the machine's devices, at most 4.

    Raises:
        SlapoError: a measurement failed, or the file cannot be written.
    """
    if not path.endswith(".toml"):
        raise SettingsError(f"--calibrate {path}: give a path that ends in .toml")
    _check_file("--calibrate", path)
    devices = torch.cuda.device_count() or os.cpu_count() or 1
    largest = ranks or min(4, devices)
    counts = sorted({1, largest, *(number for number in (2, 4, 8) if number < largest)})
    calibrate(counts, name=Path(path).stem).save(path)
    return f"measured {', '.join(map(str, counts))} ranks of this machine; use it with --hardware {path}"


def run_plan(settings: PlanSettings) -> Answer:
    """Plan as the settings say, and write the files.

    Raises:
        SlapoError: unknown hardware, a model that does not run on fake tensors, or a file that cannot be written.
    """
    check_outputs(settings.save, settings.report)
    hardware = Hardware.load(settings.hardware)
    settings, found, words = _answer(settings, hardware)
    notes: list[str] = []
    problem = ""
    try:
        notes += _write(settings, found) if found.candidates else []
    except SlapoError as err:  # the plan took long: print it all the same
        problem = str(err)
    if settings.as_json:
        data = {**found.to_dict(), "gpus": settings.gpus, "global_batch": settings.global_batch, "seq": settings.model.seq}
        text = json.dumps({**data, **({"answer": words} if words else {})}, indent=2)
        return Answer(bool(found.candidates), text, problem)
    if not found.candidates:
        return Answer(False, f"no layout fits{_reach(settings)}: {found.shortage}")
    lines = [words] if words else []
    lines += [
        plan_table(found, settings.top, settings.model.seq),
        *(f"note: {note}" for note in found.notes),
        *reasons(found.rejected),
        *notes,
    ]
    return Answer(True, "\n".join(lines), problem)


def _reach(settings: PlanSettings) -> str:
    """Return how far a question of size was asked, in a clause."""
    devices = format_count(settings.gpus, "device")
    return {"fit": f" on up to {devices}", "max_seq": f", not even with --seq {settings.model.seq}"}.get(settings.question, "")


def _check_file(flag: str, path: str) -> None:
    """Refuse a file that cannot be written, before the work that it is to hold."""
    if Path(path).is_dir() or not os.access(Path(os.path.realpath(path)).parent, os.W_OK):
        raise SettingsError(f"{flag} {path}: its folder is not there, or cannot be written to; choose another file")


def _answer(settings: PlanSettings, hardware: Hardware) -> tuple[PlanSettings, Plan, str]:
    """Return the settings that the question leads to, their plan, and the answer in words."""

    def fits(trial: PlanSettings, check: int) -> bool:
        return bool(_search(trial, hardware, check).candidates)

    probe = Probe(partial(fits, check=0), partial(fits, check=1))
    words = ""
    if settings.question == "fit":
        least = _parameter_bytes(settings) * 3 // hardware.usable_bytes
        found, words = least_devices(settings, probe, least)
    elif settings.question == "max_seq":
        found, words = longest_sequence(settings, probe, _positions(settings))
    elif settings.question == "max_batch":
        found, words = most_rows(settings, probe)
    else:
        found = settings
    return found, _search(found, hardware, settings.check), words


def _search(settings: PlanSettings, hardware: Hardware, check: int) -> Plan:
    model = _meta_model(settings)
    ids = torch.zeros(1, settings.model.seq, dtype=torch.long)
    options = {} if settings.precision == "fp32" else {"precision": settings.precision}
    try:
        return plan(
            model,
            {"input_ids": ids, "labels": ids},
            ranks=settings.gpus,
            global_batch=settings.global_batch,
            hardware=hardware,
            constraints=settings.constraints,
            check=check,
            target=settings.target,
            **options,
        )
    except ScheduleError as err:
        raise SlapoError(f"{err}; known without it: {known_facts(model, hardware)}") from err


def known_facts(model: nn.Module, hardware: Hardware) -> str:
    """Return what can be said about a model that does not run on fake tensors."""
    nbytes = sum(each.numel() * 4 for each in model.parameters())
    least = -(-_STATES * nbytes // hardware.usable_bytes)
    return (
        f"its parameters have {format_bytes(nbytes)} in fp32, {format_bytes(_STATES * nbytes)} with gradients "
        f"and AdamW's state, so at least {format_count(least, 'device')} of {hardware.name}"
    )


def _meta_model(settings: PlanSettings) -> nn.Module:
    with init_empty_weights():
        return build_model(settings.model)


def _positions(settings: PlanSettings) -> int | None:
    return most_positions(folder_config(settings.model.model)) if is_folder(settings.model.model) else None


def _parameter_bytes(settings: PlanSettings) -> int:
    return sum(each.numel() * 4 for each in _meta_model(settings).parameters())


def _write(settings: PlanSettings, found: Plan) -> list[str]:
    """Write the schedule and the page of the best; return a line for each."""
    notes = []
    if settings.save:
        found.best.save(settings.save, model=_model_flags(settings))
        notes.append(f"schedule: {settings.save}; train it by `slapo train --schedule {settings.save}`")
    if settings.report:
        exact = found.estimate()
        try:
            Path(settings.report).write_text(plan_page(_page_data(settings, found, exact)), encoding="utf-8")
        except OSError as err:
            raise SettingsError(f"--report {settings.report}: cannot be written, {err.strerror}; give another file") from err
        notes.append(f"report: {settings.report}")
        if exact.time is not None:
            trace = os.path.splitext(settings.report)[0] + ".trace.json"
            exact.save_trace(trace)
            notes.append(f"simulated step: {trace}; open it in https://ui.perfetto.dev")
    return notes


def _model_flags(settings: PlanSettings) -> dict[str, Any]:
    model = settings.model
    if is_folder(model.model):
        return {"model": str(Path(model.model).resolve()), "seq": model.seq, "batch": settings.global_batch}
    sizes = {name: getattr(model, name) for name in ("model", "layers", "hidden", "heads", "seq")}
    return {**sizes, "batch": settings.global_batch}


def _page_data(settings: PlanSettings, found: Plan, estimate: Estimate) -> dict[str, Any]:
    best = found.best
    predicted = {"step_seconds": best.step_seconds, "bubble": best.bubble, "mfu": best.mfu}
    exact = {key: value for key, value in estimate.to_dict().items() if value is not None}
    flops = {"model": best.flops, **exact.get("flops", {})}
    return {
        "title": f"{settings.model.model}: {best.layout}",
        **predicted,
        **exact,
        "flops": flops,
        "candidates": candidate_rows(found, settings.top, settings.model.seq),
        "notes": [*exact.get("notes", ()), *found.notes, *reasons(found.rejected)],
    }
