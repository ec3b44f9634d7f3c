"""Speed and memory of `launcher prepare`, compared with encode_batch of `tokenizers`.

`python -m benchmarks.prepare [--mb 1000] [--kills 20] [--folder DIR]` generates a corpus of JSON
lines, whose words are drawn by Zipf's law, and trains a BPE tokenizer on a part of it. It compares
all of `launcher prepare` (reading, tokenizing, shuffling, packing, writing) with `encode_batch`
alone on the same texts in memory. Memory is the sum over all processes, including the launcher.
Then a corpus of a twentieth of the size is prepared by processes that are killed at random moments,
and the result is compared with that of an undisturbed run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.table import Row, emit_rows, log_progress

VOCAB, WORDS, LENGTH = 8192, 50_000, 1024
FILE_BYTES = 128 << 20
# The number of documents in a call of encode_batch.
BATCH = 2000
SEED = 7


def make_texts(size: int) -> Iterator[str]:
    """Yield documents of 60 to 2,000 words, together about `size` bytes."""
    rng = np.random.default_rng(SEED)
    letters = "".join(
        rng.choice(list("eeeetttaaooiinnsshhrrddlluccmmwffggyyppbbvk"), 20 * WORDS).tolist()
    )
    words = [
        letters[20 * index : 20 * index + length]
        for index, length in enumerate(rng.integers(2, 11, WORDS).tolist())
    ]
    frequency = 1 / np.arange(3, WORDS + 3)
    cumulative = np.cumsum(frequency / frequency.sum())
    while size > 0:
        word_indices = np.searchsorted(cumulative, rng.random(400_000)).tolist()
        start = 0
        while start < len(word_indices) and size > 0:
            end = start + int(np.exp(rng.uniform(np.log(60), np.log(2000))))
            text = " ".join(map(words.__getitem__, word_indices[start:end])).capitalize() + "."
            yield text
            size -= len(text)
            start = end


def write_corpus(folder: Path, size: int) -> int:
    """Write files of JSON lines, and return the bytes of text in them."""
    written = 0
    file = None
    for number, text in enumerate(make_texts(size)):
        if file is None or file.tell() > FILE_BYTES:
            if file is not None:
                file.close()
            file = (folder / f"part-{written >> 20:05}.jsonl").open("w")
        file.write(json.dumps({"id": number, "text": text}) + "\n")
        written += len(text)
    assert file is not None
    file.close()
    return written


def train_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer, like that of GPT-2, on the first megabyte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(make_texts(1_000_000), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def write_job(folder: Path, name: str, tokenizer: Path) -> Path:
    """Write a job that reads the files of a folder, and return its path."""
    data = {
        "source": "text",
        "path": f"{folder}/*.jsonl",
        "tokenizer": str(tokenizer),
        "eval_split": 0.01,
    }
    model = {
        "kind": "gpt2",
        "layers": 2,
        "width": 256,
        "heads": 4,
        "vocab": VOCAB,
        "length": LENGTH,
    }
    train = {"task": "lm", "model": model, "data": data | {"data_dir": str(folder / "out")}}
    path = folder / "job.yaml"
    path.write_text(json.dumps({"name": name, "accelerator": {"type": "cpu"}, "train": train}))
    return path


class PeakMemory(threading.Thread):
    """Measures the peak memory of all processes of a session. Shared pages count for each."""

    def __init__(self, session: int) -> None:
        super().__init__(daemon=True)
        self.peak, self._session, self._is_over = 0, session, threading.Event()

    def run(self) -> None:
        """Read the memory ten times a second."""
        while not self._is_over.wait(0.1):
            self.peak = max(self.peak, sum(map(self._resident_bytes, Path("/proc").glob("[0-9]*"))))

    def end(self) -> int:
        """Stop and return the peak."""
        self._is_over.set()
        self.join()
        return self.peak

    def _resident_bytes(self, process: Path) -> int:
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            return 0
        return (
            int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if int(fields[3]) == self._session else 0
        )


def measure_prepare(path: Path) -> tuple[float, int, int]:
    """Return the seconds, tokens and peak memory in bytes of `launcher prepare`."""
    command = [str(Path(sys.executable).with_name("launcher")), "prepare", str(path), "-o", "json"]
    started_at = time.perf_counter()
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=null, text=True, start_new_session=True
    ) as process:
        watch = PeakMemory(process.pid)
        watch.start()
        assert process.stdout is not None
        result = json.loads(process.stdout.read())
        process.wait()
        seconds = time.perf_counter() - started_at
    return seconds, result["prepared"][0]["tokens"], watch.end()


def measure_encode_batch(folder: Path, tokenizer: Path) -> tuple[float, int]:
    """Return the seconds and tokens of encode_batch alone, without the reading of files."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    seconds, tokens, batch = 0.0, 0, []

    def encode_batch() -> None:
        nonlocal seconds, tokens
        started_at = time.perf_counter()
        encodings = encoder.encode_batch(batch, add_special_tokens=False)
        seconds += time.perf_counter() - started_at
        tokens += sum(map(len, encodings))
        batch.clear()

    for path in sorted(folder.glob("*.jsonl")):
        for line in path.open():
            batch.append(json.loads(line)["text"])
            if len(batch) == BATCH:
                encode_batch()
    encode_batch()
    return seconds, tokens


def digest_files(folder: Path) -> dict[str, str]:
    """Return the digests of prepared files by name."""
    files = (path for path in folder.glob("*/*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_with_kills(folder: Path, path: Path, kills: int) -> tuple[int, bool]:
    """Kill `launcher prepare` at random moments until it has been killed `kills` times.

    Returns the number of kills, and whether the files are those of an undisturbed run.
    """
    started_at = time.perf_counter()
    command = [str(Path(sys.executable).with_name("launcher")), "prepare", str(path), "-o", "json"]
    run = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, check=True, **run)
    undisturbed_s = time.perf_counter() - started_at
    expected = digest_files(folder / "out")
    (folder / "out").rename(folder / "whole")
    rng, count = random.Random(SEED), 0
    while count < kills:
        with subprocess.Popen(command, start_new_session=True, **run) as process:
            try:
                process.wait(rng.uniform(0, 0.6 * undisturbed_s))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                count += 1
                continue
        # It has finished too early. Start again, without its files.
        if any((folder / "out").glob("*/index.json")):
            for prepared_file in (folder / "out").glob("*/*"):
                prepared_file.unlink()
    subprocess.run(command, check=True, **run)
    return count, digest_files(folder / "out") == expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=1000, help="of text, in millions of bytes")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", help="where the corpus is written; default a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        root = Path(name)
        log_progress(f"prepare: writing {arguments.mb} MB")
        train_tokenizer(root / "tokenizer")
        for folder, size in (("whole", arguments.mb), ("killed", max(arguments.mb // 20, 1))):
            (root / folder).mkdir()
            write_corpus(root / folder, size * 1_000_000)
        log_progress("prepare: launcher prepare")
        seconds, tokens, peak = measure_prepare(
            write_job(root / "whole", "whole", root / "tokenizer")
        )
        log_progress(
            f"prepare: {tokens} tokens in {seconds:.1f} s, {peak / 1e6:.0f} MB; encode_batch"
        )
        their_s, their_tokens = measure_encode_batch(root / "whole", root / "tokenizer")
        log_progress(f"prepare: {their_tokens} tokens in {their_s:.1f} s; {arguments.kills} kills")
        count, is_equal = run_with_kills(
            root / "killed",
            write_job(root / "killed", "killed", root / "tokenizer"),
            arguments.kills,
        )
    cores = len(os.sched_getaffinity(0))
    # `launcher prepare` adds an end token to each document, so the numbers of tokens differ.
    rate, their_rate = tokens / seconds, their_tokens / their_s
    emit_rows(
        [
            Row(
                f"encode_batch over launcher prepare, tokens per second, {arguments.mb} MB, "
                f"{cores} cores",
                their_rate / rate,
                1 / 0.9,
                f"{rate / 1e6:.2f} million a second in {seconds:.0f} s, encode_batch alone "
                f"{their_rate / 1e6:.2f}",
            ),
            Row(
                "launcher prepare: memory of all its processes over 1 GB",
                peak / 1e9,
                1.0,
                f"{peak / 1e6:.0f} MB",
            ),
            Row(
                f"bytes that differ after {count} kills at random moments",
                0.0 if is_equal else 1.0,
                0.5,
                "equal" if is_equal else "different",
            ),
        ]
    )


if __name__ == "__main__":
    main()
