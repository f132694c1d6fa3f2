"""Comparison of weights between ranks at the first run: all ranks must have made the same model.

Each process makes its own copy of the model, and a process that was seeded with its rank makes a different one. Shards would
then belong to different models, and replicated weights would differ between ranks, without an error.
"""

from __future__ import annotations

import hashlib
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from slapo_core import BuildError, gather_objects, is_sharded, parameter_facts
from slapo_tracing.nodes import in_function_transform

from ..communication._torch_autograd import no_functions
from ..communication._torch_private import no_modes
from ..communication.collectives import Group
from ..rules.sharding_rule import split_of
from ..syncs.sync_hooks import off_switch

_SAMPLES = 64
_digests: Any = WeakIdKeyDictionary()
"""Shard to its digest, and the digest of the full tensor."""


def sharding_group(model: nn.Module) -> tuple[Group, torch.device]:
    """Return the group that a model is sharded over, None if it is not, and the device of the shards."""
    for module in model.modules():
        if (applied := split_of(module)) is not None:
            return applied.spec.group, next(chain(module.parameters(), module.buffers())).device
    return None, torch.device("cpu")


def record_digest(shard: torch.Tensor, full: torch.Tensor) -> None:
    """Record the digests of a new shard and of its full tensor."""
    if not full.is_meta:
        _digests[shard] = (_digest(shard), _digest(full))


def check_same_weights(model: nn.Module) -> None:
    """Compare the weights of a sharded model between the ranks. Collective over their group.

    Weights on meta are left out, and so are those that were modified since they were split, or that an engine replaced.

    Raises:
        BuildError: they differ; on every rank, with the first weight that does.
    """
    group, _ = sharding_group(model)
    if group is None or in_function_transform() or dist.get_backend(group) == "fake":
        return
    with no_functions(), no_modes(), torch.no_grad():
        digests = {name: digest for name, parameter in model.named_parameters() if (digest := _digest_of_full(parameter))}
        if len(set(gather_objects(_hash(repr(digests).encode()), None, group))) == 1:
            return
        found = gather_objects(digests, None, group)
    shared = (name for name in digests if all(name in other for other in found))
    different = next((name for name in shared if len({other[name] for other in found}) > 1), None)
    if different is not None:
        raise BuildError(
            f"the ranks do not split the same model: {different!r} had different values on one of them before it was split; "
            f"make the model with the same seed on every rank, or load the same weights before scheduling it; "
            f"{off_switch('weights')}"
        )


def _digest_of_full(parameter: torch.Tensor) -> str:
    """Return the digest of a parameter's full tensor; empty if it is unknown."""
    if parameter in _digests:
        shard, full = _digests[parameter]
        return str(full) if shard == _digest(parameter) else ""
    is_plain = type(parameter) is nn.Parameter and not parameter.is_meta and not is_sharded(parameter)
    return _digest(parameter) if is_plain and parameter_facts(parameter).names else ""


def _digest(x: torch.Tensor) -> str:
    if not x.numel():
        return ""
    with no_functions(), no_modes(), torch.no_grad():
        indices = torch.linspace(0, x.numel() - 1, min(_SAMPLES, x.numel()), dtype=torch.float64, device=x.device).long()
        samples = x.detach()[torch.unravel_index(indices, x.shape)] if x.dim() else x.detach().view(1)
        return _hash(samples.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=7).hexdigest()
