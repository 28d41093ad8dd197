"use strict";
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const number = (element) => element && element.dataset.value !== undefined ? Number(element.dataset.value) : NaN;
const percent = (fraction) => (100 * fraction).toFixed(1);
const TEXTS = ["model", "category"]; // columns that are sorted as words

function amount(value) { // as people say it: 0.25, 696 k, 11.2 M
  const size = Math.abs(value);
  for (const [unit, least] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (size >= least) return `${Number((value / least).toPrecision(3))} ${unit}`;
  }
  return String(Number(value.toPrecision(3)));
}

function make(parent, tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

class Board {
  constructor(section) {
    this.section = section;
    const table = section.querySelector("table"); // the first one; others are of all its models together
    this.heads = [...table.querySelectorAll("thead th")];
    this.body = table.querySelector("tbody");
    this.rows = [...this.body.rows];
    this.figure = section.querySelector("figure");
    this.plot = section.querySelector(".plot");
    this.across = section.querySelector(".across");
    this.up = section.querySelector(".down");
    this.said = section.querySelector("figcaption output");
    this.points = [];
    this.chosen = -1;
    this.heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => this.sort(column)));
    this.prepareScatter();
  }

  get visible() {
    return this.rows.filter((row) => !row.hidden);
  }

  sort(column) {
    const head = this.heads[column];
    const words = TEXTS.includes(head.dataset.key);
    const rising = words || head.dataset.kind === "errors"; // first click: a to z, best first
    const before = head.getAttribute("aria-sort");
    const ascending = before ? before === "descending" : rising;
    this.heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const sign = ascending ? 1 : -1;
    const compare = words
      ? (a, b) => a.cells[column].dataset.value.localeCompare(b.cells[column].dataset.value, undefined, { numeric: true })
      : (a, b) => number(a.cells[column]) - number(b.cells[column]);
    const [measured, rest] = [true, false].map((wanted) =>
      this.rows.filter((row) => (row.cells[column].dataset.value !== undefined) === wanted));
    this.rows = [...measured.sort((a, b) => sign * compare(a, b)), ...rest]; // what was not measured stays last
    this.body.append(...this.rows);
    const group = (row) => head.dataset.key === "category" ? row && row.cells[column].dataset.value : "";
    this.rows.forEach((row, index) => row.classList.toggle("begins", index > 0 && group(row) !== group(this.rows[index - 1])));
  }

  filter(words, norm) {
    for (const row of this.rows) {
      const name = row.cells[0].dataset.value.toLowerCase();
      row.hidden = !words.every((word) => name.includes(word));
    }
    this.heads.forEach((head, column) => {
      const norms = (head.dataset.norms || "").split(" ").filter(Boolean);
      const hidden = Boolean(norm && norms.length && !norms.includes(norm));
      if (head.hidden !== hidden) {
        head.hidden = hidden;
        for (const row of this.rows) row.cells[column].hidden = hidden;
      }
    });
    this.draw();
  }

  prepareScatter() {
    const columns = this.heads.map((head, column) => ({ head, column })).filter(({ head }) => head.dataset.kind);
    const clean = columns.find(({ head }) => head.dataset.kind === "clean");
    const others = columns.filter(({ head }) => !["clean", "errors", "other", "study"].includes(head.dataset.kind));
    this.parameters = this.heads.findIndex((head) => head.dataset.key === "parameters");
    const studies = columns.filter(({ head }) => head.dataset.kind === "study");
    const sizes = this.rows.some((row) => Number.isFinite(number(row.cells[this.parameters])));
    if (!clean || !others.length) return;
    this.across.append(new Option("Clean accuracy", clean.column));
    if (sizes) this.across.append(new Option("Parameters", this.parameters));
    for (const { head, column } of studies) this.across.append(new Option(head.dataset.name, column));
    for (const { head, column } of others) {
      const option = new Option(head.dataset.name, column);
      option.selected = head.hasAttribute("aria-sort");
      this.up.append(option);
    }
    this.figure.hidden = false;
    for (const choice of [this.across, this.up]) choice.addEventListener("change", () => this.draw());
    this.plot.addEventListener("keydown", (event) => this.step(event));
    this.plot.addEventListener("blur", () => this.choose(-1));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  draw() {
    if (this.figure.hidden || this.section.hidden) return;
    const x = Number(this.across.value), y = Number(this.up.value);
    const category = this.heads.findIndex((head) => head.dataset.key === "category");
    this.points = this.visible.map((row) => ({
      name: row.cells[0].dataset.value, category: category < 0 ? "" : row.cells[category].dataset.value || "",
      x: number(row.cells[x]), y: number(row.cells[y]), low: Number(row.cells[y].dataset.low), high: Number(row.cells[y].dataset.high), parameters: number(row.cells[this.parameters]),
    })).filter((point) => Number.isFinite(point.x) && Number.isFinite(point.y)).sort((a, b) => a.x - b.x || a.y - b.y);
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    const area = { left: 36, right: width - 14, top: 24, bottom: height - 40 };
    this.shares = this.heads[x].dataset.kind === "clean";
    const scales = { x: this.shares ? this.percents("x") : this.amounts("x"), y: this.percents("y") };
    const across = (value) => area.left + scales.x.place(value) * (area.right - area.left);
    const down = (value) => area.bottom - scales.y.place(value) * (area.bottom - area.top);
    this.plot.replaceChildren();
    this.svg = make(this.plot, "svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    for (const [tick, label] of scales.x.ticks) {
      make(this.svg, "line", { x1: across(tick), x2: across(tick), y1: area.top, y2: area.bottom });
      make(this.svg, "text", { x: across(tick), y: area.bottom + 16, "text-anchor": "middle" }, label);
    }
    for (const [tick, label] of scales.y.ticks) {
      make(this.svg, "line", { x1: area.left, x2: area.right, y1: down(tick), y2: down(tick) });
      make(this.svg, "text", { x: area.left - 6, y: down(tick) + 4, "text-anchor": "end" }, label);
    }
    const named = this.shares ? "clean accuracy (%)" : this.heads[x].dataset.name || "parameters";
    make(this.svg, "text", { x: area.right, y: height - 6, "text-anchor": "end" }, named);
    this.named = this.heads[y].dataset.name;
    make(this.svg, "text", { x: 0, y: 12 }, `${this.named} (%)`);
    const scale = Math.max(0.5, Math.min(1, width / 900) * (this.points.length > 300 ? 0.75 : 1));
    this.points.forEach((point, index) => {
      Object.assign(point, { cx: across(point.x), cy: down(point.y), r: scale * this.radius(point.parameters) });
      const circle = make(this.svg, "circle", { class: `point ${point.category}`, cx: point.cx, cy: point.cy, r: point.r });
      make(circle, "title", {}, point.name);
      circle.addEventListener("pointerenter", () => this.choose(index));
    });
    this.ring = make(this.svg, "circle", { class: "chosen", r: 0 });
    this.choose(-1);
  }

  percents(axis) {
    const values = this.points.map((point) => point[axis]);
    const low = values.length ? Math.floor(10 * Math.min(1, ...values)) / 10 : 0;
    const high = values.length ? Math.max(Math.ceil(10 * Math.max(0, ...values)) / 10, low + 0.1) : 1;
    const step = high - low > 0.5 ? 0.2 : high - low > 0.2 ? 0.1 : 0.02;
    const ticks = this.multiples(low, high, step).map((tick) => [tick, Math.round(100 * tick)]);
    return { ticks, place: (value) => (value - low) / (high - low) };
  }

  amounts(axis) { // by powers of ten where the numbers are far apart
    const values = this.points.map((point) => point[axis]);
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (low > 0 && high >= 5 * low) {
      [low, high] = [Math.log10(low) - 0.1, Math.log10(high) + 0.1];
      const fine = high - low > 3 ? [1] : [1, 2, 5];
      const powers = this.multiples(Math.floor(low), high, 1);
      const ticks = powers.flatMap((power) => fine.map((factor) => factor * 10 ** Math.round(power)))
        .filter((tick) => Math.log10(tick) >= low && Math.log10(tick) <= high).map((tick) => [tick, amount(tick)]);
      return { ticks, place: (value) => (Math.log10(value) - low) / (high - low) };
    }
    const margin = 0.08 * (high - low || Math.abs(high) || 1);
    [low, high] = values.length ? [low - margin, high + margin] : [0, 1];
    const rough = 10 ** Math.floor(Math.log10(high - low));
    const step = [0.2, 0.5, 1].map((part) => part * rough).find((each) => (high - low) / each <= 6) || rough;
    const ticks = this.multiples(low, high, step).map((tick) => [tick, amount(tick)]);
    return { ticks, place: (value) => (value - low) / (high - low) };
  }

  multiples(low, high, step) {
    const found = [];
    for (let each = Math.ceil(low / step - 1e-9); each <= high / step + 1e-9; each += 1) found.push(each * step);
    return found;
  }

  radius(parameters) {
    return Number.isFinite(parameters) ? Math.min(14, Math.max(3, 3 + 2.5 * (Math.log10(parameters) - 5))) : 4;
  }

  step(event) {
    const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!way || !this.points.length) return;
    event.preventDefault();
    this.choose(this.chosen < 0 ? (way > 0 ? 0 : this.points.length - 1)
      : (this.chosen + way + this.points.length) % this.points.length);
  }

  choose(index) {
    this.chosen = index;
    const point = this.points[index];
    if (this.ring) this.ring.setAttribute("r", point ? point.r + 3 : 0);
    const across = point && (this.shares ? `${percent(point.x)} % clean` : amount(point.x));
    this.said.textContent = "";
    if (!point) return;
    const interval = Number.isFinite(point.low) ? ` (${percent(point.low)}–${percent(point.high)})` : "";
    this.said.textContent = `${point.name}: ${across}, ${this.named} ${percent(point.y)} %${interval}.`;
    this.ring.setAttribute("cx", point.cx);
    this.ring.setAttribute("cy", point.cy);
  }

  csv() {
    const columns = this.heads.map((head, column) => ({ head, column })).filter(({ head }) => head.dataset.kind && !head.hidden);
    const last = this.heads.length - 2;
    const head = ["model", "data", "split", "preprocessing", "digest", "weights", "category", "parameters"];
    const category = this.heads.findIndex((each) => each.dataset.key === "category");
    for (const { head: { dataset: { name } } } of columns) head.push(name, `${name} low`, `${name} high`, `${name} n`, `${name} population`);
    const data = this.section.dataset;
    const lines = this.visible.map((row) => {
      const cells = [row.cells[0].dataset.value, data.data, data.split, data.preprocessing, data.digest, row.dataset.weights];
      cells.push(category < 0 ? "" : row.cells[category].dataset.value || "", row.cells[last].dataset.value || "");
      for (const { column } of columns) {
        const { value = "", low = "", high = "", n = "", population = "" } = row.cells[column].dataset;
        cells.push(...[value, low, high, n, population].map((each) => each === "nan" ? "" : each));
      }
      return cells;
    });
    return [head, ...lines];
  }
}

function quoted(cell) {
  const text = /^[=+\-@\t\r]/.test(cell) && !Number.isFinite(Number(cell)) ? `'${cell}` : String(cell);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const boards = [...document.querySelectorAll(".board")].map((section) => new Board(section));

function refresh() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const data = byId("data") ? byId("data").value : "", norm = byId("norm") ? byId("norm").value : "";
  boards.forEach((board, index) => {
    board.section.hidden = data !== "" && Number(data) !== index;
    board.filter(words, norm);
  });
  const shown = boards.filter((board) => !board.section.hidden);
  const count = shown.reduce((sum, board) => sum + board.visible.length, 0);
  byId("shown").textContent = `${count} of ${boards.reduce((sum, board) => sum + board.rows.length, 0)} models`;
}

byId("filter").addEventListener("input", refresh);
for (const id of ["data", "norm"]) if (byId(id)) byId(id).addEventListener("change", refresh);
byId("export").addEventListener("click", () => {
  const lines = boards.filter((board) => !board.section.hidden).flatMap((board) => board.csv());
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([lines.map((line) => line.map(quoted).join(",")).join("\n") + "\n"], { type: "text/csv" }));
  link.download = "leaderboard.csv";
  link.click();
  URL.revokeObjectURL(link.href);
});
document.querySelector(".tools").hidden = false;
refresh();
