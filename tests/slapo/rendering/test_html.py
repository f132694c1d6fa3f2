"""A notebook's view: the same tree, escaped, that needs no file and takes the page's colours."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import torch
from torch import nn

from slapo_core import build_program, create_schedule
from tests.slapo.rendering.small_models import Tied

VOID = {"br", "hr", "img"}


class Nesting(HTMLParser):
    """Checks that every element is closed where it should be, and notes which there are."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.elements: list[str] = []
        self.feed(page)
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.elements.append(tag)
        if tag not in VOID:
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag


def page(subject: object) -> str:
    text = subject._repr_html_()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_it_is_a_tree_that_unfolds() -> None:
    sch = create_schedule(Tied())
    sch["h.1"].checkpoint()
    html = page(sch)
    elements = Nesting(html).elements
    assert elements.count("details") == 5  # the model, its list, and three kinds of blocks
    assert html.count("<details open>") == 2
    assert '<b>1: </b>Block <span class="quiet">72</span> <span class="steps">checkpoint</span>' in html
    assert "2 x Block" in html
    assert "fc: </b>Linear(in_features=4, out_features=8, bias=True)" in html  # what is folded can be unfolded


def test_everything_that_is_not_ours_is_escaped() -> None:
    class Odd(nn.Module):
        def extra_repr(self) -> str:
            return "<script>alert(1)</script>&"

    model = nn.Module()
    model._modules["<b onclick='x'>"] = Odd()
    model.register_parameter("<i>", nn.Parameter(nn.Linear(1, 1).weight))
    Odd.__name__ = "<img src=x>"
    html = page(create_schedule(model))
    assert {"script", "img", "i"}.isdisjoint(Nesting(html).elements)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in html


def test_it_needs_no_file_and_has_no_colours_of_its_own() -> None:
    html = page(create_schedule(Tied()))
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script", html)
    assert not re.search(r"#[0-9a-f]{3}|rgb|: *(white|black)", html)


def test_stage_borders_and_programs_are_in_it() -> None:
    sch = create_schedule(Tied(2), example_inputs=torch.zeros(1, 3, dtype=torch.long))
    sch["h.0"].cut_pipeline_stage()
    assert page(sch).count('<div class="border">') == 1
    html = page(build_program(sch))
    assert "<b>stage 1</b>" in html
    assert "<td>receives</td><td>h_0 [1, 3, 4] float32</td>" in html
    Nesting(html)
