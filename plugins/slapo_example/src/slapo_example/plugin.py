from slapo_core import get_logger, hookimpl


@hookimpl
def slapo_primitives():
    return {"freeze": "slapo_example.freeze:FreezePrimitive"}


@hookimpl
def slapo_after_build(engine):
    if frozen := [name for name, weight in engine.module.named_parameters() if not weight.requires_grad]:
        get_logger().info("%d parameters are frozen: %s", len(frozen), ", ".join(frozen))
