from typing import Any

import pytest
from flax import nnx

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models import custom
from jaxlaunch.trainer.spec import TrainSpec


def build(kind: str, remat: str = "none", **keys: Any) -> nnx.Module:
    spec = TrainSpec(task="my:Task", model={"kind": kind, **keys}, remat=remat)
    return custom.build_model(spec, spec.model, nnx.Rngs(0))


def test_user_model_is_built_from_its_keys() -> None:
    model = build("flax.nnx:Linear", in_features=3, out_features=2)
    assert isinstance(model, nnx.Linear) and model.out_features == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"kind": "flax.nnx:Linear", "width": 2},
            r"flax.nnx:Linear\(width, rngs\) failed: .*'width'",
        ),
        ({"kind": "builtins:dict"}, "builtins:dict makes a dict, not a flax.nnx.Module"),
        (
            {"kind": "flax.nnx:Linear", "remat": "full"},
            "remat = full: flax.nnx:Linear is not a built-in model",
        ),
    ],
)
def test_unbuildable_models_are_rejected(keys: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build(**keys)
