"""Odd tables: what is written, and the expected rows or words of the error.

A table is bytes of a file. `good` reads as the numbers given; `bad` is refused with these words,
the row among them.
"""

from __future__ import annotations

import decimal
import gzip
import io
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from pyarrow import parquet


class Odd(NamedTuple):
    """A file, and the numbers of its columns `a` and `b`, or the words of its refusal."""

    name: str
    content: bytes
    good: list[list[float]] | None = None
    bad: tuple[str, ...] = ()


PLAIN = [[1.0, 2.0], [3.0, 4.0]]
ROW, SECOND = b"3,4,1\n", b'{"a": 3, "b": 4, "y": 1}\n'
ENDS = {"unix": "\n", "windows": "\r\n", "mac": "\r"}
MARKS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}
WORDS = ("", "NA", "N/A", "nan", "NaN", "NAN", "null", "NULL", "None", "?", "-")


def tables() -> list[Odd]:
    """All of them."""
    return [*_written(), *_missing(), *_numbers(), *_wrong(), *_lines(), *_arrow(), *_numpy()]


def _written() -> list[Odd]:
    result = []
    for end_name, end in ENDS.items():
        for mark_name, mark in MARKS.items():
            rows = [["a", "b", "y"], ["1", "2", "0"], ["3", "4", "1"]]
            text = end.join(mark.join(row) for row in rows) + end
            quoted = end.join(mark.join(f'"{cell}"' for cell in row) for row in rows)
            result.append(Odd(f"{mark_name}-{end_name}.csv", text.encode(), PLAIN))
            result.append(
                Odd(f"{mark_name}-{end_name}-mark.csv", b"\xef\xbb\xbf" + text.encode(), PLAIN)
            )
            result.append(Odd(f"{mark_name}-{end_name}-quoted.csv", quoted.encode(), PLAIN))
    return [
        *result,
        Odd("tab.tsv", b"a\tb\ty\n1\t2\t0\n3\t4\t1\n", PLAIN),
        Odd("comma_in_name.csv", b'a,b,"y"\n1,2,0\n\n3,4,1\n\n', PLAIN),
        Odd("spaces.csv", b"a,b,y\n 1,2 ,0\n3, 4,1\n", PLAIN),
        Odd("unnamed.csv", b"a,b,y,,\n1,2,0,,\n3,4,1,,\n", PLAIN),
        Odd("capital.CSV", b"a,b,y\n1,2,0\n3,4,1\n", PLAIN),
    ]


def _missing() -> list[Odd]:
    return [
        Odd(
            f"missing-{number}.csv",
            f"a,b,y\n1,{word},0\n3,4,1\n5,6,0\n".encode(),
            bad=("row 1", "'b' has no value"),
        )
        for number, word in enumerate(WORDS)
    ] + [
        Odd("infinite.csv", b"a,b,y\n1,2,0\n3,inf,1\n", bad=("row 2", "'b' has no value")),
        Odd("no_label.csv", b"a,b,y\n1,2,0\n3,4,\n", bad=("row 2", "'y' is empty")),
        Odd("all_missing.csv", b"a,b,y\n1,,0\n3,,1\n", bad=("row 1", "'b' has no value")),
    ]


def _numbers() -> list[Odd]:
    return [
        Odd("decimals.csv", b"a;b;y\n1,5;2;0\n3,25;4;1\n", [[1.5, 2], [3.25, 4]]),
        Odd("negative.csv", b"a;b;y\n-1,5;+2;0\n3;4;1\n", [[-1.5, 2], [3, 4]]),
        Odd(
            "thousands.csv", b'a,b,y\n"1,234",2,0\n3,4,1\n', bad=("row 1", "decimals or thousands")
        ),
        Odd(
            "spaced.csv",
            b"a,b,y\n1 234,2,0\n" + ROW,
            bad=("row 1", "'1 234'", "separated thousands"),
        ),
        Odd(
            "hard_space.csv",
            "a,b,y\n3,2,0\n1\u00a0234\u00a0567.5,4,1\n".encode(),
            bad=("row 2", "separated thousands"),
        ),
        Odd(
            "points.csv",
            b"a;b;y\n1.234.567,5;2;0\n3,5;4;1\n",
            bad=("row 1", "'1.234.567,5'", "separated thousands"),
        ),
        Odd("no_number.csv", b"a,b,k,y\n1,2,1 234,0\n3,4,room 3,1\n", PLAIN),
        Odd("too_large.csv", b"a,b,y\n1e400,2,0\n3,4,1\n", bad=("row 1", "'a' has no value")),
        Odd("exponent.csv", b"a,b,y\n1e3,2E-1,0\n3,4,1\n", [[1000, 0.2], [3, 4]]),
        Odd(
            "large.csv",
            b"a,b,y\n123456789012345678901234567890,2,0\n3,4,1\n",
            [[1.2345678901234568e29, 2], [3, 4]],
        ),
        Odd("flags.csv", b"a,b,y\ntrue,2,0\nfalse,4,1\n", [[1, 2], [0, 4]]),
        Odd("days.csv", b"a,b,y\n1970-01-02,2,0\n1970-01-03,4,1\n", [[86400, 2], [172800, 4]]),
        Odd("hours.csv", b"a,b,y\n00:00:01,2,0\n00:01:00,4,1\n", [[1, 2], [60, 4]]),
        Odd("leading_zeros.csv", b"a,b,y\n007,2,0\n008,4,1\n", [[7, 2], [8, 4]]),
        Odd(
            "mixed.csv",
            b"a,b,y\n1,2,0\n3,x,1\n5,6,0\n7,8,1\n",
            bad=("row 2", "'b' is 'x'", "3 of 4"),
        ),
        Odd(
            "late.csv", b"a,b,y\n" + b"1,2,0\n" * 2000 + b"1,x,0\n", bad=("row 2001", "'b' is 'x'")
        ),
        Odd("underscore.csv", b"a,b,y\n1_000,2,0\n3,4,1\n5,6,1\n", bad=("row 1", "'1_000'")),
        Odd("fraction_label.csv", b"a,b,y\n1,2,0.5\n3,4,1\n", bad=("row 1", "0.5", "regression")),
        Odd("gap_label.csv", b"a,b,y\n1,2,0\n3,4,2\n", bad=("without 1", "data.classes")),
        Odd(
            "negative_label.csv", b"a,b,y\n1,2,-1\n3,4,0\n", bad=("-1", "not the number of a class")
        ),
        Odd("case_label.csv", b"a,b,y\n1,2,Cat\n3,4,cat\n", bad=("'Cat'", "'cat'", "case")),
    ]


def _wrong() -> list[Odd]:
    wide = ",".join(f"c{number}" for number in range(2_000))
    return [
        Odd("empty.csv", b"", bad=("cannot be read",)),
        Odd("header_alone.csv", b"a,b,y\n", bad=("has no rows",)),
        Odd("short.csv", b"a,b,y\n1,2,0\n3,4\n", bad=("row 2", "Expected 3 columns, got 2")),
        Odd("long.csv", b"a,b,y\n1,2,0\n3,4,1,5\n", bad=("row 2", "Expected 3 columns, got 4")),
        Odd("twice.csv", b"a,a,y\n1,2,0\n3,4,1\n", bad=("two columns 'a'",)),
        Odd("latin.csv", b"a,b,y\n1,x,0\n3,\xff,1\n", bad=("'b'", "not UTF-8 in row 2")),
        Odd("utf16.csv", "a,b,y\n1,2,0\n".encode("utf-16"), bad=("UTF-16",)),
        Odd("utf16_without_mark.csv", "a,b,y\n1,2,0\n".encode("utf-16-le"), bad=("UTF-16",)),
        Odd(
            "backslash.csv",
            b'a,b,y\n1,"x\\"",0\n3,w,1\n',
            bad=("row 1", "Expected 3 columns, got 2"),
        ),
        Odd("packed.csv", gzip.compress(b"a,b,y\n1,2,0\n"), bad=("is not text, but gzip",)),
        Odd(
            "far_apart.csv",
            b"a,b,y\n1e200,2,0\n-1e200,4,1\n",
            bad=("'a' has numbers up to 1e+200",),
        ),
        Odd("open_quote.csv", b'a,b,y\n1,2,0\n3,4,"1\n5,6,0\n', bad=("row 2", "never closed")),
        Odd(
            "long_texts.csv",
            b"a,b,y\n" + b"".join(b"1,t%d,0\n" % n for n in range(200)),
            bad=("200 different",),
        ),
        Odd(
            "wide.csv",
            f"{wide},y\n{'1,' * 2_000}0\n{'2,' * 2_000}1\n".encode(),
            [[1.0] * 2_000, [2.0] * 2_000],
        ),
        Odd("broken.parquet", b"PAR1 nothing PAR1", bad=("cannot be read",)),
        Odd("broken.arrow", b"ARROW1\0\0", bad=("cannot be read",)),
        Odd("broken.npy", b"\x93NUMPY\x01", bad=("cannot be read",)),
        Odd("broken.npz", b"PK\x03\x04", bad=("cannot be read",)),
        Odd("pickle.npy", b"\x80\x04N.", bad=("cannot be read",)),
        Odd("table.xlsx", b"PK", bad=("not a table by its name",)),
    ]


def _lines() -> list[Odd]:
    return [
        Odd("plain.jsonl", b'{"a": 1, "b": 2, "y": 0}\n{"a": 3, "b": 4, "y": 1}\n', PLAIN),
        Odd(
            "other_order.jsonl",
            b'{"y": 0, "b": 2, "a": 1}\n{"a": 3, "y": 1, "b": 4}\n',
            [[2, 1], [4, 3]],
        ),
        Odd("as_texts.jsonl", b'{"a": "1", "b": 2, "y": 0}\n{"a": "3", "b": 4, "y": 1}\n', PLAIN),
        Odd("lists.jsonl", b'{"a": [1, 2], "y": 0}\n{"a": [3, 4], "y": 1}\n', PLAIN),
        Odd(
            "ragged.jsonl",
            b'{"a": [1, 2], "y": 0}\n{"a": [3], "y": 1}\n',
            bad=("row 2", "'a' has another shape"),
        ),
        Odd("null.jsonl", b'{"a": 1, "b": null, "y": 0}\n' + SECOND, bad=("row 1", "'b'")),
        Odd(
            "lacks.jsonl",
            b'{"a": 1, "b": 2, "y": 0}\n{"a": 3, "y": 1}\n',
            bad=("row 2", "'b' has no value"),
        ),
        Odd("nan.jsonl", b'{"a": 1, "b": NaN, "y": 0}\n' + SECOND, bad=("row 1", "'b'")),
        Odd("nested.jsonl", b'{"a": {"c": 1}, "y": 0}\n{"a": {"c": 2}, "y": 1}\n', bad=("'a'",)),
        Odd("mark.jsonl", b'\xef\xbb\xbf{"a": 1, "b": 2, "y": 0}\n\n' + SECOND, PLAIN),
        Odd("latin.jsonl", b'{"a": 1, "b": "\xff", "y": 0}\n', bad=("not UTF-8",)),
        Odd("number.jsonl", b'{"a": 1, "b": 2, "y": 0}\n7\n', bad=("row 2", "not a JSON object")),
        Odd("empty.jsonl", b"\n\n", bad=("has no columns",)),
        Odd("twice.jsonl", b'{"a": 9, "a": 1, "b": 2, "y": 0}\n{"a": 3, "b": 4, "y": 1}\n', PLAIN),
        Odd(
            "text_lists.jsonl",
            b'{"a": ["x"], "y": 0}\n{"a": ["z"], "y": 1}\n',
            bad=("'a' has lists of texts or objects",),
        ),
        Odd(
            "object_lists.jsonl",
            b'{"a": [{}], "y": 0}\n{"a": [{}], "y": 1}\n',
            bad=("'a' has lists of texts or objects",),
        ),
        Odd(
            "long.jsonl",
            b'{"a": 1%s, "y": 0}\n{"a": 3, "y": 1}\n' % (b"0" * 400),
            bad=("row 1", "'a' has no value"),
        ),
        Odd("cut.jsonl", b'{"a": 1, "b": 2, "y": 0}\n{"a": 3, "b"', bad=("row 2", "not JSON")),
        Odd("array.jsonl", b"[1, 2]\n", bad=("row 1", "not a JSON object")),
    ]


def _arrow() -> list[Odd]:
    def odd(
        name: str, a: Any, good: list[list[float]] | None = None, bad: tuple[str, ...] = ()
    ) -> Odd:
        """Return Parquet with a dictionary column, labels 0 and 1, and an index of pandas."""
        file = io.BytesIO()
        parquet.write_table(
            pyarrow.table({"a": a, "b": [2, 4], "y": [0, 1], "__index_level_0__": [7, 9]}), file
        )
        return Odd(f"{name}.parquet", file.getvalue(), good, bad)

    twice = io.BytesIO()
    columns = [pyarrow.array([1, 3])] * 3
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["a", "a", "y"]), twice)
    nanoseconds = pyarrow.array([0, 1_500_000_001], pyarrow.timestamp("ns"))
    return [
        Odd("twice.parquet", twice.getvalue(), bad=("two columns 'a'",)),
        odd("nanoseconds", nanoseconds, [[0, 2], [1.5, 4]]),
        odd("view", pyarrow.array(["1", "3"], pyarrow.string_view()), PLAIN),
        odd("dictionary", pyarrow.array(["1", "3"]).dictionary_encode(), PLAIN),
        odd("decimal", pyarrow.array([decimal.Decimal("1.0"), decimal.Decimal("3.0")]), PLAIN),
        odd("nested", pyarrow.array([[[1.0, 5.0]], [[3.0, 6.0]]]), [[1, 5, 2], [3, 6, 4]]),
        odd(
            "ragged",
            pyarrow.array([[1.0], [3.0, 6.0]]),
            bad=("'a' has lists of different lengths",),
        ),
        odd("struct", pyarrow.array([{"c": 1}, {"c": 3}]), bad=("'a' is of struct",)),
        odd("null", pyarrow.nulls(2), bad=("row 1", "'a' has no value")),
    ]


def _numpy() -> list[Odd]:
    def odd(
        name: str, a: Any, good: list[list[float]] | None = None, bad: tuple[str, ...] = ()
    ) -> Odd:
        """An .npz with the column `a`, 2 and 4 as `b`, and the labels 0 and 1."""
        file = io.BytesIO()
        np.savez(file, a=a, b=np.array([2, 4], ">i2"), y=np.array([0, 1]))
        return Odd(f"{name}.npz", file.getvalue(), good, bad)

    rows = np.array([(1, 2, 0), (3, 4, 1)], [("a", ">f8"), ("b", "<i2"), ("y", "u1")])
    structured = io.BytesIO()
    np.save(structured, rows)
    return [
        Odd("structured.npy", structured.getvalue(), PLAIN),
        odd("columns_first", np.asfortranarray([[1.0, 5.0], [3.0, 6.0]]), [[1, 5, 2], [3, 6, 4]]),
        odd("days", np.array(["1970-01-02", "1970-01-03"], "M8[D]"), [[86400, 2], [172800, 4]]),
        odd("spans", np.array([1500, 2000], "m8[ms]"), [[1.5, 2], [2, 4]]),
        odd("no_day", np.array(["1970-01-02", "NaT"], "M8[D]"), bad=("row 2", "'a' has no value")),
        odd("objects", np.array([1, "x"], object), bad=("allow_pickle=False",)),
        odd("complex", np.array([1j, 2]), bad=("'a' is complex128",)),
        odd("latin", np.array([b"x", b"\xff"]), bad=("row 2", "'a' is not UTF-8")),
    ]
