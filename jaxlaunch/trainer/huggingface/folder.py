"""The metadata files of a Hugging Face folder: model, preprocessor and special tokens.

- config.json defines every size of the model, and the keys of the job must agree with it.
- preprocessor_config.json defines how images are normalized. Its means and deviations apply to
  pixels times a factor, 1/255 by default, whereas ours apply to bytes.
- generation_config.json and the tokenizer define the tokens that begin, end and pad a text.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
from etils import epath

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import SpecError, StorageError, pydantic_message
from jaxlaunch.trainer.huggingface import config_json
from jaxlaunch.trainer.huggingface.families import FAMILIES, key_set
from jaxlaunch.trainer.spec import (
    Decoder,
    ImageModel,
    PublishedModel,
    TrainSpec,
    TransformersModel,
)
from jaxlaunch.trainer.spec.model import SEQUENCE_CLASSIFICATION

PREPROCESSOR_FILE = "preprocessor_config.json"
# Pillow's number for bilinear resampling.
BILINEAR = 2
RESCALE_FACTOR = 1 / 255
GENERATION_FILE = "generation_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# The kind of models that run the PyTorch code of transformers.
TRANSFORMERS = "transformers"
# Tokens of a text that a published classifier reads.
MAX_TEXT_TOKENS = 512
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def resolve_spec(train: TrainSpec, *, must_exist: bool = True) -> TrainSpec:
    """Return the spec with the model of its `init_from` folder, if it names one.

    If `must_exist` is False, the folder may be missing, provided that the job sets every size.
    Raises SpecError if config.json cannot be read, is not supported, or contradicts the job.
    """
    model = train.model
    if not isinstance(model, PublishedModel) or model.init_from is None:
        return train
    folder = model.init_from
    if not must_exist:
        sizes = key_set("layers width heads vocab length image patch classes depths widths")
        # Other models have a default of 4 × width for hidden.
        sizes |= {"hidden"} if isinstance(model, Decoder) else set()
        has_every_size = sizes & type(model).model_fields.keys() <= model.model_fields_set
        if has_every_size and (remote.is_remote(folder) or not _config_path(folder).exists()):
            return train
    job_keys = {key: getattr(model, key) for key in model.model_fields_set}
    folder_model = read_model(folder, model.kind if "kind" in model.model_fields_set else None)
    check_model(model, folder_model, folder, set(job_keys))
    kept_keys = (
        config_json.UNCOMPARED_KEYS & job_keys.keys() & type(folder_model).model_fields.keys()
    )
    model_keys = folder_model.model_dump() | {key: job_keys[key] for key in kept_keys}
    keys = {key: getattr(train, key) for key in train.model_fields_set}
    try:
        keys["model"] = type(folder_model).model_validate(model_keys)
    except pydantic.ValidationError as error:
        raise SpecError(f"train.model: {pydantic_message(error.errors()[0])}") from None
    try:
        resolved = TrainSpec.model_validate(keys)
        _check_classes(resolved.model)
        return resolved
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(("train", *map(str, fault["loc"])))
        raise SpecError(f"{key}: {pydantic_message(fault)}") from None


def _check_classes(model: Any) -> None:
    """Raise SpecError for a classifier whose classes neither the folder nor the job counts."""
    if (
        isinstance(model, TransformersModel)
        and model.head == SEQUENCE_CLASSIFICATION
        and model.classes is None
    ):
        raise SpecError(
            f"{model.init_from} has no classifier: set train.model.classes, the number of labels; "
            "its head is then drawn from train.seed"
        )


def _config_path(folder: str) -> epath.Path:
    return epath.Path(folder) / "config.json"


def _convert_errors(folder: str) -> contextlib.AbstractContextManager[None]:
    """Convert errors of an object store to SpecError or StorageError."""
    if remote.is_remote(folder):
        return remote.convert_errors(f"reading train.model.init_from = {folder}", SpecError)
    return contextlib.nullcontext()


def read_model(folder: str, kind: str | None = None) -> PublishedModel:
    """Read the model of a folder, with the pixel statistics of its preprocessor.

    An architecture without a built-in model, or any with `kind` transformers, is a
    TransformersModel. Raises SpecError, and StorageError if an object store fails.
    """
    path, name = _config_path(folder), "config.json"
    try:
        if remote.is_remote(folder):
            remote.check_url("train.model.init_from", folder)
        with _convert_errors(folder):
            config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise SpecError(f"{path} is not a block of keys, as transformers writes it")
        is_built_in = config.get("model_type") in FAMILIES
        try:
            if kind == TRANSFORMERS or (not is_built_in and _has_transformers()):
                return config_json.parse_transformers_model(config, folder)
            model = config_json.parse_model(config)
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from None
        name = PREPROCESSOR_FILE
        with _convert_errors(folder):
            preprocessor = epath.Path(folder) / name
            if not isinstance(model, ImageModel) or not preprocessor.exists():
                return model
            text = preprocessor.read_text()
    except (OSError, ValueError) as error:
        source = f"train.model.init_from = {folder}: {name}"
        raise SpecError(f"{source} cannot be read: {error}") from None
    return with_pixel_statistics(model, parse_pixel_statistics(text, str(preprocessor)))


def _has_transformers() -> bool:
    """Return whether the packages of the extra [transformers] are installed."""
    return all(importlib.util.find_spec(name) for name in ("torch", "torchax", "transformers"))


def describe_text_classifier(folder: str) -> dict[str, Any] | None:
    """Return how rows of texts become inputs of a folder's classifier, None for other models."""
    config = _read_keys(folder, "config.json")
    if not config_json.is_text_classifier(config):
        return None
    model = config_json.parse_transformers_model(config, folder)
    names = config.get("id2label") or {}
    classes = [str(names.get(str(number), number)) for number in range(model.classes or 0)]
    problem = config.get("problem_type")
    target = "regression" if problem == "regression" or model.classes == 1 else "class"
    labels: dict[str, list[str]] = {}
    if problem == "multi_label_classification":
        target, labels = "multi_label", {"label": classes}
    return {
        "kind": "text",
        "target": target,
        **labels,
        "shape": [min(model.length, MAX_TEXT_TOKENS)],
        "field": "text",
        "classes": classes,
    }


def has_tokenizer(folder: str) -> bool:
    """Return whether a folder has tokenizer.json. Raises SpecError, StorageError."""
    with _convert_errors(folder):
        return bool((epath.Path(folder) / "tokenizer.json").exists())


def class_names(folder: str) -> list[str]:
    """Return the names of a folder's classes in the order of its head, empty if it names none.

    Raises OSError, SpecError and StorageError: hosts that could not read the folder would number
    labels differently.
    """
    try:
        names = _load_keys(folder, "config.json").get("id2label")
    except ValueError as error:
        raise SpecError(f"{_config_path(folder)} cannot be read: {error}") from None
    if not isinstance(names, dict) or not all(map(str.isdecimal, names)):
        return []
    return [str(names[number]) for number in sorted(names, key=int)]


def check_model(
    job_model: PublishedModel, folder_model: PublishedModel, path: str, keys: set[str] | None = None
) -> None:
    """Raise SpecError if the model of the job differs from that of the folder in one of `keys`.

    By default all keys are compared.
    """
    if differences := config_json.find_differences(job_model, folder_model, keys):
        text = "; ".join(differences)
        raise SpecError(f"{_config_path(path)} describes another model than train.model: {text}")


# --- preprocessor_config.json ---------------------------------------------------------------------


def parse_pixel_statistics(text: str, path: str) -> dict[str, list[float]]:
    """Return `pixel_mean` and `pixel_std`, or an empty dict if the file has none.

    Raises SpecError.
    """
    try:
        preprocessor = json.loads(text)
        if not isinstance(preprocessor, dict):
            raise ValueError("it is not a block of keys, as transformers writes it")
        factor = 1.0
        if preprocessor.get("do_rescale", True):
            factor = float(preprocessor.get("rescale_factor", RESCALE_FACTOR))
        if not preprocessor.get("do_normalize", True):
            preprocessor |= {"image_mean": [0.0], "image_std": [1.0]}
        if preprocessor.get("image_mean") is None or preprocessor.get("image_std") is None:
            return {}
        pixels: dict[str, list[float]] = {}
        for ours, theirs in (("pixel_mean", "image_mean"), ("pixel_std", "image_std")):
            values = preprocessor[theirs]
            pixels[ours] = [*map(float, values if isinstance(values, list) else [values])]
            if not pixels[ours] or not all(map(math.isfinite, pixels[ours])):
                raise ValueError(f"{values} is not a list with one number for each channel")
        if factor <= 0 or min(pixels["pixel_std"]) <= 0:
            raise ValueError("its rescale_factor and image_std must be above 0")
    except (ValueError, TypeError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from None
    return {key: [value / factor for value in values] for key, values in pixels.items()}


def with_pixel_statistics(model: ImageModel, pixels: Mapping[str, list[float]]) -> ImageModel:
    """Return the model with these means and deviations. One number applies to all channels."""
    update = {
        key: values * (model.channels if len(values) == 1 else 1) for key, values in pixels.items()
    }
    return model.model_copy(update=update)


def render_preprocessor(
    model: ImageModel, size: Sequence[int] | None, crop_share: float
) -> dict[str, Any] | None:
    """Return preprocessor_config.json for the preprocessing of an evaluation.

    Args:
        model: Model.
        size: Height and width to which images are resized. If they differ, the file only contains
            the normalization.
        crop_share: Share of a side that the center crop has before it is resized.

    Returns:
        The keys, or None if each image is normalized by its own statistics, which transformers does
        not support.
    """
    if model.pixel_mean is None or model.pixel_std is None:
        return None
    keys: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_rescale": True,
        "rescale_factor": RESCALE_FACTOR,
        "do_normalize": True,
        "image_mean": [mean * RESCALE_FACTOR for mean in model.pixel_mean],
        "image_std": [deviation * RESCALE_FACTOR for deviation in model.pixel_std],
        "do_resize": False,
        "do_convert_rgb": model.channels == 3,
    }
    if model.channels == 1:
        # The slow processors of transformers 4 refuse images without an axis of channels.
        keys["image_processor_type"] = "ViTImageProcessorFast"
    # For any size but a square, transformers resizes without a crop, which would distort images.
    if size is None or size[0] != size[1]:
        return keys
    # As in `center_box` of data/augment.py, a quotient such as 223.99999 is rounded up.
    edge = math.floor(size[0] / crop_share + 1e-6)
    return keys | {
        "image_processor_type": keys["image_processor_type"].replace("ViT", "Bit"),
        "do_resize": True,
        "resample": BILINEAR,
        "size": {"shortest_edge": edge},
        "do_center_crop": True,
        "crop_size": {"height": size[0], "width": size[1]},
    }


# --- special tokens -------------------------------------------------------------------------------


def read_generation_config(folder: str | None) -> dict[str, Any]:
    """Read generation_config.json of a folder, with the special tokens of config.json as defaults.

    Returns an empty dict if there is no folder, or if the files are missing or unreadable.
    """
    if folder is None:
        return {}
    config = _read_keys(folder, "config.json")
    tokens = {key: config[key] for key in TOKEN_KEYS if config.get(key) is not None}
    return {**tokens, **_read_keys(folder, GENERATION_FILE)}


def render_generation_config(
    folder: str | None, tokenizer_files: Mapping[str, bytes], turn_ends: Sequence[int] = ()
) -> dict[str, Any]:
    """Return generation_config.json for a model that was fine-tuned from `folder`, if any.

    The tokens that end a text are those of the folder, those of the tokenizer, and `turn_ends`.
    """
    tokens, config = special_token_ids(tokenizer_files), read_generation_config(folder)
    ends: list[int] = []
    for value in (config.get("eos_token_id"), tokens.get("eos_token_id"), [*turn_ends]):
        ends += value if isinstance(value, list) else [] if value is None else [value]
    ends = list(dict.fromkeys(ends))
    end_keys = {"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}
    return {**tokens, **config, **end_keys}


def _read_keys(folder: str, name: str) -> dict[str, Any]:
    try:
        return _load_keys(folder, name)
    except (OSError, ValueError, SpecError, StorageError):
        # These files are optional: the model is complete without them.
        return {}


def _load_keys(folder: str, name: str) -> dict[str, Any]:
    path = epath.Path(folder) / name
    with _convert_errors(folder):
        keys = json.loads(path.read_text()) if path.exists() else {}
    return keys if isinstance(keys, dict) else {}


def end_tokens(folder: str) -> tuple[int, ...]:
    """Return the tokens that end a text according to a folder."""
    ends = read_generation_config(folder).get("eos_token_id")
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (int(ends),)


def special_token_ids(files: Mapping[str, bytes]) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens, as far as its tokenizer.json contains them.

    The files are parsed as JSON, so that an export does not need the package `tokenizers`.
    Unreadable files are ignored.
    """
    names: dict[str, Any] = {}
    for file in ("special_tokens_map.json", TOKENIZER_CONFIG_FILE):
        # tokenizer_config.json is the newer format and takes precedence.
        keys = _parse_keys(files.get(file, b""))
        names |= {key: token for key, token in keys.items() if token is not None}
    tokenizer = _parse_keys(files.get("tokenizer.json", b""))
    vocab = tokenizer.get("model", {}).get("vocab")
    ids: dict[str, int] = dict(vocab) if isinstance(vocab, dict) else {}
    ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    token_ids = {}
    for key in TOKEN_KEYS:
        token = names.get(key.removesuffix("_id"))
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            token_ids[key] = ids[token]
    return token_ids


def complete_tokenizer_config(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a tokenizer's files with a class and the special tokens in tokenizer_config.json.

    Without a class, transformers uses that of the model's type, which may add tokens and split text
    by its own rules instead of those in tokenizer.json. transformers 4 does not know the class that
    transformers 5 writes, so it is replaced by one that both know.
    """
    if "tokenizer.json" not in files:
        return dict(files)
    config = _parse_keys(files.get(TOKENIZER_CONFIG_FILE, b""))
    completed = {**_parse_keys(files.get("special_tokens_map.json", b"")), **config}
    if completed.get("tokenizer_class") in (None, "TokenizersBackend"):
        completed["tokenizer_class"] = "PreTrainedTokenizerFast"
    if completed == config:
        return dict(files)
    return {**files, TOKENIZER_CONFIG_FILE: json.dumps(completed, indent=2).encode() + b"\n"}


def _parse_keys(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(keys := json.loads(text), dict):
            return keys
    return {}
