"""A look at a page in a real browser: what text a reader cannot see, in windows of several widths, and what keys do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (1400, 760, 400)
"""Widths of the windows; the style sheet supports 400 pixels and more."""

PROBE = """
const faults = [];
const cover = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
function texts(doc) {
  const walker = doc.createTreeWalker(doc.body, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const owner = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || owner.closest("script, style")) continue;
    const range = doc.createRange();
    range.selectNodeContents(walker.currentNode);
    found.push({owner, words: walker.currentNode.data.trim(), boxes: [...range.getClientRects()]});
  }
  return found;
}
function clips(owner, box, view) {
  for (let at = owner; at; at = at.parentElement) {
    const style = view.getComputedStyle(at), frame = at.getBoundingClientRect();
    if (style.visibility === "hidden" || +style.opacity < .3) return "invisible";
    if (style.overflowX === "auto") return "";  // it scrolls
    if (style.overflowX !== "visible" && (box.left < frame.left - 1 || box.right > frame.right + 1)) return "clipped";
  }
  return box.left < -1 || box.right > view.innerWidth + 1 ? "outside of the window" : "";
}
function look(frame, where) {
  const view = frame.contentWindow, found = texts(frame.contentDocument);
  const say = (words, what) => faults.push(`${where}: ${what}: ${words}`);
  const lying = [];
  for (const {owner, words, boxes} of found) {
    const floats = owner.className === "readout";
    if (floats && !owner.closest(".read")) continue;  // the pointer is not on this chart
    if (owner.closest(".inside")) continue;  // of a folded module; what it sums up is unfolded here
    const below = box => box.top >= owner.getBoundingClientRect().bottom;
    if (owner.matches(".bar, .part") && boxes.every(below)) continue;  // the tooltip of a narrow bar says it
    if (!boxes.some(box => box.width && box.height)) { say(words, "hidden"); continue; }
    for (const box of boxes) {
      const fault = clips(owner, box, view);
      if (fault) say(words, fault);
      if (!floats) for (const other of lying)
        if (other.owner !== owner && cover(other.box, box)) say(`${words} | ${other.words}`, "overlap");
      if (!floats && !owner.closest(".scroll")) lying.push({owner, words, box});
    }
  }
}
function readMarks(chart, view, where) {
  const marks = [...chart.querySelectorAll("[title]")], line = chart.nextElementSibling;
  const press = key => {
    chart.dispatchEvent(new view.KeyboardEvent("keydown", {key, bubbles: true}));
    return line.textContent;
  };
  const says = (words, mark, how) => { if (words !== mark.title) faults.push(`${where}: ${how} reads ${words}`); };
  says(press("ArrowRight"), marks[0], "the first key");
  says(press("End"), marks.at(-1), "End");
  says(press("ArrowRight"), marks.at(-1), "a key at the end");
  says(press("Home"), marks[0], "Home");
  const below = +chart.dataset.marks;
  if (below < marks.length) says(press("ArrowDown"), marks[below], "down");
  marks.at(-1).dispatchEvent(new view.PointerEvent("pointerover", {bubbles: true}));
  says(line.textContent, marks.at(-1), "the pointer");
  if (chart.querySelectorAll(".read-mark").length !== 1) faults.push(`${where}: not one mark is read`);
}
function sortBy(table, where) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    for (const order of ["ascending", "descending"]) {
      head.querySelector("button").click();
      if (head.ariaSort !== order) faults.push(`${where}: ${head.textContent} is ${head.ariaSort}`);
      const cells = [...table.tBodies[0].rows].map(row => row.cells[column]);
      const values = cells.filter(cell => cell.dataset.value !== undefined).map(cell => +cell.dataset.value);
      const sign = order === "ascending" ? 1 : -1;
      if (values.some((value, index) => index && sign * (value - values[index - 1]) < 0))
        faults.push(`${where}: ${head.textContent} is not ${order}`);
      const empty = cells.map(cell => cell.textContent === "");
      if (empty.lastIndexOf(false) > empty.indexOf(true) && empty.includes(true)) faults.push(`${where}: empty cells first`);
    }
    if (heads.filter(each => each.ariaSort !== "none").length !== 1) faults.push(`${where}: sorted by several columns`);
  });
}
for (const frame of document.querySelectorAll("iframe")) {
  const doc = frame.contentDocument, view = frame.contentWindow;
  for (const node of doc.querySelectorAll("details")) node.open = true;
  look(frame, frame.width);
  for (const plot of doc.querySelectorAll("[data-chart]")) {
    const box = plot.getBoundingClientRect(), readout = plot.querySelector(".readout");
    for (const part of [0, .3, .54, .6, 1]) {
      const at = {clientX: box.left + part * box.width, clientY: box.top + 50};
      plot.dispatchEvent(new view.PointerEvent("pointermove", at));
      if (!readout.getBoundingClientRect().width) faults.push(`${frame.width}: no readout at ${part}`);
      if (/NaN|undefined/.test(readout.textContent)) faults.push(`${frame.width}: ${readout.textContent}`);
      look(frame, `${frame.width}, pointer at ${part}`);
    }
    plot.dispatchEvent(new view.PointerEvent("pointerleave"));
  }
  for (const bar of doc.querySelectorAll(".bar, .part, .cell, .point"))
    if (!bar.title.includes(bar.matches(".bar") ? " ms from " : " ")) faults.push(`${frame.width}: a bar without a tooltip`);
  for (const chart of doc.querySelectorAll("[data-marks]")) readMarks(chart, view, `${frame.width}: ${chart.ariaLabel}`);
  for (const table of doc.querySelectorAll("table.sortable")) sortBy(table, `${frame.width}: ${table.parentElement.ariaLabel}`);
  look(frame, `${frame.width}, read and sorted`);
}
document.body.innerHTML = "<pre id=found></pre>";
document.getElementById("found").textContent = JSON.stringify([...new Set(faults)]);
"""


def faults_of(page: str, folder: Path) -> list[str]:
    """Open a page in windows of all widths, move the pointer over its charts, and return what text cannot be read there."""
    frames = "".join(f'<iframe width="{width}" height="2000" srcdoc="{escape(page)}"></iframe>' for width in WIDTHS)
    path = folder / "frames.html"
    path.write_text(f"<!doctype html><body>{frames}<script>window.onload = () => {{{PROBE}}};</script>", encoding="utf-8")
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--virtual-time-budget=3000"]
    command = [CHROMIUM, *flags, "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)
    faults: list[str] = json.loads(found.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    return faults
