import json
from pathlib import Path

from jaxlaunch.trainer.data.pipeline import ExampleLog


def lines(folder: Path, process: int) -> list[dict[str, object]]:
    return [
        json.loads(line)
        for line in (folder / "examples" / f"process-{process}.jsonl").read_text().splitlines()
    ]


def write(folder: Path, process: int, start: int, stop: int, *, processes: int = 1) -> None:
    trace = ExampleLog(folder, process, start, processes=processes)
    for step in range(start, stop):
        trace.write_step(step, [step, process])
    trace.close()


def test_one_line_holds_the_ids_of_one_step(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, 2)
    assert lines(tmp_path, 0) == [{"step": 0, "ids": [0, 0]}, {"step": 1, "ids": [1, 0]}]


def test_lines_are_on_the_system_s_side_at_once(tmp_path: Path) -> None:
    trace = ExampleLog(tmp_path, 0, 0, processes=1)
    trace.write_step(0, [3])
    assert lines(tmp_path, 0) == [{"step": 0, "ids": [3]}]
    trace.close()


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, 7)
    with (tmp_path / "examples" / "process-0.jsonl").open("a") as file:
        file.write('{"step": 7, "id')  # killed while it wrote
    write(tmp_path, 0, 4, 9)
    assert [line["step"] for line in lines(tmp_path, 0)] == list(range(9))


def test_a_run_that_starts_behind_the_last_line_keeps_them_all(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, 3)
    write(tmp_path, 0, 3, 5)
    assert [line["step"] for line in lines(tmp_path, 0)] == list(range(5))


def test_processes_that_are_no_more_are_cut_too(tmp_path: Path) -> None:
    for process in range(4):
        write(tmp_path, process, 0, 6, processes=4)
    write(tmp_path, 0, 2, 6, processes=2)
    assert [len(lines(tmp_path, process)) for process in range(4)] == [6, 6, 2, 2]
