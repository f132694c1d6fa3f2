"""Hook implementations of slapo."""

from __future__ import annotations

from slapo_core import Engine, Program, Schedule, hookimpl


@hookimpl(trylast=True)
def slapo_render(subject: object, html: bool) -> str | None:
    from .rendering.html import html_of  # noqa: PLC0415  finding plugins must stay cheap
    from .rendering.subject_views import view_of_engine, view_of_program, view_of_schedule  # noqa: PLC0415
    from .rendering.text import text_of  # noqa: PLC0415

    if isinstance(subject, Schedule):
        view = view_of_schedule(subject)
    elif isinstance(subject, Program):
        view = view_of_program(subject)
    elif isinstance(subject, Engine):
        view = view_of_engine(subject)
    else:
        return None
    return html_of(view) if html else text_of(view)
