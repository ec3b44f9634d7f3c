"""The text of /metrics: the rows of the agent, and those of its processes merged."""

from __future__ import annotations

from jaxlaunch import contract
from jaxlaunch.launcher.agent import metrics_server
from jaxlaunch.launcher.agent.gang.progress import RankProgress

DEFAULTS = contract.TIMEOUTS_S


def test_every_row_of_the_agent_is_there_before_anything_is_known() -> None:
    text = metrics_server.render_agent_metrics(
        0, {}, {3: RankProgress(0.0)}, DEFAULTS, 0.0, {"in_use": None, "limit": None}, 1.0
    )
    for row in contract.PROMETHEUS:
        if row.exporter == "agent":
            assert f"# TYPE {row.name} {row.type}" in text
            assert any(
                line.startswith((f"{row.name} ", f"{row.name}{{")) for line in text.splitlines()
            ), row.name


def test_a_rank_lags_behind_the_foremost_and_by_nan_until_both_steps_are_known() -> None:
    def lag(step: int | None, foremost: int | None) -> str:
        rank = RankProgress(0.0)
        if step is not None:
            rank.take_message({"phase": "step", "step": step}, 1.0)
        gang = {"foremost": foremost}
        text = metrics_server.render_agent_metrics(
            0, gang, {3: rank}, DEFAULTS, 0.0, {"in_use": None, "limit": None}, 2.0
        )
        (line,) = (
            line for line in text.splitlines() if line.startswith("jaxlaunch_rank_lag_steps{")
        )
        return line.rpartition(" ")[2]

    assert (lag(4, 7), lag(9, 7), lag(None, 7), lag(4, None)) == ("3.0", "0.0", "NaN", "NaN")


def test_texts_are_merged_so_that_a_metric_appears_once() -> None:
    texts = [f'# HELP a Help.\n# TYPE a gauge\na{{rank="{rank}"}} {rank}\n' for rank in (0, 1)]
    assert (
        metrics_server.merge_expositions(texts)
        == '# HELP a Help.\n# TYPE a gauge\na{rank="0"} 0\na{rank="1"} 1\n'
    )


def test_a_histograms_samples_stay_with_it() -> None:
    text = '# HELP h Help.\n# TYPE h histogram\nh_bucket{le="+Inf"} 1\nh_sum 2\nh_count 1\n'
    assert metrics_server.merge_expositions(
        [text, "# HELP b B.\n# TYPE b gauge\nb 1\n"]
    ).startswith(text)


def test_lines_of_a_process_that_are_no_samples_are_left_out() -> None:
    for line in ("{a} 1", " ", "\x85", "\x1b[2J 1", "# HELP ", "=", "\x00", "{" * 9_000):
        assert metrics_server.merge_expositions([f"{line}\nb 1\n"]).endswith("b 1\n")
