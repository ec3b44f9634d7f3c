import pytest

from benchmarks import compiled
from jaxlaunch.launcher.job import load

pytestmark = pytest.mark.extended


def test_every_training_is_a_valid_job_on_each_of_its_chips() -> None:
    for job, chips in compiled.CASES.items():
        for name in chips:
            on = compiled.ON[name]
            spec = load.load_job(
                compiled.JOBS / f"{job}.yaml",
                [*on.keys, *compiled._batch_argument(job, on.devices)],
            )
            assert spec.train is not None and spec.train.mesh.resolve(on.devices)


def test_row_shows_the_result_or_the_reason() -> None:
    result = {
        "peak": 3 * 2**29,
        "seconds": 41.7,
        "recomputed": 0.21,
        "collectives": [
            {"axes": ["fsdp"], "wire": 2.0**30, "exposed": 2.0**28},
            {"axes": ["fsdp"], "wire": 2.0**30, "exposed": 0.0},
            {"axes": ["dp", "ep"], "wire": 2.0**29, "exposed": 0.0},
        ],
        "modelled": {"seconds": [0.010, 0.0125]},
    }
    row = compiled.format_row("vit-b16", "v5e-8", result)
    assert (
        row
        == "| vit-b16 | v5e-8 | 1.50 | 21% | fsdp 2.00; dp × ep 0.50 | 0.25 | 10.0 to 12.5 | 42 |"
    )
    assert "| not compiled: too large |" in compiled.format_row(
        "vit-b16", "v5e-8", {"says": "too large"}
    )
