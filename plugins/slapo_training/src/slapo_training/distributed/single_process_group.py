"""Process group of a single process, for engines that need one."""

from __future__ import annotations

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

    def leave(self) -> bool:
        """Release the group for this engine; return True if no engine uses it, and the caller must destroy it."""
        if not self.is_ours:
            return False
        self.is_ours = False
        SingleProcessGroup._users -= 1
        return SingleProcessGroup._users == 0 and dist.is_initialized()
