"""The style sheet of the training report: that of all pages, and the module tree's."""

from __future__ import annotations

from slapo_report import STYLE as PAGE_STYLE

TREE_STYLE = """
.tree { font-size: 13px; } .tree details, .tree .leaf { padding-left: 16px; border-left: 1px solid var(--rule); }
.tree > details { padding-left: 0; border: 0; } .tree .leaf { padding-left: 31px; }
.tree summary, .leaf { padding-top: 3px; padding-bottom: 3px; }
.kind { color: var(--soft); margin-left: 4px; overflow-wrap: anywhere; }
.badge, .stage { display: inline-block; margin-left: 8px; padding: 0 7px; border-radius: 9px; font-size: 11.5px;
  font-weight: 600; line-height: 18px; }
.badge { background: var(--tint); color: var(--ink); border: 1px solid var(--rule); } .stage { border: 1px solid currentColor; }
.stage-0 { color: var(--s0); } .stage-1 { color: var(--s1); } .stage-2 { color: var(--s2); }
.stage-3 { color: var(--s3); } .stage-4 { color: var(--s4); } .stage-5 { color: var(--s5); }
.inside { margin-left: 10px; color: var(--soft); font-size: 12px; } details[open] > summary .inside { display: none; }
.fold { margin: -34px 0 10px; text-align: right; } .fold button { font: inherit; font-size: 13px; color: var(--own);
  background: none; border: 0; padding: 4px; cursor: pointer; }
.head { display: inline-flex; width: calc(100% - 18px); justify-content: space-between; align-items: baseline;
  vertical-align: top; }
.leaf .head { width: 100%; } .params { color: var(--soft); font-variant-numeric: tabular-nums; margin-left: 12px; }
.calls { margin: 2px 0 6px 15px; padding: 0; list-style: none; } .calls li { overflow-wrap: anywhere; }
"""

STYLE = PAGE_STYLE + TREE_STYLE
