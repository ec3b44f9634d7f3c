"use strict";
// Charts: curves, the timeline of a run by cause, and the phases of its ranks. They are drawn by
// uPlot. Texts are inserted as text nodes and never as HTML.

// The label, colour and pattern of each cause of time. Patterns tell causes apart without colours.
const CAUSES = {
  step: { label: "steps that count", color: "--c-step", pattern: "plain" },
  data: { label: "waiting for data", color: "--c-data", pattern: "dots" },
  eval: { label: "evaluation", color: "--c-eval", pattern: "vertical" },
  save: { label: "saving", color: "--c-save", pattern: "horizontal" },
  lost_work: { label: "lost work: steps that were not saved", color: "--c-lost", pattern: "cross" },
  compile: { label: "compiling", color: "--c-compile", pattern: "rising" },
  restore: { label: "restoring", color: "--c-restore", pattern: "falling" },
  init: { label: "starting processes", color: "--c-init", pattern: "falling" },
  prepare: { label: "preparing", color: "--c-init", pattern: "dots" },
  rendezvous: { label: "waiting for all hosts", color: "--c-init", pattern: "vertical" },
  down: { label: "down, or between attempts", color: "--c-down", pattern: "rising" },
  hung: { label: "hangs", color: "--c-hung", pattern: "cross" },
  waits: { label: "waits for the rank that hangs", color: "--c-init", pattern: "rising" },
};
// CSS pixels of the value axis. It is equal in all charts, so that their time axes are aligned.
const AXIS_WIDTH = 62;
// CSS pixels to the right of a chart. Half of the last label of the x axis is beyond the end of the
// axis.
const RIGHT_PADDING = 24;
// Dash patterns of curves, for readers who cannot tell colours apart.
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [12, 4], [4, 2]];

// The values of CSS variables in the current colour scheme. They are cached, because a chart has
// thousands of cells.
const colors = new Map();

function cssVariable(name) {
  if (!colors.has(name))
    colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colors.get(name);
}

function forgetColors() {
  colors.clear();
  patterns.clear();
}

const causeStyle = (name) => CAUSES[name] || { label: name, color: "--c-init", pattern: "plain" };

// Creates an HTML element. Keys such as "onclick" are event listeners, and empty children are left
// out.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value ?? "";
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(key, value === true ? "" : value);
  }
  node.append(
    ...children.filter((child) => child !== null && child !== undefined && child !== false),
  );
  return node;
}

function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function formatSpan(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${seconds.toFixed(2)} s`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = seconds / 60;
  if (minutes < 120) return `${Math.floor(minutes)} min ${Math.round(seconds % 60)} s`;
  return minutes < 2880 ? `${(minutes / 60).toFixed(1)} h` : `${(minutes / 1440).toFixed(1)} d`;
}

// Returns the unit of the time axis in seconds, and its name.
function timeUnit(wallSeconds) {
  if (wallSeconds < 180) return [1, "seconds"];
  if (wallSeconds < 10800) return [60, "minutes"];
  return wallSeconds < 400000 ? [3600, "hours"] : [86400, "days"];
}

const patterns = new Map();

// Returns the fill style of a cause. `scale` is the number of device pixels per CSS pixel.
function fillPattern(context, cause, scale) {
  const { color, pattern } = causeStyle(cause);
  const key = `${cause} ${scale} ${cssVariable("--paper")}`;
  if (!patterns.has(key)) {
    const size = Math.round(8 * scale);
    const tile = el("canvas", { width: size, height: size });
    const paint = tile.getContext("2d");
    paint.fillStyle = cssVariable(color);
    paint.fillRect(0, 0, size, size);
    paint.strokeStyle = paint.fillStyle = cssVariable("--pattern");
    paint.lineWidth = scale;
    paint.beginPath();
    if (pattern === "vertical") (paint.moveTo(size / 2, 0), paint.lineTo(size / 2, size));
    if (pattern === "horizontal") (paint.moveTo(0, size / 2), paint.lineTo(size, size / 2));
    if (pattern === "rising" || pattern === "cross") (paint.moveTo(0, size), paint.lineTo(size, 0));
    if (pattern === "falling" || pattern === "cross")
      (paint.moveTo(0, 0), paint.lineTo(size, size));
    paint.stroke();
    if (pattern === "dots")
      paint.fillRect(size / 2 - scale, size / 2 - scale, 2 * scale, 2 * scale);
    patterns.set(key, context.createPattern(tile, "repeat"));
  }
  return patterns.get(key);
}

function swatch(cause) {
  const canvas = el("canvas", { width: 28, height: 14, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  context.fillStyle = fillPattern(context, cause, 1);
  context.fillRect(0, 0, 28, 14);
  return canvas;
}

// Returns the options of the x axis, which is hidden without a label, and of the value axis.
function makeAxes(formatValue, xLabel) {
  const common = () => ({
    stroke: cssVariable("--quiet"),
    grid: { stroke: cssVariable("--line"), width: 1 },
    ticks: { stroke: cssVariable("--line"), width: 1 },
  });
  return [
    {
      ...common(),
      size: xLabel ? 44 : 0,
      show: Boolean(xLabel),
      label: xLabel,
      labelSize: 16,
      labelFont: "12px system-ui",
      font: "12px system-ui",
    },
    {
      ...common(),
      size: AXIS_WIDTH,
      font: "12px system-ui",
      values: (u, splits) => splits.map((v) => (v === null ? "" : formatValue(v))),
    },
  ];
}

// A chart in a frame element. It has the width of the frame, and the x axis zooms by dragging and
// by keys. Charts that are `peers` zoom together.
class Chart {
  constructor(frame, options, data, peers) {
    this.frame = frame;
    this.peers = peers;
    const zoomPeers = (u, key) => {
      if (key !== "x" || this.isFollowing) return;
      for (const peer of this.peers)
        if (peer !== this) peer.followZoom(u.scales.x.min, u.scales.x.max);
    };
    options.width = Math.max(200, frame.clientWidth);
    options.legend = { show: false };
    options.hooks = { ...(options.hooks || {}), setScale: [zoomPeers] };
    this.plot = new uPlot(options, data, frame);
    this.height = options.height;
    this.observer = new ResizeObserver(() => this.fitWidth());
    this.observer.observe(frame);
    frame.addEventListener("keydown", (event) => this.handleKey(event));
  }
  fitWidth() {
    const width = Math.max(200, this.frame.clientWidth);
    if (width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }
  followZoom(min, max) {
    this.isFollowing = true;
    this.plot.batch(() => this.plot.setScale("x", { min, max }));
    this.isFollowing = false;
  }
  handleKey(event) {
    const { min, max } = this.plot.scales.x;
    const step = (max - min) / 4;
    // The changes of the lower and the upper end of the axis.
    const moves = {
      "+": [step, -step],
      "-": [-step, step],
      ArrowLeft: [-step, -step],
      ArrowRight: [step, step],
    };
    if (event.key === "0") this.plot.setData(this.plot.data, true);
    else if (moves[event.key])
      this.plot.setScale("x", { min: min + moves[event.key][0], max: max + moves[event.key][1] });
    else return;
    event.preventDefault();
  }
  // Shows new points of the same curves. If the reader has zoomed in, the section stays.
  update(data) {
    const { min, max } = this.plot.scales.x;
    const x = this.plot.data[0];
    const isWhole = !x.length || (min <= x[0] && max >= x[x.length - 1]);
    this.plot.setData(data, isWhole);
    if (!isWhole) this.plot.redraw();
  }
  destroy() {
    this.observer.disconnect();
    this.plot.destroy();
  }
}

// Returns lines [{x, y}] as uPlot takes them, with one x axis for all. `ends` are the ends of that
// axis.
function joinLines(lines, isLog, ends = null) {
  const tables = lines.map((line) => [
    line.x,
    isLog ? line.y.map((v) => (v > 0 ? v : null)) : line.y,
  ]);
  if (ends) tables.push([ends, [null, null]]);
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}

// The margin above and below the values of a chart, as a share of their range.
const VALUE_MARGIN = 0.05;
// Values are outliers if the range of all values exceeds that of the middle 96 % by this factor.
// They leave the frame.
const OUTLIER_FACTOR = 8;

// Returns the range of the value axis for the points `from` to `to`, without outliers unless the
// reader wants them.
function valueRange(data, from, to, isLog) {
  const values = [];
  for (const line of data.slice(1))
    for (let index = from; index <= to; index++)
      if (line[index] !== null && line[index] !== undefined) values.push(line[index]);
  // uPlot draws no axis without a range, and a logarithmic one needs positive ends.
  if (!values.length) return isLog ? [0.1, 1] : [0, 1];
  values.sort((a, b) => a - b);
  let [low, high] = [values[0], values[values.length - 1]];
  if (isLog) return [low / 1.5, high * 1.5];
  const [innerLow, innerHigh] = [0.02, 0.98].map(
    (share) => values[Math.round(share * (values.length - 1))],
  );
  const innerSize = innerHigh - innerLow;
  if (
    !view.hasOutliers &&
    values.length >= 50 &&
    innerSize > 0 &&
    high - low > OUTLIER_FACTOR * innerSize
  ) {
    [low, high] = [Math.max(low, innerLow - innerSize), Math.min(high, innerHigh + innerSize)];
  }
  const size = Math.max(Math.abs(low), Math.abs(high));
  // Means of equal values may differ by rounding.
  if (high - low <= 1e-9 * size)
    return size === 0 ? [-1, 1] : [low - VALUE_MARGIN * size, high + VALUE_MARGIN * size];
  const margin = VALUE_MARGIN * (high - low);
  return [low - margin, high + margin];
}

// Hides values of a logarithmic axis, so that the others have room. Of few powers of ten it shows 1,
// 2 and 5 times each, and otherwise the powers.
function hideLogSplits(u, splits) {
  const shown = splits[splits.length - 1] / splits[0] < 1000 ? "125" : "1";
  return splits.map((value) => (shown.includes(value.toExponential()[0]) ? value : null));
}

// Returns the index of the point of a line that is nearest to index `at` of the joined x axis, or
// null without a point.
function nearestPoint(x, y, at) {
  const isPoint = (index) => y[index] !== null && y[index] !== undefined;
  let [before, after] = [at, at];
  while (before >= 0 && !isPoint(before)) before--;
  while (after < y.length && !isPoint(after)) after++;
  if (before < 0) return after < y.length ? after : null;
  return after < y.length && x[after] - x[at] < x[at] - x[before] ? after : before;
}

// Draws lines [{label, x, y}] on one pair of axes.
function lineChart(
  frame,
  lines,
  { label, height = 190, isLog = false, xLabel = "", ends = null, peers = [], readout = null },
) {
  const data = joinLines(lines, isLog, ends);
  const axes = makeAxes(formatNumber, xLabel);
  if (isLog) axes[1].filter = hideLogSplits;
  const range = (u) =>
    valueRange(
      u.data,
      u.series[0].idxs?.[0] ?? 0,
      u.series[0].idxs?.[1] ?? u.data[0].length - 1,
      isLog,
    );
  const series = [...lines, ...(ends ? [{ label: "", x: ends, dash: [] }] : [])].map(
    (line, index) => ({
      label: line.label,
      stroke: cssVariable(line.stroke || `--s${index % 6}`),
      width: line.isFaint ? 1 : 1.5,
      alpha: line.isFaint ? 0.35 : 1,
      dash: line.dash || DASHES[index % DASHES.length],
      points: { show: line.x.length < 3 },
      spanGaps: true,
    }),
  );
  const showReadout = (u) => {
    const at = u.cursor.idx;
    if (!readout || at === null || at === undefined) return;
    const x = u.data[0];
    const values = lines.map((line, index) => {
      const y = u.data[index + 1];
      const point = nearestPoint(x, y, at);
      if (line.isFaint || point === null) return "";
      return `${line.label} ${formatNumber(y[point])}${point === at ? "" : ` (at ${formatNumber(x[point])})`}`;
    });
    readout.textContent = `${formatNumber(x[at])} ${xLabel}: ${values.filter(Boolean).join(", ")}`;
  };
  const options = {
    height,
    padding: [10, RIGHT_PADDING, 0, 0],
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, range } },
    axes,
    series: [{}, ...series],
    cursor: { y: false, drag: { x: true, y: false } },
    hooks: { setCursor: [showReadout] },
  };
  frame.setAttribute("role", "img");
  frame.setAttribute("tabindex", "0");
  frame.setAttribute("aria-label", label);
  const chart = new Chart(frame, options, data, peers);
  peers.push(chart);
  return chart;
}

// CSS pixels of a line of text above the strip, and below the strip for the marks.
const LABEL_LINE = 14;
const STRIP_BOTTOM = 14;
// Ends of attempts in the text that stands for the strip.
const MAX_SPOKEN_ENDS = 20;

const listEnds = (run) => run.attempts.filter(({ end }) => end.length);
// CSS pixels above the strip, for three lines about the end of an attempt.
const stripTop = (run) => 4 + (listEnds(run).length ? 3 : 0) * LABEL_LINE;

// Draws the seconds of a run by cause as a strip, with the ends of its attempts above and its marks
// below.
// `unit` is in seconds.
function stripChart(frame, run, unit, { peers, readout }) {
  const showReadout = (u) => {
    const left = u.cursor.left;
    if (left === null || left === undefined || left < 0) return;
    const seconds = u.posToVal(left, "x") * unit;
    const segment = run.strip.find(([from, to]) => from <= seconds && seconds < to);
    const attempt = run.attempts.find(({ from, to }) => from <= seconds && seconds < to);
    const text = segment
      ? `${causeStyle(segment[2]).label}, ${formatSpan(segment[1] - segment[0])}`
      : "";
    readout.textContent = `${formatSpan(seconds)}: ${text}${attempt ? ` (attempt ${attempt.number})` : ""}`;
  };
  const options = {
    height: 74 + stripTop(run),
    padding: [0, RIGHT_PADDING, 0, 0],
    scales: { x: { time: false }, y: { range: [0, 1] } },
    axes: [
      { show: false },
      { ...makeAxes(() => "", "")[1], grid: { show: false }, ticks: { show: false } },
    ],
    series: [{}, { show: false }],
    cursor: { y: false, drag: { x: true, y: false } },
    hooks: { draw: [(u) => drawStrip(u, run, unit)], setCursor: [showReadout] },
  };
  frame.setAttribute("role", "img");
  frame.setAttribute("tabindex", "0");
  frame.setAttribute(
    "aria-label",
    [
      `Where ${formatSpan(run.wall_s)} went, by cause; the tables below have the same numbers`,
      ...listEnds(run).slice(0, MAX_SPOKEN_ENDS).map(({ to, end }) => `at ${formatSpan(to)} ${end.join(", ")}`),
    ].join("; "),
  );
  const chart = new Chart(
    frame,
    options,
    [
      [0, run.wall_s / unit],
      [null, null],
    ],
    peers,
  );
  peers.push(chart);
  return chart;
}

function drawStrip(u, run, unit) {
  const context = u.ctx;
  const scale = devicePixelRatio || 1;
  const { left, top, width, height } = u.bbox;
  const x = (seconds) => u.valToPos(seconds / unit, "x", true);
  const strip = {
    top: top + stripTop(run) * scale,
    height: height - (stripTop(run) + STRIP_BOTTOM) * scale,
  };
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  for (const [from, to, cause] of run.strip) {
    const begin = x(from);
    const end = x(to);
    if (end < left || begin > left + width) continue;
    context.fillStyle = fillPattern(context, cause, scale);
    context.fillRect(begin, strip.top, Math.max(end - begin, 0.5), strip.height);
  }
  context.strokeStyle = cssVariable("--quiet");
  context.lineWidth = scale;
  context.strokeRect(x(0), strip.top, x(run.wall_s) - x(0), strip.height);
  context.fillStyle = cssVariable("--quiet");
  const floor = strip.top + strip.height + 2 * scale;
  const size = 4 * scale;
  for (const [at, kind] of run.marks) {
    const middle = x(at);
    context.beginPath();
    if (kind === "save") {
      context.moveTo(middle, floor);
      context.lineTo(middle - size, floor + 2 * size);
      context.lineTo(middle + size, floor + 2 * size);
      context.closePath();
      context.fill();
    } else {
      context.arc(middle, floor + size, size * 0.8, 0, 7);
      context.closePath();
      context.strokeStyle = cssVariable("--quiet");
      context.stroke();
    }
  }
  context.restore();
  drawEnds(context, run, x, strip, scale, u.bbox);
}

// Draws a line at the end of each attempt that failed or was stopped, with the cause, the seconds
// that it cost, and the step from which the next attempt resumed.
function drawEnds(context, run, x, strip, scale, { left, top, width: axisWidth }) {
  context.font = `${12 * scale}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.lineWidth = 1.5 * scale;
  const isVisible = ({ to }) => left <= x(to) && x(to) <= left + axisWidth;
  const ends = listEnds(run).filter(isVisible);
  const gap = 4 * scale;
  const outerEnd = left + axisWidth + RIGHT_PADDING * scale;
  // The position after the last label.
  let free = left;
  ends.forEach(({ to, end, cause }, index) => {
    const sign = ["preempted", "interrupted"].includes(cause) ? "■" : "✕";
    const at = x(to);
    const limit = index + 1 < ends.length ? x(ends[index + 1].to) : outerEnd;
    context.strokeStyle = context.fillStyle = cssVariable("--ink");
    context.beginPath();
    context.moveTo(at, top + 3 * scale);
    context.lineTo(at, strip.top + strip.height);
    context.stroke();
    // The longest of these labels that fits is drawn, to the right of its line or to the left.
    const [first, ...rest] = [`${sign} ${end[0]}`, ...end.slice(1)];
    const labels = [[[first, ...rest].join(", ")], [first, ...rest], [first], [sign]];
    for (const lines of labels) {
      const width = Math.max(...lines.map((line) => context.measureText(line).width));
      const begin = [Math.max(at + gap, free), at - gap - width].find(
        (start, side) => start >= free && start + width <= (side ? at : limit),
      );
      if (begin === undefined) continue;
      lines.forEach((line, row) => {
        const above = lines.length - row - 1;
        context.fillText(line, begin, strip.top - (9 + above * LABEL_LINE) * scale);
      });
      free = Math.max(at, begin + width) + gap;
      break;
    }
  });
}

// Decodes a sample of the ranks: run-length encoded letters such as "s31d", and lags such as
// "0x31,5,".
function decodeColumn(column) {
  const letters = column[2].replace(/([a-z-])(\d+)/g, (_, letter, count) => letter.repeat(count));
  const lags = new Float64Array(letters.length);
  let rank = 0;
  for (const [, lag, count] of column[3].matchAll(/(\d+)(?:x(\d+))?,/g))
    lags.fill(Number(lag), rank, (rank += Number(count || 1)));
  return { from: column[0], to: column[1], letters, lags };
}

// If several ranks share a pixel, one that hangs is shown, else one that waits for data, or that
// has ended.
const LETTERS_BY_PRIORITY = ["h", "d", "x", "-"];

function phaseLabel(heat, letter) {
  const phase = heat.letters[letter];
  if (phase === "done") return "done";
  if (phase) return causeStyle(phase).label;
  return letter === "x" ? "ended" : "said nothing yet";
}

// Returns the ranks that hung, are slow, fell behind, or waited for data while others did not. The
// worst are first.
function worstRanks(heat) {
  const ranks = [];
  for (const { letters, lags, from, to } of heat.columns.map(decodeColumn)) {
    const someWaitForData = /d/.test(letters) && /[^d]/.test(letters);
    for (let rank = 0; rank < letters.length; rank++) {
      const entry = (ranks[rank] ??= {
        rank,
        lag: 0,
        data: 0,
        letter: "",
        place: heat.hangs.find((hang) => hang.rank === rank)?.place ?? null,
        slow: heat.slow.find((slow) => slow.rank === rank) ?? null,
      });
      entry.lag = Math.max(entry.lag, lags[rank] || 0);
      if (someWaitForData && letters[rank] === "d") entry.data += to - from;
      entry.letter = letters[rank];
    }
  }
  const isHung = (entry) => entry.place !== null;
  // The other ranks wait for one that hangs.
  const compare = (a, b) =>
    isHung(b) - isHung(a) ||
    (b.slow?.own ?? 0) - (a.slow?.own ?? 0) ||
    b.lag - a.lag ||
    b.data - a.data ||
    a.rank - b.rank;
  const worst = ranks
    .filter((entry) => isHung(entry) || entry.slow || entry.lag > 1 || entry.data > 0)
    .sort(compare);
  return worst.slice(0, 10).map((entry) => ({
    ...entry,
    last: isHung(entry) ? `hung ${entry.place}` : phaseLabel(heat, entry.letter),
  }));
}

// Draws the ranks from top to bottom over the axis of the strip, by "phase" or by "lag". `openLog`
// shows a rank's log.
function heatChart(frame, run, unit, { peers, by, readout, openLog }) {
  const heat = run.heat;
  const columns = heat.columns.map(decodeColumn);
  const maxLag = Math.max(
    1,
    ...columns.map((column) => column.lags.reduce((a, b) => Math.max(a, b), 0)),
  );
  // The cell that the readout describes. It has a frame if it was chosen by keys.
  const cursor = { column: columns.length - 1, rank: 0, isFramed: false };
  const labelEvery = Math.ceil(heat.ranks / 12);
  const splits = [];
  for (let rank = 0; rank < heat.ranks; rank += labelEvery) splits.push(rank + 0.5);
  const hangPlace = (column, rank) =>
    heat.hangs.find((hang) => hang.rank === rank && hang.from < column.to && column.from < hang.to)
      ?.place ?? "";
  const describeCell = (column, rank) => {
    if (rank >= column.letters.length) return "there was no such rank";
    const letter = column.letters[rank];
    const lag = column.lags[rank] || 0;
    const phase = letter === "h" ? `hangs ${hangPlace(column, rank)}` : phaseLabel(heat, letter);
    if (!heat.has_lag) return phase;
    return `${phase}, ${lag ? `${lag} step${lag > 1 ? "s" : ""} behind` : "not behind"}`;
  };
  const showReadout = () => {
    const column = columns[cursor.column];
    readout.textContent = `Rank ${cursor.rank} at ${formatSpan(column.to)}: ${describeCell(column, cursor.rank)}`;
  };
  const followPointer = (u) => {
    const { left, top } = u.cursor;
    if (left === null || left === undefined || left < 0) return;
    const seconds = u.posToVal(left, "x") * unit;
    const index = columns.findIndex((column) => column.from <= seconds && seconds < column.to);
    if (index < 0) return void (readout.textContent = "");
    cursor.column = index;
    cursor.rank = Math.min(
      heat.ranks - 1,
      Math.max(0, Math.floor((top / u.over.clientHeight) * heat.ranks)),
    );
    cursor.isFramed = false;
    showReadout();
  };
  const options = {
    height: Math.min(320, Math.max(48, 14 * heat.ranks)) + 8,
    padding: [4, RIGHT_PADDING, 4, 0],
    scales: { x: { time: false }, y: { range: [0, heat.ranks], dir: -1 } },
    axes: [
      { show: false },
      {
        ...makeAxes((v) => String(Math.floor(v)), "")[1],
        grid: { show: false },
        splits: () => splits,
      },
    ],
    series: [{}, { show: false }],
    cursor: { y: false, drag: { x: true, y: false } },
    hooks: {
      draw: [(u) => drawHeat(u, heat, columns, unit, { by, maxLag, cursor })],
      setCursor: [followPointer],
    },
  };
  frame.setAttribute("role", "img");
  frame.setAttribute("tabindex", "0");
  frame.setAttribute(
    "aria-label",
    `${heat.ranks} ranks over the time of the run, by ${by === "lag" ? `steps behind, at most ${maxLag}` : "phase"}; arrow keys move over them, Enter opens a rank's log`,
  );
  const chart = new Chart(
    frame,
    options,
    [
      [0, run.wall_s / unit],
      [null, null],
    ],
    peers,
  );
  const moves = {
    ArrowLeft: [-1, 0],
    ArrowRight: [1, 0],
    ArrowUp: [0, -1],
    ArrowDown: [0, 1],
    PageUp: [0, -10],
    PageDown: [0, 10],
  };
  chart.handleKey = (event) => {
    if (event.key === "Enter") return openLog(cursor.rank);
    const move = moves[event.key];
    if (!move) return Chart.prototype.handleKey.call(chart, event);
    event.preventDefault();
    cursor.column = Math.min(columns.length - 1, Math.max(0, cursor.column + move[0]));
    cursor.rank = Math.min(heat.ranks - 1, Math.max(0, cursor.rank + move[1]));
    cursor.isFramed = true;
    chart.plot.redraw(false);
    showReadout();
  };
  chart.plot.over.addEventListener("click", () => openLog(cursor.rank));
  peers.push(chart);
  return chart;
}

function drawHeat(u, heat, columns, unit, { by, maxLag, cursor }) {
  const context = u.ctx;
  const scale = devicePixelRatio || 1;
  const { left, top, width, height } = u.bbox;
  // Ranks share a row if there are more than the pixels can show.
  const rows = Math.min(heat.ranks, Math.max(1, Math.floor(height / (2 * scale))));
  const rowHeight = height / rows;
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  columns.forEach((column) => {
    // Whole pixels leave no seams between cells.
    const x = Math.round(u.valToPos(column.from / unit, "x", true));
    const cellWidth = Math.max(Math.round(u.valToPos(column.to / unit, "x", true)) - x, 1);
    if (x + cellWidth < left || x > left + width) return;
    const cellValue = (row) => {
      const first = Math.floor((row * heat.ranks) / rows);
      const last = Math.max(first + 1, Math.floor(((row + 1) * heat.ranks) / rows));
      const letters = column.letters.slice(first, last);
      if (!letters) return null;
      if (by === "lag") return column.lags.slice(first, last).reduce((a, b) => Math.max(a, b), 0);
      return LETTERS_BY_PRIORITY.find((letter) => letters.includes(letter)) || letters[0];
    };
    // Equal neighbours are drawn as one rectangle, because there are many cells.
    for (let row = 0, value = cellValue(0); row < rows;) {
      const firstRow = row;
      let next = null;
      for (row++; row < rows && (next = cellValue(row)) === value; row++);
      const cell = {
        x,
        y: top + firstRow * rowHeight,
        width: cellWidth,
        height: (row - firstRow) * rowHeight,
        rowHeight,
      };
      if (value !== null) drawCell(context, heat, value, cell, { by, maxLag, scale });
      value = next;
    }
  });
  if (cursor.isFramed) {
    const column = columns[cursor.column];
    context.strokeStyle = cssVariable("--ink");
    context.lineWidth = 2 * scale;
    const begin = u.valToPos(column.from / unit, "x", true);
    const end = u.valToPos(column.to / unit, "x", true);
    const rankHeight = height / heat.ranks;
    context.strokeRect(
      begin,
      top + cursor.rank * rankHeight,
      Math.max(end - begin, 4 * scale),
      Math.max(rankHeight, 4 * scale),
    );
  }
  context.restore();
}

// Draws neighbouring cells of a column that have the same value, which is a lag or the letter of a
// phase.
function drawCell(context, heat, value, { x, y, width, height, rowHeight }, { by, maxLag, scale }) {
  if (by === "lag") {
    context.globalAlpha = value ? 0.25 + (0.75 * Math.log1p(value)) / Math.log1p(maxLag) : 0.06;
    context.fillStyle = cssVariable(value ? "--c-lost" : "--c-step");
  } else {
    const phase = heat.letters[value];
    context.fillStyle =
      value === "x"
        ? cssVariable("--c-down")
        : phase === "done"
          ? cssVariable("--c-step")
          : phase
            ? fillPattern(context, phase, scale)
            : cssVariable("--panel");
  }
  context.fillRect(x, y, width, height);
  context.globalAlpha = 1;
  if (by !== "lag" || !value || rowHeight < 12 * scale || width < 18 * scale) return;
  context.fillStyle = cssVariable("--ink");
  context.font = `${11 * scale}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  for (let rowTop = y; rowTop < y + height - rowHeight / 2; rowTop += rowHeight) {
    context.fillText(String(value), x + 3 * scale, rowTop + rowHeight / 2);
  }
}
