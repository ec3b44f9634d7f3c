"""What the blocks of the train block share: fixed keys, and the kinds of values."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from jaxlaunch.trainer.spec import buckets


def at_most(most: int, what: str = "the most that is supported") -> AfterValidator:
    """The largest value of a number by which memory, loops and tables grow; `what` says why that is the largest."""

    def judge(value: int) -> int:
        """The value, where it is no larger."""
        if value > most:
            raise ValueError(f"is above {most}, {what}")
        return value

    return AfterValidator(judge)


COUNTED = 2**31 - 1  # devices have whole numbers of 32 bits
_COUNTED = at_most(COUNTED, "the largest whole number that a device counts to")
Natural = Annotated[int, Field(ge=0), _COUNTED]
Positive = Annotated[int, Field(gt=0), _COUNTED]
# Sizes that no model or machine comes near, and that still fail quickly: a thousand times what is published.
Few = Annotated[int, Field(gt=0), at_most(2**10)]
Many = Annotated[int, Field(gt=0), at_most(2**16)]
Wide = Annotated[int, Field(gt=0), at_most(2**20)]
Ids = Annotated[int, Field(gt=0), at_most(2**24)]  # of a vocabulary, of classes; examples of a step
Tokens = Annotated[int, Field(gt=0), at_most(2**27)]  # of an example
Rate = Annotated[float, Field(gt=0.0)]
Weight = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Steps = Annotated[int, Field(gt=0, le=COUNTED)]  # a device counts them in 32 bits
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]  # a key of JAX holds 64 bits; an order of examples, any number


class Block(BaseModel):
    """A mapping with fixed keys: an unknown key is an error, and a value cannot change after it was read."""

    # A block is built when it is first used: nearly all are only parts of another, which builds them again.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


def or_text(schema: dict[str, Any]) -> None:
    """In the schema: a block may be its name alone."""
    found = schema.pop("anyOf", None) or [{"$ref": schema.pop("$ref")}]
    schema["anyOf"] = [*found, {"type": "string"}]


def in_bucket(path: str) -> str:
    """A place, unchanged. Raises ValueError where it is a URL of a bucket that cannot be."""
    if (wrong := buckets.fault(path)) is not None:
        raise ValueError(wrong)
    return path


def _is_place(path: str) -> str:
    scheme, is_url, rest = path.partition("://")
    if not path.strip() or (is_url and (scheme.lower() not in buckets.STORES or not rest)):
        raise ValueError("is not a folder or a gs:// or s3:// URL")
    return in_bucket(path)


Place = Annotated[str, AfterValidator(_is_place)]  # where something is kept
