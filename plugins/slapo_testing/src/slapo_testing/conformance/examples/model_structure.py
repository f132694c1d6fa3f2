"""Structure of a model, which is equal for models with the same steps."""

from __future__ import annotations

from typing import Any

from slapo_core import Schedule, parameter_facts, shard_spec


def structure(schedule: Schedule) -> dict[str, Any]:
    """Return facts of modules and tensors by path that are equal for models with the same steps."""
    found: dict[str, Any] = {}
    for path, module in schedule.mod.named_modules(remove_duplicate=False):
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        found[f"module {path!r}"] = (type(module).__qualname__, module.training, *map(len, hooks), "forward" in module.__dict__)
    for kind, tensors in (("parameter", schedule.mod.named_parameters), ("buffer", schedule.mod.named_buffers)):
        for name, tensor in tensors(remove_duplicate=False):
            spec = shard_spec(tensor)
            where = None if spec is None else (spec.dim, spec.full_shape, spec.sizes)
            known = (
                tuple(tensor.shape),
                tensor.dtype,
                tensor.requires_grad,
                parameter_facts(tensor).names,
                parameter_facts(tensor).tags,
            )
            found[f"{kind} {name!r}"] = (*known, where)
    return found


def first_difference(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    """Return the first difference of the second structure as text."""
    what = next(key for key in {**wanted, **found} if wanted.get(key) != found.get(key))
    return f"{what} is {found.get(what, 'missing')}, not {wanted.get(what, 'there')}"
