"""From a schedule to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..distributed.agreement import agree_on_error, compare_across_ranks
from ..interfaces.dialect import Dialect
from ..interfaces.engine import Engine, PlainEngine
from ..interfaces.program import Program, Stage
from ..modules.parameters import parameter_facts, shard_spec
from ..reporting.errors import BuildError
from ..schedules.schedule import Schedule
from .weights import Initialiser, materialize

DEFAULT_OPTIONS: dict[str, Any] = {"optimizer": None, "loss_fn": None, "microbatches": 1, "precision": "fp32", "clip": 0.0}
"""Options with the same meaning for every dialect, and their defaults."""


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
    """Build an engine from a schedule. Steps before this call can no longer be undone.

    Collective over the ranks of the schedule's mesh and group; without these, over the world. All ranks must have the same
    schedule. A schedule without a mesh gets one of all ranks from the hook ``slapo_default_mesh``.

    Args:
        sch: Any handle of the schedule.
        target: Name of an installed dialect, e.g. ``"torch"``. None returns the plain module.
        init_weights: True initialises weights on the meta device, which an engine needs. A function is the initialiser: it is
            called with each module, children first, see ``materialize``. None means False.
        optimizer: A factory ``parameters -> torch.optim.Optimizer``, or an optimizer of the unmodified model's parameters.
        loss_fn: ``loss_fn(outputs, labels)``, the mean over a micro-batch, or with ``loss_over="replicas"`` the loss of the
            whole batch. None takes the loss from the model's output: its part called ``loss``, or its only number with a
            gradient.
        microbatches: Number of equal parts that a batch is split into along dimension 0.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        clip: Maximum gradient norm over all ranks; 0 turns clipping off.
        param_init_fn: Another name for the initialiser.
        seed: Seed of the weights that are initialised now.
        **config: Options of plugins and of the dialect. All dialects that train take ``lr_scheduler``, a factory ``optimizer ->
            ...`` of ``torch.optim.lr_scheduler``; ``loss``, the part of the model's output that is the loss: a key or field, a
            position, or a function of the output; ``ignore_index``, the label value that the loss leaves out; ``loss_weights``
            and ``loss_over``, for losses that are not a mean over rows or labels; ``gradient_hooks``; ``optimizer_blocks``, for
            optimizers such as Muon; ``check`` and ``strict``, for the checks of the first step.
            ``help(slapo_training.options.CommonOptions)`` explains each. ``slapo_weights`` takes ``weights``, a folder of
            safetensors for weights on the meta device. The guide to engines lists the further options of each,
            such as ``config``, the engine's own configuration.

    Returns:
        An engine; it unpacks as ``module, optimizer``.

    Raises:
        UnknownNameError: no such target.
        BuildError: the schedule and the engine do not fit, another rank failed, or another rank has another schedule. Nothing
            was built. After an error of ``slapo_after_build`` the schedule counts as built; create a new one to try again.

    Example:
        >>> engine = build(create_schedule(nn.Linear(4, 2)))
        >>> engine.module(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    options: dict[str, Any] = dict(zip(DEFAULT_OPTIONS, (optimizer, loss_fn, microbatches, precision, clip), strict=True))
    if not isinstance(sch, Schedule):
        raise BuildError(f"cannot build a {type(sch).__name__}; give what create_schedule returned")
    compare_across_ranks(sch.journal.comparable_lines(), *_build_ranks(sch))
    compare_across_ranks([f"build({target!r})"] if sch.mesh is None else [], *_build_ranks(sch))
    with _default_mesh(sch, target):
        plan = _plan_on_all_ranks(sch, target, init_weights, param_init_fn, **options, **config)
        with plan.weights(init_weights if callable(init_weights) else param_init_fn, seed, fill_all=bool(init_weights)):
            engine = plan.engine()
        sch.journal.seal()
        sch._root.program, sch._root.target = plan.program, target
        top = sch._root.metadata_of(sch.root_module)
        top.tie_weights = {each: each for each in sch.root_module.parameters() if each in top.tie_weights}
        with agree_on_error(*_build_ranks(sch)):
            sch.registry.hook.slapo_after_build(engine=engine)
    return engine


@contextmanager
def _default_mesh(sch: Schedule, target: str | None) -> Iterator[None]:
    """Set the default mesh of a schedule of all ranks that has none; reset it if the block fails. Collective."""
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


def _build_ranks(sch: Schedule) -> tuple[DeviceMesh | None, dist.ProcessGroup | None]:
    """Return the mesh and the group whose ranks build together."""
    return sch.mesh, sch.group if sch.mesh is None else sch._root.group


@dataclass
class BuildPlan:
    """First phase of ``build``: the parts of this rank's engine. Nothing has changed yet.

    The second phase, ``weights``, gives values to meta parameters. The third, ``engine``, passes the program to the dialect.

    Attributes:
        schedule: Any handle of the schedule.
        dialect: The target; None for the plain module.
        program: The program that the engine will run.
        fillers: Results of ``slapo_before_build``; each gives values to meta parameters.
        options: Every option of ``DEFAULT_OPTIONS``.
        config: The other options, without those that plugins took.

    Example:
        >>> plan = BuildPlan.of(create_schedule(nn.Linear(2, 2)), target=None)
        >>> with plan.weights(None, seed=1):
        ...     type(plan.engine()).__name__
        'PlainEngine'
    """

    schedule: Schedule
    dialect: type[Dialect] | None
    program: Program
    fillers: list[Callable[..., Any]]
    options: dict[str, Any]
    config: dict[str, Any]

    @classmethod
    def of(cls, sch: Schedule, target: str | None, **config: Any) -> BuildPlan:
        """Return the plan of this rank. Does not communicate.

        Args:
            sch: Any handle of the schedule.
            target: As for ``build``.
            **config: All other options of ``build``.

        Raises:
            BuildError: the schedule and the options do not fit.
        """
        if sch.target is not None:
            raise BuildError(f"the schedule was built for {sch.target!r} already; start a new schedule to build again")
        options = {name: config.pop(name, default) for name, default in DEFAULT_OPTIONS.items()}
        dialect = sch.registry.get("dialect", target) if target is not None else None
        fillers = sch.registry.hook.slapo_before_build(schedule=sch, target=target, config=config)
        program = build_program(sch)
        if dialect is not None:
            program = dialect.check(program, **options, **config) or program
        elif unused := [*(key for key, value in options.items() if value != DEFAULT_OPTIONS[key]), *config]:
            raise BuildError(f"target=None gives a plain module and has no use for {', '.join(unused)}")
        return cls(sch, dialect, program, fillers, options, config)

    def agreed_lines(self) -> list[str]:
        """Return the lines that plugins compare between ranks before they give values."""
        return [line for fill in self.fillers for line in getattr(fill, "agreed", list)()]

    @contextmanager
    def weights(self, initialise: Initialiser | None, seed: int | None, *, fill_all: bool = True) -> Iterator[None]:
        """Give values to the meta parameters of this rank's stages. Plugins undo theirs if the block fails. Collective.

        Args:
            initialise: As for ``materialize``; None uses the model's own initialiser.
            seed: Seed of the weights that are initialised.
            fill_all: True initialises parameters that no plugin fills.

        Raises:
            BuildError: on every rank, if any rank fails.
        """
        program = self.program
        device = program.mesh.device_type if program.mesh is not None else "cpu"
        held = [stage.module for stage in program.stages if program.rank_of(stage.index) == program.axis_rank("pp")]
        with ExitStack() as filled:
            with agree_on_error(*_build_ranks(self.schedule)):
                for fill in self.fillers:
                    if undo := fill(program, held, device):
                        filled.push(undo)
                if fill_all:
                    materialize(program.module, held, param_init_fn=initialise, seed=seed, device=device)
            yield

    def engine(self) -> Engine:
        """Return the engine of this rank. Collective if the dialect's ``build`` is."""
        if self.dialect is None:
            return PlainEngine(self.program.module)
        return self.dialect.build(self.program, **self.options, **self.config)


def _plan_on_all_ranks(
    sch: Schedule, target: str | None, init_weights: bool | Initialiser | None, param_init_fn: Initialiser | None, **config: Any
) -> BuildPlan:
    """Return the plan on every rank, or raise one rank's error on all of them. Collective."""
    with agree_on_error(*_build_ranks(sch)):
        init_weights = False if init_weights is None else init_weights
        if not (callable(init_weights) or isinstance(init_weights, bool)) or (param_init_fn and init_weights is not True):
            raise BuildError(f"init_weights is {init_weights!r}; give a bool, or a function of a module and no param_init_fn")
        if target and not init_weights and (empty := [name for name, p in sch.root_module.named_parameters() if p.is_meta]):
            raise BuildError(f"init_weights is False, and target {target!r} needs values for {empty[0]!r}; leave it out")
        plan = BuildPlan.of(sch, target, **config)
        lines = [*_program_lines(target, plan), *plan.agreed_lines()]
    compare_across_ranks(lines, *_build_ranks(sch))
    return plan


def _program_lines(target: str | None, plan: BuildPlan) -> list[str]:
    """Return the lines that must be equal on all ranks of one engine, besides the steps."""
    program = plan.program
    options = {key: plan.options[key] for key in ("microbatches", "precision", "clip")}
    stages = [f"a stage {stage.index} of {', '.join(stage.paths)}" for stage in program.stages]
    shapes = {name: tuple(parameter.shape) for name, parameter in program.module.named_parameters()}
    shapes.update({name: spec.full_shape for name, spec in program.shard_specs.items()})
    parameters = (f"the parameter {name!r} of shape {shape}" for name, shape in shapes.items())
    return [f"build({target!r}) with {options}", *stages, *parameters]


def build_program(sch: Schedule) -> Program:
    """Return the schedule's program, in stages if a plugin partitioned it: the input of ``Dialect.build``.

    ``program(**batch)`` runs it in one process.

    Example:
        >>> program = build_program(create_schedule(nn.Linear(4, 2)))
        >>> len(program.stages), program.original_names["bias"]
        (1, ('bias',))
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
