"""The pages in a real browser."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain.explanation import explain_job
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.report import compare, page, viewers
from jaxlaunch.launcher.report.cluster_jobs import ClusterJobs
from jaxlaunch.launcher.report.run import RunReader
from jaxlaunch.launcher.report.server import RunCatalog, Server
from jaxlaunch.launcher.sweep.table import Member, SweepTable
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs.layout import hold_lock
from tests import needs
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Server as ApiServer
from tests.launcher.report import browser, made_jobs, made_runs
from tests.launcher.report.serving import serving
from tests.launcher.report.test_page import NASTY
from tests.launcher.report.test_viewers import ALICE, EVE, Api

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not browser.is_here(), reason="there is no chromium"),
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Page]:
    with browser.page() as opened:
        yield opened


def test_report_draws_without_requests_or_errors(chromium: browser.Page, tmp_path: Path) -> None:
    folder = tmp_path / "<b>odd"
    made_runs.run(folder, (137, 83, 0), points=300)
    made_runs.run(tmp_path / "empty", (83,), points=0)
    with open(folder / "eval.jsonl", "a") as file:
        file.write(
            '{"step": 1001, "loss": 1.0, "<img src=x onerror=alert(1)>": 1e300, "flat": 0.0}\n'
        )
    (tmp_path / "run.html").write_text(
        page.render_page("run", NASTY, RunReader(folder).read_report().to_json())
    )
    for width, is_dark in ((1180, False), (400, True)):
        chromium.requests.clear()

        chromium.open((tmp_path / "run.html").as_uri(), width, is_dark)

        visible = chromium.value(
            "[...document.querySelectorAll('h2')].map((each) => each.textContent)"
        )
        assert {"Where the time went", "Attempts", "Curves", "Commands", "Job"} <= set(visible)
        assert (
            chromium.value("document.querySelectorAll('#strip canvas, #loss canvas').length") == 2
        )
        edges = "view.pair.map((chart) => `${chart.plot.bbox.left} ${chart.plot.bbox.width}`)"
        assert len(set(chromium.value(edges))) == 1  # one axis
        strip = chromium.value("document.getElementById('strip').getAttribute('aria-label')")
        assert "at 38 s rank 1 killed, 17 s lost, resumed at step 100" in strip
        # The sentence and the first cards are on the first screen, at any width.
        for place in ("#the-sentence", ".facts dd"):
            box = f"document.querySelector('{place}').getBoundingClientRect().bottom"
            assert chromium.value(f"{box} < innerHeight")
        first = chromium.value("document.querySelector('.facts dt').textContent")
        assert first in ("eval/accuracy", "eval/loss")
        assert chromium.value("document.querySelectorAll('#the-attempts tbody tr').length") == 3
        facts = chromium.value("document.querySelector('#the-facts').innerText").split("\n")
        assert facts[facts.index("Restarts") + 1] == "2"
        assert chromium.value("document.documentElement.scrollWidth <= innerWidth")
        assert chromium.value("document.querySelectorAll('img').length") == 0
        assert [url for url in chromium.requests if not url.startswith(("file:", "data:"))] == []
    (tmp_path / "empty.html").write_text(
        page.render_page("run", "empty", RunReader(tmp_path / "empty").read_report().to_json())
    )
    chromium.open((tmp_path / "empty.html").as_uri(), 400)
    assert len(set(chromium.value(edges))) == 1  # without a curve, too
    assert chromium.errors == []


def test_failure_opens_its_traceback_and_joins_equal_attempts(
    chromium: browser.Page, tmp_path: Path
) -> None:
    made_runs.run(tmp_path / "run", (83, 83, 83, 137, 83))
    path = tmp_path / "run" / "attempts.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["verdict"]["traceback"] = "Traceback:\n  line\nValueError: boom"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = RunReader(tmp_path / "run").read_report().to_json()
    (tmp_path / "run.html").write_text(page.render_page("run", "run", data))
    for width, is_dark in ((1180, False), (400, True)):
        chromium.open((tmp_path / "run.html").as_uri(), width, is_dark)
        opened = "document.querySelector('#the-sentence details[open] pre')"
        assert chromium.value(f"{opened}.textContent").endswith("ValueError: boom")
        assert chromium.value(f"{opened}.getBoundingClientRect().top < innerHeight")
        cells = "[...document.querySelectorAll('#the-attempts tbody tr')].map((row) => "
        cells += "[row.cells[0].textContent, row.cells[2].textContent])"
        assert chromium.value(cells) == [
            ["1–3", "3 × ✕ crash (83)"],
            ["4", "✕ killed (137)"],
            ["5", "✕ crash (83)"],
        ]
    assert chromium.errors == []


def test_sweep_opens_in_the_table_and_has_a_page(chromium: browser.Page, tmp_path: Path) -> None:
    made_runs.sweep(tmp_path / "runs" / "lr-sweep")
    made_runs.run(tmp_path / "runs" / "alone", points=300)
    with serving(Server(RunCatalog(tmp_path / "runs", None))) as server:
        for width, is_dark in ((1180, False), (400, True)):
            chromium.open(server.page_url, width, is_dark)
            names = "[...document.querySelectorAll('#runs tbody tr')].map((row) => "
            names += "row.querySelector('a').textContent)"
            assert sorted(chromium.value(names)) == ["alone", "lr-sweep"]
            group = "[...document.querySelectorAll('#runs tbody tr')].find((row) => "
            group += "row.textContent.includes('lr-sweep')).textContent"
            text = chromium.value(group)
            # The best of those that are done, with its keys.
            assert "train.optimizer.lr=1e-2 train.model.width=8" in text and "0.3" in text
            assert "3 done, 1 failed" in text
            chromium.value("document.querySelector('[data-group]').click()")
            assert len(chromium.value(names)) == 6
            is_open = "document.querySelector('[data-group]').getAttribute('aria-expanded')"
            assert chromium.value(is_open) == "true"
            assert chromium.value("document.querySelectorAll('.spark').length") >= 1
            assert chromium.value("document.documentElement.scrollWidth <= innerWidth")
        chromium.open(chromium.value("document.querySelector('a[href*=sweep]').href"), 1180)
        cells = "[...document.querySelectorAll('tbody tr')].map((row) => row.cells[2].textContent)"
        assert chromium.value(cells) == ["0.3", "0.5", "0.9", "110", "–"]
        sentence = chromium.value("document.querySelector('.sentence').textContent")
        assert "best that is done is lr-sweep-001: eval/loss 0.3 with train.opt" in sentence
        # The curves, and the metric by each of two keys.
        assert chromium.value("document.querySelectorAll('.chart canvas').length") == 3
        chromium.open(chromium.value("location.href"), 400, True)
        assert chromium.value("document.documentElement.scrollWidth <= innerWidth")
    assert chromium.errors == []


def test_keys_move_chart_and_strip(chromium: browser.Page, tmp_path: Path) -> None:
    made_runs.run(tmp_path / "run", (137, 0))
    (tmp_path / "run.html").write_text(
        page.render_page("run", "run", RunReader(tmp_path / "run").read_report().to_json())
    )
    chromium.open((tmp_path / "run.html").as_uri())
    wide = chromium.value("view.pair.map((chart) => chart.plot.scales.x.max)")

    chromium.value(
        "document.getElementById('loss').dispatchEvent(new KeyboardEvent('keydown', {key: '+'}))"
    )

    strip, loss = chromium.value("view.pair.map((chart) => chart.plot.scales.x.max)")
    assert strip == loss < wide[0]
    chromium.value("document.querySelector('input[value=time]').click()")
    chromium.value("document.querySelector('input[type=checkbox]').click()")
    assert chromium.errors == []


def test_keys_select_ranks_and_open_logs(chromium: browser.Page, tmp_path: Path) -> None:
    wall_s = sum(made_runs.run(tmp_path / "run", (0,)).values())
    made_runs.ranks(tmp_path / "run", 1000, wall_s, slow=2)
    logs = tmp_path / "run" / "starts" / "1" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-2.log").write_text("no file for rank 2\n")
    text = page.render_page("run", "run", RunReader(tmp_path / "run").read_report().to_json())
    assert len(text) < 500_000
    (tmp_path / "run.html").write_text(text)
    for width, is_dark in ((1180, False), (400, True)):
        chromium.open((tmp_path / "run.html").as_uri(), width, is_dark)
        edges = "view.pair.map((chart) => `${chart.plot.bbox.left} ${chart.plot.bbox.width}`)"
        assert len(chromium.value(edges)) == 3 and len(set(chromium.value(edges))) == 1  # one axis
        press = (
            "document.getElementById('heat').dispatchEvent(new KeyboardEvent('keydown', "
            "{key: '%s'}))"
        )
        for key in ("ArrowDown", "ArrowDown", "ArrowLeft"):
            chromium.value(press % key)
        label = chromium.value("document.getElementById('heat-readout').textContent")
        assert label.startswith("Rank 2 at ") and label.endswith(
            "waiting for data, 238 steps behind"
        )
        chromium.value(press % "Enter")
        assert (
            chromium.value(
                "document.activeElement.parentNode.open && document.activeElement.textContent"
            )
            == "Rank 2"
        )
        chromium.value("document.querySelector('input[name=heat][value=lag]').click()")
        chromium.value("openRank(999)")
        visible = chromium.value("document.getElementById('heat-readout').textContent")
        assert visible.endswith("--rank 999 --tail 100")
        table = "document.querySelector('#the-ranks tbody').innerText"
        assert chromium.value(table).split()[:3] == ["2", "239", "17"]
        assert chromium.value("document.documentElement.scrollWidth <= innerWidth")
    assert chromium.errors == []


def test_frame_of_curves_fits_their_values(chromium: browser.Page, tmp_path: Path) -> None:
    """Constant, with an outlier, negative and sparse curves; the reference is in the file."""
    run = tmp_path / "run"
    made_runs.run(run, points=0)
    with open(run / "metrics.jsonl", "w") as metrics, open(run / "eval.jsonl", "w") as evals:
        for step in range(1, 401):
            time = made_runs.BEGAN + step / 20
            outlier = 1e6 if step == 150 else 1.0 + step % 10 / 10
            row = {"step": step, "time": time, "loss": 2.0, "flat": 0.97, "zero": 0.0}
            metrics.write(json.dumps(row | {"outlier": outlier, "negative": -5.0}) + "\n")
            if step % 100 == 0:
                evals.write(json.dumps({"step": step, "time": time, "loss": 3.0}) + "\n")
    data = RunReader(run).read_report().to_json()
    (tmp_path / "run.html").write_text(page.render_page("run", "run", data))
    chromium.open((tmp_path / "run.html").as_uri())
    frame = "(({min, max}) => [min, max])(view.charts.get('%s').chart.plot.scales.y)"

    def frame_of(name: str) -> list[float]:
        return chromium.value(frame % name)

    for name, value in (("flat", 0.97), ("negative", -5.0), ("loss", 2.0)):
        low, high = frame_of(name)
        assert value - 0.1 * abs(value) < low < value < high < value + 0.1 * abs(value), name
    assert frame_of("zero") == [-1, 1]
    low, high = frame_of("outlier")
    assert 0 <= low < 1.0 and 1.9 < high < 4
    chromium.value("document.getElementById('outliers').click()")
    assert frame_of("outlier")[1] > 1e6

    # Under the pointer, each curve has its nearest point and where it is.
    move = "view.pair.find((chart) => chart.frame.id === 'loss').plot.setCursor({left: %s, top: 9})"
    width = chromium.value(
        "view.pair.find((chart) => chart.frame.id === 'loss').plot.over.clientWidth"
    )
    chromium.value(f"({move % (width * 4.0 / data['wall_s'])}, 0)")
    readout = chromium.value("document.getElementById('readout').textContent")
    assert "loss 2" in readout and "eval/loss 3 (at 5)" in readout, readout

    # The smoothed loss is a line of its own, also on a logarithmic scale.
    chromium.value(
        "(() => { const box = document.querySelector('input[type=range]'); box.value = 0.9;"
        " box.dispatchEvent(new Event('input')); })()"
    )
    chromium.value(
        "[...document.querySelectorAll('input[type=checkbox]')].find((box) => !box.id).click()"
    )
    series = (
        "view.pair.find((chart) => chart.frame.id === 'loss').plot.series.map((one) => one.alpha)"
    )
    assert chromium.value(series)[1:5] == [0.35, 1, 0.35, 1]
    # Half of the last label fits to the right of the axis.
    right = "view.pair.map((chart) => chart.plot.width - chart.plot.over.clientWidth - 62)"
    assert min(chromium.value(right)) >= 24
    assert chromium.errors == []


def test_hung_rank_is_named_with_its_line(chromium: browser.Page, tmp_path: Path) -> None:
    wall_s = sum(made_runs.run(tmp_path / "run", (contract.HANG,)).values())
    made_runs.ranks(tmp_path / "run", 4, wall_s, slow=3)
    made_runs.hang(tmp_path / "run", 2, 12.0, "in step in read (tasks.py:12)")
    text = page.render_page("run", "run", RunReader(tmp_path / "run").read_report().to_json())
    (tmp_path / "run.html").write_text(text)
    readout = "document.getElementById('heat-readout').textContent"
    press = (
        "document.getElementById('heat').dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}))"
    )
    # The colours of the newest column, from the first rank to the last.
    pixels = """(() => {
        const { ctx, bbox } = view.pair.find((chart) => chart.frame.id === "heat").plot;
        const [x, high] = [bbox.left + 0.97 * bbox.width, Math.round(bbox.height)];
        const { data } = ctx.getImageData(x, bbox.top, 1, high);
        return [0, 1, 2, 3].map((rank) => {
            const at = 4 * Math.floor((rank + 0.5) * high / 4);
            return data.slice(at, at + 4).join();
        });
    })()"""
    for width, is_dark in ((1180, False), (400, True)):
        chromium.open((tmp_path / "run.html").as_uri(), width, is_dark)
        first, second, hung, last = chromium.value(pixels)
        assert hung not in (first, second, last)
        for key in ("ArrowLeft", "ArrowDown", "ArrowDown"):
            chromium.value(press % key)
        assert "hangs in step in read (tasks.py:12)" in chromium.value(readout)
        chromium.value(press % "ArrowUp")
        assert "Rank 1 at" in chromium.value(readout)
        assert "waits for the rank that hangs" in chromium.value(readout)
        row = chromium.value("document.querySelector('#the-ranks tbody tr').innerText")
        assert row.split("\t")[0] == "2" and "hung in step in read (tasks.py:12)" in row
    assert chromium.errors == []


def test_classes_are_shown_as_tables(chromium: browser.Page, tmp_path: Path) -> None:
    made_runs.run(tmp_path / "run", (0,))
    for count, (width, is_dark) in {3: (1180, False), 50: (400, True), 60: (400, False)}.items():
        made_runs.classification(
            tmp_path / "run", [NASTY[:100], *(f"class {at}" for at in range(1, count))]
        )
        text = page.render_page("run", "run", RunReader(tmp_path / "run").read_report().to_json())
        (tmp_path / "run.html").write_text(text)
        chromium.open((tmp_path / "run.html").as_uri(), width, is_dark)
        cells = "document.querySelectorAll('.matrix tbody td')"
        assert chromium.value(f"{cells}.length") == (count**2 if count <= 50 else 0)
        if count <= 50:
            assert chromium.value(f"[...{cells}].slice(0, 3).map((each) => each.textContent)") == [
                "8",
                "1",
                "·",
            ]
            shades = chromium.value(
                f"[...{cells}].slice(0, 3).map((each) => getComputedStyle(each).backgroundColor)"
            )
            assert len(set(shades)) == 3
        else:
            assert "class 1" in chromium.value(
                "document.querySelector('[aria-label=\"Confused pairs\"]').innerText"
            )
        rows = "document.querySelectorAll('table[aria-label=\"Rates by class\"] tbody tr').length"
        assert chromium.value(rows) == count
        assert chromium.value("document.querySelectorAll('.calibration .bar').length") == 1
        assert chromium.value("document.documentElement.scrollWidth <= innerWidth")
    assert chromium.errors == []


def test_dashboard_sorts_filters_compares_and_updates(
    chromium: browser.Page, tmp_path: Path
) -> None:
    made_runs.run(tmp_path / "first", points=40)
    made_runs.run(tmp_path / "second", points=40)
    made_runs.failed(tmp_path / "third", verdict_for_code(83, NASTY, rank=0))
    with serving(Server(RunCatalog(tmp_path, None))) as server:
        chromium.open(server.page_url)
        names = (
            "[...document.querySelectorAll('tbody tr')].map((each) => each.children[1].textContent)"
        )
        chromium.value("document.querySelector('[data-sort=name]').click()")
        assert chromium.value(names) == ["first", "second", "third"]
        box = "document.querySelector('input[type=search]')"
        chromium.value(f"({box}.value = 'failed', {box}.dispatchEvent(new Event('input')))")
        assert chromium.value(names) == ["third"]
        chromium.value(f"({box}.value = '', {box}.dispatchEvent(new Event('input')))")
        chromium.value(
            "[...document.querySelectorAll('tbody input')].slice(0, 2).forEach((each) => "
            "each.click())"
        )
        chromium.open(chromium.value("document.querySelector('#compare a').href"))
        assert chromium.value("document.querySelector('h1').textContent") == "first and second"
        assert chromium.value("document.querySelectorAll('#curves canvas').length") == 4

        chromium.open(chromium.value("document.querySelector('tbody a').href"))
        chromium.until(
            "performance.getEntriesByName('drawn').length > 1"
        )  # the page, and what the server knew of it
        press = (
            "document.querySelector('#curves .chart').dispatchEvent(new "
            "KeyboardEvent('keydown', {key: '+'}))"
        )
        axis = "(({min, max}) => [min, max])(view.charts.values().next().value.chart.plot.scales.x)"
        chromium.value(f"{press}, document.querySelector('#curves summary').click()")
        zoomed = chromium.value(axis)
        with open(tmp_path / "first" / "metrics.jsonl", "a") as file:
            file.write('{"step": 1001, "loss": 0.125}\n')
        assert chromium.until(
            "document.querySelector('#curves p').textContent.startsWith('now 0.125')"
        )
        assert chromium.value(axis) == zoomed  # what somebody looks at stays
        newest = chromium.value("document.querySelector('#curves tbody').lastChild.innerText")
        assert newest.split() == ["1001", "0.125"]
        chromium.open("about:blank")
    assert chromium.errors == []


def test_viewer_signs_in_and_out(
    chromium: browser.Page,
) -> None:
    api = Api()
    with serving(viewers.Server(api, ["team-a", "team-b"], [])) as server:

        def signs_in(token: str) -> None:
            field = "document.querySelector('input[name=token]')"
            chromium.lead(f"({field}.value = '{token}', {field}.form.requestSubmit())")

        def has_no_faults() -> None:
            assert find_violations(chromium) == []
            assert chromium.value("document.documentElement.scrollWidth <= innerWidth")

        chromium.open(f"http://127.0.0.1:{server.server_address[1]}/", 400, is_dark=True)
        alert = "document.querySelector('[role=alert]')?.textContent"
        assert chromium.value(alert) == "Sign in to see your jobs."
        has_no_faults()
        signs_in(EVE)
        assert chromium.value(alert).startswith("You may not list jobs")
        signs_in(ALICE)
        names = (
            "[...document.querySelectorAll('tbody tr')].map((each) => "
            "each.children[1].textContent).join()"
        )
        assert chromium.value(names) == "job-of-team-a"
        assert chromium.value("document.cookie + location.pathname + location.search") == "/"
        assert chromium.value("document.querySelectorAll('tbody input, #compare *').length") == 2
        has_no_faults()
        chromium.lead("document.querySelector('a[href=\"/sign-out\"]').click()")
        assert chromium.value(alert) == "You have signed out."
        chromium.open(f"http://127.0.0.1:{server.server_address[1]}/")
        assert chromium.value(alert) == "Sign in to see your jobs."
        label = "Failed to load resource: the server responded with a status of "
        refused = {"401", "403"}
        assert {
            text.removeprefix(label).split()[0] for text in chromium.errors
        } == refused  # which a console repeats
        chromium.errors.clear()


AXE = Path("axe_playwright_python") / "axe.min.js"


def find_violations(chromium: browser.Page) -> list[list[str]]:
    """Return what axe-core finds on the page of the browser, with all details open."""
    chromium.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    chromium.call("Runtime.evaluate", expression=(needs.packages("axe") / AXE).read_text())
    label = "found.violations.map((each) => [each.impact, each.id, each.nodes[0].html])"
    violations: list[list[str]] = chromium.value(f"axe.run().then((found) => {label})")
    return violations


@pytest.mark.extended
def test_pages_pass_accessibility_audit(chromium: browser.Page, tmp_path: Path) -> None:
    """The pages of a run, of a sweep and of a comparison, and the table, have no violation."""
    runs = tmp_path / "runs"
    wall_s = sum(made_runs.run(runs / "first", (137, 83, 0), points=300).values())
    made_runs.ranks(runs / "first", 12, wall_s, slow=2)
    made_runs.classification(runs / "first", [f"class {at}" for at in range(12)])
    made_runs.failed(runs / "second", verdict_for_code(83, "rank 0 raised ValueError", rank=0))
    made_runs.sweep(runs / "lr-sweep")
    with serving(Server(RunCatalog(runs))) as server:
        chromium.open(server.page_url)
        table = "[...document.querySelectorAll('#runs tbody tr')]"
        chromium.value("document.querySelector('[data-group]').click()")
        links = f"Object.fromEntries({table}.map((row) => row.querySelector('a'))"
        pages = chromium.value(f"{links}.map((link) => [link.textContent, link.href]))")
        ids = chromium.value(
            f"{table}.filter((row) => /^(first|second)$/.test(row.querySelector('a').textContent))"
            ".map((row) => `run=${row.querySelector('a').href.split('/').pop()}`).join('&')"
        )
        addresses = [server.page_url, f"{server.page_url}compare?{ids}"]
        addresses += [pages[name] for name in ("first", "second", "lr-sweep")]
        for address in addresses:
            for width, is_dark in ((1180, False), (400, True)):
                chromium.open(address, width, is_dark)
                chromium.value("document.querySelector('[data-group]')?.click()")
                assert find_violations(chromium) == [], (address, width, is_dark)
        chromium.open("about:blank")
    assert chromium.errors == []


@pytest.fixture
def cluster_jobs(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterJobs:
    """Jobs of a fake API server: one that runs again after a kill, one that waits, and a sweep."""
    config = apiserver.write_kubeconfig(tmp_path, server.url, namespace="team-a")
    monkeypatch.setenv("KUBECONFIG", str(config))
    first = made_jobs.beats(20)
    killed = made_jobs.ended(137, "rank 1 was killed", attempt=1, at=made_jobs.BEGAN + 290, rank=1)
    seconds = {**first[-1].seconds, "down": 15.0}
    second = made_jobs.beats(
        20, attempt=2, began=made_jobs.BEGAN + 300, first_step=150, seconds=seconds
    )
    made_jobs.put_job(server, "lm", [*first, killed, *second])
    for number, lr in enumerate(("1e-3", "1e-2", "1e-1")):
        made_jobs.put_job(
            server,
            f"lr-sweep-{number:03}",
            made_jobs.beats(20 + 10 * number),
            labels={"sweep": "lr-sweep", "team": "vision"},
            words=[f"train.optimizer.lr={lr}", "labels.sweep=lr-sweep"],
            status=objects.ended("Completed"),
            is_over=True,
        )
    return ClusterJobs(Cluster.connect(), explain_job)


def compare_picked_jobs(chromium: browser.Page, home: str, width: int, is_dark: bool) -> None:
    """Follow the link that the picked rows of the table make."""
    chromium.open(home, width, is_dark)
    chromium.value("document.querySelector('[data-group]').click()")
    chromium.value("document.querySelectorAll('tbody input').forEach((box) => box.click())")
    chromium.lead("document.querySelector('#compare a').click()")
    differs = "document.querySelector('[aria-label=\"What differs\"]').innerText"
    assert "labels.team" in chromium.value(differs)
    assert chromium.value("document.querySelectorAll('#curves canvas').length") == 2
    assert find_violations(chromium) == [], (width, is_dark)


@pytest.mark.extended
def test_viewer_opens_jobs_and_sweeps(
    chromium: browser.Page, server: ApiServer, cluster_jobs: ClusterJobs
) -> None:
    """The pages of a cluster are those of a run folder, and say what may not be read."""
    with serving(viewers.Server(lambda _: cluster_jobs, ["team"], [])) as dashboard:
        home = f"http://127.0.0.1:{dashboard.server_address[1]}/"
        chromium.open(home)
        field = "document.querySelector('input[name=token]')"
        chromium.lead(f"({field}.value = 'a.b.c', {field}.form.requestSubmit())")
        # The answer to a visitor without a token is 401, which the console repeats.
        assert len(chromium.errors) == 1 and "401" in chromium.errors.pop()
        rows = "[...document.querySelectorAll('#runs tbody tr')]"
        names = f"{rows}.map((row) => row.querySelector('a').textContent)"
        assert sorted(chromium.value(names)) == ["lm", "lr-sweep"]
        assert chromium.value("document.querySelectorAll('.spark').length") == 2
        chromium.value("document.querySelector('[data-group]').click()")
        assert len(chromium.value(names)) == 5
        text = chromium.value(f"{rows}.map((row) => row.textContent).join()")
        assert "train.optimizer.lr=1e-1" in text and "team=vision" in text and "340 / 1000" in text
        assert find_violations(chromium) == []

        for width, is_dark in ((1180, False), (400, True)):
            chromium.open(f"{home}job/team/lm", width, is_dark)
            sentence = chromium.value("document.querySelector('.sentence').textContent")
            assert "at step 340 of 1000: eval/loss 0.5; 1 kill costs 15 s." in sentence, sentence
            heads = "[...document.querySelectorAll('h2')].map((head) => head.textContent)"
            assert chromium.value(heads) == [
                "Explanation",
                "Where the time went",
                "Attempts",
                "Curves",
                "Hosts",
                "Ranks",
                "Commands",
                "Job",
            ]
            assert chromium.value("document.querySelectorAll('#curves canvas').length") == 2
            assert chromium.value("document.querySelectorAll('#heat canvas').length") == 1
            assert chromium.value("document.querySelectorAll('input[value=lag]').length") == 0
            chromium.value("openRank(1)")
            log = "document.querySelector('[data-id=\"rank 1\"] pre').textContent"
            assert "line 1" in chromium.value(log)
            assert chromium.value("document.documentElement.scrollWidth <= innerWidth")
            assert find_violations(chromium) == [], (width, is_dark)
            chromium.open(f"{home}sweep/team/lr-sweep", width, is_dark)
            cells = "[...document.querySelectorAll('tbody tr')].map((row) => "
            assert chromium.value(f"{cells} row.cells[0].textContent.trim())") == [
                "lr-sweep-002",
                "lr-sweep-001",
                "lr-sweep-000",
            ]
            assert find_violations(chromium) == [], (width, is_dark)
            compare_picked_jobs(chromium, home, width, is_dark)

        def forbid(handler: apiserver.Handler) -> bool:
            handler.fail(403, "Forbidden", "pods is forbidden")
            return True

        server.on("GET", "/log", *[forbid] * 100)
        for jobs in (cluster_jobs._page_logs, cluster_jobs._table_logs):
            jobs.clear()
        chromium.open(f"{home}job/team/lm", 400)
        unread = "[...document.querySelectorAll('.unread')].map((place) => place.textContent)"
        sentence = "⚠ pods/log: you may not read logs in namespace team."
        assert chromium.value(unread) == [sentence] * 3
        assert find_violations(chromium) == []
        chromium.open("about:blank")
    assert chromium.errors == []


# What a live update may take of the processor, and the server of memory.
MAX_UPDATE_S, MAX_SERVER_MIB = 0.1, 100


def make_large_sweep(folder: Path, stack: contextlib.ExitStack) -> list[Path]:
    """Make a sweep of 30 runs that train, with 1,000 points in each curve."""
    members = dict[str, Member]()
    for number in range(30):
        run = folder / f"{folder.name}-{number:03}"
        made_runs.run(run, (137, 0), points=1000)
        path = run / "summary.json"
        summary = json.loads(path.read_text()) | {"verdict": None, "status": "running"}
        path.write_text(json.dumps(summary))
        stack.enter_context(hold_lock(run))
        changes = [f"train.seed={number}", f"train.batch={8 * (number % 3 + 1)}"]
        members[run.name] = Member(run.name, run, changes, str(number))
    settings = {"sweep": folder.name, "metric": "loss", "mode": "min", "cluster": None}
    SweepTable(folder).record_sweep(settings, members)
    return [member.folder for member in members.values()]


def measure_updates(chromium: browser.Page, runs: list[Path], first_step: int) -> float:
    """Return the seconds of processor that the page takes for an update of all runs."""
    chromium.call("Performance.enable", timeDomain="threadTicks")

    def read_task_s() -> float:
        metrics = chromium.call("Performance.getMetrics")["metrics"]
        return float({entry["name"]: entry["value"] for entry in metrics}["TaskDuration"])

    count = "performance.getEntriesByName('drawn').length"
    # The page itself, and what the server has read since.
    drawn = chromium.until(f"{count} > 1 && {count}")
    began_s, updates = read_task_s(), 3
    for step in range(first_step, first_step + updates):
        for run in runs:
            row = {"step": step, "loss": 100 / step, "time": made_runs.BEGAN + step}
            with open(run / "metrics.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
        drawn = chromium.until(f"{count} > {drawn} && {count}")
    return (read_task_s() - began_s) / updates


@pytest.mark.extended
def test_large_sweep_is_updated_within_limits(chromium: browser.Page, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        runs = make_large_sweep(tmp_path / "runs" / "large", stack)
        command = [sys.executable, "-m", "jaxlaunch.launcher.cli.main", "dashboard", "runs"]
        pipe = subprocess.PIPE
        server = stack.enter_context(
            subprocess.Popen(command, cwd=tmp_path, stdout=pipe, text=True)
        )
        stack.callback(server.terminate)
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        chromium.open(address)
        chromium.value("document.querySelector('[data-group]').click()")
        links = "[...document.querySelectorAll('#runs a')].map((link) => link.href)"
        sweep, *pages = chromium.value(links)
        assert len(pages) == 30
        update_s = {"table": measure_updates(chromium, runs, 2001)}
        for step, (name, page_address) in enumerate({"sweep": sweep, "run": pages[0]}.items(), 1):
            chromium.open(page_address)
            update_s[name] = measure_updates(chromium, runs, 2001 + 100 * step)
        assert max(update_s.values()) < MAX_UPDATE_S, update_s
        for page_address in pages:
            with urllib.request.urlopen(page_address) as answer:
                answer.read()
        status = Path(f"/proc/{server.pid}/status").read_text()
        (peak_kib,) = re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        assert int(peak_kib) / 1024 < MAX_SERVER_MIB, peak_kib
        chromium.open("about:blank")
    assert chromium.errors == []


def test_comparison_without_common_curve(chromium: browser.Page, tmp_path: Path) -> None:
    for name in ("one", "two"):
        made_runs.run(tmp_path / name, (83,), points=0)
    data = compare.compare_runs(
        [RunReader(tmp_path / name).read_report() for name in ("one", "two")], (), "hour"
    )
    (tmp_path / "both.html").write_text(page.render_page("compare", "both", data))
    chromium.open((tmp_path / "both.html").as_uri(), 400)
    assert chromium.value("document.querySelector('h1').textContent") == "one and two"
    assert chromium.errors == []
