"use strict";
// Curves by uPlot, and the strip of seconds by cause above them. Nothing here makes HTML of a text.

const CAUSES = {
  step: ["steps that count", "--c-step", "plain"],
  data: ["waiting for data", "--c-data", "dots"],
  eval: ["evaluation", "--c-eval", "vertical"],
  save: ["saving", "--c-save", "horizontal"],
  lost_work: ["lost work: steps that were done again", "--c-lost", "cross"],
  compile: ["compiling", "--c-compile", "rising"],
  restore: ["restoring", "--c-restore", "falling"],
  init: ["starting processes", "--c-init", "falling"],
  prepare: ["preparing", "--c-init", "dots"],
  rendezvous: ["waiting for all hosts", "--c-init", "vertical"],
  down: ["down, or between attempts", "--c-down", "rising"],
};
const AXIS = 62; // CSS pixels of the values' axis: equal everywhere, so that what is above each other has one time axis
const LINES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [12, 4], [4, 2]]; // dashes, since not everyone tells colours apart

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const causeOf = (name) => CAUSES[name] || [name, "--c-init", "plain"];

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${seconds.toFixed(2)} s`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = seconds / 60;
  if (minutes < 120) return `${Math.floor(minutes)} min ${Math.round(seconds % 60)} s`;
  return minutes < 2880 ? `${(minutes / 60).toFixed(1)} h` : `${(minutes / 1440).toFixed(1)} d`;
}

function unitOf(wall) {
  return wall < 180 ? [1, "seconds"] : wall < 10800 ? [60, "minutes"] : wall < 400000 ? [3600, "hours"] : [86400, "days"];
}

const patterns = new Map();

function pattern(context, cause, scale) {
  const [, color, kind] = causeOf(cause);
  const key = `${cause} ${scale} ${css("--paper")}`;
  if (!patterns.has(key)) {
    const size = Math.round(8 * scale);
    const tile = el("canvas", { width: size, height: size });
    const paint = tile.getContext("2d");
    paint.fillStyle = css(color);
    paint.fillRect(0, 0, size, size);
    paint.strokeStyle = paint.fillStyle = css("--pattern");
    paint.lineWidth = scale;
    paint.beginPath();
    if (kind === "vertical") (paint.moveTo(size / 2, 0), paint.lineTo(size / 2, size));
    if (kind === "horizontal") (paint.moveTo(0, size / 2), paint.lineTo(size, size / 2));
    if (kind === "rising" || kind === "cross") (paint.moveTo(0, size), paint.lineTo(size, 0));
    if (kind === "falling" || kind === "cross") (paint.moveTo(0, 0), paint.lineTo(size, size));
    paint.stroke();
    if (kind === "dots") paint.fillRect(size / 2 - scale, size / 2 - scale, 2 * scale, 2 * scale);
    patterns.set(key, context.createPattern(tile, "repeat"));
  }
  return patterns.get(key);
}

function swatch(cause) {
  const made = el("canvas", { width: 28, height: 14, "aria-hidden": "true" });
  const context = made.getContext("2d");
  context.fillStyle = pattern(context, cause, 1);
  context.fillRect(0, 0, 28, 14);
  return made;
}

function axes(valueFormat, xLabel) {
  const common = () => ({ stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } });
  return [
    { ...common(), size: xLabel ? 44 : 0, show: Boolean(xLabel), label: xLabel, labelSize: 16, labelFont: "12px system-ui", font: "12px system-ui" },
    { ...common(), size: AXIS, font: "12px system-ui", values: (u, splits) => splits.map((v) => (v === null ? "" : valueFormat(v))) },
  ];
}

// A chart in its frame: it takes the frame's width, zooms by dragging and by keys, and has its numbers as a table too.
class Chart {
  constructor(frame, options, data, peers) {
    this.frame = frame;
    this.peers = peers;
    const zoom = (u, key) => {
      if (key !== "x" || this.isFollowing) return;
      for (const peer of this.peers) if (peer !== this) peer.follow(u.scales.x.min, u.scales.x.max);
    };
    options.width = Math.max(200, frame.clientWidth);
    options.legend = { show: false };
    options.hooks = { ...(options.hooks || {}), setScale: [zoom] };
    this.plot = new uPlot(options, data, frame);
    this.height = options.height;
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(frame);
    frame.addEventListener("keydown", (event) => this.key(event));
  }
  fit() {
    const width = Math.max(200, this.frame.clientWidth);
    if (width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }
  follow(min, max) {
    this.isFollowing = true;
    this.plot.batch(() => this.plot.setScale("x", { min, max }));
    this.isFollowing = false;
  }
  key(event) {
    const { min, max } = this.plot.scales.x;
    const step = (max - min) / 4;
    const moves = { "+": [step, -step], "-": [-step, step], ArrowLeft: [-step, -step], ArrowRight: [step, step] };
    if (event.key === "0") this.plot.setData(this.plot.data, true);
    else if (moves[event.key]) this.plot.setScale("x", { min: min + moves[event.key][0], max: max + moves[event.key][1] });
    else return;
    event.preventDefault();
  }
  destroy() {
    this.observer.disconnect();
    this.plot.destroy();
  }
}

// Runs of one curve each: [{label, x, y}] on one pair of axes. x may differ: they are joined.
function lineChart(frame, lines, { label, height = 190, isLog = false, xLabel = "", range = null, peers = [], readout = null }) {
  const tables = lines.map((line) => [line.x, isLog ? line.y.map((v) => (v > 0 ? v : null)) : line.y]);
  const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
  const series = lines.map((line, at) => ({
    label: line.label,
    stroke: css(`--s${at % 6}`),
    width: line.isFaint ? 1 : 1.5,
    alpha: line.isFaint ? 0.35 : 1,
    dash: line.dash || LINES[at % LINES.length],
    points: { show: line.x.length < 3 },
    spanGaps: true,
  }));
  const tell = (u) => {
    const at = u.cursor.idx;
    if (!readout || at === null || at === undefined) return;
    const found = lines.map((line, each) => `${line.isFaint ? "" : `${line.label} ${short(u.data[each + 1][at])}`}`);
    readout.textContent = `${short(u.data[0][at])} ${xLabel}: ${found.filter(Boolean).join(", ")}`;
  };
  const options = {
    height,
    padding: [10, 8, 0, 0],
    scales: { x: { time: false, ...(range ? { range: () => range() } : {}) }, y: { distr: isLog ? 3 : 1 } },
    axes: axes(short, xLabel),
    series: [{}, ...series],
    cursor: { y: false, drag: { x: true, y: false } },
    hooks: { setCursor: [tell] },
  };
  frame.setAttribute("role", "img");
  frame.setAttribute("tabindex", "0");
  frame.setAttribute("aria-label", label);
  const chart = new Chart(frame, options, data, peers);
  peers.push(chart);
  return chart;
}

const TOP = 18, BOTTOM = 14; // CSS pixels above the strip for attempts, below it for marks

// The strip: run.strip, run.attempts and run.marks, on an axis in `unit` seconds.
function stripChart(frame, run, unit, { peers, readout, range }) {
  const tell = (u) => {
    const left = u.cursor.left;
    if (left === null || left === undefined || left < 0) return;
    const at = u.posToVal(left, "x") * unit;
    const found = run.strip.find(([from, to]) => from <= at && at < to);
    const attempt = run.attempts.find((one) => one.from <= at && at < one.to);
    const what = found ? `${causeOf(found[2])[0]}, ${span(found[1] - found[0])}` : "";
    readout.textContent = `${span(at)}: ${what}${attempt ? ` (attempt ${attempt.number})` : ""}`;
  };
  const options = {
    height: 92,
    padding: [0, 8, 0, 0],
    scales: { x: { time: false, range }, y: { range: [0, 1] } },
    axes: [{ show: false }, { ...axes(() => "", "")[1], grid: { show: false }, ticks: { show: false } }],
    series: [{}, { show: false }],
    cursor: { y: false, drag: { x: true, y: false } },
    hooks: { draw: [(u) => drawStrip(u, run, unit)], setCursor: [tell] },
  };
  frame.setAttribute("role", "img");
  frame.setAttribute("tabindex", "0");
  frame.setAttribute("aria-label", `Where ${span(run.wall_s)} went, by cause; the tables below have the same numbers`);
  const chart = new Chart(frame, options, [[0, run.wall_s / unit], [null, null]], peers);
  peers.push(chart);
  return chart;
}

function drawStrip(u, run, unit) {
  const context = u.ctx, scale = devicePixelRatio || 1;
  const { left, top, width, height } = u.bbox;
  const x = (seconds) => u.valToPos(seconds / unit, "x", true);
  const strip = { top: top + TOP * scale, height: height - (TOP + BOTTOM) * scale };
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  for (const [from, to, cause] of run.strip) {
    const begin = x(from), end = x(to);
    if (end < left || begin > left + width) continue;
    context.fillStyle = pattern(context, cause, scale);
    context.fillRect(begin, strip.top, Math.max(end - begin, 0.5), strip.height);
  }
  context.strokeStyle = css("--quiet");
  context.lineWidth = scale;
  context.strokeRect(x(0), strip.top, x(run.wall_s) - x(0), strip.height);
  drawAttempts(context, run, x, strip, scale, top);
  context.fillStyle = css("--quiet");
  const floor = strip.top + strip.height + 2 * scale, size = 4 * scale;
  for (const [at, kind] of run.marks) {
    const middle = x(at);
    context.beginPath();
    if (kind === "save") (context.moveTo(middle, floor), context.lineTo(middle - size, floor + 2 * size), context.lineTo(middle + size, floor + 2 * size));
    else context.arc(middle, floor + size, size * 0.8, 0, 7);
    context.closePath();
    if (kind === "save") context.fill();
    else (context.strokeStyle = css("--quiet"), context.stroke());
  }
  context.restore();
}

function drawAttempts(context, run, x, strip, scale, top) {
  context.font = `${12 * scale}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  let free = -Infinity; // where the next label fits
  for (const one of run.attempts) {
    const begin = x(one.from), end = x(one.to);
    context.strokeStyle = context.fillStyle = css("--ink");
    context.lineWidth = 1.5 * scale;
    context.beginPath();
    context.moveTo(begin, top + 3 * scale);
    context.lineTo(begin, strip.top + strip.height);
    context.stroke();
    const sign = one.code === 0 ? "✓" : one.code === null ? "…" : one.cause === "preempted" ? "■" : "✕";
    const words = [`${one.number} ${sign} ${one.cause}`, `${one.number} ${sign}`, `${one.number}`];
    const start = Math.max(begin + 4 * scale, free);
    const fits = words.find((word) => start + context.measureText(word).width < Math.max(end, begin + 14 * scale));
    if (fits) {
      context.fillText(fits, start, top + 9 * scale);
      free = start + context.measureText(fits).width + 6 * scale;
    }
  }
}
