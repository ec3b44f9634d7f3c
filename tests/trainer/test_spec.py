from typing import Any

import pytest
from flax import nnx
from pydantic import TypeAdapter, ValidationError

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.classifiers import ViT
from jaxlaunch.trainer.models.decoder import Decoder
from jaxlaunch.trainer.models.gpt2 import GPT2
from jaxlaunch.trainer.spec import LM, OPTIMIZERS, Optimizer, TrainSpec, merge_defaults
from jaxlaunch.trainer.spec.presets import PRESETS
from jaxlaunch.trainer.step.state import ModelArrays


def faults(**train: Any) -> dict[str, str]:
    """Dotted key -> what is wrong with it."""
    with pytest.raises(ValidationError) as caught:
        TrainSpec.model_validate({"task": "lm", **train})
    return {".".join(map(str, fault["loc"])): fault["msg"] for fault in caught.value.errors()}


@pytest.mark.parametrize(
    ("optimizer", "key", "message"),
    [
        ({"name": "sgd", "b1": 0.9}, "b1", "does not apply to sgd, which takes momentum, nesterov"),
        ({"name": "sgd", "b2": 0.9}, "b2", "does not apply to sgd"),
        ({"name": "sgd", "eps": 1e-8}, "eps", "does not apply to sgd"),
        ({"name": "sgd", "nesterov": True}, "nesterov", "needs a momentum above 0"),
        ({"name": "lion", "eps": 1e-8}, "eps", "does not apply to lion, which takes b1, b2"),
        ({"name": "adafactor", "b2": 0.9}, "b2", "does not apply to adafactor, which takes b1"),
        ({"momentum": 0.9}, "momentum", "does not apply to adamw, which takes b1, b2, eps"),
        (
            {"schedule": {"name": "constant", "final": 0.1}},
            "schedule.final",
            "does not apply to constant",
        ),
        ({"schedule": {"decay": 10}}, "schedule.decay", "does not apply to cosine"),
        (
            {"schedule": {"name": "linear", "shape": "cosine"}},
            "schedule.shape",
            "does not apply to linear",
        ),
        ({"schedule": "exponential"}, "schedule.final", "must be above 0 with exponential, which"),
        ({"schedule": {"start": 0.1}}, "schedule.start", "does not apply without a warmup"),
        (
            {"schedule": {"name": "my:rate", "warmup": 9}},
            "schedule.warmup",
            "does not apply to my:rate; give it in args",
        ),
        ({"schedule": {"args": {"a": 1}}}, "schedule.args", "does not apply to cosine"),
        ({"name": "adamx"}, "name", 'is not a known optimizer (did you mean "adam"?)'),
        ({"name": "my:own", "b1": 0.9}, "b1", "does not apply to my:own; give it in args"),
        ({"args": {"b1": 0.9}}, "args", "does not apply to adamw, which takes b1, b2, eps"),
        ({"chain": [{"name": "lion"}], "b1": 0.9}, "b1", "does not apply to a chain; give it in"),
        ({"chain": [{"name": "lion"}], "name": "sgd"}, "chain", "is given together with name"),
        ({"chain": [{"name": "lion"}, {"name": "sgd"}]}, "chain", "lion and sgd would each"),
        ({"name": "chain"}, "chain", "is empty, but name = chain needs its entries"),
        (
            {"name": "schedule-free", "schedule": "linear"},
            "schedule",
            "linear decays, and schedule-free needs no",
        ),
        ({"name": "schedule-free", "ema": 0.9}, "ema", "does not apply to schedule-free, which"),
        ({"name": "schedule-free", "b1": 0.0}, "b1", "must be above 0: schedule-free divides by"),
        (
            {"groups": [{"match": "*.bias"}]},
            "groups.0.match",
            "is not a pattern (nothing to repeat",
        ),
        (
            {"groups": [{"match": ".*", "lr": 0.1, "freeze": True}]},
            "groups.0.freeze",
            "is given together with lr or weight_decay",
        ),
    ],
)
def test_a_key_that_the_named_optimizer_or_schedule_does_not_take_is_a_fault(
    optimizer: dict[str, Any], key: str, message: str
) -> None:
    found = faults(optimizer=optimizer)
    assert list(found) == [f"optimizer.{key}"]
    assert message in found[f"optimizer.{key}"]


def test_which_values_of_a_metric_are_better_must_be_said_but_for_a_loss() -> None:
    said = "needs mode for metric = eval/accuracy: min or max, whichever values are better"
    metric: dict[str, Any] = {"metric": "eval/accuracy"}
    found = faults(checkpoint={"best": metric}, stop_early=metric | {"patience": 2})
    assert {key: text.removeprefix("Value error, ") for key, text in found.items()} == {
        "checkpoint.best": said, "stop_early": said,
    }  # fmt: skip
    assert spec.Best(metric="eval/bits_per_byte").mode == "min"
    assert spec.Best(**metric, mode="min").mode == "min"


@pytest.mark.parametrize(
    ("default", "given", "merged"),
    [
        (
            {"kind": "decoder", "layers": 2, "length": 64},
            {"init_from": "w"},
            {"init_from": "w", "length": 64},
        ),
        ({"kind": "mlp", "width": 8}, {"init_from": "w"}, {"kind": "vit", "init_from": "w"}),
        ({"preset": "vit-b16"}, {"init_from": "w"}, {"kind": "vit", "init_from": "w"}),
        (
            {"kind": "gpt2", "width": 8},
            {"kind": "gpt2", "init_from": "w"},
            {"kind": "gpt2", "init_from": "w"},
        ),
        (
            {"kind": "my:Net", "width": 8},
            {"init_from": "w"},
            {"kind": "my:Net", "width": 8, "init_from": "w"},
        ),
        ({"kind": "gpt2", "width": 8}, {"layers": 2}, {"kind": "gpt2", "width": 8, "layers": 2}),
    ],
)
def test_a_folder_to_start_from_says_the_sizes_in_place_of_a_task_s_defaults(
    default: dict[str, Any], given: dict[str, Any], merged: dict[str, Any]
) -> None:
    assert spec.merge_task_defaults({"model": given}, {"model": default})["model"] == merged


@pytest.mark.parametrize(("length", "steps"), [({"steps": 100}, 100), ({}, 1000)])
def test_a_decay_that_does_not_fit_beside_the_warmup_is_a_fault(
    length: dict[str, int], steps: int
) -> None:
    schedule = {"name": "wsd", "warmup": 60, "decay": 990}
    found = faults(**length, optimizer={"schedule": schedule})
    assert f"schedule.warmup = 60 and decay = 990 do not fit in {steps} steps" in found["optimizer"]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_optimizer_survives_being_written_out_in_full(name: str) -> None:
    optimizer = Optimizer(name=name)  # type: ignore[arg-type]
    assert Optimizer.model_validate_json(optimizer.model_dump_json()) == optimizer
    assert optimizer.options() == OPTIMIZERS[name]


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        ({"optimizer": {"lr": 0.1}}, {"optimizer": {"name": "adamw", "eps": 1e-6, "lr": 0.1}}),
        ({"optimizer": {"name": "lion"}}, {"optimizer": {"name": "lion"}}),
        (
            {"optimizer": {"chain": [{"name": "lion"}]}},
            {"optimizer": {"chain": [{"name": "lion"}]}},
        ),
        (
            {"data": {"name": "mnist"}},
            {"data": {"source": "tfds", "name": "mnist", "split": "train[:9]"}},
        ),
        ({"data": {"source": "text", "path": "a"}}, {"data": {"source": "text", "path": "a"}}),
    ],
)
def test_a_task_s_defaults_hold_for_the_same_optimizer_and_source_only(
    given: dict[str, Any], merged: dict[str, Any]
) -> None:
    defaults = {
        "optimizer": {"name": "adamw", "eps": 1e-6},
        "data": {"source": "tfds", "name": "digits", "split": "train[:9]"},
    }
    assert merge_defaults(given, defaults) == defaults | merged


@pytest.mark.parametrize(("name", "sizes"), PRESETS.items(), ids=list(PRESETS))
def test_a_preset_names_sizes_and_with_them_the_kind(name: str, sizes: dict[str, Any]) -> None:
    model = TrainSpec(task="my:Task", model={"preset": name}).model
    assert model.kind == sizes["kind"] and model.init_from is None
    assert TypeAdapter(type(model)).validate_json(model.model_dump_json()) == model


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *[
            ("llama-1b", 1236),
            ("llama-8b", 8030),
            ("vit-s16", 22),
            ("vit-b16", 87),
            ("vit-l16", 304),
        ],
        *[
            ("llama-3b", 3213),
            ("llama-70b", 70554),
            ("mistral-7b", 7248),
            ("mistral-nemo-12b", 12248),
        ],
        *[
            ("qwen2.5-0.5b", 494),
            ("qwen2.5-1.5b", 1544),
            ("qwen2.5-3b", 3086),
            ("qwen2.5-7b", 7616),
        ],
        *[("qwen2.5-14b", 14770), ("qwen2.5-32b", 32764), ("qwen2.5-72b", 72706)],
        *[
            ("qwen3-0.6b", 596),
            ("qwen3-1.7b", 1721),
            ("qwen3-4b", 4022),
            ("qwen3-8b", 8191),
            ("qwen3-14b", 14768),
        ],
        *[("qwen3-32b", 32762), ("gemma2-2b", 2614), ("gemma2-9b", 9242), ("gemma2-27b", 27227)],
        *[
            ("gemma3-270m", 268),
            ("gemma3-1b", 1000),
            ("olmo2-1b", 1485),
            ("olmo2-7b", 7299),
            ("olmo2-13b", 13716),
        ],
        *[("olmo2-32b", 32234)],
        *[("gpt2-124m", 124), ("gpt2-355m", 355), ("gpt2-774m", 774), ("gpt2-1.5b", 1558)],
    ],
)
def test_a_preset_has_the_published_number_of_parameters(name: str, millions: int) -> None:
    train = TrainSpec(task="my:Task", model={"preset": name})
    built = {"decoder": Decoder, "gpt2": GPT2, "vit": ViT}[train.model.kind]
    params = ModelArrays(nnx.eval_shape(lambda: built(train.model, nnx.Rngs(0)))).params
    assert round(sum(param.size for param in params.values()) / 1e6) == millions


def test_a_key_beside_a_preset_comes_first() -> None:
    model = TrainSpec(task=LM, model={"preset": "gpt2-124m", "length": 128}).model
    assert isinstance(model, spec.GPT2) and (model.length, model.position_rows, model.width) == (
        128,
        1024,
        768,
    )


def test_a_seed_of_more_than_64_bits_is_a_fault() -> None:
    assert faults(seed=2**64)["seed"] == f"Input should be less than or equal to {2**64 - 1}"
    assert TrainSpec(task=LM, seed=2**64 - 1).seed == 2**64 - 1


@pytest.mark.parametrize("path", ["http://host/x", "file:///x", "gs://", "", " "])
def test_a_place_to_keep_things_is_a_folder_or_a_bucket(path: str) -> None:
    for block in ({"checkpoint": {"path": path}}, {"compile_cache": path}):
        with pytest.raises(ValidationError, match="is not a folder or a gs:// or s3:// URL"):
            TrainSpec(task="a:B", **block)
    for kept in ("runs/x", "/x", "gs://team-b/x", "s3://team-b"):
        assert TrainSpec(task="a:B", checkpoint={"path": kept}).checkpoint.path == kept


@pytest.mark.parametrize(
    "bucket", ["a" * 64, "a..b", f"{'a' * 64}.b", "a-", "_a", "a b", "arn:aws:s3", "a"]
)
def test_a_bucket_has_a_name_that_its_store_allows(bucket: str) -> None:
    for scheme in ("gs", "s3"):
        with pytest.raises(ValidationError, match="is not a URL of a bucket"):
            TrainSpec(task="a:B", checkpoint={"path": f"{scheme}://{bucket}/x"})
    for kept in (
        "gs://a_b-c.example.com/X y/_",
        f"gs://{'a' * 63}.{'b' * 63}",
        "s3://0a-b.c",
        "gs/runs",
        "s3:",
    ):
        assert TrainSpec(task="a:B", checkpoint={"path": kept}).checkpoint.path == kept


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {
                "source": "mixture",
                "parts": {
                    "a": {"weight": 1, "source": "images", "path": "x"},
                    "b": {"weight": 1, "source": "table", "path": "x"},
                },
            },
            "holds a with source = images and b with source = table, whose examples have no keys "
            "in common; mix text",
        ),
        (
            {
                "source": "mixture",
                "parts": {"a": {"weight": 1, "source": "torch", "dataset": "a:B"}},
            },
            "holds a with source = torch; a part is text, images, table, array_record or tfds",
        ),
        (
            {
                "source": "mixture",
                "parts": {"a": {"weight": 1, "source": "table", "path": "x", "label": "y"}},
            },
            "holds a with a label of its own; all parts have one, train.data.label",
        ),
        (
            {
                "source": "mixture",
                "size": 8,
                "parts": {"a": {"weight": 1, "source": "table", "path": "x"}},
            },
            "size applies to parts of images, array_record, tfds, and these are of table; "
            "leave it out",
        ),
        (
            {"source": "images", "path": "x", "augment": "imagenet-vitt"},
            "is not one of imagenet-resnet, imagenet-vit",
        ),
        ({"source": "images", "path": "x", "classes": []}, "names no class"),
    ],
)
def test_what_a_data_block_cannot_be_is_said_with_what_it_can(
    data: dict[str, Any], message: str
) -> None:
    assert message in "".join(faults(data=data).values())


@pytest.mark.parametrize("path", ["http://host/x", "gs://", ""])
def test_weights_to_start_from_are_in_a_folder_or_a_bucket(path: str) -> None:
    assert (
        TrainSpec(task="a:B", model={"init_from": "gs://team-b/x"}).model.init_from
        == "gs://team-b/x"
    )
    with pytest.raises(
        ValidationError, match="init_from.*\n.*is not a folder or a gs:// or s3:// URL"
    ):
        TrainSpec(task="a:B", model={"kind": "gpt2", "init_from": path})


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"width": 60, "heads": 8}, "width = 60 does not split into heads = 8"),
        ({"head_size": 7}, "head_size = 7 is odd"),
        ({"pattern": ["window"]}, "pattern applies to layers with a window, and window is null"),
        ({"rope_local_theta": 1e4}, "rope_local_theta applies to layers with a window"),
        ({"rope_scaling": {"factor": 2.0}}, "llama3 needs original_length"),
        (
            {"rope_scaling": {"kind": "linear", "factor": 2.0, "beta_fast": 9.0}},
            "beta_fast does not apply to linear",
        ),
        (
            {
                "rope_scaling": {
                    "kind": "yarn",
                    "factor": 2.0,
                    "original_length": 8,
                    "beta_fast": 0.5,
                }
            },
            "is not above beta_s",
        ),
    ],
)
def test_options_of_a_decoder_that_do_not_go_together_are_faults(
    model: dict[str, Any], says: str
) -> None:
    assert any(says in fault for fault in faults(model={"kind": "decoder", **model}).values())


def test_sizes_that_a_folder_will_say_are_not_judged_before_it_is_read() -> None:
    model = TrainSpec(task=LM, model={"init_from": "w", "heads": 12}, loss={"chunks": 100}).model
    assert (
        isinstance(model, spec.Decoder)
        and model.is_partial
        and "kind" not in model.model_fields_set
    )
    assert TrainSpec(task=LM, model={"init_from": "w", "preset": "gpt2-124m"}).model.kind == "gpt2"


def test_more_steps_than_a_device_counts_are_a_fault() -> None:
    assert faults(steps=2**31)["steps"] == f"Input should be less than or equal to {2**31 - 1}"
