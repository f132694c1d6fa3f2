"""A process group of one process alone, for engines that want one."""

from __future__ import annotations

import torch.distributed as dist


class SingleProcessGroup:
    """Process group of this process alone, made where there is none, and released with the last engine that uses it.

    Attributes:
        is_ours: Whether the group was made by one of these.
    """

    _users = 0

    def __init__(self) -> None:
        self.is_ours = not dist.is_initialized() or SingleProcessGroup._users > 0
        if not dist.is_initialized():
            SingleProcessGroup._users = 0
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        SingleProcessGroup._users += self.is_ours

    def leave(self) -> bool:
        """Release the group for this engine. Return whether no engine uses it, so that it has to be destroyed."""
        if not self.is_ours:
            return False
        self.is_ours = False
        SingleProcessGroup._users -= 1
        return SingleProcessGroup._users == 0 and dist.is_initialized()
