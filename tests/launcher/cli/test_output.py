from __future__ import annotations

import json
import sys
import unicodedata

import pytest
import yaml

from jaxlaunch.launcher.cli import output
from jaxlaunch.launcher.cli.output import Printer
from jaxlaunch.launcher.jobs.logs.lines import Line, Selection

Capture = pytest.CaptureFixture[str]
LINES = (Line(0, 0, "a"), Line(0, 1, "b"), Line(0, None, "agent: c"))


def test_data_is_equal_as_json_and_yaml(capsys: Capture) -> None:
    value = {"a": ("×", 1.5, None), "b": {"on": "yes"}}
    output.show_data(value, "json")
    assert json.loads(text := capsys.readouterr().out) == {
        "a": ["×", 1.5, None],
        "b": {"on": "yes"},
    }
    assert "×" in text
    output.show_data(value, "yaml")
    assert yaml.safe_load(text := capsys.readouterr().out) == {
        "a": ["×", 1.5, None],
        "b": {"on": "yes"},
    }
    assert text.endswith("\n") and not text.endswith("\n\n")


def test_columns_fit_their_widest_cell() -> None:
    assert output.format_columns([("NAME", "AGE"), ("a-long-one", "3s"), ("b", "")]) == [
        "NAME         AGE",
        "a-long-one   3s",
        "b",
    ]
    assert output.format_columns([("a", "b")], gap=2, indent="  ") == ["  a  b"]


@pytest.mark.parametrize(
    ("ranks", "out"), [(None, "[0] a\n[1] b\n"), ({0, 2}, "[0] a\n"), ({1}, "b\n"), ({7}, "")]
)
def test_printer_writes_selected_ranks_to_stdout(
    ranks: set[int] | None, out: str, capsys: Capture
) -> None:
    printer = Printer(Selection(None if ranks is None else frozenset(ranks)))
    for line in LINES:
        printer.show_line(line)
    output.show_messages("d")
    assert capsys.readouterr() == (out, "agent: c\nlauncher: d\n")


def test_messages_appear_above_the_status_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    output.show_status("training 12345")
    output.show_messages("saved")
    output.show_status("")
    output.show_messages("ended")
    erase = "\r\x1b[2K"
    expected = f"{erase}training {erase}launcher: saved\ntraining {erase}launcher: ended\n"
    assert capsys.readouterr().err == expected


def test_wrapped_status_is_erased(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    output.show_status("123456789", "b")
    monkeypatch.setenv("COLUMNS", "5")  # the first line has wrapped
    output.show_messages("x")
    output.show_status()
    erase, up = "\r\x1b[2K", "\x1b[1A\x1b[2K"
    shown = f"{erase}123456789\nb{erase}{up}{up}launcher: x\n123456789\nb{erase}{up}{up}"
    assert capsys.readouterr().err == shown


OSC = "\x1b]52;c;aGVsbG8=\x07"  # sets the clipboard
INVISIBLE = [
    chr(code)
    for code in range(0xA0, sys.maxunicode + 1)
    if unicodedata.category(chr(code)) in ("Zl", "Zp", "Cs")
]
BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
NO_WIDTH = "\xad\u180e\u200b\u200c\u200d\u2060\ufeff\U000e0041"
CONTROLS = "".join([*map(chr, [*range(32), *range(127, 160)]), *INVISIBLE, BIDI, NO_WIDTH])


def test_control_characters_are_escaped(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    printer = Printer(Selection())
    for write in (
        output.show_lines,
        output.show_messages,
        output.show_status,
        lambda text: output.show_data({text: text}, "yaml"),
        lambda text: output.show_data({text: text}, "json"),
        lambda text: printer.show_line(Line(0, 0, text)),
        lambda text: printer.show_line(Line(0, None, text)),
        lambda text: Printer(Selection(), as_json=True).show_line(Line(0, 0, text)),
    ):
        monkeypatch.setattr(output, "_status", "")
        write(f"a{OSC}b{CONTROLS}\x9b2Jc")
        written = "".join(capsys.readouterr()).removeprefix(
            "\r\x1b[2K"
        )  # of the status line itself
        assert set(CONTROLS).intersection(written) <= {"\n", "\t"}, written
    output.show_lines("a\tb\nc \x1b]0;title\x07 × é")
    assert capsys.readouterr().out == "a\tb\nc \\x1b]0;title\\x07 × é\n"
    output.show_lines("\u202egnp.exe \U000e0041 caf\udce9")
    assert capsys.readouterr().out == "\\u202egnp.exe \\U000e0041 caf\\udce9\n"


def test_data_with_control_characters_survives(capsys: Capture) -> None:
    for form, load in (("json", json.loads), ("yaml", yaml.safe_load)):
        text = f"{OSC}\x7f\x85\x9b{BIDI}{NO_WIDTH}\u2028"
        output.show_data({"a": text, text: 1}, form)
        assert load(capsys.readouterr().out) == {"a": text, text: 1}


def test_program_keeps_colours_until_end_of_line(capsys: Capture) -> None:
    printer = Printer(Selection())
    printer.show_line(Line(0, 3, "\x1b[1;31mred\x1b[38;2;1;2;3m\x1b[2Jx\x1b[5n\x1b[?25l"))
    printer.show_line(Line(0, 3, "plain"))
    printer.show_line(Line(0, None, "agent: \x1b[31mred"))
    assert capsys.readouterr() == (
        "[3] \x1b[1;31mred\x1b[38;2;1;2;3m\\x1b[2Jx\\x1b[5n\\x1b[?25l\x1b[0m\n[3] plain\n",
        "agent: \\x1b[31mred\n",
    )


@pytest.mark.parametrize(
    ("is_terminal", "variables", "is_coloured"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_state_has_a_colour_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    variables: dict[str, str],
    is_coloured: bool,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    rows = [["RUN", "STATE", "STEP"], ["a\x1b[2K", "done", "7"], ["b", "failed", "7"]]
    output.show_table([*rows, ["c", "waiting", "-"], ["d", "running", "-"]], 1)
    shown = capsys.readouterr().out
    states = {"done": "\x1b[32mdone\x1b[0m", "failed": "\x1b[31mfailed\x1b[0m"}
    states["waiting"] = "\x1b[33mwaiting\x1b[0m"
    plain = shown
    for state, coloured in states.items():
        plain = plain.replace(coloured, state)
    assert plain.splitlines() == [
        "RUN        STATE     STEP",
        "a\\x1b[2K   done      7",
        "b          failed    7",
        "c          waiting   -",
        "d          running   -",
    ]
    assert all(coloured in shown for coloured in states.values()) is is_coloured
