"""Types of a job's values: names, durations, quantities, volumes.

Each type has a description for messages. Durations are `90s`, `10m`, `1h30m`, `3d`; a bare integer
is seconds. Quantities are those of Kubernetes, `8`, `500m`, `32Gi`, `1.5T`, and are kept as written
for the API server. Source: kubernetes.io, "Quantity" in the API conventions: suffixes n u m, k M G
T P E, Ki Mi Gi Ti Pi Ei.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from jaxlaunch.launcher.job.introspection import TypeDescription, discriminate_by_key
from jaxlaunch.launcher.kubernetes.resources import QUANTITY_PATTERN, parse_quantity
from jaxlaunch.launcher.wording import format_duration
from jaxlaunch.trainer.spec import Block, check_bucket_url

_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
# YAML reads these as text only in quotes.
_NEEDS_QUOTES = re.compile(r"[0-9.]+(e-?[0-9]+)?|0[xo][0-9a-f]+|true|false|null")
_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


def _name_suggester(
    pattern: str, max_length: int, allowed: str = ""
) -> Callable[[str], str | None]:
    """Return a function that suggests a valid name: lower case, no accents, dashes.

    The characters in `allowed` are kept. Nothing is suggested if a letter would be lost or the
    result is not a valid name.
    """

    def suggest(text: str) -> str | None:
        folded = unicodedata.normalize("NFKD", text.casefold())
        plain = "".join(letter for letter in folded if not unicodedata.combining(letter))
        name = re.sub(rf"[^a-z0-9{allowed}]+", "-", plain).strip("-.")
        is_lossy = any(letter.isalnum() and not letter.isascii() for letter in plain)
        if is_lossy or len(name) > max_length or _NEEDS_QUOTES.fullmatch(name):
            return None
        return f"write {name}." if re.match(pattern, name) else None

    return suggest


def _suggest_absolute_path(text: str) -> str | None:
    if not re.fullmatch(r"[\w./-]*[\w-]", text) or ".." in text.split("/"):
        return None
    return f"write /{text.removeprefix('./')}."


JobName = Annotated[
    str,
    Field(pattern=_NAME),
    TypeDescription(
        "a name: lower-case letters, digits and inner dashes, a letter first",
        _name_suggester(_NAME, 63),
    ),
]
Label = Annotated[
    str,
    Field(pattern=_LABEL, max_length=63),
    TypeDescription(
        "a name of at most 63 lower-case letters, digits and inner dashes",
        _name_suggester(_LABEL, 63),
    ),
]
ObjectName = Annotated[
    str,
    Field(pattern=_SUBDOMAIN, max_length=253),
    TypeDescription(
        "a Kubernetes name: lower-case letters, digits, and inner dashes and dots",
        _name_suggester(_SUBDOMAIN, 253, "."),
    ),
]
AbsolutePath = Annotated[
    str,
    Field(pattern=r"^/[^:\s][^:]*$"),
    TypeDescription("an absolute path below /", _suggest_absolute_path),
]
Variable = Annotated[
    str,
    Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$"),
    TypeDescription("a variable's name: letters, digits and _"),
]
# The reader of job.yaml returns keys as text.
ExitCodeKey = Annotated[
    str,
    Field(pattern=r"^([1-9][0-9]?|1[0-9]{2}|2[0-4][0-9]|25[0-5])$"),
    TypeDescription("an exit code from 1 to 255"),
]
# A scalar that is kept as written: `--lr 3e-4` in a command must not become 0.0003.
Text = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean"]})]
LabelKey = Annotated[
    str,
    Field(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        max_length=253 + 1 + 63,
    ),
    TypeDescription("a label's key, such as team or example.com/team"),
]
LabelValue = Annotated[
    Text,
    Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63),
    TypeDescription("a label's value: at most 63 letters, digits and inner dashes, dots and _"),
]


_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_UNIT_NAMES = r"s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?|w|wks?|weeks?"
# Kubernetes stores some durations in 32 bits.
_MAX_DURATION_S = 2**31 - 1
_DURATION = re.compile(r"(?:([0-9]{1,6})d)?(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,9})s)?")


def parse_duration(value: Any) -> float:
    """Return the seconds of `90s`, `1h30m` or a positive integer, or raise ValueError."""
    total = 0
    if isinstance(value, int) and not isinstance(value, bool):
        total = value
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        counts = zip(match.groups(), _SECONDS.values(), strict=True)
        total = sum(int(count or 0) * unit for count, unit in counts)
    if not 0 < total <= _MAX_DURATION_S:
        raise PydanticCustomError("duration", "not a duration")
    return float(total)


def _suggest_duration(text: str) -> str | None:
    """Return a hint for `10 min` or `1.5h`; none if it would be rounded, or M could be months."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([a-z]+)", text.strip().lower())
    if match is None or not re.fullmatch(_UNIT_NAMES, match[2]) or text.strip().endswith("M"):
        return None
    total = Decimal(match[1]) * (_SECONDS | {"w": 604800})[match[2][0]]
    is_valid = total == int(total) and 0 < total <= _MAX_DURATION_S
    return f"write {format_duration(float(total))}." if is_valid else None


def _text_schema(pattern: str, number: str) -> WithJsonSchema:
    """Return the JSON schema of a text with this pattern, or a number of this type."""
    return WithJsonSchema({"anyOf": [{"type": "string", "pattern": pattern}, {"type": number}]})


Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    TypeDescription("a duration above 0, such as 90s, 10m, 12h or 3d", _suggest_duration),
    PlainSerializer(format_duration, return_type=str),
    _text_schema(r"^(\d+d)?(\d+h)?(\d+m)?(\d+s)?$", "integer"),
]


def _check_quantity(value: Any) -> str:
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    is_quantity = isinstance(text, str) and QUANTITY_PATTERN.fullmatch(text)
    if not is_quantity or parse_quantity(text) == 0:
        raise PydanticCustomError("quantity", "not a quantity")
    return str(text)


def _suggest_quantity(text: str) -> str | None:
    pattern = r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmgtp])(i?)b?"
    if (match := re.fullmatch(pattern, text.strip().lower())) is None:
        return None
    number, letter = match[1], match[2].upper()
    if match[3]:
        return f"write {number}{letter}i."
    decimal_letter = "k" if letter == "K" else letter
    return f"write {number}{letter}i for 1024s, or {number}{decimal_letter} for 1000s."


Quantity = Annotated[
    str,
    BeforeValidator(_check_quantity),
    TypeDescription("a Kubernetes quantity above 0, such as 8, 500m or 32Gi", _suggest_quantity),
    _text_schema(rf"^{QUANTITY_PATTERN.pattern}$", "number"),
]


class MountedVolume(Block):
    """A volume, whose first key names its source."""

    @property
    def name(self) -> str:
        """The name of the volume in `--volume NAME=DIR`."""
        return str(getattr(self, next(iter(type(self).model_fields))))


class Claim(MountedVolume):
    """A PersistentVolumeClaim.

    ```yaml
    volumes:
      - {claim: runs, path: /runs}                   # checkpoints; ReadWriteMany for several hosts
      - {claim: data, path: /data, read_only: true}
    ```
    """

    claim: ObjectName = Field(description="the claim's name")
    path: AbsolutePath = Field(description="where it is mounted")
    read_only: bool = Field(False, description="mounted read-only")


class Bucket(MountedVolume):
    """A bucket, mounted as a folder.

    ```yaml
    platform: gke
    service_account: trainer  # whose permissions read the bucket
    volumes: [{bucket: "gs://team-data/images", path: /data, read_only: true}]
    ```
    """

    bucket: Annotated[
        str,
        Field(pattern=r"^(gs|s3)://[^\s/]+(/[^\s]*)?$"),
        AfterValidator(check_bucket_url),
        TypeDescription("a bucket such as gs://name or s3://name"),
    ] = Field(description="gs:// or s3://, with or without a folder")
    path: AbsolutePath = Field(description="where it is mounted")
    read_only: bool = Field(False, description="mounted read-only")

    @property
    def name(self) -> str:
        """The name of the bucket, without its folder."""
        return self.bucket.partition("://")[2].partition("/")[0]


class Ephemeral(MountedVolume):
    """Scratch space that lives as long as the pod.

    ```yaml
    volumes: [{ephemeral: 200Gi, path: /scratch}]  # on the node's disk; empty in new pods
    ```
    """

    ephemeral: Quantity = Field(description="its size")
    path: AbsolutePath = Field(description="where it is mounted")

    @property
    def name(self) -> str:
        """The path with dashes instead of slashes."""
        return self.path.strip("/").replace("/", "-")


class SecretFiles(MountedVolume):
    """The keys of a Secret as files.

    ```yaml
    volumes: [{secret: tls, path: /etc/tls}]  # /etc/tls/ca.crt and so on, one file per key
    ```
    """

    secret: ObjectName = Field(description="the Secret's name")
    path: AbsolutePath = Field(description="where it is mounted")


class ConfigFiles(MountedVolume):
    """The keys of a ConfigMap as files.

    ```yaml
    volumes: [{configmap: settings, path: /etc/settings}]  # one file per key
    ```
    """

    configmap: ObjectName = Field(description="the ConfigMap's name")
    path: AbsolutePath = Field(description="where it is mounted")


Volume = Annotated[
    Annotated[Claim, Tag("claim")]
    | Annotated[Bucket, Tag("bucket")]
    | Annotated[Ephemeral, Tag("ephemeral")]
    | Annotated[SecretFiles, Tag("secret")]
    | Annotated[ConfigFiles, Tag("configmap")],
    discriminate_by_key("claim", "bucket", "ephemeral", "secret", "configmap"),
]
