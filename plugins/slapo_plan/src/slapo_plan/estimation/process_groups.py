"""Names of process groups by the mesh."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh


def group_name(mesh: DeviceMesh | None, ranks: Sequence[int]) -> str:
    """Return the axes along which some global ranks differ, e.g. ``"tp"`` or ``"dp x tp"``; the ranks if the mesh lacks one.

    Example:
        >>> group_name(None, [0, 1])
        'ranks 0, 1'
    """
    named = f"ranks {', '.join(map(str, ranks[:4]))}{', ...' if len(ranks) > 4 else ''}"
    if mesh is None:
        return named
    size, places = tuple(mesh.mesh.shape), {rank: index for index, rank in enumerate(mesh.mesh.reshape(-1).tolist())}
    if any(rank not in places for rank in ranks):
        return named
    coordinates = [_coordinate(places[rank], size) for rank in ranks]
    axes = [
        name
        for name, values in zip(mesh.mesh_dim_names or (), zip(*coordinates, strict=True), strict=True)
        if len(set(values)) > 1
    ]
    return " x ".join(axes) or named


def _coordinate(index: int, size: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for count in reversed(size):
        index, place = divmod(index, count)
        found.append(place)
    return tuple(reversed(found))
