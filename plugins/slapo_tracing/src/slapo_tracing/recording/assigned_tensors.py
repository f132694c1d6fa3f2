"""Values that a forward leaves in attributes, such as attention maps for plots, a loss, or the length of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core import paths

from ..nodes.nested_values import tensors_in
from .attribute_reads import MODULE_ATTRIBUTES
from .attribute_writes import is_constant

if TYPE_CHECKING:
    from .recorder import Recorder

_MISSING = object()


def assigned_values(recorder: Recorder) -> dict[str, Any]:
    """Return the values that a forward has assigned to attributes of the modules in its graph, by dotted path.

    If a module keeps a cache, i.e. a constant in an attribute that the forward had read before, the module's constants are left
    out, since some describe the call that filled the cache. The second of two runs returns the paths of the first, whatever it
    assigns.
    """
    if recorder.earlier is not None:
        recorder.assigned = recorder.earlier.assigned
    else:
        for path in ("", *sorted(recorder.inlined)):
            names = _assigned_to(recorder, recorder.module.get_submodule(path))
            recorder.assigned += [paths.join(path, name) for name in names]
    places = {path: paths.split(path) for path in recorder.assigned}
    return {path: getattr(recorder.module.get_submodule(owner), name, None) for path, (owner, name) in places.items()}


def mark_assigned_tensors(recorder: Recorder) -> None:
    """Write the attributes that hold a tensor after the forward into ``meta["assigned"]`` of the tensor's node."""
    for path, value in assigned_values(recorder).items():
        for node in filter(None, (recorder.nodes.get(id(tensor)) for tensor in tensors_in(value))):
            node.meta.setdefault("assigned", []).append(path)


def _assigned_to(recorder: Recorder, module: nn.Module) -> list[str]:
    before = recorder.sandbox.attributes_before(module)
    own = {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}
    is_written = {name: (id(module), name) in recorder.writes for name in own}
    changed = [name for name, value in own.items() if is_written[name] or before.get(name, _MISSING) is not value]
    constants = {name for name in changed if _is_constant(recorder, vars(module)[name])}
    has_cache = any((id(module), name) in recorder.reads_before for name in constants)
    return [name for name in changed if not has_cache or name not in constants]


def _is_constant(recorder: Recorder, value: Any) -> bool:
    nodes = [recorder.nodes.get(id(tensor)) for tensor in tensors_in(value)]
    return all(node is None or is_constant(node) for node in nodes)
