"""The script of pages with marks and sortable tables. Pages say everything without it, but in tooltips and one order."""

SCRIPT = """
"use strict";
for (const chart of document.querySelectorAll("[data-marks]")) {
  const marks = [...chart.querySelectorAll("[title]")], line = chart.nextElementSibling, columns = +chart.dataset.marks;
  const titles = marks.map(mark => mark.title);
  let at = -1;
  const read = index => {
    if (index < 0 || index >= marks.length) return;
    if (at >= 0) marks[at].classList.remove("read-mark");
    at = index;
    marks[at].classList.add("read-mark");
    line.textContent = titles[at];
  };
  chart.addEventListener("pointerover", event => read(marks.indexOf(event.target)));
  chart.addEventListener("keydown", event => {
    const moves = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns};
    if (event.key === "Home") read(0);
    else if (event.key === "End") read(marks.length - 1);
    else if (event.key in moves) read(at < 0 ? 0 : at + moves[event.key]);
    else return;
    event.preventDefault();
  });
}
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const key = cell => cell.dataset.value === undefined ? cell.textContent : +cell.dataset.value;
  const empty = cell => cell.textContent === "";
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
    : typeof a === "number" ? -1 : typeof b === "number" ? 1 : a.localeCompare(b, undefined, {numeric: true});
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const rows = [...body.rows].sort((one, other) => {
      const a = one.cells[column], b = other.cells[column];
      return empty(a) - empty(b) || down * compare(key(a), key(b));
    });
    body.append(...rows);
    for (const each of heads) each.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
  }));
}
const folded = [...document.querySelectorAll("details")];
let open = [];
addEventListener("beforeprint", () => { open = folded.map(each => each.open); for (const each of folded) each.open = true; });
addEventListener("afterprint", () => folded.forEach((each, index) => { each.open = open[index]; }));
"""
