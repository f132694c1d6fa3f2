"""``annotate``: set an attribute on a parameter, for later steps and engines to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..interfaces.primitive import Primitive
from ..reporting.errors import ScheduleError

if TYPE_CHECKING:
    from ..schedules.schedule import Schedule


class AnnotatePrimitive(Primitive):
    """Set an attribute on a parameter or buffer; it carries over when the tensor is sharded, replaced or moved.

    Rewrite:
        p  -->  p with p.<key> == value

    Args:
        name: Parameter or buffer of this module.
        key: Name of the attribute.
        value: Its value.

    Raises:
        ScheduleError: no such parameter, or torch already uses the attribute.
    """

    name = "annotate"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, name: str, key: str, value: Any) -> None:
        """Refuse unknown parameters and attributes that tensors have themselves."""
        tensor = _tensor(schedule, name)
        if not key.isidentifier() or key.startswith("_") or hasattr(type(tensor), key):
            problem = f"{key!r} is not a free attribute name; choose another"
            raise ScheduleError(problem, path=schedule.path, primitive="annotate")

    @staticmethod
    def apply(schedule: Schedule, name: str, key: str, value: Any) -> None:
        """Set the attribute."""
        setattr(_tensor(schedule, name), key, value)
        schedule.metadata.param_tags.add(key)


def _tensor(schedule: Schedule, name: str) -> Any:
    tables = {**schedule.mod._buffers, **schedule.mod._parameters}
    if tables.get(name) is None:
        known = ", ".join(key for key, value in tables.items() if value is not None) or "none"
        raise ScheduleError(f"no parameter or buffer {name!r}; it has: {known}", path=schedule.path, primitive="annotate")
    return tables[name]
