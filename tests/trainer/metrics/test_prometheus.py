import pathlib
import socket
import subprocess

import pytest

from jaxlaunch import contract
from jaxlaunch.trainer.metrics.counters import METRIC_ROWS, Exporter, Histogram, Value
from tests import needs


def scrape(path: pathlib.Path) -> str:
    """What an agent reads: connect, read to the end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(path))
        return b"".join(iter(lambda: client.recv(65536), b"")).decode()


def nothing_known() -> dict[str, Value]:
    """Every row, none with a value yet."""
    unknown: dict[str, Value] = {}
    for row in METRIC_ROWS:
        more = row.labels[1:]
        unknown[row.name] = {tuple("x" for _ in more): None} if more else None
    return unknown | {"jaxlaunch_step_seconds": Histogram((0.1, 1.0), (2, 1, 1), 5.25)}


def test_scrape_has_every_trainer_row(tmp_path: pathlib.Path) -> None:
    exporter = Exporter(str(tmp_path / "s"), 3, nothing_known)
    text = scrape(tmp_path / "s")
    for row in METRIC_ROWS:
        assert f"# HELP {row.name} {row.help}\n# TYPE {row.name} {row.type}\n" in text
    assert 'jaxlaunch_loss{rank="3"} NaN' in text
    exporter.close()


def test_histogram_is_cumulative(tmp_path: pathlib.Path) -> None:
    exporter = Exporter(str(tmp_path / "s"), 0, nothing_known)
    text = scrape(tmp_path / "s")
    exporter.close()
    buckets = [line for line in text.splitlines() if line.startswith("jaxlaunch_step_seconds")]
    assert buckets == [
        'jaxlaunch_step_seconds_bucket{le="0.1",rank="0"} 2.0',
        'jaxlaunch_step_seconds_bucket{le="1.0",rank="0"} 3.0',
        'jaxlaunch_step_seconds_bucket{le="+Inf",rank="0"} 4.0',
        'jaxlaunch_step_seconds_count{rank="0"} 4.0',
        'jaxlaunch_step_seconds_sum{rank="0"} 5.25',
    ]


def test_promtool_accepts_scrape(tmp_path: pathlib.Path) -> None:
    promtool = needs.tool("promtool", package="the Debian package prometheus")
    exporter = Exporter(str(tmp_path / "s"), 0, nothing_known)
    text = scrape(tmp_path / "s")
    exporter.close()
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, text=True, capture_output=True
    )
    assert checked.returncode == 0 and checked.stderr == "", checked.stderr


def test_scrape_reads_current_values(tmp_path: pathlib.Path) -> None:
    values = nothing_known()
    exporter = Exporter(str(tmp_path / "s"), 0, lambda: values)
    for step in (1, 2):
        values["jaxlaunch_step"] = step
        assert f'jaxlaunch_step{{rank="0"}} {step}.0' in scrape(tmp_path / "s")
    exporter.close()


def test_disconnected_reader_does_not_end_export(tmp_path: pathlib.Path) -> None:
    exporter = Exporter(str(tmp_path / "s"), 0, nothing_known)
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(tmp_path / "s"))
    assert "jaxlaunch_step" in scrape(tmp_path / "s")
    exporter.close()


def test_stale_socket_is_replaced_and_closed_one_removed(
    tmp_path: pathlib.Path,
) -> None:
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stale.bind(str(tmp_path / "s"))
    stale.close()
    exporter = Exporter(str(tmp_path / "s"), 0, nothing_known)
    assert scrape(tmp_path / "s")
    exporter.close()
    assert not (tmp_path / "s").exists()


def test_metric_names_follow_prometheus_style() -> None:
    names = [metric.name for metric in contract.PROMETHEUS]
    assert len(set(names)) == len(names)
    for metric in contract.PROMETHEUS:
        assert metric.name.startswith("jaxlaunch_") and metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric.name
        assert metric.exporter in ("agent", "trainer")
        assert metric.exporter == "agent" or metric.labels[0] == "rank"


@pytest.mark.parametrize("metric", contract.PROMETHEUS, ids=lambda metric: metric.name)
def test_metric_units_are_base_units(metric: contract.Metric) -> None:
    assert not any(
        unit in metric.name for unit in ("_ms", "_millis", "_kb", "_mb", "_percent", "_minutes")
    )


def test_exporter_without_socket_closes(tmp_path: pathlib.Path) -> None:
    exporter = Exporter(str(tmp_path / "s"), 0, nothing_known)
    (tmp_path / "s").unlink()
    exporter.close()
