from slapo_core import Primitive


class FreezePrimitive(Primitive):
    """Keep the module's parameters as they are while the rest of the model trains."""

    name = "freeze"

    @staticmethod
    def apply(schedule):
        schedule.mod.requires_grad_(False)
