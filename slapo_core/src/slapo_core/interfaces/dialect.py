"""Interface of a dialect, which turns a ``Program`` into the engine of a training framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from ..reporting.errors import BuildError
from .engine import Engine
from .program import Program


class Dialect(ABC):
    """Adapter to one training framework.

    Attributes:
        name: Value of ``target`` in ``build``, e.g. ``"torch"``.
        capabilities: Features of the framework: ``"pipeline"``, ``"data_parallel"``, ``"tensor_parallel"``,
            ``"precision:<fp32|bf16|fp16>"``.
        classes: For the classic ``get_dialect_cls``: kind (``"pipeline_stage"``, ``"pipeline_engine"``, ``"runtime_engine"``,
            ``"log_parser"``) to class; ``"step_model"``, a ``slapo_training.StepModel``, is for planners.
        takes_check: True if the engine reads the option ``check`` itself. Plugins that read it then leave it in the
            configuration.

    Example:
        >>> class EagerDialect(Dialect):
        ...     name = "eager"
        ...     capabilities = frozenset({"precision:fp32"})
        ...
        ...     @classmethod
        ...     def build(cls, program, **config):
        ...         return PlainEngine(program.module)
        >>> program = build_program(create_schedule(nn.Linear(2, 2)))
        >>> EagerDialect.check(program, precision="bf16")
        Traceback (most recent call last):
        slapo_core.reporting.errors.BuildError: target 'eager' cannot do precision:bf16; it can do precision:fp32
    """

    name: ClassVar[str] = ""
    capabilities: ClassVar[frozenset[str]] = frozenset()
    classes: ClassVar[dict[str, type]] = {}
    takes_check: ClassVar[bool] = False

    @classmethod
    def check(cls, program: Program, **config: Any) -> Program | None:
        """Raise ``BuildError`` for a program or options that the framework does not support.

        Called before anything is built. Changes nothing.

        Args:
            program: The program to build; its weights may be on the meta device.
            **config: All options of ``Dialect.build``.

        Returns:
            The program with its ``placement`` set, or None if stage ``i`` runs on pipeline rank ``i % pp``.
        """
        needs = {
            "pipeline": len(program.stages) > 1,
            "data_parallel": program.axis_size("dp") > 1,
            "tensor_parallel": program.axis_size("tp") > 1,
            f"precision:{config.get('precision', 'fp32')}": True,
        }
        missing = sorted(need for need, wanted in needs.items() if wanted and need not in cls.capabilities)
        if missing:
            able = ", ".join(sorted(cls.capabilities))
            raise BuildError(f"target {cls.name!r} cannot do {', '.join(missing)}; it can do {able}")
        return None

    @classmethod
    def trains_in_place(cls, **config: Any) -> bool:
        """Return True if replicas that hold the whole model train its parameters in their present memory."""
        return False

    @classmethod
    @abstractmethod
    def build(
        cls,
        program: Program,
        *,
        optimizer: Any = None,
        loss_fn: Any = None,
        microbatches: int = 1,
        precision: str = "fp32",
        clip: float = 0.0,
        **config: Any,
    ) -> Engine:
        """Build the engine of this rank.

        Args:
            program: The program to run; its weights are real.
            optimizer: Factory ``parameters -> torch.optim.Optimizer``. None builds an engine that only evaluates.
            loss_fn: ``loss_fn(outputs, labels)``, the mean over one micro-batch. None takes the loss from the model's output.
            microbatches: Number of equal parts that a batch is split into along dimension 0.
            precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
            clip: Maximum gradient norm; 0 turns clipping off.
            **config: Options of this framework alone.

        Raises:
            BuildError: an option is unknown.
        """
