"""The interface of a dialect: it hands a ``Program`` to an engine somebody else keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from ..reporting.errors import BuildError
from .engine import Engine
from .program import Program


class Dialect(ABC):
    """One training framework.

    Attributes:
        name: The ``target`` users write.
        capabilities: What the framework can do: ``"pipeline"``, ``"data_parallel"``, ``"tensor_parallel"``,
            ``"precision:<fp32|bf16|fp16>"``.
        classes: For ``get_dialect_cls``: classic kind (``"pipeline_stage"``, ``"pipeline_engine"``, ``"runtime_engine"``,
            ``"log_parser"``) to class.
        takes_check: Whether the option ``check`` is its engine's, too: plugins that read it then leave it in the configuration.
    """

    name: ClassVar[str] = ""
    capabilities: ClassVar[frozenset[str]] = frozenset()
    classes: ClassVar[dict[str, type]] = {}
    takes_check: ClassVar[bool] = False

    @classmethod
    def check(cls, program: Program, **config: Any) -> Program | None:
        """Raise ``BuildError`` for what the framework cannot do; called before anything is built, changes nothing.

        Returns:
            The program with its ``placement``, where the framework does not deal out the stages in turn.
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
        """Return whether replicas that hold the whole model train its parameters in the memory that they have."""
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
        """Make the engine of this rank.

        Args:
            program: What to run; its weights are real.
            optimizer: A factory ``parameters -> torch.optim.Optimizer``; None builds an engine that only evaluates.
            loss_fn: ``loss_fn(outputs, labels)``, the mean over one micro-batch; None takes the loss from the model's output.
            microbatches: How many equal parts a batch is cut into along dimension 0.
            precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
            clip: Largest gradient norm; 0 is off.
            **config: What this framework alone knows; an unknown key is a ``BuildError``.
        """
