import pytest

from jaxlaunch.launcher.yaml import numbers, reader, writer

PATHS = (("hosts",), ("hosts", "max"), ("slices",), ("train", "steps"), ("restarts", "crash"))
WRITTEN = writer.document(
    {
        "name": "lm",
        "command": "echo\nhosts: 7\n  steps: 8\n",
        "hosts": {"min": 2, "max": 4},
        "note": "a text that is long " * 20 + "\n",
        "train": {"prompt": "  steps: 9\n\nsteps: 10\n", "shape": [1, 2], "eval": {"steps": 11}, "steps": 1000},
        "restarts": {"in_place": 3},
    }
)


@pytest.mark.parametrize(
    "text",
    [
        WRITTEN,
        "hosts: 2\nslices: 3\ntrain:\n  steps: 4\nrestarts:\n  crash: 0\n",
        "hosts: 2\ntrain:\n  steps: null\n  epochs: 3\n",
        "train:\n- steps: 4\nhosts: 1\n",
        '{"hosts": 3, "train": {"steps": 5}}',
        "{\nhosts: 3\n}\n",
        "hosts: {max: 5}\ntrain: {steps: 5}\n",
        "hosts: 0x10\nslices: '3'\n",
        "hosts: 2\n  3\nslices: 2 # two\n",
        "# a job\nhosts: 2\n",
        "hosts: 2",
        "hosts: true\ntrain: 7\nrestarts: null\n",
        "hosts:\n\n  max: 5\n",
        "hosts: 1\nhosts: 2\n",
        "hosts: [\n",
        "\thosts: 2\n",
        "",
    ],
)
def test_the_numbers_are_those_that_the_reader_finds(text: str) -> None:
    data, found = reader.parse(text, "job.yaml").data, {}
    for path in PATHS:
        value = data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if type(value) is int:
            found[path] = value
    assert numbers.of(text, PATHS) == found


def test_a_document_of_a_run_is_not_parsed_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "parse", pytest.fail)
    assert numbers.of(WRITTEN, PATHS) == {("hosts", "max"): 4, ("train", "steps"): 1000}
