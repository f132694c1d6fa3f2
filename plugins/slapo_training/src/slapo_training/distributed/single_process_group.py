"""A process group of one process alone, for engines that want one."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist


class OwnWorld:
    """Process group of this process alone, made where there is none, and released with the last engine that uses it.

    Attributes:
        is_ours: Whether the group was made by one of these.
    """

    _users = 0

    def __init__(self) -> None:
        self.is_ours = not dist.is_initialized() or OwnWorld._users > 0
        if not dist.is_initialized():
            OwnWorld._users = 0
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        OwnWorld._users += self.is_ours

    def close(self, destroy: Callable[[], None] = dist.destroy_process_group) -> None:
        """Release the group for this engine, and destroy it where no other uses it.

        Args:
            destroy: Destroys the default process group.
        """
        if not self.is_ours:
            return
        self.is_ours = False
        OwnWorld._users -= 1
        if OwnWorld._users == 0 and dist.is_initialized():
            destroy()
