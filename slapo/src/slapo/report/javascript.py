"""The page's script: a crosshair that reads the losses of a step, and a button that unfolds the module tree."""

SCRIPT = """
"use strict";
const run = JSON.parse(document.getElementById("run").textContent);
const show = (value, digits) => value === null || value === undefined ? "none" : value.toFixed(digits);
for (const plot of document.querySelectorAll("[data-chart]")) {
  const first = +plot.dataset.first, last = +plot.dataset.last;
  const rule = plot.appendChild(document.createElement("div"));
  const readout = plot.appendChild(document.createElement("div"));
  rule.className = "rule";
  readout.className = "readout";
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect();
    const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const step = Math.min(run.losses.length, Math.round(first + part * (last - first)));
    const left = 100 * (step - first) / (last - first);
    const lines = ["step " + step, "scheduled " + show(run.losses[step - 1], 6)];
    if (run.reference.length) {
      const own = run.losses[step - 1], other = run.reference[step - 1];
      const gap = own === null || other === null ? "none" : Math.abs(own - other).toExponential(1);
      lines.push("reference " + show(other, 6), "difference " + gap);
    }
    readout.textContent = lines.join("\\n");
    rule.style.left = left + "%";
    readout.style.left = left > 55 ? "auto" : "calc(" + left + "% + 10px)";
    readout.style.right = left > 55 ? "calc(" + (100 - left) + "% + 10px)" : "auto";
    plot.classList.add("read");
  });
  plot.addEventListener("pointerleave", () => plot.classList.remove("read"));
}
const fold = document.querySelector(".fold button");
fold.addEventListener("click", () => {
  const open = fold.textContent === "unfold all";
  for (const node of document.querySelectorAll(".tree details")) node.open = open;
  fold.textContent = open ? "fold all" : "unfold all";
});
"""
