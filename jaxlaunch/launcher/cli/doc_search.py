"""Search the pages of docs/ by words, for `launcher help WORDS`.

docs/theme/search.js ranks the sections of the site in the same way. The tables here are written
into its index (tests/pages.py), so that both know the same synonyms. A section's score is that of
BM25: a word counts more the rarer it is, in a title more than in a text, and in a long text less.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

_LEFT_OUT_TEXT = """
a an and any are as at be by can do does for from has have how i if in into is it its me my of on or
own that the their them there this to use what when where which why will with without
"""
# Words that say nothing about the page that is wanted.
LEFT_OUT = frozenset(_LEFT_OUT_TEXT.split())
# What people type -> the words of the pages. A key of several words replaces them in the query.
SYNONYMS: Mapping[str, str] = {
    "getting started": "quickstart",
    "get started": "quickstart",
    "hello world": "quickstart",
    "weights and biases": "wandb",
    "all or nothing": "hosts none",
    "oom": "memory",
    "oomkilled": "memory",
    "fsdp": "fsdp parallelism",
    "ddp": "ddp parallelism",
    "zero": "zero fsdp",
    "deepspeed": "fsdp",
    "shard": "sharding parallelism",
    "multinode": "hosts",
    "distributed": "distributed hosts parallelism",
    "dataloader": "dataloader loader",
    "dataset": "dataset data",
    "reproducible": "reproducibility deterministic",
    "reproduce": "reproducibility",
    "determinism": "determinism deterministic reproducibility",
    "deterministic": "deterministic determinism reproducibility",
    "seed": "seed reproducibility",
    "sdk": "python",
    "jupyter": "notebook",
    "colab": "notebook",
    "download": "download fetch",
    "copy": "copy fetch",
    "setup": "setup install",
    "pip": "pip install",
    "conda": "conda install",
    "airgap": "air gapped",
    "offline": "offline gapped",
    "breakpoint": "breakpoint pdb debugging",
    "debugger": "pdb debugging",
    "pdb": "pdb debugging",
    "kill": "kill stop",
    "cancel": "cancel stop",
    "abort": "stop",
    "stuck": "stuck hang pending",
    "freeze": "hang",
    "price": "price cost",
    "money": "cost",
    "spend": "cost",
    "gcs": "gcs bucket",
    "s3": "s3 bucket",
    "storage": "storage bucket",
    "nan": "nan finite",
    "lr": "learning rate",
    "ckpt": "checkpoint",
    "amp": "precision",
    "preprocess": "prepare",
    "finetune": "fine tune",
    "hpo": "sweep",
    "hyperparameter": "hyperparameter sweep",
    "k8s": "kubernetes",
    "helm": "helm chart",
    "sbatch": "slurm",
    "srun": "slurm",
    "kernel": "kernel attention",
    "workstation": "workstation gpu",
    "local": "local workstation",
    "config": "config job yaml",
    "override": "overridden",
    "stored": "kept",
    "saved": "saved kept",
    "sync": "sync ship",
    "serve": "serve vllm",
    "serving": "serve vllm",
    "inference": "sample generate vllm",
    "multislice": "multislice slices",
}
# Pages and folders of the site that guides come before -> the factor of their scores.
PAGE_FACTORS: Mapping[str, float] = {
    "project/benchmarks-results": 0.3,
    "project": 0.6,
    "architecture": 0.6,
    "comparison": 0.9,
    "glossary": 0.8,
    "job-yaml": 0.8,
    "platforms": 0.8,
    "techniques": 0.85,
    "cli": 0.85,
    "api": 0.85,
}
FIELD_WEIGHTS: Mapping[str, float] = {"page": 5, "title": 7, "text": 1}
SYNONYM_WEIGHT = 0.8
MAX_PAGES = 8


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of a page: the name and title of the page, its heading and anchor, its text."""

    name: str
    page: str
    title: str
    anchor: str
    text: str


def stem(word: str) -> str:
    """Return the stem of a lower-case English word, by a few rules about its end."""
    if len(word) < 4 or re.search(r"\d", word):
        return word
    word = re.sub(r"([^s])s$", r"\1", re.sub(r"ies$", "y", word))
    if len(word) > 5:
        word = re.sub(r"([^aeiouls])\1$", r"\1", re.sub(r"(ing|ed|ion)$", "", word))
    return re.sub(r"e$", "", word) if len(word) > 3 else word


def split_words(text: str) -> list[str]:
    """Return the stems of the words of a text, in order."""
    return [stem(word) for word in re.findall(r"[a-z0-9]+", text.lower())]


class Index:
    """The words of all sections."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self._sections = sections
        # Word -> number of a section -> its weight there.
        self._rows: dict[str, dict[int, float]] = {}
        mean_length = sum(len(section.text) for section in sections) / max(1, len(sections))
        for number, section in enumerate(sections):
            for field, weight in FIELD_WEIGHTS.items():
                words = split_words(getattr(section, field))
                length = 0.5 + len(words) / 8
                if field == "text":
                    length = 0.6 + 0.4 * len(section.text) / mean_length
                for word, count in Counter(words).items():
                    row = self._rows.setdefault(word, {})
                    row[number] = row.get(number, 0) + weight * count / length

    def search(self, query: str) -> list[list[Section]]:
        """Return the best sections of each page that matches, the best page first."""
        terms = list(self._find_terms(query))
        total = sum(worth for _, worth in terms)
        scored: dict[str, list[tuple[float, Section]]] = {}
        for number, section in enumerate(self._sections):
            matches = [(row[number], worth) for row, worth in terms if number in row]
            covered = sum(worth for _, worth in matches)
            if not covered or covered < 0.4 * total:
                continue
            score = sum(worth * weight * 2.2 / (weight + 1.2) for weight, worth in matches)
            score *= (covered / total) ** 2 * page_factor(section.name)
            scored.setdefault(section.name, []).append((score, section))
        pages = [sorted(rows, key=lambda row: -row[0]) for rows in scored.values()]
        pages.sort(key=lambda rows: -rows[0][0])
        return [[section for _, section in rows[:3]] for rows in pages[:MAX_PAGES]]

    def _find_terms(self, query: str) -> Iterator[tuple[Mapping[int, float], float]]:
        """Yield the row of each word of the query, and what the word is worth: a rare one more."""
        words = self._find_words(query)
        for position, (word, synonyms) in enumerate(words):
            row = dict(self._rows.get(word, {}))
            for synonym in synonyms:
                for number, weight in self._rows.get(synonym, {}).items():
                    row[number] = max(row.get(number, 0), SYNONYM_WEIGHT * weight)
            # The last word may be half typed.
            for other in self._find_beginnings(word) if position == len(words) - 1 else ():
                for number, weight in self._rows[other].items():
                    row[number] = row.get(number, 0) + weight / 4
            rarity = (len(self._sections) - len(row) + 0.5) / (len(row) + 0.5)
            yield row, math.log(1 + rarity)

    def _find_words(self, query: str) -> list[tuple[str, list[str]]]:
        """Return the words of a query that pages have, each with its synonyms.

        A word that no page has is looked for as two, such as "datasource".
        """
        query = query.lower()
        for phrase, words in SYNONYMS.items():
            if " " in phrase:
                query = query.replace(phrase, words)
        typed = re.findall(r"[a-z0-9]+", query)
        typed = [word for word in typed if word not in LEFT_OUT] or typed
        synonyms = {stem(key): split_words(words) for key, words in SYNONYMS.items()}
        terms: list[tuple[str, list[str]]] = []
        for position, word in enumerate(map(stem, typed)):
            is_last = position == len(typed) - 1
            if (
                word in self._rows
                or word in synonyms
                or (is_last and any(True for _ in self._find_beginnings(word)))
            ):
                terms.append((word, synonyms.get(word, [])))
                continue
            for cut in range(2, len(word) - 1) if len(word) > 5 else ():
                pair = [stem(word[:cut]), stem(word[cut:])]
                if all(part in self._rows for part in pair):
                    terms += [(part, []) for part in pair]
                    break
        return terms

    def _find_beginnings(self, word: str) -> Iterable[str]:
        if len(word) < 3:
            return ()
        return (other for other in self._rows if other != word and other.startswith(word))


def page_factor(name: str) -> float:
    """Return the factor of the scores of a page; guides come before references."""
    factors = (
        factor
        for start, factor in PAGE_FACTORS.items()
        if name == start or name.startswith(f"{start}/")
    )
    return next(factors, 1.0)
