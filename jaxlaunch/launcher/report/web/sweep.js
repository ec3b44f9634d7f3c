"use strict";
// The page of a sweep: its runs, the best first, their curves, and the metric against each swept key.

// A small curve in a row of a table.
function sparkline(values, label) {
  if (!values || values.length < 2) return "";
  const low = Math.min(...values), size = Math.max(...values) / 2 - low / 2 || 1;
  const points = values.map((value, at) => `${((80 * at) / (values.length - 1)).toFixed(1)},${(18 - 16 * ((value / 2 - low / 2) / size)).toFixed(1)}`);
  return svg("svg", { viewBox: "0 0 80 20", width: 80, height: 20, class: "spark", role: "img", "aria-label": label }, svg("polyline", { points: points.join(" ") }));
}

// Points without a line. Values of a key that are no numbers are at equal distances, in the order of their names.
function scatterChart(frame, points, { label, xLabel, yLabel, isLog: isLogY }) {
  const numbers = points.map((point) => Number(point.x));
  const isNumeric = points.every((point, at) => point.x !== "" && Number.isFinite(numbers[at]));
  const names = [...new Set(points.map((point) => point.x))].sort();
  const places = points.map((point, at) => [isNumeric ? numbers[at] : names.indexOf(point.x), point.y]).sort((a, b) => a[0] - b[0]);
  const xs = places.map(([x]) => x), low = xs[0], high = xs[xs.length - 1];
  const isLog = isNumeric && low > 0 && high / low >= 20;
  const margin = isLog ? 1.3 : (high - low || 1) * 0.06;
  const made = axes(short, xLabel);
  made[0].values = (u, splits) => splits.map((at) => (isNumeric ? (at === null ? "" : short(at)) : names[at] ?? ""));
  if (!isNumeric) made[0].splits = () => names.map((_, at) => at);
  const options = {
    height: 210, padding: [10, 14, 0, 0], axes: made,
    scales: { x: { time: false, distr: isLog ? 3 : 1, range: () => (isLog ? [low / margin, high * margin] : [low - margin, high + margin]) }, y: { distr: isLogY ? 3 : 1 } },
    series: [{}, { label: yLabel, stroke: css("--s0"), paths: () => null, points: { show: true, size: 8, fill: css("--s0") } }],
    cursor: { y: false, drag: { x: true, y: false } },
  };
  frame.setAttribute("role", "img");
  frame.setAttribute("tabindex", "0");
  frame.setAttribute("aria-label", label);
  return new Chart(frame, options, [xs, places.map(([, y]) => y)], []);
}

// Whether values differ so much that a linear axis would show one of them and a line at the bottom.
const differsWidely = (values) => values.every((value) => value > 0) && Math.max(...values) / Math.min(...values) >= 30;

function countStates(runs) {
  const counts = {};
  for (const run of runs) counts[run.state] = (counts[run.state] || 0) + 1;
  return Object.entries(counts).map(([state, count]) => `${count} ${state}`).join(", ");
}

const changesOf = (run) => Object.entries(run.changes).map(([key, value]) => `${key}=${value}`).join(" ");

// The same, of which no pair is divided between two lines.
const changesCell = (run) => el("div", { class: "quiet" }, ...Object.entries(run.changes).flatMap(([key, value]) => [el("span", { class: "pair" }, `${key}=${value}`), " "]));

function showSweep(data) {
  const measured = data.runs.filter((run) => run.value !== null), done = measured.filter((run) => run.state === "done");
  const best = done[0];
  const counted = `${data.runs.length} runs: ${countStates(data.runs)}.`;
  const text = best ? `${counted} The best that is done is ${best.name}: ${data.metric} ${short(best.value)} with ${changesOf(best)}.` : `${counted} No run that is done has ${data.metric}.`;
  const place = (run, at) => el("td", {}, run.curve ? line(at) : null, " ", run.page ? el("a", { href: run.page }, run.name) : run.name);
  const draw = () => {
    const at = (run) => measured.indexOf(run);
    const isLog = differsWidely(measured.map((run) => run.value)), onLog = isLog ? ", on a logarithmic axis" : "";
    const rows = data.runs.map((run) => row(place(run, at(run)), el("td", {}, stateOf(run.state)), number(short(run.value)), ...data.keys.map((key) => number(run.changes[key] ?? "–")),
      number(run.steps ? `${run.step ?? 0} / ${run.steps}` : `${run.step ?? "–"}`), number(span(run.duration_s)), el("td", { class: "why" }, run.state === "done" ? "" : run.why)));
    const charts = el("div", { class: "charts" }), all = el("div", { class: "chart" }), readout = el("p", { class: "readout" });
    document.body.replaceChildren(el("main", {}, data.home ? el("p", {}, el("a", { href: data.home }, "All runs")) : null, el("h1", {}, data.name),
      el("p", { class: `sentence is-${best ? "done" : "running"}` }, text),
      ...chapter("runs", `Runs, the ${data.mode === "max" ? "highest" : "lowest"} ${data.metric} first`, table(["Run", "State", `#${data.metric}`, ...data.keys.map((key) => `#${key}`), "#Step", "#Duration", "Why"], rows, "Runs")),
      ...(measured.length ? chapter("curves-title", `${data.metric}${onLog}`, all, readout) : []),
      ...(measured.length > 1 ? chapter("keys", `${data.metric} by key${onLog}`, charts) : [])),
      el("footer", {}, "Made by launcher report from the files of the sweep. Curves by uPlot, © Leon Sorokin, MIT license."));
    if (!measured.length) return;
    const lines = measured.map((run, index) => ({ label: run.name, x: run.curve[0], y: run.curve[1], dash: LINES[index % LINES.length], stroke: `--s${index % 6}` }));
    lineChart(all, lines, { label: measured.map((run) => `${run.name} ${short(run.value)}`).join(", "), height: 260, isLog, xLabel: "step", readout });
    if (measured.length < 2) return;
    for (const key of data.keys) {
      const points = measured.filter((run) => key in run.changes).map((run) => ({ x: run.changes[key], y: run.value }));
      if (new Set(points.map((point) => point.x)).size < 2) continue;
      const frame = el("div", { class: "chart" });
      charts.append(el("div", {}, el("h3", {}, key), frame));
      scatterChart(frame, points, { label: points.map((point) => `${key} ${point.x}: ${short(point.y)}`).join("; "), xLabel: key, yLabel: data.metric, isLog });
    }
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetColors(); draw(); });
}
