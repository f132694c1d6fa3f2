"""From a schedule to an engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from ..distributed.agreement import agree, compare
from ..interfaces.dialect import Dialect
from ..interfaces.engine import Engine, PlainEngine
from ..interfaces.program import Program, Stage
from ..modules.parameters import facts, shard_spec
from ..registration.registry import Registry, default_registry
from ..reporting.errors import BuildError, UnknownNameError
from ..schedules.schedule import Schedule
from .default_mesh import with_mesh
from .weights import Initialiser, materialize

_OF_THIS_RANK = r"( at)? 0x[0-9a-f]+|(?<=cuda):\d+"
DEFAULTS: dict[str, Any] = {"optimizer": None, "loss_fn": None, "microbatches": 1, "precision": "fp32", "clip": 0.0}
"""Options that mean the same to every dialect."""


def build(
    sch: Schedule,
    target: str | None = None,
    init_weights: bool | Initialiser | None = True,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    microbatches: int = 1,
    precision: str = "fp32",
    clip: float = 0.0,
    param_init_fn: Initialiser | None = None,
    seed: int | None = None,
    **config: Any,
) -> Engine:
    """Hand the scheduled model to an engine. Ends what ``undo`` can take back.

    Collective over the ranks of the schedule: those of its mesh and group, and without these the world. All of them hold the
    same schedule. A schedule without a mesh gets one of all ranks for its engine, see ``default_mesh``.

    Args:
        sch: Any handle of the schedule.
        target: Name of an installed dialect, e.g. ``"torch"``; None gives the plain module.
        init_weights: Whether weights on the meta device get values, which an engine needs, or the initialiser that gives them:
            called with each module, children first; see ``slapo_core.building.weights.materialize``. None counts as False.
        optimizer: A factory ``parameters -> torch.optim.Optimizer``, or an optimizer of the unmodified model's parameters.
        loss_fn: ``loss_fn(outputs, labels)``, the mean over a micro-batch, or with ``loss_over="replicas"`` the loss of the
            whole batch; None takes the loss from the model's output: what is called ``loss``, or the only number in it that
            has a gradient.
        microbatches: Equal parts a batch is cut into along dimension 0.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        clip: Largest gradient norm over all ranks; 0 is off.
        param_init_fn: Another name for the initialiser.
        seed: Of weights that get their values now.
        **config: For the plugins and the dialect. All that train take ``lr_scheduler``, a factory ``optimizer -> ...`` of
            ``torch.optim.lr_scheduler``; ``loss``, which part of the model's output is the loss: a key or field, a position, or
            a function of the output; ``ignore_index``, the label value that the loss leaves out; ``loss_weights`` and
            ``loss_over``, for losses that are no mean over rows or labels; ``gradient_hooks``; ``optimizer_blocks``, for
            optimizers such as Muon; ``check`` and ``strict``, for the checks of the first step.
            ``help(slapo_training.options.CommonOptions)`` says what each means. ``slapo_weights`` takes ``weights``, a folder
            of safetensors for weights on the meta device. The guide to engines says what else each takes, for example
            ``config``, the engine's own configuration.

    Returns:
        An engine; it unpacks as ``module, optimizer``.

    Raises:
        UnknownNameError: no such target.
        BuildError: the schedule and the engine do not go together, another rank failed, or has another schedule; nothing was
            built. After an error of ``slapo_after_build`` the schedule counts as built, and takes a new one to try again.
    """
    common: dict[str, Any] = dict(zip(DEFAULTS, (optimizer, loss_fn, microbatches, precision, clip), strict=True))
    if not isinstance(sch, Schedule):
        raise BuildError(f"cannot build a {type(sch).__name__}; give what create_schedule returned")
    root = sch._root
    ranks = (root.mesh, sch.group if root.mesh is None else root.group)
    compare(written_steps(sch), *ranks)
    compare([f"build({target!r})"] if root.mesh is None else [], *ranks)
    with with_mesh(sch, target, build_program) if target is not None else nullcontext():
        return _build(sch, target, init_weights, common, param_init_fn, seed, config)


def _build(
    sch: Schedule,
    target: str | None,
    init_weights: bool | Initialiser | None,
    common: dict[str, Any],
    param_init_fn: Initialiser | None,
    seed: int | None,
    config: dict[str, Any],
) -> Engine:
    """Build on the mesh that there is now; see ``build``."""
    root, error = sch._root, None
    ranks = (root.mesh, sch.group if root.mesh is None else root.group)
    try:
        init_weights = False if init_weights is None else init_weights
        initialise = param_init_fn if isinstance(init_weights, bool) else init_weights
        if not (callable(init_weights) or isinstance(init_weights, bool)) or (param_init_fn and init_weights is not True):
            raise BuildError(f"init_weights is {init_weights!r}; give a bool, or a function of a module and no param_init_fn")
        if target and not init_weights and (empty := [name for name, p in root.module.named_parameters() if p.is_meta]):
            raise BuildError(
                f"init_weights is False, and {empty[0]!r} has no values, which target {target!r} needs; leave it out"
            )
        dialect, program, fillers = prepare(sch, target, common, config)
        planned = [*_planned(target, common, program), *(line for fill in fillers for line in getattr(fill, "agreed", list)())]
    except Exception as err:
        error = err
    agree(error, *ranks)
    compare(planned, *ranks)
    device = program.mesh.device_type if program.mesh is not None else "cpu"
    held = [stage.module for stage in program.stages if program.rank_of(stage.index) == program.axis_rank("pp")]
    with ExitStack() as filled:
        try:
            for fill in fillers:
                if undo := fill(program, held, device):
                    filled.push(undo)
            if init_weights:
                materialize(program.module, held, param_init_fn=initialise, seed=seed, device=device)
        except Exception as err:
            error = err
        agree(error, *ranks)
        engine: Engine = PlainEngine(program.module) if dialect is None else dialect.build(program, **common, **config)
    root.journal.seal()
    root.program, root.target, error = program, target, None
    try:
        root.registry.hook.slapo_after_build(engine=engine)
    except Exception as err:
        error = err
    agree(error, *ranks)
    return engine


def written_steps(sch: Schedule) -> list[str]:
    """The steps, without what differs between ranks that take the same ones: addresses, and the number of the GPU."""
    return [f"step {number}, {re.sub(_OF_THIS_RANK, '', str(step))}," for number, step in enumerate(sch.journal, 1)]


def _planned(target: str | None, common: dict[str, Any], program: Program) -> list[str]:
    """Return what else all ranks of one engine have in common."""
    options = {key: common[key] for key in ("microbatches", "precision", "clip")}
    stages = [f"a stage {stage.index} of {', '.join(stage.paths)}" for stage in program.stages]
    shapes = {name: tuple(parameter.shape) for name, parameter in program.module.named_parameters()}
    shapes.update({name: spec.full_shape for name, spec in program.shard_specs.items()})
    parameters = (f"the parameter {name!r} of shape {shape}" for name, shape in shapes.items())
    return [f"build({target!r}) with {options}", *stages, *parameters]


def prepare(
    sch: Schedule, target: str | None, common: dict[str, Any], config: dict[str, Any]
) -> tuple[type[Dialect] | None, Program, list[Callable[..., Any]]]:
    """Give the dialect, the program and what gives it values, or an error; nothing is built and nothing communicated.

    Args:
        sch: Any handle of the schedule.
        target: As for ``build``.
        common: Every option of ``DEFAULTS``.
        config: The others; what plugins take is taken out of it.
    """
    if sch._root.target is not None:
        raise BuildError(f"the schedule was built for {sch._root.target!r} already; start a new schedule to build again")
    dialect = sch._root.registry.dialect(target) if target is not None else None
    fillers: list[Callable[..., Any]] = sch._root.registry.hook.slapo_before_build(schedule=sch, target=target, config=config)
    program = build_program(sch)
    if dialect is not None:
        return dialect, dialect.check(program, **common, **config) or program, fillers
    if unused := [*(key for key, value in common.items() if value != DEFAULTS[key]), *config]:
        raise BuildError(f"target=None gives a plain module and has no use for {', '.join(unused)}")
    return None, program, fillers


def build_program(sch: Schedule) -> Program:
    """The schedule's program, in stages where a plugin cut it; what ``build`` gives to the dialect.

    ``program(**batch)`` runs it in one process.
    """
    root = sch._root
    program: Program | None = root.registry.hook.slapo_partition(schedule=sch.get_top_schedule())
    if program is not None:
        return program
    module = root.module
    return Program(
        module=module,
        stages=(Stage(0, module),),
        mesh=root.mesh,
        shard_specs={name: spec for name, p in module.named_parameters() if (spec := shard_spec(p)) is not None},
        original_names={name: facts(p).names for name, p in module.named_parameters()},
    )


def init_target_engine(sch: Schedule, target: str | None, **kwargs: Any) -> Engine:
    """The established name of ``build``: ``model, optimizer = init_target_engine(sch, "torch", optimizer=...)``."""
    return build(sch, target, **kwargs)


def get_dialect_cls(
    cls_type: str, target: str | None, allow_none: bool = False, plugins: Registry | None = None
) -> type | None:
    """A dialect's class of a classic kind.

    Args:
        cls_type: One of ``"pipeline_stage"``, ``"pipeline_engine"``, ``"runtime_engine"``, ``"log_parser"``.
        target: Name of the dialect; None is the plain one, whose only class is the ``"runtime_engine"``.
        allow_none: Take the plain one where there is no such dialect, and give None where there is no such class.
        plugins: Registry to look in; default: all installed plugins.

    Raises:
        UnknownNameError: no such dialect or class, without ``allow_none``.
    """
    try:
        dialect = (plugins or default_registry()).dialect(target or "None")
    except UnknownNameError:
        if not allow_none and (target is not None or cls_type != "runtime_engine"):
            raise
        return PlainEngine if cls_type == "runtime_engine" else None
    return dialect.classes.get(cls_type) if allow_none else dialect.get(cls_type)
