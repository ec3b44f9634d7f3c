import json
import math

from jaxlaunch.trainer.metrics.means import BestSteps, Patience, watched_value
from jaxlaunch.trainer.spec import Best, StopEarly


def best_after(best: BestSteps, *values: float) -> list[int]:
    for at, value in enumerate(values):
        best.add_value(10 * (at + 1), value)
    return best.steps


def test_best_steps_are_sorted_and_older_wins_ties() -> None:
    assert best_after(BestSteps(Best(keep=2)), 3.0, 1.0, 2.0, 1.0, math.nan, -math.inf) == [20, 40]
    assert best_after(BestSteps(Best(mode="max")), 3.0, 3.0, 1.0) == [10]


def test_resumed_patience_decides_like_uninterrupted() -> None:
    rule = StopEarly(patience=2, min_delta=0.5)
    values = [3.0, 2.6, 2.4, math.nan, 2.3]
    whole, first, second = Patience(rule), Patience(rule), Patience(rule)
    for at, value in enumerate(values):
        whole.add_value(at, value)
        if at == 3:
            second.resume(json.loads(json.dumps(first.to_meta())))
        (first if at < 3 else second).add_value(at, value)
        assert whole.is_over == (at == 4)
    assert second.is_over and second.to_meta() == whole.to_meta()
    assert second.describe_end() == (
        "eval/loss was not better than 2.4 of step 2 by more than 0.5 in 2 evaluations "
        "(train.stop_early)"
    )


def test_another_metric_starts_fresh() -> None:
    best, other = BestSteps(Best()), BestSteps(Best(metric="eval/accuracy", mode="max"))
    best.add_value(5, 1.0)
    other.resume(best.to_meta(), [5])
    assert other.steps == []
    repeated = BestSteps(Best())
    repeated.resume(best.to_meta(), [5])
    assert repeated.steps == [5]
    repeated.resume(None, [5])
    assert watched_value(Best(metric="eval/accuracy", mode="max"), {"accuracy": 0.5}) == 0.5


def test_deleted_best_step_makes_room() -> None:
    best, repeated = BestSteps(Best()), BestSteps(Best())
    best.add_value(5, 1.0)
    repeated.resume(best.to_meta(), [10])
    repeated.add_value(15, 2.0)
    assert repeated.steps == [15]
