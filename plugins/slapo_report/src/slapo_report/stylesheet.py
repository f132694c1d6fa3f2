"""Style sheets of pages: light and dark, from 400 pixels up."""

STYLE = """
:root {
  --page: #f6f7f9; --card: #ffffff; --ink: #1a2130; --soft: #5a6478; --rule: #dde1e8; --tint: #eef1f6;
  --own: #1d5fd1; --other: #e08a00; --gap: #7a3fb5; --good: #11703c; --good-tint: #e4f5eb; --bad: #b3261e; --bad-tint: #fdeae8;
  --forward: #1d5fd1; --backward: #c85a00; --bar-ink: #ffffff;
  --s0: #1d5fd1; --s1: #a34d00; --s2: #11703c; --s3: #9c2f7c; --s4: #00707f; --s5: #6b5600;
}
@media (prefers-color-scheme: dark) { :root {
  --page: #11151c; --card: #1a202b; --ink: #e6e9ef; --soft: #a0a9ba; --rule: #303949; --tint: #242c3a;
  --own: #6ea8ff; --other: #ffb454; --gap: #c69bf2; --good: #6fd69a; --good-tint: #16301f; --bad: #ff8f86; --bad-tint: #3a1b19;
  --forward: #6ea8ff; --backward: #ffa45c; --bar-ink: #10141b;
  --s0: #8ab8ff; --s1: #ffb27a; --s2: #7fdba6; --s3: #f0a0d6; --s4: #6fd5e2; --s5: #e0cb70;
} }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
header, main { max-width: 1160px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
.product { margin: 0; color: var(--soft); font-weight: 600; font-size: 13px; letter-spacing: .04em; }
h1 { margin: 2px 0 12px; font-size: 26px; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 0 0 12px; font-size: 18px; }
h3 { margin: 0; font-size: 14px; font-weight: 600; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px 20px; margin: 16px 0;
  min-width: 0; }
code, .name { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; }
small { color: var(--soft); font-size: 12px; }
.note { color: var(--soft); font-size: 12px; margin: 8px 0 0; }
.empty { color: var(--soft); margin: 0 0 8px; }
.verdict { margin: 0 0 14px; padding: 10px 14px; border-radius: 8px; border: 1px solid var(--rule); background: var(--card); }
.verdict.good { border-color: var(--good); background: var(--good-tint); } .verdict.good b { color: var(--good); }
.verdict.bad { border-color: var(--bad); background: var(--bad-tint); } .verdict.bad b { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(110px, 1fr)); gap: 10px; margin: 0; }
.cards div { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 10px 14px; }
dt { color: var(--soft); font-size: 12px; } dd { margin: 0; font-size: 20px; font-weight: 600;
  font-variant-numeric: tabular-nums; }
figure { margin: 0; min-width: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: 4px 16px; justify-content: space-between; margin-bottom: 6px; }
.legend { display: flex; gap: 14px; font-size: 12px; color: var(--soft); }
.key::before { content: ""; display: inline-block; width: 16px; height: 4px; margin-right: 6px; vertical-align: 3px;
  border-radius: 2px; }
.key.own::before { background: var(--own); } .key.other::before { background: var(--other); height: 6px; vertical-align: 2px; }
.key.gap::before { background: var(--gap); }
.key.bar-F::before { background: var(--forward); } .key.bar-B::before { background: var(--backward); }
.key.bar-I::before { background: var(--backward); } .key.bar-W::before { background: var(--backward); opacity: .55; }
.key.bar-idle::before { background: var(--tint); outline: 1px solid var(--rule); }
.key[class*=bar-]::before { height: 11px; vertical-align: -1px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 24px; }
.x-label { color: var(--soft); font-size: 12px; text-align: center; }
.y-label { color: var(--soft); font-size: 12px; margin-bottom: 10px; }
.plot { position: relative; height: 240px; margin: 0 10px 26px 48px; border-left: 1px solid var(--rule);
  border-bottom: 1px solid var(--rule); }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; vector-effect: non-scaling-stroke; }
.line.own { stroke: var(--own); } .line.other { stroke: var(--other); stroke-width: 6; opacity: .75; }
.line.gap { stroke: var(--gap); }
.line.limit { stroke: var(--bad); stroke-dasharray: 6 5; stroke-width: 1.5; }
.grid { stroke: var(--rule); stroke-width: 1; vector-effect: non-scaling-stroke; }
.tick { position: absolute; color: var(--soft); font-size: 12px; line-height: 1; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tick.x { top: calc(100% + 7px); transform: translateX(-50%); } .tick.y { right: calc(100% + 7px);
  transform: translateY(-50%); }
.limit-label { position: absolute; right: 4px; color: var(--bad); font-size: 12px; transform: translateY(2px); }
.rule { display: none; position: absolute; pointer-events: none; top: 0; bottom: 0; border-left: 1px solid var(--soft); }
.readout { display: none; position: absolute; pointer-events: none; top: 8px; padding: 6px 9px; white-space: pre;
  font-size: 12px; background: var(--card); border: 1px solid var(--rule); border-radius: 6px;
  font-variant-numeric: tabular-nums; }
.read .rule, .read .readout { display: block; }
.row { display: grid; grid-template-columns: 104px minmax(0, 1fr) 66px; gap: 10px; align-items: center; margin-top: 6px; }
.who small { display: block; line-height: 1.1; } .who { font-size: 13px; line-height: 1.25; }
.track { position: relative; height: 30px; background: var(--tint); border-radius: 4px; }
.axis .track { background: none; height: 14px; } .axis .tick.x { top: 0; }
.bar { position: absolute; top: 0; bottom: 0; overflow: hidden; border-radius: 3px;
  font: 600 11px/30px system-ui, sans-serif; text-align: center; color: var(--bar-ink);
  box-shadow: inset 0 0 0 1px var(--card); }
.bar::before { content: ""; display: inline-block; } /* a number wider than its bar wraps below it, where none of it shows */
.bar-F.bar { background: var(--forward); } .bar-B.bar { background: var(--backward); }
.bar-I.bar { background: var(--backward); } .bar-W.bar { background: var(--backward); opacity: .55; }
.bar-other.bar { background: var(--soft); }
.busy { font-size: 12px; color: var(--soft); text-align: right; white-space: nowrap; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th { text-align: left; color: var(--soft); font-weight: 600; } th, td { padding: 5px 14px 5px 0;
  border-bottom: 1px solid var(--rule); vertical-align: top; }
.numbers th, .numbers td { text-align: right; padding: 5px 0 5px 26px; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.words td { overflow-wrap: anywhere; min-width: 90px; } .words { width: 100%; }
summary { cursor: pointer; } summary:focus-visible { outline: 2px solid var(--own); outline-offset: 2px; border-radius: 4px; }
.more { margin-top: 12px; } .more > summary { color: var(--soft); font-size: 13px; margin-bottom: 8px; }
.nowrap { white-space: nowrap; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: 28px; }
@media (max-width: 560px) {
  header, main { padding: 0 12px; } header { padding-top: 18px; } section { padding: 14px 12px; } h1 { font-size: 21px; }
  .row { grid-template-columns: 62px minmax(0, 1fr) 40px; } .busy { white-space: normal; line-height: 1.1; }
  .plot { margin-left: 42px; }
  .numbers th, .numbers td { padding-left: 16px; }
}
@media print { body { background: none; } section { break-inside: avoid; } }
"""
"""Rules of all pages, with line charts and timelines."""

CHART_STYLE = """
:root { --s6: #566176; --s7: #b3261e; --s8: #4d6b00; --s9: #5540b8; --heat: #1d5fd1; }
@media (prefers-color-scheme: dark) { :root { --s6: #b4bdcd; --s7: #ff8f86; --s8: #b5d35c; --s9: #b3a4ff; --heat: #6ea8ff; } }
.verdict ul { margin: 6px 0 0; padding-left: 20px; } .verdict li { overflow-wrap: anywhere; }
.stacked .legend, .traffic .legend, .timeline .legend, .chart .legend { flex-wrap: wrap; gap: 2px 14px; }
.marks { border-radius: 4px; }
.marks:focus-visible, .scroll:focus-visible { outline: 2px solid var(--own); outline-offset: 4px; }
.picked { color: var(--soft); font-size: 12px; margin: 8px 0 0; min-height: 18px; overflow-wrap: anywhere; }
.read-mark { outline: 2px solid var(--ink); outline-offset: 1px; z-index: 2; }
.part { position: absolute; top: 0; bottom: 0; overflow: hidden; border-radius: 3px; font: 600 11px/30px system-ui, sans-serif;
  text-align: center; color: var(--bar-ink); box-shadow: inset 0 0 0 1px var(--card); }
.part::before { content: ""; display: inline-block; }
.part-0 { --kind: var(--s0); } .part-1 { --kind: var(--s1); } .part-2 { --kind: var(--s2); } .part-3 { --kind: var(--s3); }
.part-4 { --kind: var(--s4); } .part-5 { --kind: var(--s5); } .part-6 { --kind: var(--s6); } .part-7 { --kind: var(--s7); }
.part-8 { --kind: var(--s8); } .part-9 { --kind: var(--s9); }
.part[class*=part-] { background: var(--kind); }
.key[class*=part-]::before { background: var(--kind); height: 11px; vertical-align: -1px; }
.stacked .row, .shares .row { grid-template-columns: 132px minmax(0, 1fr) 66px; } .shares .who { overflow-wrap: anywhere; }
.limit-mark { position: absolute; top: -6px; bottom: 0; border-left: 2px solid var(--bad); outline: 1px solid var(--card);
  pointer-events: none; }
.limit-row .track { background: none; height: auto; } .limit-row { margin: 0 0 8px; }
.limit-row .track span { display: block; color: var(--bad); font-size: 12px; line-height: 16px; }
.over { color: var(--bad); font-weight: 600; }
.dense { position: absolute; inset: 0; width: 100%; height: 100%; }
.dense-F { fill: var(--forward); } .dense-B, .dense-I { fill: var(--backward); }
.dense-W { fill: var(--backward); opacity: .55; }
.dense-other { fill: var(--soft); } .key.bar-other::before { background: var(--soft); }
.heat { display: grid; grid-template-columns: max-content repeat(var(--columns), minmax(12px, 36px)); gap: 2px; font-size: 12px;
  color: var(--soft); overflow-x: auto; padding: 3px; }
.heat .from { padding-right: 8px; text-align: right; white-space: nowrap; align-self: center; line-height: 1.2; }
.heat .to { writing-mode: vertical-rl; transform: rotate(180deg); white-space: nowrap; line-height: 12px; justify-self: center;
  padding-top: 4px; }
.heat .corner { align-self: end; text-align: right; padding-right: 8px; white-space: nowrap; }
.cell { position: relative; min-height: 18px; background: var(--tint); border-radius: 2px; }
.cell::before { content: ""; position: absolute; inset: 0; border-radius: 2px; background: var(--heat); opacity: var(--shade); }
.ramp { width: 90px; height: 11px; align-self: center; border-radius: 2px;
  background: linear-gradient(to right, var(--tint), var(--heat)); }
.line.even { stroke: var(--soft); stroke-dasharray: 4 5; stroke-width: 1.5; }
.point { position: absolute; width: 10px; height: 10px; margin: -5px 0 0 -5px; border-radius: 50%; border: 2px solid var(--own);
  background: var(--own); }
.point.stopped { background: var(--card); border-color: var(--soft); }
.point.failed { background: var(--card); border-color: var(--bad); border-radius: 0; }
.point.best { z-index: 1; width: 16px; height: 16px; margin: -8px 0 0 -8px;
  background: var(--good); border-color: var(--card); }
.interval { position: absolute; width: 0; border-left: 2px solid var(--own); opacity: .45; margin-left: -1px; }
.mark-key::before { content: ""; display: inline-block; width: 10px; height: 10px; margin-right: 6px; border-radius: 50%;
  border: 2px solid var(--own); background: var(--own); vertical-align: -1px; }
.mark-key.stopped::before { background: var(--card); border-color: var(--soft); }
.mark-key.failed::before { background: var(--card); border-color: var(--bad); border-radius: 0; }
.mark-key.best::before { background: var(--good); border-color: var(--good); }
.mark-key.curve::before { width: 16px; height: 3px; border: 0; border-radius: 2px; vertical-align: 3px; }
.sortable { width: 100%; } .sortable th button { font: inherit; color: inherit; background: none; border: 0; padding: 0;
  cursor: pointer; text-align: inherit; white-space: nowrap; }
.sortable th button::after { content: ""; display: inline-block; width: 1em; text-align: right; }
.sortable th[aria-sort=ascending] button::after { content: "\\2191"; }
.sortable th[aria-sort=descending] button::after { content: "\\2193"; }
.sortable th button:focus-visible { outline: 2px solid var(--own); outline-offset: 2px; border-radius: 3px; }
.sortable .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.sortable .short { white-space: nowrap; } .sortable .long { min-width: 220px; overflow-wrap: break-word; }
.sortable .long button { white-space: normal; }
.sortable tbody tr:hover { background: var(--tint); }
.beside { display: flex; flex-wrap: wrap; gap: 24px 40px; align-items: flex-start; }
.beside > * { flex: 1 1 440px; min-width: 0; } .beside > .traffic { flex: 0 1 auto; max-width: 100%; }
.sentences { margin: 0; padding-left: 20px; } .sentences li { overflow-wrap: anywhere; margin-bottom: 4px; }
.below { margin-top: 22px; }
@media (max-width: 560px) {
  .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .stacked .row, .shares .row { grid-template-columns: minmax(0, 1fr) max-content; gap: 2px 10px; }
  .stacked .track, .shares .track { grid-column: 1 / -1; grid-row: 2; }
  .stacked .who small { display: inline; margin-left: 6px; } .limit-mark { top: 0; }
}
@media print {
  .part, .cell, .cell::before, .point, .bar, .key::before, .mark-key::before, .ramp, .track, .limit-mark {
    print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .picked { display: none; } dd { font-size: 16px; white-space: nowrap; }
  section { break-inside: auto; } figure, tr, .two, h2 { break-inside: avoid; } h2 { break-after: avoid; }
  .scroll { overflow: visible; } .sortable { font-size: 9px; }
  .sortable th, .sortable td { padding: 2px 6px 2px 0; min-width: 0; white-space: normal; }
  .sortable th button { white-space: normal; } .sortable th button::after { content: none; }
}
"""
"""Rules of stacked bars, heat maps, points and sortable tables."""
