"use strict";
// The evaluation of a classification by class. Every cell has its number, and the shades only add
// to it.

// A longer table of classes is folded.
const MAX_OPEN_CLASSES = 50;

const formatShare = (share) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`;

function svgElement(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
  node.append(...children);
  return node;
}

// Returns the confusion matrix: a row for each label and a column for each predicted class.
function confusionTable(evaluation) {
  const names = evaluation.per_class.map(({ label }) => label);
  const makeCell = (count, label, predicted, total) => {
    const text = count ? String(count) : "·";
    const isRight = label === predicted;
    const cell = el(
      "td",
      {
        class: isRight ? "is-right" : "is-wrong",
        title: `${names[label]} taken for ${names[predicted]}: ${count}`,
      },
      isRight ? el("strong", {}, text) : text,
    );
    cell.style.setProperty("--share", `${total ? Math.round(60 * Math.sqrt(count / total)) : 0}%`);
    return cell;
  };
  const rows = evaluation.confusion.map((counts, label) => {
    const total = counts.reduce((sum, count) => sum + count, 0);
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, names[label]),
      ...counts.map((count, predicted) => makeCell(count, label, predicted, total)),
    );
  });
  const heads = names.map((name) => el("th", { scope: "col" }, el("span", {}, name)));
  const body = el(
    "table",
    { class: "matrix", "aria-label": "Confusion matrix" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Label"), ...heads)),
    el("tbody", {}, ...rows),
  );
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Confusion matrix" },
    body,
  );
}

function renderConfusion(evaluation) {
  if (evaluation.confusion) {
    return [
      el("h3", {}, "Confusion"),
      el(
        "p",
        { class: "quiet" },
        "Rows are labels, columns are what the model chose. The diagonal, in bold, is right; the stronger the shade of a cell, the larger its share of the row.",
      ),
      confusionTable(evaluation),
    ];
  }
  if (!evaluation.confused.length) return [];
  const rows = evaluation.confused.map(({ label, predicted, examples }) =>
    tableRow(label, predicted, numberCell(examples)),
  );
  return [
    el("h3", {}, "Pairs that are confused most"),
    makeTable(["Label", "Taken for", "#Examples"], rows, "Confused pairs"),
  ];
}

function renderRates(evaluation) {
  const worstFirst = evaluation.per_class.slice().sort((a, b) => (a.f1 ?? 2) - (b.f1 ?? 2));
  const rows = worstFirst.map(({ label, examples, precision, recall, f1 }) =>
    tableRow(
      label,
      numberCell(examples),
      numberCell(formatShare(precision)),
      numberCell(formatShare(recall)),
      numberCell(formatShare(f1)),
    ),
  );
  const rates = makeTable(
    ["Class", "#Examples", "#Precision", "#Recall", "#F1"],
    rows,
    "Rates by class",
  );
  const title =
    evaluation.classes > worstFirst.length
      ? `The first ${worstFirst.length} of ${evaluation.classes} classes, the lowest F1 first`
      : "Classes, the lowest F1 first";
  return worstFirst.length > MAX_OPEN_CLASSES
    ? [el("details", { "data-id": "classes" }, el("summary", {}, title), rates)]
    : [el("h3", {}, title), rates];
}

// Draws a bar for each range of probabilities, as high as the share of right answers. On the dashed
// line both are equal.
function calibrationChart(evaluation) {
  const size = 200;
  const barWidth = size / evaluation.bins.length;
  const bars = evaluation.bins.map(({ examples, accuracy }, index) =>
    examples
      ? svgElement("rect", {
          x: index * barWidth + 1,
          width: Math.max(1, barWidth - 2),
          y: size * (1 - accuracy),
          height: Math.max(1, size * accuracy),
          class: "bar",
        })
      : "",
  );
  const label = `Share that is right by the probability of the chosen class; expected calibration error ${formatShare(evaluation.ece)}`;
  return svgElement(
    "svg",
    {
      viewBox: `-2 -2 ${size + 4} ${size + 4}`,
      role: "img",
      class: "calibration",
      "aria-label": label,
    },
    svgElement("rect", { x: 0, y: 0, width: size, height: size, class: "frame" }),
    ...bars.filter(Boolean),
    svgElement("line", { x1: 0, y1: size, x2: size, y2: 0, class: "ideal" }),
  );
}

function renderCalibration(evaluation) {
  if (!evaluation.bins.some((bin) => bin.examples)) return [];
  const edge = (index) => (index / evaluation.bins.length).toFixed(2);
  const rows = evaluation.bins
    .map((bin, index) => ({ ...bin, range: `${edge(index)} – ${edge(index + 1)}` }))
    .filter((bin) => bin.examples)
    .map(({ range, examples, confidence, accuracy }) =>
      tableRow(
        numberCell(range),
        numberCell(examples),
        numberCell(formatShare(confidence)),
        numberCell(formatShare(accuracy)),
      ),
    );
  return [
    el("h3", {}, "Calibration"),
    el(
      "p",
      { class: "quiet" },
      "The share of examples that is right, by the probability of the chosen class from 0 to 1; on the dashed line both are equal.",
    ),
    calibrationChart(evaluation),
    el(
      "details",
      { "data-id": "calibration" },
      el("summary", { class: "quiet" }, "As a table"),
      makeTable(["#Probability", "#Examples", "#Mean probability", "#Right"], rows, "Calibration"),
    ),
  ];
}

function renderWorstExamples(evaluation) {
  if (!evaluation.worst.length) return [];
  const rows = evaluation.worst.map(({ where, label, predicted, confidence, loss }) =>
    tableRow(
      el("td", { class: "why" }, where),
      label,
      predicted,
      numberCell(formatShare(confidence)),
      numberCell(formatNumber(loss)),
    ),
  );
  return [
    el("h3", {}, "The examples with the largest loss"),
    makeTable(
      ["Example", "Label", "Taken for", "#Probability", "#Loss"],
      rows,
      "The examples with the largest loss",
    ),
  ];
}

function renderClasses(run) {
  const evaluation = run.classes;
  if (!evaluation) return [];
  const facts = [
    `step ${evaluation.step}${evaluation.ema ? ", averaged weights" : ""}`,
    `${evaluation.examples} examples`,
    `top-1 ${formatShare(evaluation.top1)}`,
    evaluation.top5 !== null && `top-5 ${formatShare(evaluation.top5)}`,
    `macro F1 ${formatShare(evaluation.macro_f1)}`,
    `expected calibration error ${formatShare(evaluation.ece)}`,
  ];
  return section(
    "classes",
    "Classes",
    el("p", {}, `By launcher eval: ${facts.filter(Boolean).join(", ")}.`),
    ...renderConfusion(evaluation),
    ...renderRates(evaluation),
    ...renderCalibration(evaluation),
    ...renderWorstExamples(evaluation),
  );
}
