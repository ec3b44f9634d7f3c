"""The base class of all blocks of job.yaml, and the types of values that they share.

Names of buckets are checked by the rules of their stores, before any request to a store. Source:
cloud.google.com/storage/docs/buckets, "Bucket names";
docs.aws.amazon.com/AmazonS3/latest/userguide, "General purpose bucket naming rules".
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class PredicateError(ValueError):
    """A fault of a value, as the predicate of a sentence whose subject is the value.

    A validator raises `PredicateError("needs a momentum above 0")` where the message is to be
    "train.optimizer.nesterov = true needs a momentum above 0." The text of any other ValueError is
    a clause with a subject of its own, or describes the contents of the value.
    """


def at_most(maximum: int, reason: str = "the most that is supported") -> AfterValidator:
    """Return a validator that limits a number; `reason` explains the limit."""

    def check_value(value: int) -> int:
        if value > maximum:
            raise PredicateError(f"is above {maximum}, {reason}")
        return value

    return AfterValidator(check_value)


# Devices use integers of 32 bits.
MAX_INT32 = 2**31 - 1
_AT_MOST_INT32 = at_most(MAX_INT32, "the largest whole number that a device counts to")
Natural = Annotated[int, Field(ge=0), _AT_MOST_INT32]
Positive = Annotated[int, Field(gt=0), _AT_MOST_INT32]
# About a thousand times larger than published models; a mistake still fails quickly.
Few = Annotated[int, Field(gt=0), at_most(2**10)]
Many = Annotated[int, Field(gt=0), at_most(2**16)]
Wide = Annotated[int, Field(gt=0), at_most(2**20)]
# Number of tokens of a vocabulary, of classes, or of examples in a step.
Ids = Annotated[int, Field(gt=0), at_most(2**24)]
# Tokens of an example.
Tokens = Annotated[int, Field(gt=0), at_most(2**27)]
Rate = Annotated[float, Field(gt=0.0)]
Weight = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
# A device counts steps in 32 bits.
Steps = Annotated[int, Field(gt=0, le=MAX_INT32)]
# A key of JAX has 64 bits.
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]

# `module:Name` of an object of the user.
USER_OBJECT = r"^[\w.]+:[\w.]+$"


class Location:
    """Marks a type whose values are paths or URLs, except for some words such as `auto`."""

    def __init__(self, *words: str) -> None:
        self.words = words


class Block(BaseModel):
    """A mapping with fixed keys, whose values cannot change after they were read."""

    # Validators are built on first use, because nearly every block is part of another one, which
    # builds its own.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    def is_changed(self, key: str) -> bool:
        """Return whether the value of a key is not its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    def locations(self) -> dict[tuple[str, ...], str | list[str]]:
        """Return the paths and URLs in this block and in nested blocks, by their keys."""
        paths: dict[tuple[str, ...], str | list[str]] = {}
        markers = _location_markers(type(self))
        for key, value in self:
            if key in markers and value is not None and value not in markers[key].words:
                paths[key,] = value
            for name, block in value.items() if isinstance(value, dict) else [(None, value)]:
                if isinstance(block, Block):
                    prefix = (key,) if name is None else (key, name)
                    paths |= {(*prefix, *keys): path for keys, path in block.locations().items()}
        return paths

    def map_paths(self, map_path: Callable[[str], str], map_value: Callable[[Any], Any]) -> Self:
        """Return the block with every path mapped by `map_path`.

        `map_value` maps the arguments of the user's own classes, which may contain paths.
        """

        def map_block(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: map_block(item) for name, item in value.items()}
            return value.map_paths(map_path, map_value) if isinstance(value, Block) else value

        changes = {key: map_block(value) for key, value in self}
        for (key, *nested_keys), path in self.locations().items():
            if not nested_keys:
                changes[key] = [*map(map_path, path)] if isinstance(path, list) else map_path(path)
        # An unchanged key stays unset: a set one would take precedence over the task's default.
        changes = {key: value for key, value in changes.items() if value != getattr(self, key)}
        return self.model_copy(update=changes)


@functools.cache
def _location_markers(model: type[Block]) -> Mapping[str, Location]:
    def markers(annotation: Any) -> Iterator[Any]:
        yield from getattr(annotation, "__metadata__", ())
        for part in get_args(annotation):
            yield from markers(part)

    return {
        key: marker
        for key, field in model.model_fields.items()
        for marker in (*field.metadata, *markers(field.annotation))
        if isinstance(marker, Location)
    }


@dataclasses.dataclass(frozen=True)
class Unset:
    """The meaning of a key without a value, if no default value states it.

    It is the `json_schema_extra` of a field, and follows the description in the JSON schema.
    """

    meaning: str
    # "default", or "null:" or "left out:" where that is how a job asks for it.
    word: str = "default"
    extend_schema: Callable[[dict[str, Any]], None] | None = None

    def __call__(self, schema: dict[str, Any]) -> None:
        """Append the meaning to the description of a JSON schema."""
        schema["description"] += f"; {self.word} {self.meaning}"
        if self.extend_schema is not None:
            self.extend_schema(schema)


def allow_text(schema: dict[str, Any]) -> None:
    """Extend the JSON schema of a block that may also be written as its name alone."""
    alternatives = schema.pop("anyOf", None) or [{"$ref": schema.pop("$ref")}]
    schema["anyOf"] = [*alternatives, {"type": "string"}]


def check_bucket_url(path: str) -> str:
    """Return a path or URL unchanged. Raises ValueError if it is an invalid URL of a bucket."""
    if (fault := bucket_fault(path)) is not None:
        raise PredicateError(fault)
    return path


def _check_place(path: str) -> str:
    scheme, separator, location = path.partition("://")
    if not path.strip() or (separator and (scheme.lower() not in STORES or not location)):
        raise PredicateError("is not a folder or a gs:// or s3:// URL")
    return check_bucket_url(path)


# A folder or URL for checkpoints, weights or caches.
Place = Annotated[str, AfterValidator(_check_place), Location()]

# The schemes of the object stores that weights and data are read from and checkpoints written to.
STORES = ("gs", "s3")
_CHARACTER_RULES = {
    "gs": (r"[^a-z0-9._-]", "lower-case letters, digits, dashes, dots and _"),
    "s3": (r"[^a-z0-9.-]", "lower-case letters, digits, dashes and dots"),
}
_MIN_NAME_CHARS, _MAX_NAME_CHARS = 3, 63
# In a name with dots on gs://, each part between dots has the limit _MAX_NAME_CHARS.
_MAX_DOTTED_NAME_CHARS = {"gs": 222, "s3": _MAX_NAME_CHARS}
_IP_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")
# gs:/bucket and gs//bucket would be names of folders.
_ALMOST_URL = re.compile(r"(?i)(gs|s3)(?::/?(?!/)|//)\S")


def bucket_fault(path: str) -> str | None:
    """Return what is wrong with a URL of a bucket, as the end of "KEY = PATH …".

    Return None for a folder, a valid URL, or a URL with another scheme.
    """
    scheme, separator, location = path.partition("://")
    if not separator and (match := _ALMOST_URL.match(path)) is not None:
        return f"is not a URL: one begins with {match[1].lower()}://"
    if not separator or scheme.lower() not in STORES:
        return None
    if scheme not in STORES:
        return f"is not a URL of a bucket: write {scheme.lower()}:// in lower case"
    bucket = location.partition("/")[0]
    if not bucket:
        return "is not a URL of a bucket: it has no name"
    fault = _bucket_name_fault(scheme, bucket)
    return None if fault is None else f"is not a URL of a bucket: {fault}"


def _bucket_name_fault(scheme: str, bucket: str) -> str | None:
    forbidden, allowed = _CHARACTER_RULES[scheme]
    max_chars = _MAX_DOTTED_NAME_CHARS[scheme] if "." in bucket else _MAX_NAME_CHARS
    if (match := re.search(forbidden, bucket)) is not None:
        return f"its name contains {match[0]!r}, and names of {scheme}:// consist of {allowed}"
    if not _MIN_NAME_CHARS <= len(bucket) <= max_chars:
        limits = f"names of {scheme}:// have {_MIN_NAME_CHARS} to {max_chars}"
        return f"its name has {len(bucket)} characters, and {limits}"
    if not (bucket[0].isalnum() and bucket[-1].isalnum()):
        return "its name must begin and end with a letter or digit"
    if ".." in bucket or any(len(part) > _MAX_NAME_CHARS for part in bucket.split(".")):
        return f"its name must have 1 to {_MAX_NAME_CHARS} characters between dots"
    if _IP_ADDRESS.fullmatch(bucket):
        return "its name has the form of an IP address"
    return None
