"""Process groups on the mesh: their names, and the groups of other ranks that are like them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

PIPELINE = "pp"


class MeshGroups:
    """Groups of global ranks on a mesh, found by the coordinates of their ranks.

    Args:
        mesh: The mesh; None for rank 0 alone.

    Attributes:
        ranks: Global ranks of the mesh, with a dimension for each axis.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.ranks: torch.Tensor = torch.zeros(1, dtype=torch.long, device="cpu") if mesh is None else mesh.mesh
        names = None if mesh is None else mesh.mesh_dim_names
        self._names = names or ("",) * self.ranks.dim()
        flat = self.ranks.reshape(-1)
        self._places = torch.full((int(flat.max()) + 1,), -1, dtype=torch.long, device="cpu")
        self._places[flat.long()] = torch.arange(flat.numel(), device="cpu")
        self._known: dict[tuple[int, ...], str] = {}

    def name(self, ranks: Sequence[int]) -> str:
        """Return the axes along which some ranks differ, e.g. ``"dp x tp"``; the ranks if the mesh lacks one.

        Example:
            >>> MeshGroups(None).name([0, 1])
            'ranks 0, 1'
        """
        key = tuple(ranks)
        if key not in self._known:
            place = self._coordinates(key)
            axes = [] if place is None else [self._names[dim] for dim in _differing_axes(place)]
            self._known[key] = " x ".join(axes) or _rank_list(key)
        return self._known[key]

    @property
    def num_stages(self) -> int:
        """Number of ranks along ``pp``."""
        return int(self.ranks.shape[self._names.index(PIPELINE)]) if PIPELINE in self._names else 1

    def stage_ranks(self, pipeline_rank: int) -> torch.Tensor:
        """Return the global ranks of one rank along ``pp``; all without that axis."""
        if PIPELINE not in self._names:
            return self.ranks.reshape(-1).long()
        return self.ranks.select(self._names.index(PIPELINE), pipeline_rank).reshape(-1).long()

    def groups_like(self, ranks: Sequence[int], pipeline_rank: int) -> torch.Tensor | None:
        """Return the groups of all ranks of one pipeline stage that a group of one rank stands for.

        They have the same coordinates along the axes along which its ranks differ, and any along the others. A group along
        ``pp`` keeps its own.

        Args:
            ranks: The group; its rank along ``pp`` does not matter.
            pipeline_rank: Rank along ``pp``.

        Returns:
            Global ranks ``[groups, size]``; None if the mesh lacks a rank.
        """
        place = self._coordinates(ranks)
        if place is None:
            return None
        differing, shape = _differing_axes(place), self.ranks.shape
        choices = [torch.arange(size, device="cpu") for size in shape]
        for dim in range(len(shape)):
            if dim in differing:
                choices[dim] = torch.zeros(1, dtype=torch.long, device="cpu")
            elif self._names[dim] == PIPELINE:
                choices[dim] = torch.tensor([pipeline_rank], device="cpu")
        others = torch.cartesian_prod(*choices).reshape(-1, len(shape))
        own = torch.zeros_like(place)
        own[:, differing] = place[:, differing]
        indices = (others[:, None, :] + own[None, :, :]).unbind(-1)
        return self.ranks[indices].long()

    def _coordinates(self, ranks: Sequence[int]) -> torch.Tensor | None:
        """Return the coordinates ``[ranks, axes]``, or None if the mesh lacks a rank."""
        given = torch.tensor(ranks, dtype=torch.long, device="cpu")
        if bool((given >= self._places.numel()).any()):
            return None
        places = self._places[given]
        if bool((places < 0).any()):
            return None
        return torch.stack(torch.unravel_index(places, tuple(self.ranks.shape)), dim=-1)


def _differing_axes(coordinates: torch.Tensor) -> list[int]:
    return [dim for dim, values in enumerate(coordinates.unbind(-1)) if bool((values != values[0]).any())]


def _rank_list(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks[:4]))}{', ...' if len(ranks) > 4 else ''}"
