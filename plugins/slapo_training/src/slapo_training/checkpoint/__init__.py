"""Checkpoint folders: atomic replacement, checksums, tensor files, plain data, and saves in the background.

Each save writes a new data folder. One ``os.replace`` of the manifest, which names the folder and lists a checksum of
every file, makes the save complete; the old folder is removed afterwards. ``tensor_files`` writes and reads pieces of
sharded tensors with ``torch.distributed.checkpoint``, so that a checkpoint loads on any layout. ``async_save``
finishes a save in a thread. Pieces and plain data enter; a complete checkpoint or the data read from one leaves. It
may import ``slapo_core``, ``distributed`` and ``model``.

The writer holds the lock in ``slapo.lock``. The lock ends with its process, so two programs cannot remove each
other's data. In ``tensor_files`` a box is split where another rank's box begins or ends inside it; afterwards two
boxes are identical or disjoint, and identical boxes are written once, balanced across ranks. For a save in the
background, planning and copying finish before ``save`` returns; the threads of all ranks communicate in a process
group of their own, because training steps use the other groups. A load compares all checksums, names and shapes and
reads into new tensors. The engine changes only afterwards, on all ranks or on none.
"""

from . import folder, rng_state
from .async_save import Buffers, SaveHandle, Saver, copy_to_cpu, drop_other_buffers
from .folder import Checkpoint, CheckpointWriter
from .plain_data import check_plain, digest
from .state_loading import StateLoading
from .tensor_files import SavedTensors, TensorFiles

__all__ = [
    "Buffers",
    "Checkpoint",
    "SavedTensors",
    "Saver",
    "SaveHandle",
    "StateLoading",
    "TensorFiles",
    "CheckpointWriter",
    "check_plain",
    "copy_to_cpu",
    "digest",
    "folder",
    "drop_other_buffers",
    "rng_state",
]
