"use strict";
// The page of a sweep: its runs, the best first, their curves, and the metric against each swept
// key.

// Returns a small curve for a row of a table.
function sparkline(values, label) {
  if (!values || values.length < 2) return "";
  const low = Math.min(...values);
  const size = Math.max(...values) / 2 - low / 2 || 1;
  const points = values.map(
    (value, index) =>
      `${((80 * index) / (values.length - 1)).toFixed(1)},${(18 - 16 * ((value / 2 - low / 2) / size)).toFixed(1)}`,
  );
  return svgElement(
    "svg",
    {
      viewBox: "0 0 80 20",
      width: 80,
      height: 20,
      class: "spark",
      role: "img",
      "aria-label": label,
    },
    svgElement("polyline", { points: points.join(" ") }),
  );
}

// Draws points without a line. Values that are not numbers are at equal distances, in alphabetical
// order.
function scatterChart(frame, points, { label, xLabel, yLabel, isLog: isLogY }) {
  const numbers = points.map((point) => Number(point.x));
  const isNumeric = points.every(
    (point, index) => point.x !== "" && Number.isFinite(numbers[index]),
  );
  const names = [...new Set(points.map((point) => point.x))].sort();
  const positions = points
    .map((point, index) => [isNumeric ? numbers[index] : names.indexOf(point.x), point.y])
    .sort((a, b) => a[0] - b[0]);
  const xs = positions.map(([x]) => x);
  const low = xs[0];
  const high = xs[xs.length - 1];
  const isLog = isNumeric && low > 0 && high / low >= 20;
  const margin = isLog ? 1.3 : (high - low || 1) * 0.06;
  const [xAxis, yAxis] = makeAxes(formatNumber, xLabel);
  xAxis.values = (u, splits) =>
    splits.map((value) =>
      isNumeric ? (value === null ? "" : formatNumber(value)) : (names[value] ?? ""),
    );
  if (!isNumeric) xAxis.splits = () => names.map((_, index) => index);
  const options = {
    height: 210,
    padding: [10, 14, 0, 0],
    axes: [xAxis, yAxis],
    scales: {
      x: {
        time: false,
        distr: isLog ? 3 : 1,
        range: () => (isLog ? [low / margin, high * margin] : [low - margin, high + margin]),
      },
      y: { distr: isLogY ? 3 : 1 },
    },
    series: [
      {},
      {
        label: yLabel,
        stroke: cssVariable("--s0"),
        paths: () => null,
        points: { show: true, size: 8, fill: cssVariable("--s0") },
      },
    ],
    cursor: { y: false, drag: { x: true, y: false } },
  };
  frame.setAttribute("role", "img");
  frame.setAttribute("tabindex", "0");
  frame.setAttribute("aria-label", label);
  return new Chart(frame, options, [xs, positions.map(([, y]) => y)], []);
}

// On a linear axis, such values would be one high point above a line at the bottom.
const differsWidely = (values) =>
  values.every((value) => value > 0) && Math.max(...values) / Math.min(...values) >= 30;

function countStates(runs) {
  const counts = {};
  for (const run of runs) counts[run.state] = (counts[run.state] || 0) + 1;
  return Object.entries(counts)
    .map(([state, count]) => `${count} ${state}`)
    .join(", ");
}

const changesText = (run) =>
  Object.entries(run.changes)
    .map(([key, value]) => `${key}=${value}`)
    .join(" ");

// Returns the changes as an element in which a line breaks only between two of them.
const changesCell = (run) =>
  el(
    "div",
    { class: "quiet" },
    ...Object.entries(run.changes).flatMap(([key, value]) => [
      el("span", { class: "pair" }, `${key}=${value}`),
      " ",
    ]),
  );

// Returns the runs that have the metric, in the order of their names, so that each keeps its line.
const measuredRuns = (data) =>
  data.runs.filter((run) => run.value !== null).sort((a, b) => (a.name < b.name ? -1 : 1));

// Returns the sentence about all runs, and their table.
function renderSweepRuns(data) {
  const measured = measuredRuns(data);
  const best = data.runs.find((run) => run.value !== null && run.state === "done");
  const states = `${data.runs.length} runs: ${countStates(data.runs)}.`;
  const text = best
    ? `${states} The best that is done is ${best.name}: ${data.metric} ${formatNumber(best.value)} with ${changesText(best)}.`
    : `${states} No run that is done has ${data.metric}.`;
  const nameCell = (run) =>
    el(
      "td",
      {},
      run.curve ? lineSample(measured.indexOf(run)) : null,
      " ",
      run.page ? el("a", { href: run.page }, run.name) : run.name,
    );
  const rows = data.runs.map((run) =>
    tableRow(
      nameCell(run),
      el("td", {}, stateBadge(run.state)),
      numberCell(formatNumber(run.value)),
      ...data.keys.map((key) => numberCell(run.changes[key] ?? "–")),
      numberCell(run.steps ? `${run.step ?? 0} / ${run.steps}` : `${run.step ?? "–"}`),
      numberCell(formatSpan(run.duration_s)),
      el("td", { class: "why" }, run.state === "done" ? "" : run.why),
    ),
  );
  const numberHeads = [data.metric, ...data.keys, "Step", "Duration"].map((head) => `#${head}`);
  const first = data.mode === "max" ? "highest" : "lowest";
  return [
    el("p", { class: `sentence is-${best ? "done" : "running"}` }, text),
    ...section(
      "runs",
      `Runs, the ${first} ${data.metric} first`,
      makeTable(["Run", "State", ...numberHeads, "Why"], rows, "Runs"),
    ),
  ];
}

// Draws the curves of the runs and the metric by each key. Charts are created again only if the
// runs, the axes or the colours have changed, so that what a reader looks at stays.
function updateSweepCharts(data) {
  const measured = measuredRuns(data);
  const isLog = differsWidely(measured.map((run) => run.value));
  const lines = measured.map((run, index) => ({
    label: run.name,
    x: run.curve[0],
    y: run.curve[1],
    ...lineStyle(index),
  }));
  const label = measured.map((run) => `${run.name} ${formatNumber(run.value)}`).join(", ");
  const points = new Map(data.keys.map((key) => [key, keyPoints(measured, key)]));
  const keys = data.keys.filter((key) => new Set(points.get(key).map(({ x }) => x)).size > 1);
  const names = lines.map((line) => line.label);
  const viewKey = JSON.stringify([names, keys, isLog, cssVariable("--paper")]);
  const isNew = view.keys.get("sweep") !== viewKey;
  view.keys.set("sweep", viewKey);
  if (isNew) createSweepCharts(data, lines, label, keys, isLog);
  else if (lines.length) {
    const { chart } = view.charts.get("");
    chart.frame.setAttribute("aria-label", label);
    chart.update(joinLines(lines, isLog));
  }
  for (const key of keys) drawKeyChart(data, key, points.get(key), isLog);
}

// Returns the values of a key and the metric of the runs that have both.
const keyPoints = (measured, key) =>
  measured
    .filter((run) => key in run.changes)
    .map((run) => ({ x: run.changes[key], y: run.value }));

// Creates the chart of the curves, and an empty frame for each key.
function createSweepCharts(data, lines, label, keys, isLog) {
  for (const { chart } of view.charts.values()) chart?.destroy();
  view.charts.clear();
  const onLog = isLog ? ", on a logarithmic axis" : "";
  const frame = el("div", { class: "chart" });
  const readout = el("p", { class: "readout" });
  const curves = section("curves-title", `${data.metric}${onLog}`, frame, readout);
  document.getElementById("the-curves").replaceChildren(...(lines.length ? curves : []));
  const keyFrames = keys.map((key) => el("div", { class: "chart" }));
  const boxes = keys.map((key, index) => el("div", {}, el("h3", {}, key), keyFrames[index]));
  const byKey = section(
    "keys",
    `${data.metric} by key${onLog}`,
    el("div", { class: "charts" }, ...boxes),
  );
  document.getElementById("the-keys").replaceChildren(...(keys.length ? byKey : []));
  if (lines.length) {
    const options = { label, height: 260, isLog, xLabel: "step", readout };
    view.charts.set("", { chart: lineChart(frame, lines, options) });
  }
  keys.forEach((key, index) => view.charts.set(key, { frame: keyFrames[index] }));
}

// Draws the chart of the metric by a key, again only if a value has changed.
function drawKeyChart(data, key, points, isLog) {
  const label = points.map((point) => `${key} ${point.x}: ${formatNumber(point.y)}`).join("; ");
  const drawn = view.charts.get(key);
  if (drawn.label === label) return;
  drawn.chart?.destroy();
  const frame = el("div", { class: "chart" });
  drawn.frame.replaceWith(frame);
  const options = { label, xLabel: key, yLabel: data.metric, isLog };
  view.charts.set(key, { frame, label, chart: scatterChart(frame, points, options) });
}

function showSweep(data) {
  const state = { data };
  const place = (name) => el("div", { id: `the-${name}` });
  document.body.replaceChildren(
    el(
      "main",
      {},
      pageLinks(data),
      el("h1", {}, data.name),
      place("runs"),
      place("curves"),
      place("keys"),
    ),
    el(
      "footer",
      {},
      data.is_cluster
        ? "Made by launcher dashboard from what the cluster shows you. "
        : "Made by launcher report from the files of the sweep. ",
      "Curves by uPlot, © Leon Sorokin, MIT license.",
    ),
  );
  const draw = () => {
    const focused = document.activeElement?.getAttribute("href");
    document.getElementById("the-runs").replaceChildren(...renderSweepRuns(state.data));
    if (focused) [...document.links].find((link) => link.getAttribute("href") === focused)?.focus();
    updateSweepCharts(state.data);
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    forgetColors();
    draw();
  });
  if (data.events)
    followEvents(
      data.events,
      (newData) => {
        state.data = { ...data, ...newData };
        draw();
      },
      data.is_cluster ? reloadLater : undefined,
    );
}
