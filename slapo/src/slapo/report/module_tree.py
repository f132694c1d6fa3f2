"""The module tree with the steps that were taken on each module and the stages that run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from ..run_data.record import ModuleRecord, RunRecord, ScheduleStepRecord

OPEN_LEVELS = 2
"""Levels of the tree that are unfolded at first."""


def module_tree(record: RunRecord) -> str:
    """The unmodified model's tree as nested HTML ``details``; steps on modules the schedule brought in stand below it."""
    known = {module.path for module in record.modules}
    strangers = [step for step in record.steps if step.path not in known]
    children: dict[str, list[ModuleRecord]] = {}
    for module in record.modules[1:]:
        children.setdefault(module.path.rpartition(".")[0], []).append(module)
    tree = _Tree(record, children)
    below = f"<h3>On modules that the schedule brought in</h3>{_calls(strangers)}" if strangers else ""
    none = "" if record.steps else '<p class="empty">No primitive was applied: the model runs as it is.</p>'
    button = '<p class="fold"><button type="button">unfold all</button></p>'
    return f'{none}{button}<div class="tree">{tree.node(record.modules[0], 0)}</div>{below}'


class _Tree:
    def __init__(self, record: RunRecord, children: dict[str, list[ModuleRecord]]) -> None:
        self.children = children
        self.stage_paths = record.stage_paths
        self.all_steps = record.steps
        self.steps: dict[str, list[ScheduleStepRecord]] = {}
        for step in record.steps:
            self.steps.setdefault(step.path, []).append(step)

    def node(self, module: ModuleRecord, level: int) -> str:
        """One module and all below it."""
        steps = self.steps.get(module.path, [])
        head = self._head(module, steps)
        inside = "".join(self.node(child, level + 1) for child in self.children.get(module.path, []))
        if not inside and not steps:
            return f'<div class="leaf">{head}</div>'
        state = " open" if level < OPEN_LEVELS else ""
        return f"<details{state}><summary>{head}</summary>{_calls(steps)}{inside}</details>"

    def _head(self, module: ModuleRecord, steps: Sequence[ScheduleStepRecord]) -> str:
        name = escape(module.path.rpartition(".")[2] or "model")
        badges = "".join(f'<b class="badge">{escape(word)}</b>' for word in dict.fromkeys(step.name for step in steps))
        stages = "".join(f'<b class="stage stage-{index % 6}">stage {index}</b>' for index in self._new_stages(module.path))
        kind, params = f'<span class="kind">{escape(module.kind)}</span>', f'<span class="params">{module.params:,}</span>'
        words = f'<span class="name">{name}</span> {kind}{badges}{stages}{self._steps_below(module.path)}'
        return f'<span class="head"><span>{words}</span>{params}</span>'

    def _steps_below(self, path: str) -> str:
        """Summarise the steps below a module, for display while it is folded."""
        prefix = f"{path}." if path else ""
        counts = Counter(step.name for step in self.all_steps if step.path != path and step.path.startswith(prefix))
        words = ", ".join(f"{name} x{count}" for name, count in counts.items())
        return f'<span class="inside">inside: {escape(words)}</span>' if words else ""

    def _new_stages(self, path: str) -> list[int]:
        """The module's stages, where its parent's are others: they hold for all below."""
        own = self._stages(path)
        return [] if own == self._stages(path.rpartition(".")[0]) else own

    def _stages(self, path: str) -> list[int]:
        """The stages that run the module, or a part of it; none where the model is not cut."""
        if len(self.stage_paths) < 2:
            return []
        return [index for index, paths in enumerate(self.stage_paths) if any(_overlap(path, other) for other in paths)]


def _overlap(one: str, other: str) -> bool:
    return not one or not other or one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _calls(steps: Iterable[ScheduleStepRecord]) -> str:
    """The steps as code; those that a step took itself are indented."""
    items = "".join(
        f'<li style="margin-left:{1.5 * step.depth:g}em"><code>{escape(step.call)}</code>'
        f" <small>{escape(step.provider)}</small></li>"
        for step in steps
    )
    return f'<ul class="calls">{items}</ul>' if items else ""
