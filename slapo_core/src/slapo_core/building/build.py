"""From a schedule to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..distributed.agreement import compare_across_ranks, raise_on_all_ranks
from ..interfaces.dialect import Dialect
from ..interfaces.engine import Engine, PlainEngine
from ..interfaces.program import Program, Stage
from ..modules.parameters import parameter_facts, shard_spec
from ..reporting.errors import BuildError
from ..schedules.schedule import Schedule
from .weights import Initialiser, materialize

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
    same schedule. A schedule without a mesh gets one of all ranks for its engine, see ``slapo_default_mesh``.

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
            of safetensors for weights on the meta device. The README of a dialect says what else it takes, for example
            ``config``, the engine's own configuration.

    Returns:
        An engine; it unpacks as ``module, optimizer``.

    Raises:
        UnknownNameError: no such target.
        BuildError: the schedule and the engine do not go together, another rank failed, or has another schedule; nothing was
            built. After an error of ``slapo_after_build`` the schedule counts as built, and takes a new one to try again.
    """
    options: dict[str, Any] = dict(zip(DEFAULTS, (optimizer, loss_fn, microbatches, precision, clip), strict=True))
    if not isinstance(sch, Schedule):
        raise BuildError(f"cannot build a {type(sch).__name__}; give what create_schedule returned")
    compare_across_ranks(sch.journal.comparable_lines(), *_ranks(sch))
    compare_across_ranks([f"build({target!r})"] if sch.mesh is None else [], *_ranks(sch))
    with _default_mesh(sch, target):
        plan = _agreed_plan(sch, target, init_weights, options, param_init_fn, config)
        initialise = param_init_fn if isinstance(init_weights, bool) or init_weights is None else init_weights
        with plan.weights(initialise, seed, fill_all=bool(init_weights)):
            engine = plan.engine()
        _announce(sch, target, plan.program, engine)
    return engine


@contextmanager
def _default_mesh(sch: Schedule, target: str | None) -> Iterator[None]:
    """Give a schedule of all ranks that has no mesh one for its engine, and keep it where the block succeeds. Collective."""
    root = sch._root
    is_complete = dist.is_initialized() and 1 < sch.world_size == dist.get_world_size()
    if target is None or root.mesh is not None or not is_complete:
        yield
        return
    root.mesh = root.registry.hook.slapo_default_mesh(schedule=sch, target=target, group=root.group)
    try:
        yield
    except BaseException:
        root.mesh = None
        vars(root).pop("mesh_group", None)
        raise


def _ranks(sch: Schedule) -> tuple[DeviceMesh | None, dist.ProcessGroup | None]:
    """Return the mesh and the group whose ranks build together."""
    return sch.mesh, sch.group if sch.mesh is None else sch._root.group


@dataclass
class BuildPlan:
    """The first phase of ``build``: what this rank's engine will be made of. Nothing has changed yet.

    The second phase, ``weights``, gives values to meta parameters; the third, ``engine``, hands the program to the dialect.

    Attributes:
        schedule: Any handle of the schedule.
        dialect: The target; None for the plain module.
        program: What the engine will run.
        fillers: What ``slapo_before_build`` returned; each gives values to meta parameters.
        options: Every option of ``DEFAULTS``.
        config: The other options, less those that plugins took.
    """

    schedule: Schedule
    dialect: type[Dialect] | None
    program: Program
    fillers: list[Callable[..., Any]]
    options: dict[str, Any]
    config: dict[str, Any]

    @classmethod
    def of(cls, sch: Schedule, target: str | None, **config: Any) -> BuildPlan:
        """Make the plan of this rank; communicates nothing.

        Args:
            sch: Any handle of the schedule.
            target: As for ``build``.
            **config: All other options of ``build``.

        Raises:
            BuildError: the schedule and the options do not go together.
        """
        if sch._root.target is not None:
            raise BuildError(f"the schedule was built for {sch._root.target!r} already; start a new schedule to build again")
        options = {name: config.pop(name, default) for name, default in DEFAULTS.items()}
        dialect = sch.registry.get("dialect", target) if target is not None else None
        fillers = sch.registry.hook.slapo_before_build(schedule=sch, target=target, config=config)
        program = build_program(sch)
        if dialect is not None:
            program = dialect.check(program, **options, **config) or program
        elif unused := [*(key for key, value in options.items() if value != DEFAULTS[key]), *config]:
            raise BuildError(f"target=None gives a plain module and has no use for {', '.join(unused)}")
        return cls(sch, dialect, program, fillers, options, config)

    def agreed_lines(self) -> list[str]:
        """Return what plugins compare between ranks before they give values."""
        return [line for fill in self.fillers for line in getattr(fill, "agreed", list)()]

    @contextmanager
    def weights(self, initialise: Initialiser | None, seed: int | None, *, fill_all: bool = True) -> Iterator[None]:
        """Give values to the meta parameters of this rank's stages; undone by plugins where the block fails. Collective.

        Args:
            initialise: See ``materialize``; None takes the model's own.
            seed: Of the weights that are drawn.
            fill_all: Whether parameters that no plugin fills are initialised.
        """
        program, error = self.program, None
        device = program.mesh.device_type if program.mesh is not None else "cpu"
        held = [stage.module for stage in program.stages if program.rank_of(stage.index) == program.axis_rank("pp")]
        with ExitStack() as filled:
            try:
                for fill in self.fillers:
                    if undo := fill(program, held, device):
                        filled.push(undo)
                if fill_all:
                    materialize(program.module, held, param_init_fn=initialise, seed=seed, device=device)
            except Exception as err:
                error = err
            raise_on_all_ranks(error, *_ranks(self.schedule))
            yield

    def engine(self) -> Engine:
        """Make the engine of this rank; collective where the dialect's is."""
        if self.dialect is None:
            return PlainEngine(self.program.module)
        return self.dialect.build(self.program, **self.options, **self.config)


def _agreed_plan(
    sch: Schedule,
    target: str | None,
    init_weights: bool | Initialiser | None,
    options: dict[str, Any],
    param_init_fn: Initialiser | None,
    config: dict[str, Any],
) -> BuildPlan:
    """Make the plan on every rank, or raise one rank's error on all of them. Collective."""
    error, lines = None, []
    try:
        init_weights = False if init_weights is None else init_weights
        if not (callable(init_weights) or isinstance(init_weights, bool)) or (param_init_fn and init_weights is not True):
            raise BuildError(f"init_weights is {init_weights!r}; give a bool, or a function of a module and no param_init_fn")
        if target and not init_weights and (empty := [name for name, p in sch.root_module.named_parameters() if p.is_meta]):
            raise BuildError(
                f"init_weights is False, and {empty[0]!r} has no values, which target {target!r} needs; leave it out"
            )
        plan = BuildPlan.of(sch, target, **options, **config)
        lines = [*_program_lines(target, plan), *plan.agreed_lines()]
    except Exception as err:
        error = err
    raise_on_all_ranks(error, *_ranks(sch))
    compare_across_ranks(lines, *_ranks(sch))
    return plan


def _announce(sch: Schedule, target: str | None, program: Program, engine: Engine) -> None:
    """Note in the schedule that it is built, and tell the plugins. Collective."""
    root, error = sch._root, None
    root.journal.seal()
    root.program, root.target = program, target
    try:
        root.registry.hook.slapo_after_build(engine=engine)
    except Exception as err:
        error = err
    raise_on_all_ranks(error, *_ranks(sch))


def _program_lines(target: str | None, plan: BuildPlan) -> list[str]:
    """Return what all ranks of one engine have in common beside the steps."""
    program = plan.program
    options = {key: plan.options[key] for key in ("microbatches", "precision", "clip")}
    stages = [f"a stage {stage.index} of {', '.join(stage.paths)}" for stage in program.stages]
    shapes = {name: tuple(parameter.shape) for name, parameter in program.module.named_parameters()}
    shapes.update({name: spec.full_shape for name, spec in program.shard_specs.items()})
    parameters = (f"the parameter {name!r} of shape {shape}" for name, shape in shapes.items())
    return [f"build({target!r}) with {options}", *stages, *parameters]


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
        original_names={name: parameter_facts(p).names for name, p in module.named_parameters()},
    )
