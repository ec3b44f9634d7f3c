import pytest

from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.yaml import reader
from jaxlaunch.launcher.yaml.reader import Document


def parse(text: str) -> Document:
    return reader.parse_document(text, "job.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1.", 1.0),
        ("-.5", -0.5),
        ("0x1F", 31),
        ("0o17", 15),
        ("+12", 12),
        ("~", None),
        ("", None),
        ("Null", None),
        ("TRUE", True),
        ("no", "no"),
        ("on", "on"),
        ("y", "y"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("tRue", "tRue"),
        ("1e3x", "1e3x"),
        ("'5'", "5"),
        ("!!str 5", "5"),
        ("!!float 5", 5),
        ("[1, [2, {a: b}]]", [1, [2, {"a": "b"}]]),
        ("|\n  two\n  lines\n", "two\nlines\n"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    document = parse(f"key: {text}")
    assert document.faults == []
    assert document.data["key"] == value
    assert type(document.data["key"]) is type(value)


def test_keys_are_text() -> None:
    assert parse("{1: a, no: b, null: c, 3e-4: d}").data == {
        "1": "a",
        "no": "b",
        "null": "c",
        "3e-4": "d",
    }


def test_paths_have_lines() -> None:
    lines = parse("a: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n").lines
    assert lines[("a",)] == 1
    assert lines[("b", 0)] == 3
    assert lines[("b", 1, "c")] == 4
    assert lines[("b", 1, "d")] == 5


def test_plain_scalars_keep_their_texts() -> None:
    assert parse("a: 1e4\nb: '1e4'").texts == {("a",): "1e4"}


def test_byte_order_mark_is_ignored(tmp_path: pytest.TempPathFactory) -> None:
    file = tmp_path / "job.yaml"  # type: ignore[operator]
    file.write_bytes(b"\xef\xbb\xbfname: a\n")
    assert reader.read_document(file).data == {"name": "a"}


def test_all_faults_are_reported_at_once() -> None:
    document = parse(
        "a: &x 1\nb: *x\nc: !t 2\nd: 1\nd: 2\ne: .inf\n? [k]\n: v\nf: 1" + 40 * "0" + "\n"
    )
    assert [fault.line for fault in document.faults] == [1, 2, 3, 5, 6, 7, 9]
    assert document.faults[4].message == "e = .inf is not a finite number."
    assert document.faults[6].message == "f is a number of 41 digits."


def test_values_of_duplicate_keys_are_checked() -> None:
    document = parse("a: 1\na: {b: 1, b: 2, c: *x}\n")
    assert [fault.message[:16] for fault in document.faults] == [
        'duplicate key "a',
        'duplicate key "b',
        "uses an anchor, ",
    ]
    assert document.data == {"a": 1}


def test_overrides_set_replace_and_create_blocks() -> None:
    document = parse("train:\n  mesh: {dp: 2, mp: 2}\n  data:\nlist: [1, {a: 2}]\n")
    load._apply_overrides(
        document,
        ["train.mesh={fsdp: 4}", "train.data.source=text", "list.1.a=3e-4", "new.key=", "x=a=b"],
    )
    assert document.faults == []
    assert document.data == {
        "train": {"mesh": {"fsdp": 4}, "data": {"source": "text"}},
        "list": [1, {"a": 3e-4}],
        "new": {"key": None},
        "x": "a=b",
    }
    assert document.texts[("list", 1, "a")] == "3e-4"
    assert ("train", "mesh", "dp") not in document.lines


def test_later_override_wins() -> None:
    document = parse("a: 1")
    load._apply_overrides(document, ["a=2", "a=3"])
    assert document.data == {"a": 3}
    assert document.overrides == {("a",): "a=3"}


@pytest.mark.parametrize(
    "argument", ["a", "=1", ".a=1", "a..b=1", "a=*x", "a=[1", "a.b=1", "l.7=1", "l.x=1", "a=&x 1"]
)
def test_impossible_override_is_a_fault(argument: str) -> None:
    document = parse("a: text\nl: [1]")
    load._apply_overrides(document, [argument])
    assert [fault.location for fault in document.faults] == [f"{argument} (override)"]
    assert document.data == {"a": "text", "l": [1]}


@pytest.mark.parametrize(
    "argument",
    [
        "env.TOKEN=hunter2",
        "env={T: hunter2}",
        "secrets.T=hunter2",
        "x=https://u:hunter2@h",
        "env.T:hunter2",
    ],
)
def test_secrets_of_overrides_are_hidden(argument: str) -> None:
    document = parse("env: {}")
    load._apply_overrides(document, [argument])
    shown = [*document.overrides.values(), *(fault.location for fault in document.faults)]
    assert shown
    assert "hunter2" not in "".join(shown)


def test_whole_numbers_are_read() -> None:
    text = (
        "hosts: {min: 2, max: 4}\nslices: '3'\ntrain: {steps: 0x10, epochs: null}\nrestarts: true\n"
    )
    paths = (
        ("hosts",),
        ("hosts", "max"),
        ("slices",),
        ("train", "steps"),
        ("train", "epochs"),
        ("restarts", "crash"),
    )
    assert reader.read_whole_numbers(text, paths) == {("hosts", "max"): 4, ("train", "steps"): 16}
    assert reader.read_whole_numbers("hosts: [", paths) == {}
