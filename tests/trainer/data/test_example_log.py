import json
from pathlib import Path

from jaxlaunch.trainer.data.pipeline import ExampleLog


def read_lines(folder: Path, process: int) -> list[dict[str, object]]:
    return [
        json.loads(line)
        for line in (folder / "examples" / f"process-{process}.jsonl").read_text().splitlines()
    ]


def write_log(folder: Path, process: int, start: int, stop: int, *, processes: int = 1) -> None:
    trace = ExampleLog(folder, process, start, processes=processes)
    for step in range(start, stop):
        trace.write_step(step, [step, process])
    trace.close()


def test_lines_are_flushed_at_once(tmp_path: Path) -> None:
    trace = ExampleLog(tmp_path, 0, 0, processes=1)
    trace.write_step(0, [3])
    assert read_lines(tmp_path, 0) == [{"step": 0, "ids": [3]}]
    trace.close()


def test_resumed_run_logs_each_step_once(tmp_path: Path) -> None:
    write_log(tmp_path, 0, 0, 7)
    with (tmp_path / "examples" / "process-0.jsonl").open("a") as file:
        file.write('{"step": 7, "id')  # killed while it wrote
    write_log(tmp_path, 0, 4, 9)
    assert [line["step"] for line in read_lines(tmp_path, 0)] == list(range(9))


def test_start_after_the_last_line_keeps_all_lines(tmp_path: Path) -> None:
    write_log(tmp_path, 0, 0, 3)
    write_log(tmp_path, 0, 3, 5)
    assert [line["step"] for line in read_lines(tmp_path, 0)] == list(range(5))


def test_logs_of_former_processes_are_truncated(tmp_path: Path) -> None:
    for process in range(4):
        write_log(tmp_path, process, 0, 6, processes=4)
    write_log(tmp_path, 0, 2, 6, processes=2)
    assert [len(read_lines(tmp_path, process)) for process in range(4)] == [6, 6, 2, 2]
