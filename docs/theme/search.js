// The site's search and its moved anchors. The index is a script (search-data.js, written by tests/pages.py), since
// a page that was opened as a file may not fetch. It has SECTIONS, and the tables of `launcher help WORDS`
// (jaxlaunch/launcher/cli/doc_search.py): LEFT_OUT, SYNONYMS, PAGE_FACTORS. Words are compared as wholes; of the last
// one, which may be half typed, three letters are enough, and count less.
"use strict";

const WEIGHTS = { page: 5, title: 7, text: 1 };
const SYNONYM_WEIGHT = 0.8;
const MOST_PAGES = 12;

function stem(word) {
  if (word.length < 4 || /\d/.test(word)) return word;
  word = word.replace(/ies$/, "y").replace(/([^s])s$/, "$1");
  if (word.length > 5) word = word.replace(/(ing|ed|ion)$/, "").replace(/([^aeiouls])\1$/, "$1");
  return word.length > 3 ? word.replace(/e$/, "") : word;
}

function words(text) {
  return (text.toLowerCase().match(/[a-z0-9]+/g) || []).map(stem);
}

// Word -> {number of the section: its weight there}; a field's words count less the longer it is.
function indexed(sections) {
  const index = new Map();
  const mean = sections.reduce((sum, each) => sum + each.text.length, 0) / sections.length;
  sections.forEach((section, at) => {
    for (const field of Object.keys(WEIGHTS)) {
      const found = words(section[field]);
      const long = field === "text" ? 0.6 + 0.4 * section.text.length / mean : 0.5 + found.length / 8;
      for (const word of found) {
        if (!index.has(word)) index.set(word, {});
        const row = index.get(word);
        row[at] = (row[at] || 0) + WEIGHTS[field] / long;
      }
    }
  });
  return index;
}

// The words of a query that a page has, each with its synonyms: one that no page has is looked for as two (datasource).
function asked(index, query) {
  query = query.toLowerCase();
  for (const [phrase, wanted] of Object.entries(SYNONYMS)) if (phrase.includes(" ")) query = query.replaceAll(phrase, wanted);
  const typed = query.match(/[a-z0-9]+/g) || [];
  const wanted = typed.some((word) => !LEFT_OUT.includes(word)) ? typed.filter((word) => !LEFT_OUT.includes(word)) : typed;
  const synonyms = new Map(Object.entries(SYNONYMS).map(([word, others]) => [stem(word), words(others)]));
  return wanted.map(stem).flatMap((word, at) => {
    if (index.has(word) || synonyms.has(word) || at === wanted.length - 1 && beginning(index, word).length) {
      return [{ word, synonyms: synonyms.get(word) || [] }];
    }
    for (let cut = 2; cut < word.length - 1; cut++) {
      const pair = [stem(word.slice(0, cut)), stem(word.slice(cut))];
      if (word.length > 5 && pair.every((each) => index.has(each))) return pair.map((each) => ({ word: each, synonyms: [] }));
    }
    return [];
  });
}

function beginning(index, word) {
  return word.length < 3 ? [] : [...index.keys()].filter((known) => known !== word && known.startsWith(word));
}

// The row of the index for each word, with what the word is worth: a rare one more. The last may be half typed.
function terms(index, query, count) {
  const found = asked(index, query);
  return found.map(({ word, synonyms }, at) => {
    const row = { ...index.get(word) };
    for (const synonym of synonyms) {
      for (const [section, weight] of Object.entries(index.get(synonym) || {})) {
        row[section] = Math.max(row[section] || 0, SYNONYM_WEIGHT * weight);
      }
    }
    for (const known of at === found.length - 1 ? beginning(index, word) : []) {
      for (const [section, weight] of Object.entries(index.get(known))) row[section] = (row[section] || 0) + weight / 4;
    }
    const number = Object.keys(row).length;
    return { row, worth: Math.log(1 + (count - number + 0.5) / (number + 0.5)) };
  });
}

// The factor of the scores of a page: guides come before references and measurements.
function factor(location) {
  const name = location.split("#")[0].replace(/\.html$/, "");
  const found = Object.entries(PAGE_FACTORS).find(([start]) => name === start || name.startsWith(`${start}/`));
  return found ? found[1] : 1;
}

// Pages, best first, each with its sections that match: [{page, sections: [section, …]}, …].
function search(site, query) {
  const all = terms(site.index, query, site.sections.length);
  const total = all.reduce((sum, term) => sum + term.worth, 0);
  const pages = new Map();
  site.sections.forEach((section, at) => {
    let score = 0, covered = 0;
    for (const { row, worth } of all) {
      if (!(at in row)) continue;
      score += worth * row[at] * 2.2 / (row[at] + 1.2);
      covered += worth;
    }
    if (!covered || covered < 0.4 * total) return;
    score *= (covered / total) ** 2 * factor(section.location);
    const key = section.location.split("#")[0];
    if (!pages.has(key)) pages.set(key, { page: section.page, found: [] });
    pages.get(key).found.push({ score, section });
  });
  return [...pages.values()].map(({ page, found }) => {
    found.sort((one, other) => other.score - one.score);
    return { page, score: found[0].score, sections: found.slice(0, 3).map((each) => each.section) };
  }).sort((one, other) => other.score - one.score).slice(0, MOST_PAGES);
}

// A part of the text around the first word of the query, with its words marked.
function excerpt(text, query) {
  const typed = new Set(words(query).filter((word) => !LEFT_OUT.includes(word)));
  const parts = text.split(/([A-Za-z0-9]+)/);
  const first = Math.max(0, parts.findIndex((part) => typed.has(stem(part.toLowerCase()))) - 12);
  const element = document.createElement("small");
  for (const part of parts.slice(first, first + 60)) {
    const marked = typed.has(stem(part.toLowerCase())) ? document.createElement("mark") : document.createTextNode(part);
    if (marked.nodeType === Node.ELEMENT_NODE) marked.textContent = part;
    element.append(marked);
  }
  return element;
}

function entry(section, base, query, isFirst) {
  const link = document.createElement("a");
  link.href = new URL(section.location, base);
  link.className = isFirst ? "" : "within";
  const title = document.createElement("b");
  title.textContent = isFirst && section.title !== section.page ? `${section.page}: ${section.title}` : section.title;
  link.append(title, excerpt(section.text, query));
  const item = document.createElement("li");
  item.append(link);
  return item;
}

function opened(site, base) {
  const dialog = document.createElement("dialog");
  dialog.id = "search";
  dialog.innerHTML = '<input type="search" placeholder="Search" aria-label="Search" autocomplete="off"><p></p><ol></ol>';
  const [input, said, list] = dialog.children;
  input.addEventListener("input", () => {
    const query = input.value;
    const pages = query.trim() ? search(site, query) : [];
    list.replaceChildren(...pages.flatMap((page) => page.sections.map((section, at) => entry(section, base, query, !at))));
    said.textContent = query.trim() && !pages.length ? "No page has these words." : "";
  });
  dialog.addEventListener("keydown", (event) => {
    const links = [...list.querySelectorAll("a")];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && links.length) {
      const next = links[links.indexOf(document.activeElement) + step];
      (next || input).focus();
      event.preventDefault();
    } else if (event.key === "Enter" && document.activeElement === input && links.length) links[0].click();
    event.stopPropagation(); // keys of the theme
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog || event.target.closest("a")) dialog.close();
  });
  document.body.append(dialog);
  return dialog;
}

function prepare() {
  const button = document.querySelector(".search-open");
  const data = new URL(button.dataset.search, location);
  const ready = new Promise((done) => {
    const script = document.createElement("script");
    script.src = data;
    script.onload = () => done(opened({ sections: SECTIONS, index: indexed(SECTIONS) }, new URL(".", data)));
    button.addEventListener("click", () => document.head.append(script), { once: true });
  });
  button.addEventListener("click", async () => {
    const dialog = await ready;
    dialog.showModal();
    dialog.querySelector("input").select();
  });
  document.addEventListener("keydown", (event) => {
    const isTyped = event.key === "/" && !event.target.closest?.("input, textarea, dialog");
    if (!isTyped && !((event.ctrlKey || event.metaKey) && event.key === "k")) return;
    event.preventDefault();
    event.stopPropagation();
    button.click();
  }, true);
}

// A page that was split says where its anchors are now.
function follow() {
  const moved = document.getElementById("moved");
  const to = moved && JSON.parse(moved.textContent)[decodeURIComponent(location.hash.slice(1))];
  if (to) location.replace(new URL(to, location));
}

follow();
addEventListener("hashchange", follow);
prepare();
