"""``help(sch.shard)`` and editors show what the primitive takes and does."""

from __future__ import annotations

import inspect
import pydoc

from torch import nn

from slapo_core import Primitive, create_schedule, hookimpl
from slapo_testing import isolated_plugins


class Paint(Primitive):
    """Paint a module."""

    name = "paint"

    @staticmethod
    def apply(schedule, colour, *, coats=1):
        schedule.mod.painted = colour, coats


class Plugin:
    @staticmethod
    @hookimpl
    def slapo_primitives():
        return {"paint": Paint}


def test_help_of_a_primitive_is_its_signature_and_docstring():
    with isolated_plugins(Plugin):
        sch = create_schedule(nn.Linear(1, 1))
        assert str(inspect.signature(sch.paint)) == "(colour, *, coats=1)"
        page = pydoc.render_doc(sch.paint, renderer=pydoc.plaintext)
        assert "paint(colour, *, coats=1) method of" in page
        assert "Paint a module." in page
        assert sch.paint("red", coats=2).mod.painted == ("red", 2)
