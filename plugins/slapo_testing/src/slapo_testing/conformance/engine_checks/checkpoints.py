"""Checks of ``save`` and ``load``."""

from __future__ import annotations

import inspect
import shutil

import torch
import torch.distributed as dist

from slapo_core import Engine, Schedule, SlapoError

from ..examples.case import ConformanceError, check_sentence
from .engine_case import STEPS, EngineCase

FILES = 4
"""Number of files of a checkpoint, the largest, each of which is damaged in turn."""


def checkpoint(case: EngineCase) -> None:
    """Check that training continues unchanged from a checkpoint in another engine, and after a ``load`` that was refused."""
    losses = case.losses(case.example.options)
    with case.engine() as engine:
        engine.save(str(case.folder / "checkpoint"))  # what is saved there later takes its place
        for step in range(STEPS // 2):
            engine.train_batch(**case.batch(step))
        engine.save(case.folder / "checkpoint")
        evaluated = case.evaluate(engine, 0)
        _refuses_what_is_not_there(case, engine)
        _goes_on(case, engine, losses, "save() and a load() that was refused")
    with case.engine(_zeros(case)) as engine:
        engine.load(str(case.folder / "checkpoint"))
        if case.mesh["dp"].size() == 1:  # each of several has buffers of its own
            case.equal(case.evaluate(engine, 0), evaluated, "eval_batch() after load()")
        _goes_on(case, engine, losses, "load()")


def _refuses_what_is_not_there(case: EngineCase, engine: Engine) -> None:
    try:
        engine.load(case.folder / "none")
    except Exception as error:
        check_sentence(error, "load() of a folder that is not there")
    else:
        raise ConformanceError("load() of a folder that is not there raises nothing")


def damage(case: EngineCase) -> None:
    """Check that after a failed ``load`` of a damaged checkpoint the engine continues unchanged, or says that it cannot."""
    losses = case.losses(case.example.options)
    with case.engine() as engine:
        engine.save(case.folder / "early")
        for step in range(STEPS // 2):
            engine.train_batch(**case.batch(step))
        engine.save(case.folder / "now")
        evaluated = case.evaluate(engine, 0)
        for number in range(FILES):
            if (file := _with_half_a_file(case, number)) and _fails_to_load(case, engine, f"cut {number}"):
                try:
                    found = case.evaluate(engine, 0)
                except SlapoError:
                    return
                case.equal(found, evaluated, f"eval_batch() after a load() that failed, as the file {file!r} is damaged,")
        _goes_on(case, engine, losses, "a load() that failed, as a file is damaged", may_end=True)


def _with_half_a_file(case: EngineCase, number: int) -> str:
    """Copy the early checkpoint, truncate one file to half, and return its name, the same on all ranks."""
    done = [""]
    if dist.get_rank() == 0:
        early, copy = case.folder / "early", case.folder / f"cut {number}"
        (shutil.copytree if early.is_dir() else shutil.copy)(early, copy)
        files = sorted([copy, *copy.rglob("*")], key=lambda file: (-file.stat().st_size, str(file)))
        files = [file for file in files if file.is_file()]
        if number < len(files):
            content = files[number].read_bytes()
            files[number].write_bytes(content[: len(content) // 2])
            done = [files[number].name]
    dist.broadcast_object_list(done)
    return done[0]


def _fails_to_load(case: EngineCase, engine: Engine, name: str) -> bool:
    try:
        engine.load(case.folder / name)
    except Exception:
        return True
    engine.load(case.folder / "now")  # it may have no need of the file
    return False


def background(case: EngineCase) -> None:
    """Check that ``save(wait=False)`` writes the state at the call, and that ``load`` returns ``extra``, where the engine
    has these.
    """
    losses = case.losses(case.example.options)
    extra = {"next": STEPS // 2, "seen": torch.arange(3)}
    with case.engine() as engine:
        takes = inspect.signature(engine.save).parameters
        options = {name: value for name, value in (("extra", extra), ("wait", False)) if name in takes}
        if not options:
            return
        for step in range(STEPS // 2):
            engine.train_batch(**case.batch(step))
        saving = engine.save(case.folder / "behind", **options)
        _goes_on(case, engine, losses, f"save({', '.join(options)})")
        if "wait" in options:
            saving.wait()
    with case.engine(_zeros(case)) as engine:
        given = engine.load(case.folder / "behind")
        if "extra" in options and str(given) != str(extra):
            raise ConformanceError(f"load() gives back {given!r}, and save() was given extra={extra!r}")
        _goes_on(case, engine, losses, f"load() of what save({', '.join(options)}) wrote")


def _zeros(case: EngineCase) -> Schedule:
    """Return the schedule of a model whose parameters are zeros."""
    model = case.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return case.schedule(model)


def _goes_on(case: EngineCase, engine: Engine, losses: list[float], after: str, *, may_end: bool = False) -> None:
    """Check the next losses: the first depends on the parameters, the second on the optimizer state."""
    for step in range(STEPS // 2, STEPS):
        try:
            found = float(engine.train_batch(**case.batch(step)))
        except SlapoError:
            if may_end:
                return
            raise
        case.equal(found, losses[step], f"the loss {step - STEPS // 2 + 1} steps after {after}")
