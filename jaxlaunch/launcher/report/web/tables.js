"use strict";
// The table of all runs, and runs next to each other.

const MOST_ROWS = 500; // in the table at a time; the filter finds the others
const table_ = { sort: "age_s", isDown: false, filter: "", picked: new Set(), open: new Set() };
const COLUMNS = [
  ["name", "Name"], ["state", "State"], ["metric", "#Metric"], ["step", "#Step"], ["goodput", "#Goodput"], ["restarts", "#Restarts"],
  ["duration_s", "#Duration"], ["age_s", "#Age"], ["tags", "Tags"], ["owner", "Owner"], ["where", "Where"], ["why", "Why"],
];

function matches(run) {
  const words = table_.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const text = `${run.name} ${run.state} ${run.owner} ${run.where} ${run.why} ${run.tags || ""} ${changesText(run)}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

const changesText = (run) => (run.changes ? changesOf(run) : "");
const sortValue = (run) => (table_.sort === "metric" ? run.metric?.value : run[table_.sort]);

function inOrder(first, second) {
  const [a, b] = [sortValue(first), sortValue(second)];
  if (a === b) return first.name < second.name ? -1 : 1;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return (a < b ? -1 : 1) * (table_.isDown ? -1 : 1);
}

function runRow(run, changed) {
  const pick = changed && el("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, checked: table_.picked.has(run.id), disabled: !run.page,
    onchange: (event) => { if (event.target.checked) table_.picked.add(run.id); else table_.picked.delete(run.id); changed(); } });
  const progress = el("td", { class: "number" }, run.steps ? `${run.step ?? 0} / ${run.steps}` : `${run.step ?? "–"}`,
    run.steps && run.state === "running" ? el("progress", { max: run.steps, value: run.step || 0, "aria-label": `Progress of ${run.name}` }) : null);
  const made = row(...(pick ? [el("td", {}, pick)] : []), el("td", {}, run.page ? el("a", { href: run.page }, run.name) : run.name, run.changes ? changesCell(run) : null),
    el("td", {}, stateOf(run.state)), metricCell(run.metric), progress,
    number(run.goodput === null ? "–" : `${(100 * run.goodput).toFixed(1)} %`), number(String(run.restarts)), number(span(run.duration_s)), number(span(run.age_s)), run.tags || "–", run.owner || "–", run.where,
    el("td", { class: "why" }, run.state === "done" ? "" : run.why));
  if (run.group) made.className = "is-member";
  return made;
}

// The newest value of the metric, its name, and its curve.
function metricCell(metric) {
  if (!metric) return number("–");
  return el("td", { class: "number" }, short(metric.value), " ", sparkline(metric.spark, `${metric.name} over the steps`), el("div", { class: "quiet" }, metric.name));
}

// The row of a sweep, which opens its runs. It has the best metric of those that are done.
function groupRow(group, members, data, hasPick) {
  const isOpen = table_.open.has(group.id);
  const toggle = () => { if (isOpen) table_.open.delete(group.id); else table_.open.add(group.id); runsTable(data); document.querySelector(`[data-group="${group.id}"]`)?.focus(); };
  const done = members.filter((run) => run.state === "done" && run.metric).sort((a, b) => (group.is_max ? -1 : 1) * (a.metric.value - b.metric.value));
  const button = el("button", { "data-group": group.id, "aria-expanded": String(isOpen), "aria-label": `Runs of ${group.name}`, onclick: toggle }, isOpen ? "▼" : "▶");
  const name = el("td", {}, button, " ", el("a", { href: group.page }, group.name), el("div", { class: "quiet" }, `${members.length} runs${done.length ? ", the best with" : ""}`), done.length ? changesCell(done[0]) : null);
  const state = el("td", { class: "why", colspan: COLUMNS.length - 3 }, countStates(members));
  return row(...(hasPick ? [el("td", {})] : []), name, el("td", {}, "sweep"), metricCell(done[0]?.metric), state);
}

// The rows of the table in its order: a sweep stands where the first of its runs does.
function tableRows(found, data, changed) {
  const rows = [], seen = new Set(), groups = new Map((data.groups || []).map((group) => [group.id, group]));
  for (const run of found) {
    const group = groups.get(run.group);
    if (!group) rows.push(() => runRow(run, changed));
    else if (!seen.has(group.id)) {
      seen.add(group.id);
      const members = found.filter((one) => one.group === group.id);
      rows.push(() => groupRow(group, members, data, Boolean(changed)));
      if (table_.open.has(group.id)) rows.push(...members.map((one) => () => runRow(one, changed)));
    }
  }
  return rows;
}

function runsTable(data) {
  for (const run of data.runs) if ("began" in run) run.age_s = run.began ? Math.max(0, Date.now() / 1000 - run.began) : 0;
  const found = data.runs.filter(matches).sort(inOrder);
  const place = document.getElementById("runs");
  const focused = document.activeElement?.dataset?.sort;
  const changed = data.compare ? () => compareLink(data) : null; // jobs of a cluster have no files here to compare
  const heads = COLUMNS.map(([key, title]) => el("th", { scope: "col", class: title.startsWith("#") ? "number" : null, "aria-sort": table_.sort === key ? (table_.isDown ? "descending" : "ascending") : null },
    el("button", { "data-sort": key, onclick: () => { table_.isDown = table_.sort === key && !table_.isDown; table_.sort = key; runsTable(data); } }, title.replace("#", ""), table_.sort === key ? (table_.isDown ? " ▼" : " ▲") : "")));
  const made = el("table", { "aria-label": "Runs" }, el("thead", {}, el("tr", {}, data.compare ? el("th", { scope: "col" }, "Pick") : null, ...heads)),
    el("tbody", {}, ...tableRows(found, data, changed).slice(0, MOST_ROWS).map((make) => make())));
  place.replaceChildren(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, made));
  const more = found.length > MOST_ROWS ? `, the first ${MOST_ROWS} shown` : "";
  document.getElementById("count").textContent = `${found.length} of ${data.runs.length} runs${more}`;
  document.getElementById("unread").replaceChildren(...data.unread.map((text) => el("p", {}, `⚠ ${text}`)));
  if (focused) place.querySelector(`[data-sort="${focused}"]`)?.focus();
  changed?.();
}

function compareLink(data) {
  const ids = data.runs.filter((run) => table_.picked.has(run.id)).map((run) => run.id);
  const place = document.getElementById("compare");
  if (ids.length < 2) place.replaceChildren(el("span", { class: "quiet" }, "Pick two or more runs to compare them."));
  else place.replaceChildren(el("a", { href: `${data.compare}?${ids.map((id) => `run=${encodeURIComponent(id)}`).join("&")}` }, `Compare ${ids.length} runs`));
}

function showRuns(data) {
  const filter = el("input", { type: "search", placeholder: "name, state, owner …", oninput: (event) => { table_.filter = event.target.value; runsTable(holder.now); } });
  const holder = { now: data };
  document.body.replaceChildren(el("main", {}, el("h1", {}, "Runs"), el("div", { class: "controls" }, el("label", {}, "Filter ", filter), el("span", { id: "count", role: "status" }), el("span", { id: "compare" }),
      data.sign_out ? el("a", { href: data.sign_out }, "Sign out") : null),
    el("div", { id: "unread" }), el("div", { id: "runs" })), el("footer", {}, data.compare ? "Made by launcher dashboard from the files of the runs." : "Made by launcher dashboard from what the cluster shows you."));
  runsTable(data);
  const signIn = () => setTimeout(() => location.reload(), 10_000); // the sign-in is over, or too many pages are open
  if (data.events) follow(data.events, (now) => { holder.now = { ...data, ...now }; runsTable(holder.now); }, data.compare ? undefined : signIn);
}

// Steps, seconds or examples of a curve, as the x axis of a comparison.
function xOf(run, curve, by) {
  if (by === "step") return curve[0];
  if (by === "hour") return curve[1].map((at) => (at === null ? null : at / 3600));
  return curve[0].map((step) => (run.batch ? step * run.batch : null));
}

function comparedCurves(data) {
  const place = document.getElementById("curves");
  for (const chart of view.charts.values()) chart.destroy();
  view.charts.clear();
  place.replaceChildren();
  const all = [...new Set(data.runs.flatMap((run) => names(run)))];
  const shown = data.metric ?? all;
  const units = { step: "step", hour: "hours of running", examples: "examples" };
  for (const name of shown) {
    const with_ = data.runs.filter((run) => run.curves[name]);
    const curves_ = with_.map((run) => {
      const raw = ordered(xOf(run, run.curves[name], view.by), run.curves[name][2]);
      const at = data.runs.indexOf(run);
      return { label: run.name, x: raw.x, y: view.smooth ? smoothed(raw.y, view.smooth) : raw.y, dash: LINES[at % LINES.length], stroke: `--s${at % 6}` };
    }).filter((line) => line.x.length);
    if (!curves_.length) continue;
    const frame = el("div", { class: "chart" }), readout = el("p", { class: "readout" });
    place.append(el("div", {}, el("h3", {}, name), frame, readout));
    const label = with_.map((run) => `${run.name}, ${told(name, run.curves[name])}`).join("; ");
    view.charts.set(name, lineChart(frame, curves_, { label, height: 210, isLog: view.isLog, xLabel: units[view.by], readout }));
  }
}

function line(at) {
  const made = el("canvas", { width: 44, height: 10, "aria-hidden": "true" });
  const paint = made.getContext("2d");
  paint.strokeStyle = css(`--s${at % 6}`);
  paint.lineWidth = 2;
  paint.setLineDash(LINES[at % LINES.length]);
  paint.beginPath();
  paint.moveTo(0, 5);
  paint.lineTo(44, 5);
  paint.stroke();
  return made;
}

function showComparison(data) {
  view.by = data.at;
  const redraw = () => comparedCurves(data);
  const radio = (value, text) => el("label", {}, el("input", { type: "radio", name: "by", value, checked: view.by === value, onchange: () => { view.by = value; redraw(); } }), ` ${text}`);
  const draw = () => {
    const runs = data.runs.map((run, at) => row(el("td", {}, line(at), " ", run.page ? el("a", { href: run.page }, run.name) : run.name), el("td", {}, stateOf(run.sentence.state)), number(String(run.step ?? "–")),
      ...data.columns.map((name) => number(short(run.curves[name] ? run.curves[name][2].at(-1) : null))), number(run.goodput === null ? "–" : `${(100 * run.goodput).toFixed(1)} %`), number(span(run.wall_s))));
    const differs = data.differs.map(([key, values]) => row(el("td", {}, el("code", {}, key)), ...values));
    document.body.replaceChildren(el("main", {}, data.home ? el("p", {}, el("a", { href: data.home }, "All runs")) : null, el("h1", {}, data.runs.map((run) => run.name).join(" and ")),
      table(["Run", "State", "#Step", ...data.columns.map((name) => `#${name}`), "#Goodput", "#Time"], runs, "Runs"),
      ...chapter("differs", "What differs", differs.length ? table(["Key", ...data.runs.map((run) => run.name)], differs, "What differs") : el("p", {}, "Nothing in their jobs.")),
      ...chapter("curves-title", "Curves", el("div", { class: "controls" }, el("fieldset", {}, el("legend", {}, "Over"), radio("step", "steps"), radio("hour", "time"), data.runs.every((run) => run.batch) ? radio("examples", "examples") : null),
        el("label", {}, "Smooth ", el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smooth, oninput: (event) => { view.smooth = Number(event.target.value); redraw(); } })),
        el("label", {}, el("input", { type: "checkbox", checked: view.isLog, onchange: (event) => { view.isLog = event.target.checked; redraw(); } }), " Logarithmic values"),
        el("label", {}, el("input", { type: "checkbox", id: "outliers", checked: view.hasOutliers, onchange: (event) => { view.hasOutliers = event.target.checked; redraw(); } }), " Outliers in full")), el("div", { id: "curves", class: "charts" }))),
      el("footer", {}, "Made by launcher compare from the files of the runs. Curves by uPlot, © Leon Sorokin, MIT license."));
    redraw();
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetColors(); draw(); });
}
