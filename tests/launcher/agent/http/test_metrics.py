"""The text of /metrics: the rows of the agent, and those of its processes merged."""

from __future__ import annotations

from jaxlaunch import contract
from jaxlaunch.launcher.agent import metrics_server
from jaxlaunch.launcher.agent.gang.progress import RankProgress

DEFAULTS = contract.TIMEOUTS_S


def test_all_agent_metrics_exist_without_data() -> None:
    text = metrics_server.render_agent_metrics(
        0, {}, {3: RankProgress(0.0)}, DEFAULTS, 0.0, {"in_use": None, "limit": None}, 1.0
    )
    for row in contract.PROMETHEUS:
        if row.exporter == "agent":
            assert f"# TYPE {row.name} {row.type}" in text
            assert any(
                line.startswith((f"{row.name} ", f"{row.name}{{")) for line in text.splitlines()
            ), row.name


def test_rank_lag_is_nan_until_both_steps_are_known() -> None:
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


def test_merged_exposition_has_each_metric_once() -> None:
    texts = [f'# HELP a Help.\n# TYPE a gauge\na{{rank="{rank}"}} {rank}\n' for rank in (0, 1)]
    assert (
        metrics_server.merge_expositions(texts)
        == '# HELP a Help.\n# TYPE a gauge\na{rank="0"} 0\na{rank="1"} 1\n'
    )


def test_merged_histogram_keeps_its_samples() -> None:
    text = '# HELP h Help.\n# TYPE h histogram\nh_bucket{le="+Inf"} 1\nh_sum 2\nh_count 1\n'
    assert metrics_server.merge_expositions(
        [text, "# HELP b B.\n# TYPE b gauge\nb 1\n"]
    ).startswith(text)


def test_malformed_metric_lines_are_omitted() -> None:
    for line in ("{a} 1", " ", "\x85", "\x1b[2J 1", "# HELP ", "=", "\x00", "{" * 9_000):
        assert metrics_server.merge_expositions([f"{line}\nb 1\n"]).endswith("b 1\n")
