"""The page's style sheet: light and dark, from 400 pixels up."""

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
.nowrap { white-space: nowrap; }
.calls { margin: 2px 0 6px 15px; padding: 0; list-style: none; } .calls li { overflow-wrap: anywhere; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: 28px; }
@media (max-width: 560px) {
  header, main { padding: 0 12px; } header { padding-top: 18px; } section { padding: 14px 12px; } h1 { font-size: 21px; }
  .row { grid-template-columns: 62px minmax(0, 1fr) 40px; } .busy { white-space: normal; line-height: 1.1; }
  .plot { margin-left: 42px; }
  .numbers th, .numbers td { padding-left: 16px; }
}
@media print { body { background: none; } section { break-inside: avoid; } }
"""
