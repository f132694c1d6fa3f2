"""A look at a page of the report in a real browser: what text a reader cannot see, in windows of several widths."""

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
    if (owner.matches(".bar") && boxes.every(below)) continue;  // the tooltip of a narrow bar says it
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
  for (const bar of doc.querySelectorAll(".bar"))
    if (!bar.title.includes(" of micro-batch ")) faults.push(`${frame.width}: a bar without a tooltip`);
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
