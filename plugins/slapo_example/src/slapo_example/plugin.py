import torch.distributed as dist

from slapo_core import get_logger, hookimpl


@hookimpl
def slapo_primitives():
    return {"freeze": "slapo_example.freeze:FreezePrimitive"}


@hookimpl
def slapo_after_build(engine):
    if frozen := [name for name, weight in engine.module.named_parameters() if not weight.requires_grad]:
        log = get_logger().info if not dist.is_initialized() or dist.get_rank() == 0 else get_logger().debug
        log("%d parameters are frozen, %s the first", len(frozen), frozen[0])
