"use strict";
// The page of a run. Its data is the JSON in the page, or what the dashboard sends while the run goes on.

const SIGNS = { done: "✓", failed: "✕", killed: "✕", stopped: "■", running: "▶" };
const FIRST = ["loss", "eval/loss", "learning_rate", "grad_norm", "accuracy", "eval/accuracy", "tokens_per_s", "examples_per_s", "mfu"];
const view = { by: "step", smooth: 0, isLog: false, hasOutliers: false, heat: "phase", logs: "", charts: new Map(), pair: [], keys: new Map() };

const chapter = (id, title, ...children) => [el("h2", { id }, title), ...children];
const row = (...cells) => el("tr", {}, ...cells.map((cell) => (cell instanceof Node ? cell : el("td", {}, String(cell ?? "–")))));
const number = (text) => el("td", { class: "number" }, text);

function table(heads, rows, label) {
  const head = heads.map((text) => el("th", { scope: "col", class: text.startsWith("#") ? "number" : null }, text.replace("#", "")));
  const body = el("table", { "aria-label": label }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, body);
}

const stateOf = (state) => el("span", { class: `state is-${state}` }, `${SIGNS[state] || "○"} ${state}`);

function bytes(size) {
  if (size === null) return "–";
  const power = Math.min(4, Math.floor(Math.log(Math.max(1, size)) / Math.log(1024)));
  return `${(size / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

function sentence(run) {
  const { state, text, todo } = run.sentence;
  const last = run.attempts.at(-1); // a failure shows its traceback on the first screen
  const traceback = state === "failed" && last?.traceback && el("details", { open: true, "data-id": "traceback" }, el("summary", {}, "Traceback"), el("pre", { tabindex: "0", class: "traceback" }, last.traceback));
  return [el("p", { class: `sentence is-${state}` }, stateOf(state), ` ${text}`), todo && el("p", {}, todo), traceback];
}

// The label of each fact, the keys of the run that it is made of, and its text, which is empty where nothing is known.
// The numbers that every surface shows follow, with the labels of jaxlaunch/records/run_numbers.py.
const FACTS = [
  ["Step", ["step", "steps"], (run) => (run.steps ? `${run.step ?? "–"} of ${run.steps}` : `${run.step ?? "–"}`)],
  ["Seconds not spent on steps", ["seconds"], (run) => span(Object.entries(run.seconds).reduce((sum, [cause, spent]) => sum + (cause === "step" ? 0 : spent), 0))],
  ["Saved", ["saved"], (run) => (run.saved === null ? "nothing" : `step ${run.saved}`)],
  // The count of `launcher list` and `status`: an earlier start has its own.
  ["Restarts", ["restarts", "starts"], (run) => `${run.restarts}${run.starts.length > 1 ? " since the newest start" : ""}`],
  ["Began", ["began"], (run) => (run.began ? new Date(run.began * 1000).toLocaleString() : "")],
];

// The first row: the result, the loss and the speed, the time left or in all, then what every surface shows.
function facts(run) {
  const time = run.left_s === null ? ["Time of running", span(run.wall_s)] : ["Time left", span(run.left_s)];
  const known = run.facts.map(([label, text]) => [label[0].toUpperCase() + label.slice(1), text]);
  const texts = [...run.cards, time, ...known, ...FACTS.map(([label, , text]) => [label, text(run)])];
  const bar = run.steps ? el("progress", { max: run.steps, value: run.step || 0, "aria-label": "Progress" }) : "";
  return [el("dl", { class: "facts" }, ...texts.filter(([, text]) => text).map(([label, text]) =>
    el("div", {}, el("dt", {}, label), el("dd", {}, text, label === "Step" ? bar : ""))))];
}

function causes(run) {
  const rows = Object.entries(run.seconds).filter(([, spent]) => spent > 0).sort((a, b) => b[1] - a[1]);
  return [table(["Cause", "#Seconds", "#Share"], rows.map(([cause, spent]) => row(
    el("td", {}, swatch(cause), ` ${causeOf(cause)[0]}`), number(spent.toFixed(1)), number(`${((100 * spent) / run.wall_s).toFixed(1)} %`),
  )), "Seconds by cause")];
}

function attempts(run) {
  if (!run.attempts.length) return [];
  const groups = []; // of attempts one after the other that ended equally
  const endOf = (one) => JSON.stringify([one.start, one.code, one.cause, one.rank, one.message]);
  for (const one of run.attempts) {
    const group = groups.at(-1);
    if (group && endOf(group.last) === endOf(one)) Object.assign(group, { last: one, count: group.count + 1 });
    else groups.push({ first: one, last: one, count: 1 });
  }
  const rows = groups.map(({ first, last: one, count }) => row(
    number(`${run.starts.length > 1 ? `${one.start}.` : ""}${count > 1 ? `${first.number}–` : ""}${one.number}`), el("td", { class: "number" }, `${span(first.from)} – ${span(one.to)}`),
    `${count > 1 ? `${count} × ` : ""}${one.code === 0 ? "✓" : one.code === null ? "▶" : "✕"} ${one.cause}${one.code === null ? "" : ` (${one.code})`}`,
    el("td", { class: "why" }, one.message, one.traceback ? el("details", {}, el("summary", {}, "Traceback"), el("pre", { tabindex: "0" }, one.traceback)) : null),
    number(one.saved ?? "–"),
  ));
  return chapter("attempts", "Attempts", table(["#Attempt", "#From, to", "Ended by", "Why", "#Saved step"], rows, "Attempts"));
}

function ranks(run) {
  if (!run.ranks.length && !run.heat) return [];
  const found = run.ranks.map((one) => el("details", { "data-id": `rank ${one.rank}` },
    el("summary", {}, `Rank ${one.rank}${one.is_cause ? ": the cause" : ""}`),
    one.stack ? el("h3", {}, "Where it stood") : null, one.stack ? el("pre", { tabindex: "0" }, one.stack) : null,
    el("h3", {}, "The end of its log"), el("pre", { tabindex: "0" }, one.tail.join("\n") || "(no line)")));
  return chapter("ranks", "Ranks", ...(run.heat ? behind(run) : []), ...found);
}

function checkpoints(run) {
  if (!run.checkpoints.length) return [];
  const rows = run.checkpoints.map((one) => row(number(one.step), one.verified ? "✓ complete" : "✕ no manifest", one.best ? "★ best" : "", number(bytes(one.bytes)), one.where));
  return chapter("checkpoints", "Checkpoints", table(["#Step", "State", "Best", "#Size", "Where"], rows, "Checkpoints"));
}

function differs(run) {
  if (!run.differs.length) return [];
  const rows = run.differs.map((one) => row(number(one.start), el("td", {}, el("code", {}, one.key)), one.then, one.now));
  return chapter("differs", "What later starts changed", table(["#Start", "Key", "Before", "After"], rows, "Changes"));
}

function sample(one) {
  if (typeof one === "string" || typeof one === "number") return el("pre", { tabindex: "0" }, String(one));
  if (one && typeof one.image === "string" && one.image.startsWith("data:image/png;base64,")) {
    return el("figure", {}, el("img", { src: one.image, alt: one.name || "a picture that the task reported" }), el("figcaption", { class: "quiet" }, one.name || ""));
  }
  const text = one && (one.text ?? one.sample);
  if (typeof text === "string") return el("div", {}, one.name ? el("h3", {}, one.name) : null, el("pre", { tabindex: "0" }, one.prompt ? el("strong", {}, String(one.prompt)) : null, text));
  return el("pre", { tabindex: "0" }, JSON.stringify(one, null, 1));
}

function samples(run) {
  if (!run.samples.length) return [];
  const newest = run.samples.slice().reverse().map((one, at) => el("details", { open: at === 0, "data-id": `sample ${one.step}` },
    el("summary", {}, `Step ${one.step}`), el("div", { class: "samples" }, ...(Array.isArray(one.samples) ? one.samples : [one.samples]).map(sample))));
  return chapter("samples", "Samples and pictures", ...newest);
}

function rest(run) {
  const commands = run.commands.map(([what, command]) => {
    const copy = el("button", { class: "no-print", onclick: () => navigator.clipboard?.writeText(command).then(() => { copy.textContent = "Copied"; }) }, "Copy");
    return el("div", { class: "command" }, el("span", {}, `${what}:`), el("code", {}, command), copy);
  });
  return [
    ...(run.notes.length ? chapter("notes", "Notes", el("ul", {}, ...run.notes.map((note) => el("li", {}, note)))) : []),
    ...chapter("commands", "Commands", ...commands),
    ...(run.job ? chapter("job", "Job", el("details", { "data-id": "job" }, el("summary", {}, "job.yaml, as it ran"), el("pre", { tabindex: "0" }, run.job))) : []),
  ];
}

// The log and stack of a rank, or the command that shows them where the page has no room for it.
function openRank(rank) {
  const found = document.querySelector(`[data-id="rank ${rank}"]`);
  const more = document.getElementById("heat-readout");
  if (!found) return void (more.textContent = `The log of rank ${rank}: ${view.logs} --rank ${rank} --tail 100`);
  found.open = true;
  found.scrollIntoView({ block: "start" });
  found.querySelector("summary").focus();
}

function heat(run, unit) {
  const frame = document.getElementById("heat"), controls = document.getElementById("heat-controls");
  frame.replaceChildren();
  controls.replaceChildren();
  frame.hidden = controls.hidden = !run.heat || !run.heat.columns.length;
  if (frame.hidden) return;
  view.logs = run.commands.find(([, command]) => command.startsWith("launcher logs"))?.[1].replace(/ --rank.*/, "") || "launcher logs";
  const radio = (value, text) => el("label", {}, el("input", { type: "radio", name: "heat", value, checked: view.heat === value, onchange: () => { view.heat = value; timePair(run); } }), ` ${text}`);
  controls.append(el("fieldset", {}, el("legend", {}, "Each rank's"), radio("phase", "phase"), radio("lag", "steps behind")),
    el("span", { class: "quiet no-print" }, "Click, or move by ← → ↑ ↓ and press Enter: the rank's log"));
  heatChart(frame, run, unit, { peers: view.pair, by: view.heat, readout: document.getElementById("heat-readout"), open: openRank });
}

function behind(run) {
  const rows = worstRanks(run.heat).map((one) => row(number(one.rank), number(one.slow ? `${((one.slow.own - one.slow.usual) / 10).toFixed(1)} %` : ""), number(one.lag), number(span(one.data)), one.last,
    el("td", {}, el("button", { class: "no-print", onclick: () => openRank(one.rank), "aria-label": `Log of rank ${one.rank}` }, "Log"))));
  const heads = ["#Rank", "#Slower by", "#Most steps behind", "#Seen waiting for data", "Seen last", "Its log"];
  // All ranks of a gang end a step at the same time: only what each does by itself tells which of them is slow.
  const unknown = run.heat && !run.heat.has_own ? [el("p", { class: "quiet" }, "Which rank is slow was not measured: only train: and jaxlaunch.run report the time that each rank spends by itself.")] : [];
  return rows.length ? [el("h3", {}, "Ranks that hung, are slow, were behind, or waited for data"), table(heads, rows, "Ranks that were behind"), ...unknown] : unknown;
}

const SECTIONS = { sentence, facts, causes, attempts, ranks, checkpoints, differs, classes, samples, rest };
const PARTS = { // what each is made of: it is made anew only where that has changed
  sentence: ["sentence", "attempts"], facts: ["cards", "facts", "left_s", "wall_s", ...FACTS.flatMap(([, keys]) => keys)], causes: ["seconds"],
  attempts: ["attempts"], ranks: ["ranks", "heat"], checkpoints: ["checkpoints"], differs: ["differs"], classes: ["classes"], samples: ["samples"], rest: ["notes", "commands", "job"],
};

function fill(run) {
  for (const [name, make] of Object.entries(SECTIONS)) {
    const key = JSON.stringify(PARTS[name].map((part) => run[part]));
    if (view.keys.get(name) === key) continue;
    view.keys.set(name, key);
    const place = document.getElementById(`the-${name}`);
    const open = new Set([...place.querySelectorAll("details[open]")].map((each) => each.dataset.id));
    place.replaceChildren(...make(run).filter(Boolean));
    for (const each of place.querySelectorAll("details")) if (open.has(each.dataset.id)) each.open = true;
  }
}

function smoothed(values, weight) {
  let mean = 0, factor = 1;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    factor *= weight;
    return mean / (1 - factor);
  });
}

// Points in order of x; those without an x, of a program that gave no time, are left out.
function ordered(x, y) {
  const known = x.map((each, at) => [each, y[at]]).filter(([each]) => each !== null).sort((a, b) => a[0] - b[0]);
  return { x: known.map(([each]) => each), y: known.map(([, each]) => each) };
}

function lines(name, curve, by, unit) {
  const [steps, seconds, values] = curve;
  const raw = ordered(by === "step" ? steps : seconds.map((at) => (at === null ? null : at / unit)), values);
  const style = { dash: [], stroke: "--s0" };
  if (!view.smooth) return [{ label: name, ...raw, ...style }];
  return [{ label: name, ...raw, ...style, isFaint: true }, { label: `${name}, smoothed`, x: raw.x, y: smoothed(raw.y, view.smooth), ...style }];
}

const LIMITS = { host_gib: "host_limit_gib", device_gib: "device_limit_gib" };

// A curve of memory has its limit as a dashed line: at the limit the kernel or the device ends the process.
function limited(run, name, unit) {
  const limit = run.curves[LIMITS[name]], shown = lines(name, run.curves[name], view.by, unit);
  return limit ? [...shown, ...lines("limit", limit, view.by, unit).slice(0, 1).map((line) => ({ ...line, isFaint: false, dash: LINES[1], stroke: "--s1" }))] : shown;
}

function told(name, curve) {
  const values = curve[2], steps = curve[0];
  return `${name}: ${short(values[0])} at step ${steps[0]}, ${short(values[values.length - 1])} at step ${steps[steps.length - 1]}, ` +
    `lowest ${short(Math.min(...values))}, highest ${short(Math.max(...values))}`;
}

function timePair(run) {
  for (const chart of view.pair) chart.destroy();
  view.pair = [];
  const [unit, label] = unitOf(run.wall_s);
  const ends = [0, Math.max(run.wall_s / unit, 1e-9)];
  const readout = document.getElementById("readout");
  const strip = document.getElementById("strip"), loss = document.getElementById("loss");
  strip.replaceChildren();
  loss.replaceChildren();
  stripChart(strip, run, unit, { peers: view.pair, readout });
  const name = ["loss", "eval/loss"].find((each) => run.curves[each]) || Object.keys(run.curves)[0];
  const known = name && run.curves[name][1].some((at) => at !== null);
  const shown = known ? lines(name, run.curves[name], "time", unit) : [{ label: "no curve yet", x: ends, y: [null, null] }];
  if (known && name === "loss" && run.curves["eval/loss"]) shown.push(...lines("eval/loss", run.curves["eval/loss"], "time", unit).map((line) => ({ ...line, dash: line.isFaint ? [] : LINES[1], stroke: "--s1" })));
  document.getElementById("loss-name").textContent = known ? shown.filter((line) => !line.isFaint).map((line, at) => `${line.label} (${at ? "dashed" : "solid"})`).join(", ") : "";
  heat(run, unit);
  lineChart(loss, shown, { label: known ? told(name, run.curves[name]) : "no curve yet", height: 220, xLabel: `${label} of running`, ends, peers: view.pair, readout, isLog: view.isLog });
}

function names(run) {
  const order = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  return run.drawn.slice().sort((a, b) => order(a) - order(b) || (a < b ? -1 : 1));
}

const inWords = (curve) => `now ${short(curve[2][curve[2].length - 1])}, lowest ${short(Math.min(...curve[2]))}, highest ${short(Math.max(...curve[2]))}`;

// The charts of all curves: with the same curves as before on the same axes, only their points are others.
function curves(run) {
  const [unit, label] = unitOf(run.wall_s), shown = names(run);
  const key = JSON.stringify([shown, label, view.by, view.smooth > 0, view.isLog, css("--paper")]);
  const isNew = view.keys.get("curves") !== key;
  if (isNew) manyCharts(run, shown, unit, label);
  view.keys.set("curves", key);
  for (const name of shown) {
    const curve = run.curves[name], { chart, words, peek } = view.charts.get(name);
    words.textContent = inWords(curve);
    chart.frame.setAttribute("aria-label", told(name, curve));
    peek.ontoggle = () => peek.open && peek.replaceChildren(peek.firstChild, numbers(name, curve));
    peek.ontoggle();
    if (!isNew) chart.update(joined(limited(run, name, unit), view.isLog));
  }
}

function manyCharts(run, shown, unit, label) {
  const place = document.getElementById("curves");
  for (const { chart } of view.charts.values()) chart.destroy();
  view.charts.clear();
  place.replaceChildren();
  for (const name of shown) {
    const frame = el("div", { class: "chart" }), curve = run.curves[name], words = el("p", { class: "quiet" });
    const peek = el("details", { class: "no-print" }, el("summary", { class: "quiet" }, "As a table"));
    place.append(el("div", {}, el("h3", {}, name), words, frame, peek));
    const chart = lineChart(frame, limited(run, name, unit), { label: told(name, curve), height: 170, isLog: view.isLog, xLabel: view.by === "step" ? "step" : label });
    view.charts.set(name, { chart, words, peek });
  }
}

function numbers(name, curve) {
  const every = Math.max(1, Math.ceil(curve[0].length / 50));
  const rows = curve[0].map((step, at) => [step, curve[2][at]]).filter((_, at) => at % every === 0 || at === curve[0].length - 1);
  return table(["#Step", `#${name}`], rows.map(([step, value]) => row(number(step), number(short(value)))), `Values of ${name}`);
}

function controls(run) {
  const redraw = () => { timePair(run.now); curves(run.now); };
  const radio = (value, text) => el("label", {}, el("input", { type: "radio", name: "by", value, checked: view.by === value, onchange: () => { view.by = value; redraw(); } }), ` ${text}`);
  return el("div", { class: "controls" },
    el("fieldset", {}, el("legend", {}, "Over"), radio("step", "steps"), radio("time", "time")),
    el("label", {}, "Smooth ", el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput: (event) => { view.smooth = Number(event.target.value); redraw(); } })),
    el("label", {}, el("input", { type: "checkbox", onchange: (event) => { view.isLog = event.target.checked; redraw(); } }), " Logarithmic values"),
    el("label", {}, el("input", { type: "checkbox", id: "outliers", onchange: (event) => { view.hasOutliers = event.target.checked; view.keys.delete("curves"); redraw(); } }), " Outliers in full"),
    el("span", { class: "quiet" }, "Drag over a curve to zoom, double-click to see all; by keys: + − ← → 0"));
}

function show(run) {
  const holder = { now: run };
  const place = (name) => el("div", { id: `the-${name}` });
  document.body.replaceChildren(el("main", {},
    el("header", {}, run.home ? el("p", {}, el("a", { href: run.home }, "All runs")) : null, el("h1", {}, run.name), place("sentence"), place("facts")),
    ...chapter("time", "Where the time went", el("p", { class: "quiet", id: "loss-name" }), el("div", { id: "strip", class: "chart" }), el("div", { id: "loss", class: "chart" }),
      el("div", { id: "heat-controls", class: "controls" }), el("div", { id: "heat", class: "chart" }), el("p", { id: "heat-readout", class: "readout", role: "status" }),
      el("p", { id: "readout", class: "readout" }, "▲ a save, ○ an evaluation; each line above the strip begins an attempt, with what ended it."), place("causes")),
    place("attempts"), ...chapter("curves-title", "Curves", controls(holder), el("div", { id: "curves", class: "charts" })),
    place("ranks"), place("checkpoints"), place("differs"), place("classes"), place("samples"), place("rest")),
    el("footer", {}, `Made by launcher report from the files of the run. Curves by uPlot, © Leon Sorokin, MIT license.`));
  const draw = () => { fill(holder.now); timePair(holder.now); curves(holder.now); };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetColors(); view.keys.clear(); draw(); });
  if (run.events) follow(run.events, (now) => { holder.now = { ...now, home: run.home }; draw(); });
}

// While nobody sees the page it asks for nothing. `refused` is called where the server refuses to say more.
function follow(address, took, refused = () => {}) {
  let events = null;
  const begin = () => {
    events = new EventSource(address);
    events.addEventListener("run", (event) => {
      performance.mark("told");
      took(JSON.parse(event.data));
      drawn("told");
    });
    events.addEventListener("error", () => { if (events.readyState === EventSource.CLOSED) refused(); });
  };
  document.addEventListener("visibilitychange", () => { events.close(); if (!document.hidden) begin(); });
  begin();
}

// Measures, for who looks at the page's performance, from a mark until what was drawn since is on the screen.
function drawn(from) {
  requestAnimationFrame(() => setTimeout(() => performance.measure("drawn", from)));
}
