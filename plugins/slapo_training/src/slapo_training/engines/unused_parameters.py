"""Parameters that a step does not use, on engines that take zeros for their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Program, gather_objects, get_logger

from .gradient_comparison import watch_gradients


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
        if mesh is not None and self._program.axis_size("dp") > 1 and own:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group("dp"))
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
