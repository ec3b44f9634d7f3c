from typing import Any

import pytest
from flax import nnx
from pydantic import TypeAdapter, ValidationError

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.classifiers import ConvNeXt, ResNet, ViT
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


FROZEN_RATE = {"match": ".*", "lr": 0.1, "freeze": True}


@pytest.mark.parametrize(
    ("optimizer", "key", "message"),
    [
        ({"name": "sgd", "b1": 0.9}, "b1", "does not apply to sgd, which takes momentum, nesterov"),
        ({"name": "sgd", "b2": 0.9}, "b2", "does not apply to sgd"),
        ({"name": "sgd", "eps": 1e-8}, "eps", "does not apply to sgd"),
        ({"name": "sgd", "nesterov": True}, "nesterov", "needs a momentum above 0"),
        ({"name": "lion", "eps": 1e-8}, "eps", "does not apply to lion, which takes b1, b2"),
        (
            {"name": "adafactor", "b2": 0.9},
            "b2",
            "does not apply to adafactor, which takes b1, eps",
        ),
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
        (
            {"schedule": "exponential"},
            "schedule.final",
            "must be above 0 with exponential, which never reaches 0",
        ),
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
        (
            {"chain": [{"name": "lion"}], "b1": 0.9},
            "b1",
            "does not apply to a chain; give it in the entry",
        ),
        (
            {"chain": [{"name": "lion"}], "name": "sgd"},
            "chain",
            "is given together with name = sgd",
        ),
        (
            {"chain": [{"name": "lion"}, {"name": "sgd"}]},
            "chain",
            "lion and sgd would each multiply by the rate",
        ),
        ({"name": "chain"}, "chain", "is empty, but name = chain needs its entries"),
        (
            {"name": "schedule-free", "schedule": "linear"},
            "schedule",
            "linear decays, and schedule-free needs no",
        ),
        (
            {"name": "schedule-free", "ema": 0.9},
            "ema",
            "does not apply to schedule-free, which averages by itself",
        ),
        (
            {"name": "schedule-free", "b1": 0.0},
            "b1",
            "must be above 0: schedule-free divides by it",
        ),
        (
            {"groups": [{"match": "*.bias"}]},
            "groups.0.match",
            "is not a pattern (nothing to repeat",
        ),
        ({"groups": [FROZEN_RATE]}, "groups.0.freeze", "is given together with lr or weight_decay"),
    ],
)
def test_keys_that_do_not_apply_to_an_optimizer_are_rejected(
    optimizer: dict[str, Any], key: str, message: str
) -> None:
    errors = faults(optimizer=optimizer)
    assert list(errors) == [f"optimizer.{key}"]
    assert message in errors[f"optimizer.{key}"]


def test_mode_is_required_unless_the_metric_is_a_loss() -> None:
    message = "needs mode for metric = eval/accuracy: min or max, whichever values are better"
    metric: dict[str, Any] = {"metric": "eval/accuracy"}
    errors = faults(checkpoint={"best": metric}, stop_early=metric | {"patience": 2})
    assert {key: text.removeprefix("Value error, ") for key, text in errors.items()} == {
        "checkpoint.best": message, "stop_early": message,
    }  # fmt: skip
    assert spec.Best(metric="eval/bits_per_byte").mode == "min"
    assert spec.Best(**metric, mode="min").mode == "min"


FOLDER = {"init_from": "w"}


@pytest.mark.parametrize(
    ("default", "block", "merged"),
    [
        ({"kind": "decoder", "layers": 2, "length": 64}, FOLDER, FOLDER | {"length": 64}),
        ({"kind": "mlp", "width": 8}, FOLDER, FOLDER | {"kind": "vit"}),
        ({"preset": "vit-b16"}, FOLDER, FOLDER | {"kind": "vit"}),
        ({"kind": "gpt2", "width": 8}, FOLDER | {"kind": "gpt2"}, FOLDER | {"kind": "gpt2"}),
        ({"kind": "my:Net", "width": 8}, FOLDER, FOLDER | {"kind": "my:Net", "width": 8}),
        ({"kind": "gpt2", "width": 8}, {"layers": 2}, {"kind": "gpt2", "width": 8, "layers": 2}),
    ],
)
def test_init_from_replaces_the_sizes_of_task_defaults(
    default: dict[str, Any], block: dict[str, Any], merged: dict[str, Any]
) -> None:
    assert spec.merge_task_defaults({"model": block}, {"model": default})["model"] == merged


@pytest.mark.parametrize(("length", "steps"), [({"steps": 100}, 100), ({}, 1000)])
def test_decay_must_fit_after_the_warmup(length: dict[str, int], steps: int) -> None:
    schedule = {"name": "wsd", "warmup": 60, "decay": 990}
    errors = faults(**length, optimizer={"schedule": schedule})
    message = f"schedule.warmup = 60 and decay = 990 do not fit in {steps} steps"
    assert message in errors["optimizer"]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizer_round_trips_as_json(name: str) -> None:
    optimizer = Optimizer(name=name)  # type: ignore[arg-type]
    assert Optimizer.model_validate_json(optimizer.model_dump_json()) == optimizer
    assert optimizer.options() == OPTIMIZERS[name]


@pytest.mark.parametrize(
    ("key", "block", "is_merged"),
    [
        ("optimizer", {"lr": 0.1}, True),
        ("optimizer", {"name": "lion"}, False),
        ("optimizer", {"chain": [{"name": "lion"}]}, False),
        ("data", {"name": "mnist"}, True),
        ("data", {"source": "text", "path": "a"}, False),
    ],
)
def test_task_defaults_apply_to_the_same_optimizer_and_source(
    key: str, block: dict[str, Any], is_merged: bool
) -> None:
    defaults = {
        "optimizer": {"name": "adamw", "eps": 1e-6},
        "data": {"source": "tfds", "name": "digits", "split": "train[:9]"},
    }
    expected = defaults[key] | block if is_merged else block
    assert merge_defaults({key: block}, defaults) == defaults | {key: expected}


@pytest.mark.parametrize(("name", "sizes"), PRESETS.items(), ids=list(PRESETS))
def test_preset_sets_the_kind(name: str, sizes: dict[str, Any]) -> None:
    model = TrainSpec(task="my:Task", model={"preset": name}).model
    assert model.kind == sizes["kind"] and model.init_from is None
    assert TypeAdapter(type(model)).validate_json(model.model_dump_json()) == model


# Millions of parameters, as published.
MILLIONS = (
    "llama-1b 1236, llama-3b 3213, llama-8b 8030, llama-70b 70554, mistral-7b 7248, "
    "mistral-nemo-12b 12248, qwen2.5-0.5b 494, qwen2.5-1.5b 1544, qwen2.5-3b 3086, "
    "qwen2.5-7b 7616, qwen2.5-14b 14770, qwen2.5-32b 32764, qwen2.5-72b 72706, qwen3-0.6b 596, "
    "qwen3-1.7b 1721, qwen3-4b 4022, qwen3-8b 8191, qwen3-14b 14768, qwen3-32b 32762, "
    "gemma2-2b 2614, gemma2-9b 9242, gemma2-27b 27227, gemma3-270m 268, gemma3-1b 1000, "
    "olmo2-1b 1485, olmo2-7b 7299, olmo2-13b 13716, olmo2-32b 32234, gpt2-124m 124, "
    "gpt2-355m 355, gpt2-774m 774, gpt2-1.5b 1558, vit-s16 22, vit-b16 87, vit-l16 304"
)


@pytest.mark.parametrize(("name", "millions"), [row.split() for row in MILLIONS.split(", ")])
def test_preset_has_the_published_number_of_parameters(name: str, millions: str) -> None:
    train = TrainSpec(task="my:Task", model={"preset": name})
    built = {"decoder": Decoder, "gpt2": GPT2, "vit": ViT}[train.model.kind]
    params = ModelArrays(nnx.eval_shape(lambda: built(train.model, nnx.Rngs(0)))).params
    assert round(sum(param.size for param in params.values()) / 1e6) == int(millions)


# Parameters for 1,000 classes in torchvision, whose ResNets and ConvNeXts are those of the papers.
PARAMETERS = {
    "resnet-18": 11_689_512,
    "resnet-34": 21_797_672,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
    "resnet-152": 60_192_808,
    "convnext-tiny": 28_589_128,
    "convnext-small": 50_223_688,
    "convnext-base": 88_591_464,
    "convnext-large": 197_767_336,
}
PRESETS_BY_KIND = [({"preset": name}, count) for name, count in PARAMETERS.items()]
DEFAULTS = {"resnet": "resnet-18", "convnext": "convnext-tiny"}


@pytest.mark.parametrize(
    ("keys", "count"),
    [*PRESETS_BY_KIND, *(({"kind": kind}, PARAMETERS[name]) for kind, name in DEFAULTS.items())],
    ids=str,
)
def test_convolutional_model_has_the_published_parameters(keys: dict[str, str], count: int) -> None:
    model = TrainSpec(task="my:Task", model={**keys, "classes": 1000}).model
    built = {"resnet": ResNet, "convnext": ConvNeXt}[model.kind]
    params = ModelArrays(nnx.eval_shape(lambda: built(model, nnx.Rngs(0)))).params
    assert sum(param.size for param in params.values()) == count


def test_only_a_bottleneck_needs_widths_that_4_divides() -> None:
    model = {"kind": "resnet", "depths": [1, 1], "widths": [6, 10]}
    assert TrainSpec(task="my:Task", model=model).model.widths == [6, 10]
    with pytest.raises(ValidationError, match=r"widths = \[6, 10\] are not multiples of 4"):
        TrainSpec(task="my:Task", model=model | {"block": "bottleneck"})


def test_keys_override_a_preset() -> None:
    model = TrainSpec(task=LM, model={"preset": "gpt2-124m", "length": 128}).model
    assert isinstance(model, spec.GPT2)
    assert (model.length, model.position_rows, model.width) == (128, 1024, 768)


def test_seed_has_at_most_64_bits_and_steps_32() -> None:
    assert faults(seed=2**64)["seed"] == f"Input should be less than or equal to {2**64 - 1}"
    assert TrainSpec(task=LM, seed=2**64 - 1).seed == 2**64 - 1
    assert faults(steps=2**31)["steps"] == f"Input should be less than or equal to {2**31 - 1}"


@pytest.mark.parametrize("path", ["http://host/x", "file:///x", "gs://", "", " "])
def test_place_is_a_folder_or_a_bucket(path: str) -> None:
    gpt2 = {"kind": "gpt2", "init_from": path}
    for block in ({"checkpoint": {"path": path}}, {"compile_cache": path}, {"model": gpt2}):
        with pytest.raises(ValidationError, match="is not a folder or a gs:// or s3:// URL"):
            TrainSpec(task="a:B", **block)
    for place in ("runs/x", "/x", "gs://team-b/x", "s3://team-b"):
        train = TrainSpec(task="a:B", checkpoint={"path": place}, model={"init_from": place})
        assert train.checkpoint.path == train.model.init_from == place


@pytest.mark.parametrize(
    "bucket", ["a" * 64, "a..b", f"{'a' * 64}.b", "a-", "_a", "a b", "arn:aws:s3", "a"]
)
def test_bucket_names_are_checked(bucket: str) -> None:
    for scheme in ("gs", "s3"):
        with pytest.raises(ValidationError, match="is not a URL of a bucket"):
            TrainSpec(task="a:B", checkpoint={"path": f"{scheme}://{bucket}/x"})
    long_name = f"gs://{'a' * 63}.{'b' * 63}"
    for place in ("gs://a_b-c.example.com/X y/_", long_name, "s3://0a-b.c", "gs/runs", "s3:"):
        assert TrainSpec(task="a:B", checkpoint={"path": place}).checkpoint.path == place


def mixture(**parts: Any) -> dict[str, Any]:
    blocks = {name: {"weight": 1, "source": source} for name, source in parts.items()}
    for block in blocks.values():
        block |= {"dataset": "a:B"} if block["source"] == "torch" else {"path": "x"}
    return {"source": "mixture", "parts": blocks}


LABELED = {"source": "table", "weight": 1, "path": "x", "label": "y"}
IMAGES = {"source": "images", "path": "x"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            mixture(a="images", b="table"),
            "holds a with source = images and b with source = table, whose examples have no keys "
            "in common; mix text",
        ),
        (
            mixture(a="torch"),
            "holds a with source = torch; a part is text, images, table, array_record or tfds",
        ),
        (
            {"source": "mixture", "parts": {"a": LABELED}},
            "holds a with a label of its own; all parts have one, train.data.label",
        ),
        (
            mixture(a="table") | {"size": 8},
            "size applies to parts of images, array_record, tfds, and these are of table; "
            "leave it out",
        ),
        (IMAGES | {"augment": "imagenet-vitt"}, "is not one of imagenet-resnet, imagenet-vit"),
        (IMAGES | {"classes": []}, "names no class"),
    ],
)
def test_invalid_data_blocks_are_rejected(data: dict[str, Any], message: str) -> None:
    assert message in "".join(faults(data=data).values())


@pytest.mark.parametrize(
    ("model", "message"),
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
def test_conflicting_decoder_options_are_rejected(model: dict[str, Any], message: str) -> None:
    assert any(message in fault for fault in faults(model={"kind": "decoder", **model}).values())


def test_sizes_of_a_folder_are_not_checked_before_it_is_read() -> None:
    model = TrainSpec(task=LM, model={"init_from": "w", "heads": 12}, loss={"chunks": 100}).model
    assert isinstance(model, spec.Decoder) and model.is_partial
    assert "kind" not in model.model_fields_set
    assert TrainSpec(task=LM, model={"init_from": "w", "preset": "gpt2-124m"}).model.kind == "gpt2"
