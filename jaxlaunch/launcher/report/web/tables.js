"use strict";
// The table of all runs, and the comparison of some.

// The table shows at most this many rows. The filter finds the others.
const MAX_ROWS = 500;
// The choices of the reader: order, filter, the ids of runs to compare, and the ids of sweeps that
// are open.
const tableView = { sort: "age_s", isDown: false, filter: "", picked: new Set(), open: new Set() };
const COLUMNS = [
  ["name", "Name"],
  ["state", "State"],
  ["metric", "#Metric"],
  ["step", "#Step"],
  ["goodput", "#Goodput"],
  ["restarts", "#Restarts"],
  ["duration_s", "#Duration"],
  ["age_s", "#Age"],
  ["tags", "Tags"],
  ["owner", "Owner"],
  ["where", "Where"],
  ["why", "Why"],
];

function matchesFilter(run) {
  const words = tableView.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const text =
    `${run.name} ${run.state} ${run.owner} ${run.where} ${run.why} ${run.tags || ""} ${run.changes ? changesText(run) : ""}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

const sortValue = (run) => (tableView.sort === "metric" ? run.metric?.value : run[tableView.sort]);

function compareRuns(first, second) {
  const [a, b] = [sortValue(first), sortValue(second)];
  if (a === b) return first.name < second.name ? -1 : 1;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return (a < b ? -1 : 1) * (tableView.isDown ? -1 : 1);
}

// Returns the row of a run, with a checkbox if `onPick` is given.
function runRow(run, onPick) {
  const checkbox =
    onPick &&
    el("input", {
      type: "checkbox",
      "aria-label": `Compare ${run.name}`,
      checked: tableView.picked.has(run.id),
      onchange: (event) => {
        if (event.target.checked) tableView.picked.add(run.id);
        else tableView.picked.delete(run.id);
        onPick();
      },
    });
  const progress = el(
    "td",
    { class: "number" },
    run.steps ? `${run.step ?? 0} / ${run.steps}` : `${run.step ?? "–"}`,
    run.steps && run.state === "running"
      ? el("progress", {
          max: run.steps,
          value: run.step || 0,
          "aria-label": `Progress of ${run.name}`,
        })
      : null,
  );
  const node = tableRow(
    ...(checkbox ? [el("td", {}, checkbox)] : []),
    el(
      "td",
      {},
      run.page ? el("a", { href: run.page }, run.name) : run.name,
      run.changes ? changesCell(run) : null,
    ),
    el("td", {}, stateBadge(run.state)),
    metricCell(run.metric),
    progress,
    numberCell(run.goodput === null ? "–" : `${(100 * run.goodput).toFixed(1)} %`),
    numberCell(String(run.restarts)),
    numberCell(formatSpan(run.duration_s)),
    numberCell(formatSpan(run.age_s)),
    run.tags || "–",
    run.owner || "–",
    run.where,
    el("td", { class: "why" }, run.state === "done" ? "" : run.why),
  );
  if (run.group) node.className = "is-member";
  return node;
}

// Returns a cell with the newest value of a metric, its curve and its name.
function metricCell(metric) {
  if (!metric) return numberCell("–");
  return el(
    "td",
    { class: "number" },
    formatNumber(metric.value),
    " ",
    sparkline(metric.spark, `${metric.name} over the steps`),
    el("div", { class: "quiet" }, metric.name),
  );
}

// Returns the row of a sweep, with a button that opens its runs, and the best metric of its runs
// that are done.
function groupRow(group, members, data, hasCheckbox) {
  const isOpen = tableView.open.has(group.id);
  const toggle = () => {
    if (isOpen) tableView.open.delete(group.id);
    else tableView.open.add(group.id);
    drawRunsTable(data);
    document.querySelector(`[data-group="${group.id}"]`)?.focus();
  };
  const done = members
    .filter((run) => run.state === "done" && run.metric)
    .sort((a, b) => (group.is_max ? -1 : 1) * (a.metric.value - b.metric.value));
  const button = el(
    "button",
    {
      "data-group": group.id,
      "aria-expanded": String(isOpen),
      "aria-label": `Runs of ${group.name}`,
      onclick: toggle,
    },
    isOpen ? "▼" : "▶",
  );
  const name = el(
    "td",
    {},
    button,
    " ",
    el("a", { href: group.page }, group.name),
    el("div", { class: "quiet" }, `${members.length} runs${done.length ? ", the best with" : ""}`),
    done.length ? changesCell(done[0]) : null,
  );
  const state = el("td", { class: "why", colspan: COLUMNS.length - 3 }, countStates(members));
  return tableRow(
    ...(hasCheckbox ? [el("td", {})] : []),
    name,
    el("td", {}, "sweep"),
    metricCell(done[0]?.metric),
    state,
  );
}

// Returns functions that make the rows of the table. A sweep has the place of the first of its
// runs.
function tableRows(runs, data, onPick) {
  const rows = [];
  const seen = new Set();
  const groups = new Map((data.groups || []).map((group) => [group.id, group]));
  for (const run of runs) {
    const group = groups.get(run.group);
    if (!group) rows.push(() => runRow(run, onPick));
    else if (!seen.has(group.id)) {
      seen.add(group.id);
      const members = runs.filter((member) => member.group === group.id);
      rows.push(() => groupRow(group, members, data, Boolean(onPick)));
      if (tableView.open.has(group.id))
        rows.push(...members.map((member) => () => runRow(member, onPick)));
    }
  }
  return rows;
}

function drawRunsTable(data) {
  for (const run of data.runs)
    if ("began" in run) run.age_s = run.began ? Math.max(0, Date.now() / 1000 - run.began) : 0;
  const runs = data.runs.filter(matchesFilter).sort(compareRuns);
  const place = document.getElementById("runs");
  const focused = document.activeElement?.dataset?.sort;
  const onPick = data.compare ? () => updateCompareLink(data) : null;
  const heads = COLUMNS.map(([key, title]) =>
    el(
      "th",
      {
        scope: "col",
        class: title.startsWith("#") ? "number" : null,
        "aria-sort":
          tableView.sort === key ? (tableView.isDown ? "descending" : "ascending") : null,
      },
      el(
        "button",
        {
          "data-sort": key,
          onclick: () => {
            tableView.isDown = tableView.sort === key && !tableView.isDown;
            tableView.sort = key;
            drawRunsTable(data);
          },
        },
        title.replace("#", ""),
        tableView.sort === key ? (tableView.isDown ? " ▼" : " ▲") : "",
      ),
    ),
  );
  const table = el(
    "table",
    { "aria-label": "Runs" },
    el(
      "thead",
      {},
      el("tr", {}, data.compare ? el("th", { scope: "col" }, "Pick") : null, ...heads),
    ),
    el(
      "tbody",
      {},
      ...tableRows(runs, data, onPick)
        .slice(0, MAX_ROWS)
        .map((make) => make()),
    ),
  );
  place.replaceChildren(
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, table),
  );
  const more = runs.length > MAX_ROWS ? `, the first ${MAX_ROWS} shown` : "";
  document.getElementById("count").textContent =
    `${runs.length} of ${data.runs.length} runs${more}`;
  document
    .getElementById("unread")
    .replaceChildren(...data.unread.map((text) => el("p", {}, `⚠ ${text}`)));
  if (focused) place.querySelector(`[data-sort="${focused}"]`)?.focus();
  onPick?.();
}

function updateCompareLink(data) {
  const ids = data.runs.filter((run) => tableView.picked.has(run.id)).map((run) => run.id);
  const place = document.getElementById("compare");
  if (ids.length < 2)
    place.replaceChildren(el("span", { class: "quiet" }, "Pick two or more runs to compare them."));
  else
    place.replaceChildren(
      el(
        "a",
        { href: `${data.compare}?${ids.map((id) => `run=${encodeURIComponent(id)}`).join("&")}` },
        `Compare ${ids.length} runs`,
      ),
    );
}

function showRuns(data) {
  const filter = el("input", {
    type: "search",
    placeholder: "name, state, owner …",
    oninput: (event) => {
      tableView.filter = event.target.value;
      drawRunsTable(state.data);
    },
  });
  const state = { data };
  document.body.replaceChildren(
    el(
      "main",
      {},
      el("h1", {}, "Runs"),
      el(
        "div",
        { class: "controls" },
        el("label", {}, "Filter ", filter),
        el("span", { id: "count", role: "status" }),
        el("span", { id: "compare" }),
        data.sign_out ? el("a", { href: data.sign_out }, "Sign out") : null,
      ),
      el("div", { id: "unread" }),
      el("div", { id: "runs" }),
    ),
    el(
      "footer",
      {},
      data.is_cluster
        ? "Made by launcher dashboard from what the cluster shows you."
        : "Made by launcher dashboard from the files of the runs.",
    ),
  );
  drawRunsTable(data);
  if (data.events)
    followEvents(
      data.events,
      (newData) => {
        state.data = { ...data, ...newData };
        drawRunsTable(state.data);
      },
      data.is_cluster ? reloadLater : undefined,
    );
}

// Returns the x values of a curve: steps, hours or examples.
function xValues(run, curve, by) {
  if (by === "step") return curve[0];
  if (by === "hour") return curve[1].map((at) => (at === null ? null : at / 3600));
  return curve[0].map((step) => (run.batch ? step * run.batch : null));
}

function drawComparedCurves(data) {
  const place = document.getElementById("curves");
  for (const chart of view.charts.values()) chart.destroy();
  view.charts.clear();
  place.replaceChildren();
  const names = data.metric ?? [...new Set(data.runs.flatMap((run) => sortedCurves(run)))];
  const units = { step: "step", hour: "hours of running", examples: "examples" };
  for (const name of names) {
    const runs = data.runs.filter((run) => run.curves[name]);
    const lines = runs
      .map((run) => {
        const raw = sortPoints(xValues(run, run.curves[name], view.by), run.curves[name][2]);
        return {
          label: run.name,
          x: raw.x,
          y: view.smooth ? smoothValues(raw.y, view.smooth) : raw.y,
          ...lineStyle(data.runs.indexOf(run)),
        };
      })
      .filter((line) => line.x.length);
    if (!lines.length) continue;
    const frame = el("div", { class: "chart" });
    const readout = el("p", { class: "readout" });
    place.append(el("div", {}, el("h3", {}, name), frame, readout));
    const label = runs
      .map((run) => `${run.name}, ${describeCurve(name, run.curves[name])}`)
      .join("; ");
    view.charts.set(
      name,
      lineChart(frame, lines, {
        label,
        height: 210,
        isLog: view.isLog,
        xLabel: units[view.by],
        readout,
      }),
    );
  }
}

// Returns the colour and the dashes of the run with an index.
const lineStyle = (index) => ({ stroke: `--s${index % 6}`, dash: DASHES[index % DASHES.length] });

// Returns a sample of the line of a run, for the legend.
function lineSample(index) {
  const canvas = el("canvas", { width: 44, height: 10, "aria-hidden": "true" });
  const paint = canvas.getContext("2d");
  const { stroke, dash } = lineStyle(index);
  paint.strokeStyle = cssVariable(stroke);
  paint.lineWidth = 2;
  paint.setLineDash(dash);
  paint.beginPath();
  paint.moveTo(0, 5);
  paint.lineTo(44, 5);
  paint.stroke();
  return canvas;
}

function showComparison(data) {
  view.by = data.at;
  const redraw = () => drawComparedCurves(data);
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
  const draw = () => {
    const runs = data.runs.map((run, index) =>
      tableRow(
        el(
          "td",
          {},
          lineSample(index),
          " ",
          run.page ? el("a", { href: run.page }, run.name) : run.name,
        ),
        el("td", {}, stateBadge(run.sentence.state)),
        numberCell(String(run.step ?? "–")),
        ...data.columns.map((name) =>
          numberCell(formatNumber(run.curves[name] ? run.curves[name][2].at(-1) : null)),
        ),
        numberCell(run.goodput === null ? "–" : `${(100 * run.goodput).toFixed(1)} %`),
        numberCell(formatSpan(run.wall_s)),
      ),
    );
    const differs = data.differs.map(([key, values]) =>
      tableRow(el("td", {}, el("code", {}, key)), ...values),
    );
    document.body.replaceChildren(
      el(
        "main",
        {},
        pageLinks(data),
        el("h1", {}, data.runs.map((run) => run.name).join(" and ")),
        makeTable(
          ["Run", "State", "#Step", ...data.columns.map((name) => `#${name}`), "#Goodput", "#Time"],
          runs,
          "Runs",
        ),
        ...section(
          "differs",
          "What differs",
          differs.length
            ? makeTable(["Key", ...data.runs.map((run) => run.name)], differs, "What differs")
            : el("p", {}, "Nothing in their jobs."),
        ),
        ...section(
          "curves-title",
          "Curves",
          el(
            "div",
            { class: "controls" },
            el(
              "fieldset",
              {},
              el("legend", {}, "Over"),
              radio("step", "steps"),
              radio("hour", "time"),
              data.runs.every((run) => run.batch) ? radio("examples", "examples") : null,
            ),
            el(
              "label",
              {},
              "Smooth ",
              el("input", {
                type: "range",
                min: 0,
                max: 0.99,
                step: 0.01,
                value: view.smooth,
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
                checked: view.isLog,
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
                checked: view.hasOutliers,
                onchange: (event) => {
                  view.hasOutliers = event.target.checked;
                  redraw();
                },
              }),
              " Outliers in full",
            ),
          ),
          ...data.runs.flatMap((run) => unreadNotes(run, "curves", `${run.name}: `)),
          el("div", { id: "curves", class: "charts" }),
        ),
      ),
      el(
        "footer",
        {},
        data.is_cluster
          ? "Made by launcher dashboard from what the cluster shows you. "
          : "Made by launcher compare from the files of the runs. ",
        "Curves by uPlot, © Leon Sorokin, MIT license.",
      ),
    );
    redraw();
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    forgetColors();
    draw();
  });
}
