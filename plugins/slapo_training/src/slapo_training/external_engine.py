"""Base of engines that are another project's: their checkpoints, their end, and the checks around construction and steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import (
    BuildError,
    Program,
    compare_across_ranks,
    gather_objects,
    get_logger,
    is_sharded,
    parameter_facts,
    raise_on_all_ranks,
)

from .batch_engine import BatchEngine
from .checkpoint.async_save import Saver
from .distributed.gradients import compare_gradients
from .distributed.ranks import reduce_over_replicas, run_on_all_ranks
from .engines import open_engines
from .engines.dialect import holds_copies
from .engines.initial_weights import check_same_start
from .gradient_hooks import StepHooks
from .losses.microbatch_loss import CountedLoss
from .model.state_rollback import TrainingMode
from .options.common_options import EngineOptions

__all__ = ["ExternalEngine"]

_STEPS = 10


class GradientComparison:
    """Compares the gradients of the first steps as the backward makes them: later an engine may share them out.

    A gradient may be zero at first, as behind an adapter that starts at zero; such parameters are looked at in up to ten steps.

    Args:
        program: With a mesh where parameters are sharded.
        shape_of: Returns the shape of a parameter's gradient, where an engine empties the parameter itself.
    """

    def __init__(
        self,
        program: Program,
        parameters: Mapping[str, nn.Parameter],
        shape_of: Callable[[nn.Parameter], torch.Size] = lambda parameter: parameter.shape,
    ) -> None:
        self._program, self._shape_of = program, shape_of
        named = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._named = named if any(map(is_sharded, parameters.values())) else {}
        self._waiting = {name for name, parameter in self._named.items() if not is_sharded(parameter)}
        self._steps = 0
        self._is_done = not program.shard_specs  # the same on every rank

    @contextmanager
    def compare_backwards(self) -> Iterator[None]:
        """Compare the gradients of the backwards inside. Collective over the tensor-parallel ranks, behind the last of them.

        Raises:
            BuildError: on every rank; names a parameter of which each rank has a part only.
        """
        if self._is_done or self._steps == _STEPS:
            yield
            return
        self._steps += 1
        found: dict[str, torch.Tensor] = {}

        def note(name: str, gradient: torch.Tensor) -> None:
            gradient = gradient.detach()
            found[name] = found[name] + gradient if name in found else gradient.clone()

        with watch_gradients(self._named, note):
            yield
        named = {name: self._parameter_with_gradient(found.get(name), parameter) for name, parameter in self._named.items()}
        wrong, seen = compare_gradients(named, {name: named[name] for name in sorted(self._waiting)})
        self._waiting -= seen
        raise_on_all_ranks(BuildError(wrong) if wrong else None, self._program.mesh)
        # other stages and replicas may wait for gradients that this one has seen
        self._is_done = not any(gather_objects(bool(self._waiting), self._program.mesh))

    def _parameter_with_gradient(self, gradient: torch.Tensor | None, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter of the same facts with this gradient."""
        if gradient is None:
            made = nn.Parameter(torch.empty(self._shape_of(parameter), dtype=parameter.dtype, device=parameter.device))
        else:
            made = nn.Parameter(torch.empty_like(gradient))
            made.grad = gradient
        parameter_facts(made).spec = parameter_facts(parameter).spec
        return made


@contextmanager
def watch_gradients(parameters: Mapping[str, nn.Parameter], note: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call ``note`` with a parameter's name and its gradient for each gradient that a backward inside makes."""
    with ExitStack() as handles:
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                handles.enter_context(parameter.register_hook(partial(note, name)))  # type: ignore[no-untyped-call]
        yield


class UnusedParameters:
    """Warns of parameters that no micro-batch of the first step used on any replica.

    In one process they have no gradient, and the optimizer leaves them as they are. With zeros weight decay shrinks them.
    """

    def __init__(self, program: Program, parameters: Mapping[str, nn.Parameter], target: str) -> None:
        self._program, self._target = program, target
        self._named = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._is_done = False

    @contextmanager
    def watch_backwards(self) -> Iterator[None]:
        """Watch the backwards inside, the first time. Collective over the mesh, behind the last of them."""
        if self._is_done:
            yield
            return
        self._is_done = True
        used = set[str]()
        with watch_gradients(self._named, lambda name, gradient: used.add(name)):
            yield
        self._warn(used)

    def _warn(self, used: set[str]) -> None:
        mesh, ties = self._program.mesh, self._program.ties
        if ties:  # one stage's use of a parameter is all that the others' copies need
            told = zip(*gather_objects([bool(used.intersection(tie.names)) for tie in ties], mesh), strict=True)
            used = used.union(*(tie.names for tie, each in zip(ties, told, strict=True) if any(each)))
        own = [name in used for name in self._named]
        found = torch.tensor(own, dtype=torch.uint8, device=mesh.device_type if mesh is not None else "cpu")
        if own:
            reduce_over_replicas(found, self._program, dist.ReduceOp.MAX)
        unused = [name for name, is_used in zip(self._named, found.tolist(), strict=True) if not is_used]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            get_logger().warning(
                "%r%s got no gradient in the first step; target %r takes zeros for it, which weight decay and momentum act "
                "on, while target 'torch' and one process leave it alone; freeze it if it is not to be trained",
                unused[0],
                more,
                self._target,
            )


class ExternalEngine(BatchEngine):
    """An engine around that of another project, which sums gradients over micro-batches and steps by itself.

    Attributes:
        module: This rank's stage, or the model.
        optimizer: The other project's, around the one given; None where there is none.
        lr_scheduler: The schedule of its learning rate, or None.
    """

    module: nn.Module
    optimizer: Any
    lr_scheduler: Any
    _hooks: StepHooks

    def __init__(self, program: Program, options: EngineOptions) -> None:
        super().__init__(program, options)
        self._saver = Saver(program)
        compare_across_ranks(options.rank_invariants(), program.mesh)
        open_engines.abandon_stale()

    @contextmanager
    def _build_context(self) -> Iterator[None]:
        """Build the engine inside; on an error give back what it holds of the process."""
        try:
            yield
        except BaseException:
            if hasattr(self, "_hooks"):
                self._hooks.give_back()
            self._release_process()
            raise
        open_engines.add_group_holder(self)
        open_engines.add(self)

    def _check_parameters(self, module: nn.Module, named: Mapping[str, nn.Parameter], replicas: bool = True) -> None:
        """Check the parameters of this rank's stages, and take the user's hooks off them. Collective.

        With ``replicas``, data-parallel ranks have to begin with the same values, too.
        """
        open_engines.check_free(named if self._trains else {}, self.takes_gradients)
        self._hooks = StepHooks(self.program, module, self._common.gradient_hooks == "step")
        check_same_start(self.program, named, replicas=replicas)
        self._modes = TrainingMode(self.program.module)
        self._loss = CountedLoss(self._common.loss_fn, self._common.output_loss)

    def _begin_checks(
        self, named: Mapping[str, nn.Parameter], shape_of: Callable[[nn.Parameter], torch.Size] = lambda each: each.shape
    ) -> None:
        """Begin the checks of each step, when the other project's engine is made.

        ``shape_of`` returns the shape of a parameter's gradient, where the engine empties the parameter itself.
        """
        self._trained = {name: (parameter, parameter.requires_grad) for name, parameter in named.items()}
        self._gradients = GradientComparison(self.program, named, shape_of)
        self._unused = UnusedParameters(self.program, named, self._common.target)

    def _run_hooks(self) -> None:
        """Run the user's gradient hooks on the reduced gradients. Collective."""
        if self._hooks.is_active:
            run_on_all_ranks(self._hooks.run, self.program)

    def _set_grad_norm(self, norm: Any) -> None:
        """Note the norm of the step, unless several ranks hold the same part of a parameter, which it counts several times."""
        self.grad_norm = None if norm is None or holds_copies(self.program) else float(norm)

    def averaging_problem(self) -> str:
        return "" if self._trains else "an engine without an optimizer"

    def close(self) -> None:
        """Wait for a checkpoint, and give back what the engine holds of the model and the process; it trains no more."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._saver.close()
        finally:
            self._hooks.give_back()
            self._detach()
            self._release_process()

    def abandon(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._hooks.give_back()
            self._abandon()

    @abstractmethod
    def _detach(self) -> None:
        """Take the other project's hooks off the model, and let go of its objects."""

    @abstractmethod
    def _release_process(self) -> None:
        """Give back the process groups and other state of this process. Collective."""

    @abstractmethod
    def _abandon(self) -> None:
        """Detach, and forget process groups that are gone."""
