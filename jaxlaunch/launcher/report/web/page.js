"use strict";
// The page of a run, and helpers of all pages. The data is the JSON in the page, and the dashboard
// streams newer data.

const SIGNS = { done: "✓", failed: "✕", killed: "✕", stopped: "■", running: "▶" };
// These curves are drawn first, in this order.
const FIRST_CURVES = [
  "loss",
  "eval/loss",
  "learning_rate",
  "grad_norm",
  "accuracy",
  "eval/accuracy",
  "tokens_per_s",
  "examples_per_s",
  "mfu",
];
// The choices of the reader, and the charts that are drawn. `pair` has the charts over time, which
// zoom together, and `keys` the data from which each section was rendered.
const view = {
  by: "step",
  smooth: 0,
  isLog: false,
  hasOutliers: false,
  heat: "phase",
  logs: "",
  charts: new Map(),
  pair: [],
  keys: new Map(),
};

const section = (id, title, ...children) => [el("h2", { id }, title), ...children];
// Returns the sentences about what could not be read at a place of the page.
const unreadNotes = (run, place, subject = "") =>
  (run.unread[place] || []).map((text) => el("p", { class: "unread" }, `⚠ ${subject}${text}`));
// Links to the table and, of a dashboard in a cluster, out of the session.
const pageLinks = (data) =>
  data.home
    ? el(
        "p",
        {},
        el("a", { href: data.home }, "All runs"),
        ...(data.sign_out ? [" · ", el("a", { href: data.sign_out }, "Sign out")] : []),
      )
    : null;
const tableRow = (...cells) =>
  el(
    "tr",
    {},
    ...cells.map((cell) => (cell instanceof Node ? cell : el("td", {}, String(cell ?? "–")))),
  );
const numberCell = (text) => el("td", { class: "number" }, text);

function makeTable(heads, rows, label) {
  // A heading with "#" is that of a column of numbers.
  const head = heads.map((text) =>
    el(
      "th",
      { scope: "col", class: text.startsWith("#") ? "number" : null },
      text.replace("#", ""),
    ),
  );
  const body = el(
    "table",
    { "aria-label": label },
    el("thead", {}, el("tr", {}, ...head)),
    el("tbody", {}, ...rows),
  );
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, body);
}

const stateBadge = (state) =>
  el("span", { class: `state is-${state}` }, `${SIGNS[state] || "○"} ${state}`);

function formatBytes(size) {
  if (size === null) return "–";
  const power = Math.min(4, Math.floor(Math.log(Math.max(1, size)) / Math.log(1024)));
  return `${(size / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

function renderSentence(run) {
  const { state, text, todo } = run.sentence;
  const last = run.attempts.at(-1);
  const traceback =
    state === "failed" &&
    last?.traceback &&
    el(
      "details",
      { open: true, "data-id": "traceback" },
      el("summary", {}, "Traceback"),
      el("pre", { tabindex: "0", class: "traceback" }, last.traceback),
    );
  return [
    el("p", { class: `sentence is-${state}` }, stateBadge(state), ` ${text}`),
    todo && el("p", {}, todo),
    traceback,
  ];
}

// The label of each fact, the keys of the run that it depends on, and its text, which is empty if
// it is unknown. They follow the numbers that every command shows, which
// jaxlaunch/records/run_numbers.py labels.
const FACTS = [
  [
    "Step",
    ["step", "steps"],
    (run) => (run.steps ? `${run.step ?? "–"} of ${run.steps}` : `${run.step ?? "–"}`),
  ],
  [
    "Seconds not spent on steps",
    ["seconds"],
    (run) =>
      formatSpan(
        Object.entries(run.seconds).reduce(
          (sum, [cause, spent]) => sum + (cause === "step" ? 0 : spent),
          0,
        ),
      ),
  ],
  ["Saved", ["saved"], (run) => (run.saved === null ? "nothing" : `step ${run.saved}`)],
  // As in `launcher list` and `status`, restarts of earlier starts are not counted.
  [
    "Restarts",
    ["restarts", "starts"],
    (run) => `${run.restarts}${run.starts.length > 1 ? " since the newest start" : ""}`,
  ],
  ["Began", ["began"], (run) => (run.began ? new Date(run.began * 1000).toLocaleString() : "")],
];

// Shows the result, the loss and the speed, the time left or in total, and then the other facts.
function renderFacts(run) {
  const time =
    run.left_s === null
      ? ["Time of running", formatSpan(run.wall_s)]
      : ["Time left", formatSpan(run.left_s)];
  const numbers = run.facts.map(([label, text]) => [label[0].toUpperCase() + label.slice(1), text]);
  const texts = [
    ...run.cards,
    time,
    ...numbers,
    ...FACTS.map(([label, , text]) => [label, text(run)]),
  ];
  const bar = run.steps
    ? el("progress", { max: run.steps, value: run.step || 0, "aria-label": "Progress" })
    : "";
  return [
    el(
      "dl",
      { class: "facts" },
      ...texts
        .filter(([, text]) => text)
        .map(([label, text]) =>
          el("div", {}, el("dt", {}, label), el("dd", {}, text, label === "Step" ? bar : "")),
        ),
    ),
  ];
}

function renderCauses(run) {
  const total = Object.values(run.seconds).reduce((sum, spent) => sum + spent, 0);
  const rows = Object.entries(run.seconds)
    .filter(([, spent]) => spent > 0)
    .sort((a, b) => b[1] - a[1]);
  return [
    ...unreadNotes(run, "time"),
    makeTable(
      ["Cause", "#Seconds", "#Share"],
      rows.map(([cause, spent]) =>
        tableRow(
          el("td", {}, swatch(cause), ` ${causeStyle(cause).label}`),
          numberCell(spent.toFixed(1)),
          numberCell(`${((100 * spent) / total).toFixed(1)} %`),
        ),
      ),
      "Seconds by cause",
    ),
  ];
}

function renderAttempts(run) {
  if (!run.attempts.length) return [];
  // Consecutive attempts with the same end share a row.
  const groups = [];
  const endKey = ({ start, code, cause, rank, message }) =>
    JSON.stringify([start, code, cause, rank, message]);
  for (const attempt of run.attempts) {
    const group = groups.at(-1);
    if (group && endKey(group.last) === endKey(attempt))
      Object.assign(group, { last: attempt, count: group.count + 1 });
    else groups.push({ first: attempt, last: attempt, count: 1 });
  }
  const rows = groups.map(({ first, last, count }) => {
    const start = run.starts.length > 1 ? `${last.start}.` : "";
    const sign = last.code === 0 ? "✓" : last.code === null ? "▶" : "✕";
    const code = last.code === null ? "" : ` (${last.code})`;
    return tableRow(
      numberCell(`${start}${count > 1 ? `${first.number}–` : ""}${last.number}`),
      numberCell(`${formatSpan(first.from)} – ${formatSpan(last.to)}`),
      `${count > 1 ? `${count} × ` : ""}${sign} ${last.cause}${code}`,
      el(
        "td",
        { class: "why" },
        last.message,
        last.memory ? el("p", {}, `Most memory of rank ${last.rank}: ${last.memory}.`) : null,
        last.traceback
          ? el(
              "details",
              {},
              el("summary", {}, "Traceback"),
              el("pre", { tabindex: "0" }, last.traceback),
            )
          : null,
      ),
      numberCell(last.saved ?? "–"),
    );
  });
  return section(
    "attempts",
    "Attempts",
    makeTable(["#Attempt", "#From, to", "Ended by", "Why", "#Saved step"], rows, "Attempts"),
  );
}

// Shows what `launcher explain` says about a job on a cluster.
function renderExplanation(run) {
  const answer = run.explanation;
  if (!answer) return [];
  const see = answer.see.map((command) => el("p", {}, "More: ", el("code", {}, command)));
  return section(
    "explanation",
    "Explanation",
    el("p", {}, answer.headline),
    answer.lines.length ? el("ul", {}, ...answer.lines.map((line) => el("li", {}, line))) : null,
    ...see,
    ...unreadNotes(run, "explanation"),
  );
}

function renderHosts(run) {
  const unread = unreadNotes(run, "hosts");
  if (!run.hosts.length && !unread.length) return [];
  const rows = run.hosts.map(([number, ranks, ready, state, node, pod]) =>
    tableRow(numberCell(number), numberCell(ranks), ready, state, node, pod),
  );
  const heads = ["#Host", "#Ranks", "Ready", "State", "Node", "Pod"];
  return section("hosts", "Hosts", rows.length ? makeTable(heads, rows, "Hosts") : null, ...unread);
}

// The largest process and the memory in use of each host, the fullest host first. A process that was
// killed on a full host ran out of memory.
function renderMemory(hosts) {
  if (hosts.length < 2) return [];
  const rows = hosts.map(({ host, rank, process, used }) =>
    tableRow(numberCell(host), numberCell(used || "–"), numberCell(rank), numberCell(process)),
  );
  const head = ["#Host", "#Most in use", "#Largest rank", "#Its process"];
  return [el("h3", {}, "Memory by host"), makeTable(head, rows, "Memory by host")];
}

function renderRanks(run) {
  const unread = unreadNotes(run, "ranks");
  if (!run.ranks.length && !run.heat && !run.memory.length && !unread.length) return [];
  const logs = run.ranks.map(({ rank, is_cause, stack, tail, earlier = [] }) =>
    el(
      "details",
      { "data-id": `rank ${rank}` },
      el("summary", {}, `Rank ${rank}${is_cause ? ": the cause" : ""}`),
      ...(stack ? [el("h3", {}, "Where it stood"), el("pre", { tabindex: "0" }, stack)] : []),
      el("h3", {}, "The end of its log"),
      el("pre", { tabindex: "0" }, tail.join("\n") || "(no line)"),
      ...(earlier.length
        ? [
            el("h3", {}, "The end of its log in earlier pods"),
            el("pre", { tabindex: "0" }, earlier.join("\n")),
          ]
        : []),
    ),
  );
  const worst = run.heat ? renderWorstRanks(run.heat) : [];
  return section("ranks", "Ranks", ...worst, ...renderMemory(run.memory), ...logs, ...unread);
}

function renderCheckpoints(run) {
  const unread = unreadNotes(run, "checkpoints");
  if (!run.checkpoints.length)
    return unread.length ? section("checkpoints", "Checkpoints", ...unread) : [];
  const rows = run.checkpoints.map(({ step, verified, best, bytes, where }) =>
    tableRow(
      numberCell(step),
      verified ? "✓ complete" : "✕ no manifest",
      best ? "★ best" : "",
      numberCell(formatBytes(bytes)),
      where,
    ),
  );
  return section(
    "checkpoints",
    "Checkpoints",
    makeTable(["#Step", "State", "Best", "#Size", "Where"], rows, "Checkpoints"),
  );
}

function renderChanges(run) {
  if (!run.differs.length) return [];
  const rows = run.differs.map(({ start, key, then, now }) =>
    tableRow(numberCell(start), el("td", {}, el("code", {}, key)), then, now),
  );
  return section(
    "differs",
    "What later starts changed",
    makeTable(["#Start", "Key", "Before", "After"], rows, "Changes"),
  );
}

function renderSample(sample) {
  if (typeof sample === "string" || typeof sample === "number")
    return el("pre", { tabindex: "0" }, String(sample));
  if (
    sample &&
    typeof sample.image === "string" &&
    sample.image.startsWith("data:image/png;base64,")
  ) {
    return el(
      "figure",
      {},
      el("img", { src: sample.image, alt: sample.name || "a picture that the task reported" }),
      el("figcaption", { class: "quiet" }, sample.name || ""),
    );
  }
  const text = sample && (sample.text ?? sample.sample);
  if (typeof text === "string")
    return el(
      "div",
      {},
      sample.name ? el("h3", {}, sample.name) : null,
      el(
        "pre",
        { tabindex: "0" },
        sample.prompt ? el("strong", {}, String(sample.prompt)) : null,
        text,
      ),
    );
  return el("pre", { tabindex: "0" }, JSON.stringify(sample, null, 1));
}

function renderSamples(run) {
  if (!run.samples.length) return [];
  const newestFirst = run.samples
    .slice()
    .reverse()
    .map(({ step, samples }, index) =>
      el(
        "details",
        { open: index === 0, "data-id": `sample ${step}` },
        el("summary", {}, `Step ${step}`),
        el(
          "div",
          { class: "samples" },
          ...(Array.isArray(samples) ? samples : [samples]).map(renderSample),
        ),
      ),
    );
  return section("samples", "Samples and pictures", ...newestFirst);
}

function renderRest(run) {
  const commands = run.commands.map(([title, command]) => {
    const copy = el(
      "button",
      {
        class: "no-print",
        onclick: () =>
          navigator.clipboard?.writeText(command).then(() => {
            copy.textContent = "Copied";
          }),
      },
      "Copy",
    );
    return el(
      "div",
      { class: "command" },
      el("span", {}, `${title}:`),
      el("code", {}, command),
      copy,
    );
  });
  return [
    ...(run.notes.length
      ? section("notes", "Notes", el("ul", {}, ...run.notes.map((note) => el("li", {}, note))))
      : []),
    ...section("commands", "Commands", ...commands),
    ...(run.job
      ? section(
          "job",
          "Job",
          el(
            "details",
            { "data-id": "job" },
            el("summary", {}, "job.yaml, as it ran"),
            el("pre", { tabindex: "0" }, run.job),
          ),
        )
      : []),
  ];
}

// Shows the log and stack of a rank, or the command that shows them if they are not on the page.
function openRank(rank) {
  const details = document.querySelector(`[data-id="rank ${rank}"]`);
  const readout = document.getElementById("heat-readout");
  if (!details)
    return void (readout.textContent = `The log of rank ${rank}: ${view.logs} --rank ${rank} --tail 100`);
  details.open = true;
  details.scrollIntoView({ block: "start" });
  details.querySelector("summary").focus();
}

function drawRankPhases(run, unit) {
  const frame = document.getElementById("heat");
  const controls = document.getElementById("heat-controls");
  frame.replaceChildren();
  controls.replaceChildren();
  frame.hidden = controls.hidden = !run.heat || !run.heat.columns.length;
  if (frame.hidden) return;
  view.logs =
    run.commands
      .find(([, command]) => command.startsWith("launcher logs"))?.[1]
      .replace(/ --rank.*/, "") || "launcher logs";
  const radio = (value, text) =>
    el(
      "label",
      {},
      el("input", {
        type: "radio",
        name: "heat",
        value,
        checked: view.heat === value,
        onchange: () => {
          view.heat = value;
          drawTimeCharts(run);
        },
      }),
      ` ${text}`,
    );
  controls.append(
    el(
      "fieldset",
      {},
      el("legend", {}, "Each rank's"),
      radio("phase", "phase"),
      run.heat.has_lag ? radio("lag", "steps behind") : null,
    ),
    el(
      "span",
      { class: "quiet no-print" },
      "Click, or move by ← → ↑ ↓ and press Enter: the rank's log",
    ),
  );
  heatChart(frame, run, unit, {
    peers: view.pair,
    by: view.heat,
    readout: document.getElementById("heat-readout"),
    openLog: openRank,
  });
}

function renderWorstRanks(heat) {
  const rows = worstRanks(heat).map(({ rank, slow, lag, data, last }) =>
    tableRow(
      numberCell(rank),
      numberCell(slow ? `${((slow.own - slow.usual) / 10).toFixed(1)} %` : ""),
      ...(heat.has_lag ? [numberCell(lag)] : []),
      numberCell(formatSpan(data)),
      last,
      el(
        "td",
        {},
        el(
          "button",
          { class: "no-print", onclick: () => openRank(rank), "aria-label": `Log of rank ${rank}` },
          "Log",
        ),
      ),
    ),
  );
  const heads = [
    "#Rank",
    "#Slower by",
    ...(heat.has_lag ? ["#Most steps behind"] : []),
    "#Seen waiting for data",
    "Seen last",
    "Its log",
  ];
  // All ranks end a step at the same time. Only the time that each spends by itself shows which one
  // is slow.
  const unknown = !heat.has_own
    ? [
        el(
          "p",
          { class: "quiet" },
          heat.has_lag
            ? "Which rank is slow was not measured: only train: and jaxlaunch.run report the time that each rank spends by itself."
            : "Which rank is slow is in the run folder, which the dashboard of a cluster does not read.",
        ),
      ]
    : [];
  return rows.length
    ? [
        el("h3", {}, "Ranks that hung, are slow, were behind, or waited for data"),
        makeTable(heads, rows, "Ranks that were behind"),
        ...unknown,
      ]
    : unknown;
}

// The function that renders each section, and the keys of the run that it depends on.
const SECTIONS = {
  sentence: [renderSentence, ["sentence", "attempts"]],
  explanation: [renderExplanation, ["explanation", "unread"]],
  facts: [
    renderFacts,
    ["cards", "facts", "left_s", "wall_s", ...FACTS.flatMap(([, keys]) => keys)],
  ],
  causes: [renderCauses, ["seconds", "unread"]],
  attempts: [renderAttempts, ["attempts"]],
  "curves-unread": [(run) => unreadNotes(run, "curves"), ["unread"]],
  hosts: [renderHosts, ["hosts", "unread"]],
  ranks: [renderRanks, ["ranks", "heat", "memory", "unread"]],
  checkpoints: [renderCheckpoints, ["checkpoints", "unread"]],
  differs: [renderChanges, ["differs"]],
  classes: [renderClasses, ["classes"]],
  samples: [renderSamples, ["samples"]],
  rest: [renderRest, ["notes", "commands", "job"]],
};

// Renders the sections whose data has changed. Details that the reader has opened stay open.
function updateSections(run) {
  for (const [name, [render, keys]] of Object.entries(SECTIONS)) {
    const key = JSON.stringify(keys.map((field) => run[field]));
    if (view.keys.get(name) === key) continue;
    view.keys.set(name, key);
    const place = document.getElementById(`the-${name}`);
    const openIds = new Set(
      [...place.querySelectorAll("details[open]")].map((details) => details.dataset.id),
    );
    place.replaceChildren(...render(run).filter(Boolean));
    for (const details of place.querySelectorAll("details"))
      if (openIds.has(details.dataset.id)) details.open = true;
  }
}

// Returns the exponential moving average of values, corrected for its start at 0.
function smoothValues(values, weight) {
  let mean = 0;
  let factor = 1;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    factor *= weight;
    return mean / (1 - factor);
  });
}

// Returns the points in order of x. Points without an x, of a program that reported no time, are
// left out.
function sortPoints(x, y) {
  const points = x
    .map((value, index) => [value, y[index]])
    .filter(([value]) => value !== null)
    .sort((a, b) => a[0] - b[0]);
  return { x: points.map(([value]) => value), y: points.map(([, value]) => value) };
}

// Returns a curve over "step" or "time" as a line, and if the reader smooths it, also as a smooth
// one.
function curveLines(name, curve, by, unit) {
  const [steps, seconds, values] = curve;
  const raw = sortPoints(
    by === "step" ? steps : seconds.map((at) => (at === null ? null : at / unit)),
    values,
  );
  const style = { dash: [], stroke: "--s0" };
  if (!view.smooth) return [{ label: name, ...raw, ...style }];
  return [
    { label: name, ...raw, ...style, isFaint: true },
    { label: `${name}, smoothed`, x: raw.x, y: smoothValues(raw.y, view.smooth), ...style },
  ];
}

// A curve of memory is drawn with its limit as a dashed line, at which the kernel or the device
// ends the process.
const LIMITS = { host_gib: "host_limit_gib", device_gib: "device_limit_gib" };

function linesWithLimit(run, name, unit) {
  const lines = curveLines(name, run.curves[name], view.by, unit);
  const limit = run.curves[LIMITS[name]];
  if (!limit) return lines;
  const [limitLine] = curveLines("limit", limit, view.by, unit);
  return [...lines, { ...limitLine, isFaint: false, dash: DASHES[1], stroke: "--s1" }];
}

function describeCurve(name, curve) {
  const values = curve[2];
  const steps = curve[0];
  return (
    `${name}: ${formatNumber(values[0])} at step ${steps[0]}, ${formatNumber(values[values.length - 1])} at step ${steps[steps.length - 1]}, ` +
    `lowest ${formatNumber(Math.min(...values))}, highest ${formatNumber(Math.max(...values))}`
  );
}

// Draws the strip, the phases of the ranks and the loss, on one time axis.
function drawTimeCharts(run) {
  for (const chart of view.pair) chart.destroy();
  view.pair = [];
  const [unit, label] = timeUnit(run.wall_s);
  const ends = [0, Math.max(run.wall_s / unit, 1e-9)];
  const readout = document.getElementById("readout");
  const strip = document.getElementById("strip");
  const loss = document.getElementById("loss");
  strip.replaceChildren();
  loss.replaceChildren();
  stripChart(strip, run, unit, { peers: view.pair, readout });
  const name =
    ["loss", "eval/loss"].find((candidate) => run.curves[candidate]) || Object.keys(run.curves)[0];
  const hasTimes = name && run.curves[name][1].some((at) => at !== null);
  const lines = hasTimes
    ? curveLines(name, run.curves[name], "time", unit)
    : [{ label: "no curve yet", x: ends, y: [null, null] }];
  if (hasTimes && name === "loss" && run.curves["eval/loss"]) {
    const evalLines = curveLines("eval/loss", run.curves["eval/loss"], "time", unit);
    lines.push(
      ...evalLines.map((line) => ({
        ...line,
        dash: line.isFaint ? [] : DASHES[1],
        stroke: "--s1",
      })),
    );
  }
  const names = lines
    .filter((line) => !line.isFaint)
    .map((line, index) => `${line.label} (${index ? "dashed" : "solid"})`);
  document.getElementById("loss-name").textContent = hasTimes ? names.join(", ") : "";
  drawRankPhases(run, unit);
  lineChart(loss, lines, {
    label: hasTimes ? describeCurve(name, run.curves[name]) : "no curve yet",
    height: 220,
    xLabel: `${label} of running`,
    ends,
    peers: view.pair,
    readout,
    isLog: view.isLog,
  });
}

function sortedCurves(run) {
  const order = (name) =>
    FIRST_CURVES.includes(name) ? FIRST_CURVES.indexOf(name) : FIRST_CURVES.length;
  return run.drawn.slice().sort((a, b) => order(a) - order(b) || (a < b ? -1 : 1));
}

function summarizeValues(values) {
  return `now ${formatNumber(values[values.length - 1])}, lowest ${formatNumber(Math.min(...values))}, highest ${formatNumber(Math.max(...values))}`;
}

// Updates the charts of all curves. They are created again only if the curves, the axes or the
// colours have changed.
function updateCurves(run) {
  const [unit, label] = timeUnit(run.wall_s);
  const names = sortedCurves(run);
  const key = JSON.stringify([
    names,
    label,
    view.by,
    view.smooth > 0,
    view.isLog,
    cssVariable("--paper"),
  ]);
  const isNew = view.keys.get("curves") !== key;
  if (isNew) createCharts(run, names, unit, label);
  view.keys.set("curves", key);
  for (const name of names) {
    const curve = run.curves[name];
    const { chart, summary, values } = view.charts.get(name);
    summary.textContent = summarizeValues(curve[2]);
    chart.frame.setAttribute("aria-label", describeCurve(name, curve));
    values.ontoggle = () =>
      values.open && values.replaceChildren(values.firstChild, valuesTable(name, curve));
    values.ontoggle();
    if (!isNew) chart.update(joinLines(linesWithLimit(run, name, unit), view.isLog));
  }
}

function createCharts(run, names, unit, label) {
  const place = document.getElementById("curves");
  for (const { chart } of view.charts.values()) chart.destroy();
  view.charts.clear();
  place.replaceChildren();
  for (const name of names) {
    const frame = el("div", { class: "chart" });
    const curve = run.curves[name];
    const summary = el("p", { class: "quiet" });
    const values = el(
      "details",
      { class: "no-print" },
      el("summary", { class: "quiet" }, "As a table"),
    );
    place.append(el("div", {}, el("h3", {}, name), summary, frame, values));
    const chart = lineChart(frame, linesWithLimit(run, name, unit), {
      label: describeCurve(name, curve),
      height: 170,
      isLog: view.isLog,
      xLabel: view.by === "step" ? "step" : label,
    });
    view.charts.set(name, { chart, summary, values });
  }
}

// Returns a table of at most some 50 values of a curve.
function valuesTable(name, curve) {
  const [steps, , values] = curve;
  const every = Math.max(1, Math.ceil(steps.length / 50));
  const rows = steps
    .map((step, index) => [step, values[index]])
    .filter((_, index) => index % every === 0 || index === steps.length - 1);
  return makeTable(
    ["#Step", `#${name}`],
    rows.map(([step, value]) => tableRow(numberCell(step), numberCell(formatNumber(value)))),
    `Values of ${name}`,
  );
}

// Returns the controls of the curves. `state.run` is the newest data of the run.
function curveControls(state) {
  const redraw = () => {
    drawTimeCharts(state.run);
    updateCurves(state.run);
  };
  const radio = (value, text) =>
    el(
      "label",
      {},
      el("input", {
        type: "radio",
        name: "by",
        value,
        checked: view.by === value,
        onchange: () => {
          view.by = value;
          redraw();
        },
      }),
      ` ${text}`,
    );
  return el(
    "div",
    { class: "controls" },
    el("fieldset", {}, el("legend", {}, "Over"), radio("step", "steps"), radio("time", "time")),
    el(
      "label",
      {},
      "Smooth ",
      el("input", {
        type: "range",
        min: 0,
        max: 0.99,
        step: 0.01,
        value: 0,
        oninput: (event) => {
          view.smooth = Number(event.target.value);
          redraw();
        },
      }),
    ),
    el(
      "label",
      {},
      el("input", {
        type: "checkbox",
        onchange: (event) => {
          view.isLog = event.target.checked;
          redraw();
        },
      }),
      " Logarithmic values",
    ),
    el(
      "label",
      {},
      el("input", {
        type: "checkbox",
        id: "outliers",
        onchange: (event) => {
          view.hasOutliers = event.target.checked;
          view.keys.delete("curves");
          redraw();
        },
      }),
      " Outliers in full",
    ),
    el(
      "span",
      { class: "quiet" },
      "Drag over a curve to zoom, double-click to see all; by keys: + − ← → 0",
    ),
  );
}

function showRun(run) {
  const state = { run };
  const place = (name) => el("div", { id: `the-${name}` });
  document.body.replaceChildren(
    el(
      "main",
      {},
      el("header", {}, pageLinks(run), el("h1", {}, run.name), place("sentence"), place("facts")),
      place("explanation"),
      ...section(
        "time",
        "Where the time went",
        el("p", { class: "quiet", id: "loss-name" }),
        el("div", { id: "strip", class: "chart" }),
        el("div", { id: "loss", class: "chart" }),
        el("div", { id: "heat-controls", class: "controls" }),
        el("div", { id: "heat", class: "chart" }),
        el("p", { id: "heat-readout", class: "readout", role: "status" }),
        el(
          "p",
          { id: "readout", class: "readout" },
          "▲ a save, ○ an evaluation; a line through the strip ends an attempt.",
        ),
        place("causes"),
      ),
      place("attempts"),
      ...section(
        "curves-title",
        "Curves",
        place("curves-unread"),
        curveControls(state),
        el("div", { id: "curves", class: "charts" }),
      ),
      place("hosts"),
      place("ranks"),
      place("checkpoints"),
      place("differs"),
      place("classes"),
      place("samples"),
      place("rest"),
    ),
    el(
      "footer",
      {},
      run.explanation
        ? "Made by launcher dashboard from what the cluster shows you. "
        : "Made by launcher report from the files of the run. ",
      "Curves by uPlot, © Leon Sorokin, MIT license.",
    ),
  );
  const draw = () => {
    updateSections(state.run);
    drawTimeCharts(state.run);
    updateCurves(state.run);
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    forgetColors();
    view.keys.clear();
    draw();
  });
  if (run.events)
    followEvents(
      run.events,
      (data) => {
        state.run = data;
        draw();
      },
      run.explanation ? reloadLater : undefined,
    );
}

// The session has ended, the job is gone, or too many pages are open.
const reloadLater = () => setTimeout(() => location.reload(), 10_000);

// Calls `onData` with each event of a stream while the page is visible, and `onClosed` if the
// server refuses the stream.
function followEvents(address, onData, onClosed = () => {}) {
  let events = null;
  const connect = () => {
    events = new EventSource(address);
    events.addEventListener("run", (event) => {
      performance.mark("received");
      onData(JSON.parse(event.data));
      measureDrawing("received");
    });
    events.addEventListener("error", () => {
      if (events.readyState === EventSource.CLOSED) onClosed();
    });
  };
  document.addEventListener("visibilitychange", () => {
    events.close();
    if (!document.hidden) connect();
  });
  connect();
}

// Measures the time from a mark, or from the start of the page, until the next frame is on the
// screen.
function measureDrawing(startMark) {
  requestAnimationFrame(() => setTimeout(() => performance.measure("drawn", startMark)));
}
