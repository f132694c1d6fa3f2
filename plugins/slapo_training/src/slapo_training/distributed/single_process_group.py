"""Process group of a single process, for engines that need one."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist


class SingleProcessGroup:
    """Default process group of this process alone; made if there is none, and released by its last engine.

    Attributes:
        is_ours: True if this class made the default group and this engine uses it.
    """

    _users = 0

    def __init__(self) -> None:
        self.is_ours = not dist.is_initialized() or SingleProcessGroup._users > 0
        if not dist.is_initialized():
            SingleProcessGroup._users = 0
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        SingleProcessGroup._users += self.is_ours

    def close(self, destroy: Callable[[], None] = dist.destroy_process_group) -> None:
        """Release the group for this engine, and destroy it if no other engine uses it.

        Args:
            destroy: Destroys the default process group.
        """
        if not self.is_ours:
            return
        self.is_ours = False
        SingleProcessGroup._users -= 1
        if SingleProcessGroup._users == 0 and dist.is_initialized():
            destroy()
