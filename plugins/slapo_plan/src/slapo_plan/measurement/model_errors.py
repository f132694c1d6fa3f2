"""Errors of a model that runs on fake tensors, as one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slapo_core import ScheduleError, SlapoError, failure_reason
from slapo_tracing.nodes import UnknownValueError

from ._torch_private import VALUE_READS

NEEDS_VALUES = (*VALUE_READS, UnknownValueError)
"""Errors of a model on fake tensors that runs on real ones."""


@contextmanager
def model_errors(name: str) -> Iterator[None]:
    """Raise errors of the model's code in a block as ``ScheduleError``.

    Args:
        name: Function that ran the model, e.g. ``"estimate"``.
    """
    try:
        yield
    except SlapoError:
        raise
    except VALUE_READS as err:
        what = "the model reads a value that it computed, as x.item() and x[mask] do, and fake tensors have none"
        advice = "leave that out for the estimate, or measure a real step with slapo_plan.measure_step"
        raise ScheduleError(f"{what}; {advice}", primitive=name) from err
    except UnknownValueError as err:
        what = "the model writes values that it computed into a tensor made without them, as torch.zeros(...)[:, i] = x does"
        raise ScheduleError(f"{what}; make that tensor of another one, by x.new_zeros(...)", primitive=name) from err
    except Exception as err:  # the model's code and fake tensors may raise anything
        what = f"the model does not run on this batch with fake tensors: {failure_reason(err)}"
        raise ScheduleError(f"{what}; give the arguments of its forward by name", primitive=name) from err
