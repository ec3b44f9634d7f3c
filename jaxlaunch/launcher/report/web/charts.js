"use strict";
// Curves by uPlot, and the strip of seconds by cause above them. Nothing here makes HTML of a text.

const CAUSES = {
  step: ["steps that count", "--c-step", "plain"],
  data: ["waiting for data", "--c-data", "dots"],
  eval: ["evaluation", "--c-eval", "vertical"],
  save: ["saving", "--c-save", "horizontal"],
  lost_work: ["lost work: steps that were not saved", "--c-lost", "cross"],
  compile: ["compiling", "--c-compile", "rising"],
  restore: ["restoring", "--c-restore", "falling"],
  init: ["starting processes", "--c-init", "falling"],
  prepare: ["preparing", "--c-init", "dots"],
  rendezvous: ["waiting for all hosts", "--c-init", "vertical"],
  down: ["down, or between attempts", "--c-down", "rising"],
  hung: ["hangs", "--c-hung", "cross"],
  waits: ["waits for the rank that hangs", "--c-init", "rising"],
};
const AXIS = 62; // CSS pixels of the values' axis: equal everywhere, so that what is above each other has one time axis
const RIGHT = 24; // beside the last label, half of which is beyond the end of its axis
const LINES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [12, 4], [4, 2]]; // dashes, since not everyone tells colours apart

const colors = new Map(); // of the scheme that the page is in: asked for once, since a chart has thousands of cells

function css(name) {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colors.get(name);
}

function forgetColors() {
  colors.clear();
  patterns.clear();
}

const causeOf = (name) => CAUSES[name] || [name, "--c-init", "plain"];

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value ?? "";
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
  // Other points of the same curves; where the reader has zoomed in, the section stays.
  update(data) {
    const { min, max } = this.plot.scales.x, x = this.plot.data[0];
    const isWhole = !x.length || (min <= x[0] && max >= x[x.length - 1]);
    this.plot.setData(data, isWhole);
    if (!isWhole) this.plot.redraw();
  }
  destroy() {
    this.observer.disconnect();
    this.plot.destroy();
  }
}

// Lines [{x, y}] as a chart takes them. x may differ: they are joined.
function joined(lines, isLog, ends = null) {
  const tables = lines.map((line) => [line.x, isLog ? line.y.map((v) => (v > 0 ? v : null)) : line.y]);
  if (ends) tables.push([ends, [null, null]]); // the whole axis, also where there is no point
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}

const FLAT = 0.05; // of a constant value are above and below it
const OUTLIERS = 8; // times the range of all but the outermost hundredths: a larger range shows its outliers only as lines that leave the frame

// The range of the values' axis, which leaves outliers out unless they are asked for.
function frameOf(data, from, to, isLog) {
  const values = [];
  for (const line of data.slice(1)) for (let at = from; at <= to; at++) if (line[at] !== null && line[at] !== undefined) values.push(line[at]);
  if (!values.length) return isLog ? [0.1, 1] : [0, 1]; // with no point there would be no axis, and none of a logarithm
  values.sort((a, b) => a - b);
  let [low, high] = [values[0], values[values.length - 1]];
  if (isLog) return [low / 1.5, high * 1.5];
  const [least, most] = [0.02, 0.98].map((share) => values[Math.round(share * (values.length - 1))]);
  if (!view.hasOutliers && values.length >= 50 && most > least && high - low > OUTLIERS * (most - least)) {
    [low, high] = [Math.max(low, least - (most - least)), Math.min(high, most + (most - least))];
  }
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low <= 1e-9 * size) return size === 0 ? [-1, 1] : [low - FLAT * size, high + FLAT * size]; // also a mean of equal values, which rounding alone tells apart
  const margin = FLAT * (high - low);
  return [low - margin, high + margin];
}

// The index of the point of a line that is nearest to an index of the joined x; null where the line has none.
function nearest(x, y, at) {
  const isPoint = (index) => y[index] !== null && y[index] !== undefined;
  let [before, after] = [at, at];
  while (before >= 0 && !isPoint(before)) before--;
  while (after < y.length && !isPoint(after)) after++;
  if (before < 0) return after < y.length ? after : null;
  return after < y.length && x[after] - x[at] < x[at] - x[before] ? after : before;
}

// Runs of one curve each: [{label, x, y}] on one pair of axes.
function lineChart(frame, lines, { label, height = 190, isLog = false, xLabel = "", ends = null, peers = [], readout = null }) {
  const data = joined(lines, isLog, ends);
  const frame_ = (u) => frameOf(u.data, u.series[0].idxs?.[0] ?? 0, u.series[0].idxs?.[1] ?? u.data[0].length - 1, isLog);
  const series = [...lines, ...(ends ? [{ label: "", x: ends, dash: [] }] : [])].map((line, at) => ({
    label: line.label,
    stroke: css(line.stroke || `--s${at % 6}`),
    width: line.isFaint ? 1 : 1.5,
    alpha: line.isFaint ? 0.35 : 1,
    dash: line.dash || LINES[at % LINES.length],
    points: { show: line.x.length < 3 },
    spanGaps: true,
  }));
  const tell = (u) => {
    const at = u.cursor.idx;
    if (!readout || at === null || at === undefined) return;
    const x = u.data[0];
    const found = lines.map((line, each) => {
      const point = nearest(x, u.data[each + 1], at);
      if (line.isFaint || point === null) return "";
      return `${line.label} ${short(u.data[each + 1][point])}${point === at ? "" : ` (at ${short(x[point])})`}`;
    });
    readout.textContent = `${short(u.data[0][at])} ${xLabel}: ${found.filter(Boolean).join(", ")}`;
  };
  const options = {
    height,
    padding: [10, RIGHT, 0, 0],
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, range: frame_ } },
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
function stripChart(frame, run, unit, { peers, readout }) {
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
    padding: [0, RIGHT, 0, 0],
    scales: { x: { time: false }, y: { range: [0, 1] } },
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
  context.textAlign = "left";
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

// One look at the ranks in cells: "s31d" and "0x31,5," as the leader keeps them.
function unpacked(column) {
  const letters = column[2].replace(/([a-z-])(\d+)/g, (_, letter, count) => letter.repeat(count));
  const lags = new Float64Array(letters.length);
  let at = 0;
  for (const [, lag, count] of column[3].matchAll(/(\d+)(?:x(\d+))?,/g)) lags.fill(Number(lag), at, (at += Number(count || 1)));
  return { from: column[0], to: column[1], letters, lags };
}

const ODD = ["h", "d", "x", "-"]; // of the ranks that share a pixel the one is shown that hangs, waits for data, or has ended

function phaseOf(heat, letter) {
  const phase = heat.letters[letter];
  if (phase === "done") return "done";
  return phase ? causeOf(phase)[0] : letter === "x" ? "ended" : "said nothing yet";
}

// The ranks that hung, are slow, were most behind, or were seen waiting for data while others were not.
function worstRanks(heat) {
  const found = [];
  for (const { letters, lags, from, to } of heat.columns.map(unpacked)) {
    const isAny = /d/.test(letters) && /[^d]/.test(letters);
    for (let rank = 0; rank < letters.length; rank++) {
      const one = (found[rank] ??= { rank, lag: 0, data: 0, letter: "", place: heat.hangs.find((hang) => hang.rank === rank)?.place ?? null, slow: heat.slow.find((one) => one.rank === rank) ?? null });
      one.lag = Math.max(one.lag, lags[rank] || 0);
      if (isAny && letters[rank] === "d") one.data += to - from;
      one.letter = letters[rank];
    }
  }
  const isHung = (one) => one.place !== null; // before all others: they wait for it
  const worst = found.filter((one) => isHung(one) || one.slow || one.lag > 1 || one.data > 0).sort((a, b) => isHung(b) - isHung(a) || (b.slow?.own ?? 0) - (a.slow?.own ?? 0) || b.lag - a.lag || b.data - a.data || a.rank - b.rank);
  return worst.slice(0, 10).map((one) => ({ ...one, last: isHung(one) ? `hung ${one.place}` : phaseOf(heat, one.letter) }));
}

// Ranks from top to bottom over the axis of the strip; `by` is "phase" or "lag".
function heatChart(frame, run, unit, { peers, by, readout, open }) {
  const heat = run.heat, columns = heat.columns.map(unpacked);
  const most = Math.max(1, ...columns.map((column) => column.lags.reduce((a, b) => Math.max(a, b), 0)));
  const at = { column: columns.length - 1, rank: 0, isShown: false };
  const every = Math.ceil(heat.ranks / 12), splits = [];
  for (let rank = 0; rank < heat.ranks; rank += every) splits.push(rank + 0.5);
  const hangAt = (one, rank) => heat.hangs.find((hang) => hang.rank === rank && hang.from < one.to && one.from < hang.to)?.place ?? "";
  const tell = () => {
    const one = columns[at.column];
    const lag = one.lags[at.rank] || 0;
    readout.textContent = at.rank < one.letters.length
      ? `Rank ${at.rank} at ${span(one.to)}: ${one.letters[at.rank] === "h" ? `hangs ${hangAt(one, at.rank)}` : phaseOf(heat, one.letters[at.rank])}, ${lag ? `${lag} step${lag > 1 ? "s" : ""} behind` : "not behind"}`
      : `Rank ${at.rank} at ${span(one.to)}: there was no such rank`;
  };
  const under = (u) => {
    const { left, top } = u.cursor;
    if (left === null || left === undefined || left < 0) return;
    const seconds = u.posToVal(left, "x") * unit;
    const found = columns.findIndex((column) => column.from <= seconds && seconds < column.to);
    if (found < 0) return void (readout.textContent = "");
    at.column = found;
    at.rank = Math.min(heat.ranks - 1, Math.max(0, Math.floor((top / u.over.clientHeight) * heat.ranks)));
    at.isShown = false;
    tell();
  };
  const options = {
    height: Math.min(320, Math.max(48, 14 * heat.ranks)) + 8,
    padding: [4, RIGHT, 4, 0],
    scales: { x: { time: false }, y: { range: [0, heat.ranks], dir: -1 } },
    axes: [{ show: false }, { ...axes((v) => String(Math.floor(v)), "")[1], grid: { show: false }, splits: () => splits }],
    series: [{}, { show: false }],
    cursor: { y: false, drag: { x: true, y: false } },
    hooks: { draw: [(u) => drawHeat(u, heat, columns, unit, { by, most, at })], setCursor: [under] },
  };
  frame.setAttribute("role", "img");
  frame.setAttribute("tabindex", "0");
  frame.setAttribute("aria-label", `${heat.ranks} ranks over the time of the run, by ${by === "lag" ? `steps behind, at most ${most}` : "phase"}; arrow keys move over them, Enter opens a rank's log`);
  const chart = new Chart(frame, options, [[0, run.wall_s / unit], [null, null]], peers);
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageUp: [0, -10], PageDown: [0, 10] };
  chart.key = (event) => {
    if (event.key === "Enter") return open(at.rank);
    const move = moves[event.key];
    if (!move) return Chart.prototype.key.call(chart, event);
    event.preventDefault();
    at.column = Math.min(columns.length - 1, Math.max(0, at.column + move[0]));
    at.rank = Math.min(heat.ranks - 1, Math.max(0, at.rank + move[1]));
    at.isShown = true;
    chart.plot.redraw(false);
    tell();
  };
  chart.plot.over.addEventListener("click", () => open(at.rank));
  peers.push(chart);
  return chart;
}

function drawHeat(u, heat, columns, unit, { by, most, at }) {
  const context = u.ctx, scale = devicePixelRatio || 1;
  const { left, top, width, height } = u.bbox;
  const rows = Math.min(heat.ranks, Math.max(1, Math.floor(height / (2 * scale)))), each = height / rows;
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  columns.forEach((column) => {
    const begin = Math.round(u.valToPos(column.from / unit, "x", true)); // whole pixels: no seams between cells
    const wide = Math.max(Math.round(u.valToPos(column.to / unit, "x", true)) - begin, 1);
    if (begin + wide < left || begin > left + width) return;
    const cellOf = (row) => {
      const first = Math.floor((row * heat.ranks) / rows), last = Math.max(first + 1, Math.floor(((row + 1) * heat.ranks) / rows));
      const letters = column.letters.slice(first, last);
      if (!letters) return null;
      return by === "lag" ? column.lags.slice(first, last).reduce((a, b) => Math.max(a, b), 0) : ODD.find((odd) => letters.includes(odd)) || letters[0];
    };
    for (let row = 0, cell = cellOf(0); row < rows; ) {
      const y = top + row * each, from = row;
      let next = null;
      for (row++; row < rows && (next = cellOf(row)) === cell; row++); // one rectangle of equal cells: there are many
      if (cell !== null) drawCell(context, heat, cell, { x: begin, y, wide, high: (row - from) * each, each }, { by, most, scale });
      cell = next;
    }
  });
  if (at.isShown) {
    const one = columns[at.column];
    context.strokeStyle = css("--ink");
    context.lineWidth = 2 * scale;
    const begin = u.valToPos(one.from / unit, "x", true);
    context.strokeRect(begin, top + (at.rank * height) / heat.ranks, Math.max(u.valToPos(one.to / unit, "x", true) - begin, 4 * scale), Math.max(height / heat.ranks, 4 * scale));
  }
  context.restore();
}

// Neighbours in a column that have the same lag, or the letter of the same phase; `each` is the height of one.
function drawCell(context, heat, cell, { x, y, wide, high, each }, { by, most, scale }) {
  if (by === "lag") {
    context.globalAlpha = cell ? 0.25 + (0.75 * Math.log1p(cell)) / Math.log1p(most) : 0.06;
    context.fillStyle = css(cell ? "--c-lost" : "--c-step");
  } else {
    const phase = heat.letters[cell];
    context.fillStyle = cell === "x" ? css("--c-down") : phase === "done" ? css("--c-step") : phase ? pattern(context, phase, scale) : css("--panel");
  }
  context.fillRect(x, y, wide, high);
  context.globalAlpha = 1;
  if (by !== "lag" || !cell || each < 12 * scale || wide < 18 * scale) return;
  for (let from = y; from < y + high - each / 2; from += each) label(context, String(cell), x + 3 * scale, from + each / 2, scale);
}

function label(context, text, x, y, scale) {
  context.fillStyle = css("--ink");
  context.font = `${11 * scale}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  context.fillText(text, x, y);
}
