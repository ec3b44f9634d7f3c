"""The folder of `init_from`: its config.json sets every size, and what the job says besides must agree."""

from __future__ import annotations

import json
from typing import Any

import pydantic
from etils import epath

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import SpecError, said
from jaxlaunch.trainer.huggingface import config_json, preprocessor
from jaxlaunch.trainer.spec import Decoder, OfImages, Published, TrainSpec


def resolved(train: TrainSpec, *, is_here: bool = True) -> TrainSpec:
    """The spec with the model of the folder that it starts from; as it is where it starts from none.

    With `is_here` False a folder that is not here is forgiven where the job says every size. Raises SpecError where
    config.json cannot be read, describes what is not supported, or does not agree with the job.
    """
    model = train.model
    if not isinstance(model, Published) or model.init_from is None:
        return train
    folder = model.init_from
    if not is_here and _says_every_size(model) and (remote.is_remote(folder) or not _config_of(folder).exists()):
        return train
    given = {key: getattr(model, key) for key in model.model_fields_set}
    theirs = described_by(folder)
    check(model, theirs, folder, set(given))
    own = {key: value for key, value in given.items() if key in config_json.OWN and key in type(theirs).model_fields}
    keys = {key: getattr(train, key) for key in train.model_fields_set} | {"model": _with(theirs, own)}
    try:
        return TrainSpec.model_validate(keys)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise SpecError(f"train.{place}: {said(first)}") from None


def _says_every_size(model: Published) -> bool:
    sizes = {"layers", "width", "heads", "vocab", "length", "image", "patch", "classes", "depths", "widths"}
    sizes |= {"hidden"} if isinstance(model, Decoder) else set()  # 4 × width in the others
    return sizes & type(model).model_fields.keys() <= model.model_fields_set


def _with(model: Published, own: dict[str, Any]) -> Published:
    try:
        return type(model).model_validate({**model.model_dump(), **own})
    except pydantic.ValidationError as error:
        raise SpecError(f"train.model: {said(error.errors()[0])}") from None


def _config_of(folder: str) -> epath.Path:
    return epath.Path(folder) / "config.json"


def _text(folder: str, name: str = "config.json") -> str:
    path = epath.Path(folder) / name
    if not remote.is_remote(folder):
        return str(path.read_text())
    remote.check("train.model.init_from", folder)
    with remote.storage(f"reading train.model.init_from = {folder}", SpecError):
        return str(path.read_text())


def _with_pixels(model: OfImages, folder: str) -> OfImages:
    """The model with the means and deviations of the folder's preprocessor_config.json, where it has one."""
    path = epath.Path(folder) / preprocessor.FILE
    if remote.is_remote(folder):
        with remote.storage(f"reading train.model.init_from = {folder}", SpecError):
            is_there = path.exists()
    else:
        is_there = path.exists()
    if not is_there:
        return model
    try:
        text = _text(folder, preprocessor.FILE)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"train.model.init_from = {folder}: {preprocessor.FILE} cannot be read: {error}") from None
    return preprocessor.of_model(model, preprocessor.pixels(text, str(path)))


def described_by(folder: str) -> Published:
    """The model that the folder's config.json describes, an image's pixels as its preprocessor_config.json does.

    Raises SpecError; StorageError where a store fails.
    """
    try:
        given = json.loads(_text(folder))
    except (OSError, ValueError) as error:
        raise SpecError(f"train.model.init_from = {folder}: config.json cannot be read: {error}") from None
    if not isinstance(given, dict):
        raise SpecError(f"{_config_of(folder)} is not a block of keys, as transformers writes it")
    try:
        found = config_json.model(given)
    except SpecError as error:
        raise SpecError(f"{_config_of(folder)}: {error}") from None
    return _with_pixels(found, folder) if isinstance(found, OfImages) else found


def check(mine: Published, theirs: Published, folder: str, keys: set[str] | None = None) -> None:
    """Raises SpecError where keys, by default all, of `mine` differ from the model of the folder."""
    differing = config_json.differences(mine, theirs, keys)
    if differing:
        raise SpecError(f"{_config_of(folder)} describes another model than train.model: {'; '.join(differing)}")
