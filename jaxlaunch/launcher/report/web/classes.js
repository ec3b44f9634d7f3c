"use strict";
// What `launcher eval` found out about the classes of a run. Every cell has its number: shades are only for the eye.

const MOST_OPEN = 50; // classes; a longer table is folded
const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

// A matrix: a row for each label, a column for what its examples are called. A shade is a share of the row.
function confusionTable(found) {
  const names = found.per_class.map((one) => one.label);
  const cell = (count, at, to, all) => {
    const text = count ? String(count) : "·";
    const made = el("td", { class: at === to ? "is-right" : "is-wrong", title: `${names[at]} taken for ${names[to]}: ${count}` }, at === to ? el("strong", {}, text) : text);
    made.style.setProperty("--share", `${all ? Math.round(60 * Math.sqrt(count / all)) : 0}%`);
    return made;
  };
  const rows = found.confusion.map((counts, at) => {
    const all = counts.reduce((sum, count) => sum + count, 0);
    return el("tr", {}, el("th", { scope: "row" }, names[at]), ...counts.map((count, to) => cell(count, at, to, all)));
  });
  const heads = names.map((name) => el("th", { scope: "col" }, el("span", {}, name)));
  const body = el("table", { class: "matrix", "aria-label": "Confusion matrix" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Label"), ...heads)), el("tbody", {}, ...rows));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Confusion matrix" }, body);
}

function confused(found) {
  if (found.confusion) {
    return [el("h3", {}, "Confusion"), el("p", { class: "quiet" }, "Rows are labels, columns are what the model chose. The diagonal, in bold, is right; the stronger the shade of a cell, the larger its share of the row."), confusionTable(found)];
  }
  if (!found.confused.length) return [];
  const rows = found.confused.map((one) => row(one.label, one.predicted, number(one.examples)));
  return [el("h3", {}, "Pairs that are confused most"), table(["Label", "Taken for", "#Examples"], rows, "Confused pairs")];
}

function perClass(found) {
  const worst = found.per_class.slice().sort((a, b) => (a.f1 ?? 2) - (b.f1 ?? 2));
  const rows = worst.map((one) => row(one.label, number(one.examples), number(percent(one.precision)), number(percent(one.recall)), number(percent(one.f1))));
  const rates = table(["Class", "#Examples", "#Precision", "#Recall", "#F1"], rows, "Rates by class");
  const title = found.classes > worst.length ? `The first ${worst.length} of ${found.classes} classes, the lowest F1 first` : "Classes, the lowest F1 first";
  return worst.length > MOST_OPEN ? [el("details", { "data-id": "classes" }, el("summary", {}, title), rates)] : [el("h3", {}, title), rates];
}

// A bar for each range of probabilities, as high as the share that is right; on the dashed line both are equal.
function calibrationChart(found) {
  const size = 200, wide = size / found.bins.length;
  const bars = found.bins.map((one, at) => (one.examples ? svg("rect", { x: at * wide + 1, width: Math.max(1, wide - 2), y: size * (1 - one.accuracy), height: Math.max(1, size * one.accuracy), class: "bar" }) : ""));
  const label = `Share that is right by the probability of the chosen class; expected calibration error ${percent(found.ece)}`;
  return svg("svg", { viewBox: `-2 -2 ${size + 4} ${size + 4}`, role: "img", class: "calibration", "aria-label": label },
    svg("rect", { x: 0, y: 0, width: size, height: size, class: "frame" }), ...bars.filter(Boolean), svg("line", { x1: 0, y1: size, x2: size, y2: 0, class: "ideal" }));
}

function calibration(found) {
  if (!found.bins.some((one) => one.examples)) return [];
  const edge = (at) => (at / found.bins.length).toFixed(2);
  const rows = found.bins.map((one, at) => [one, `${edge(at)} – ${edge(at + 1)}`]).filter(([one]) => one.examples)
    .map(([one, range]) => row(number(range), number(one.examples), number(percent(one.confidence)), number(percent(one.accuracy))));
  return [el("h3", {}, "Calibration"), el("p", { class: "quiet" }, "The share of examples that is right, by the probability of the chosen class from 0 to 1; on the dashed line both are equal."), calibrationChart(found),
    el("details", { "data-id": "calibration" }, el("summary", { class: "quiet" }, "As a table"), table(["#Probability", "#Examples", "#Mean probability", "#Right"], rows, "Calibration"))];
}

function worstExamples(found) {
  if (!found.worst.length) return [];
  const rows = found.worst.map((one) => row(el("td", { class: "why" }, one.where), one.label, one.predicted, number(percent(one.confidence)), number(short(one.loss))));
  return [el("h3", {}, "The examples with the largest loss"), table(["Example", "Label", "Taken for", "#Probability", "#Loss"], rows, "The examples with the largest loss")];
}

function classes(run) {
  const found = run.classes;
  if (!found) return [];
  const facts = [`step ${found.step}${found.ema ? ", averaged weights" : ""}`, `${found.examples} examples`, `top-1 ${percent(found.top1)}`, found.top5 !== null && `top-5 ${percent(found.top5)}`,
    `macro F1 ${percent(found.macro_f1)}`, `expected calibration error ${percent(found.ece)}`];
  return chapter("classes", "Classes", el("p", {}, `By launcher eval: ${facts.filter(Boolean).join(", ")}.`), ...confused(found), ...perClass(found), ...calibration(found), ...worstExamples(found));
}
