"""Introspection of the schema: types in words, keys, and the path of a validation error. Pure.

Reads the annotations of pydantic models, so that messages and documentation always agree with the
schema.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag
from pydantic.fields import FieldInfo

from jaxlaunch.launcher.errors import KeyPath


@dataclasses.dataclass(frozen=True)
class Words:
    """Metadata of a type: its description in messages ("hosts = x is not <text>"), and a correction of a near miss."""

    text: str
    suggest: Callable[[str], str | None] = lambda written: None


@dataclasses.dataclass(frozen=True)
class Type:
    """An annotation split into the bare type, its constraints, and whether null is allowed."""

    bare: Any
    constraints: tuple[Any, ...] = ()
    nullable: bool = False

    @classmethod
    def from_annotation(cls, annotation: Any, constraints: tuple[Any, ...] = ()) -> Type:
        """Parse an annotation, with additional constraints."""
        nullable = False
        while True:
            origin = get_origin(annotation)
            if origin is Annotated:
                annotation, *metadata = get_args(annotation)
                constraints += tuple(metadata)
            elif origin in (Union, types.UnionType) and type(None) in get_args(annotation):
                members = tuple(
                    member for member in get_args(annotation) if member is not type(None)
                )
                annotation, nullable = functools.reduce(operator.or_, members), True
            else:
                nested = (
                    (item.metadata if isinstance(item, FieldInfo) else [item])
                    for item in constraints
                )
                return cls(annotation, tuple(itertools.chain.from_iterable(nested)), nullable)

    @classmethod
    def from_field(cls, field: FieldInfo) -> Type:
        """Return the type of a pydantic field."""
        return cls.from_annotation(field.annotation, tuple(field.metadata))

    @property
    def members(self) -> tuple[Type, ...]:
        """The alternatives of a union, empty for any other type."""
        return (
            tuple(map(Type.from_annotation, get_args(self.bare)))
            if get_origin(self.bare) in (Union, types.UnionType)
            else ()
        )

    @property
    def model(self) -> type[BaseModel] | None:
        """The model, if the type is a block."""
        return (
            self.bare if isinstance(self.bare, type) and issubclass(self.bare, BaseModel) else None
        )

    @property
    def items(self) -> Type | None:
        """The type of a list's items."""
        return (
            Type.from_annotation(get_args(self.bare)[0]) if get_origin(self.bare) is list else None
        )

    @property
    def keys(self) -> Type | None:
        """The type of a mapping's keys."""
        return (
            Type.from_annotation(get_args(self.bare)[0]) if get_origin(self.bare) is dict else None
        )

    @property
    def values(self) -> Type | None:
        """The type of a mapping's values."""
        return (
            Type.from_annotation(get_args(self.bare)[1]) if get_origin(self.bare) is dict else None
        )

    @property
    def literals(self) -> tuple[Any, ...]:
        """The values of a Literal, empty for any other type."""
        return get_args(self.bare) if get_origin(self.bare) is Literal else ()

    def find_member(self, label: Any) -> Type | None:
        """Return the alternative that a validation error names by tag, class or literal key."""
        for member in self.members:
            tags = {
                constraint.tag for constraint in member.constraints if isinstance(constraint, Tag)
            }
            if member.model is not None:
                keys = {"kind", "source"} & member.model.model_fields.keys()
                literals = (
                    Type.from_field(member.model.model_fields[key]).literals for key in keys
                )
                tags |= {member.model.__name__, *itertools.chain.from_iterable(literals)}
            if label in tags or (member.items is not None and str(label).startswith("list")):
                return member
        return None


def block_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a block by the names that job.yaml uses."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


@dataclasses.dataclass(frozen=True)
class Spot:
    """The location of a validation error.

    Attributes:
        path: Path of the value, or of the key if `is_key`.
        kind: Type that the schema expects there; None for an unknown key.
        block: Block that contains the key.
        union: Path of the last union on the way.
        label: What the error calls the alternative of that union.
        is_key: Whether the key is wrong, not the value.
        root: Schema in which the path begins.
    """

    path: KeyPath
    kind: Type | None
    block: type[BaseModel] | None
    union: KeyPath | None = None
    label: Any = None
    is_key: bool = False
    root: type[BaseModel] = BaseModel


def find_spot(model: type[BaseModel], location: tuple[str | int, ...]) -> Spot:
    """Return the spot of an error's `loc`, in which pydantic mixes keys with names of alternatives."""
    spot, key_type = Spot((), Type(model), None, root=model), None
    for element in location:
        current_type = spot.kind
        if element == "[key]":
            return dataclasses.replace(spot, kind=key_type, is_key=True)
        if current_type is not None and current_type.members:
            spot = dataclasses.replace(
                spot, kind=current_type.find_member(element), union=spot.path, label=element
            )
            continue
        spot = dataclasses.replace(spot, path=(*spot.path, element))
        if current_type is None:
            continue
        if current_type.model is not None:
            field = block_fields(current_type.model).get(str(element))
            spot = dataclasses.replace(
                spot,
                kind=None if field is None else Type.from_field(field),
                block=current_type.model,
            )
        else:
            key_type = current_type.keys
            spot = dataclasses.replace(spot, kind=current_type.items or current_type.values)
    return spot


def types_at(model: type[BaseModel], path: KeyPath) -> list[Type]:
    """Return every type that the schema allows at a path, over all alternatives of unions on the way."""
    kinds = [Type(model)]
    for key in path:
        next_kinds: list[Type] = []
        for kind in [member for union in kinds for member in (union.members or (union,))]:
            if (
                kind.model is not None
                and (field := block_fields(kind.model).get(str(key))) is not None
            ):
                next_kinds.append(Type.from_field(field))
            elif (item := kind.items or kind.values) is not None:
                next_kinds.append(item)
        kinds = next_kinds
    return kinds


def walk_fields(model: type[BaseModel], path: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Yield every key of the schema with its field, over all alternatives of unions."""
    for key, field in block_fields(model).items():
        yield (*path, key), field
        for block in nested_blocks(Type.from_field(field)):
            yield from walk_fields(block, (*path, key))


def nested_blocks(kind: Type) -> list[type[BaseModel]]:
    """Return the blocks that a type may contain: itself, its alternatives, or its items."""
    inner = kind.items or kind.values
    if inner is not None:
        return nested_blocks(inner)
    return [member.model for member in (kind.members or (kind,)) if member.model is not None]


# --- in words -------------------------------------------------------------------------------------

_PATTERNS: Mapping[str, str] = {r"^[\w.]+:[\w.]+$": "a name of the form module:Name"}
_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
_TYPE_NAMES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Any: "a value",
}


def describe_type(kind: Type) -> str:
    """Describe a type, as the end of "hosts = x is not …"."""
    texts = [constraint.text for constraint in kind.constraints if isinstance(constraint, Words)]
    if texts:
        return texts[-1]
    if kind.members:
        models = [member.model for member in kind.members if member.model is not None]
        if len(models) < len(kind.members):
            return ", or ".join(
                dict.fromkeys(
                    describe_type(member).removesuffix(", its only value")
                    for member in kind.members
                )
            )
        if (key := discriminator_key(kind)) is None:
            return (
                "a block with one of the keys "
                f"{', '.join(next(iter(block_fields(model))) for model in models)}"
            )
        return f"a block whose {key} is {describe_choices(kind)}"
    if kind.literals:
        offered = [str(literal) for literal in kind.literals]
        return (
            f"{offered[0]}, its only value" if len(offered) == 1 else f"one of {', '.join(offered)}"
        )
    if kind.model is not None:
        return (
            f"a block with the key{'s' * (len(block_fields(kind.model)) > 1)} "
            f"{', '.join(block_fields(kind.model))}"
        )
    if kind.items is not None:
        return (
            "a list of texts"
            if kind.items.bare is str
            else f"a list, each item {describe_type(kind.items)}"
        )
    if kind.values is not None:
        return (
            "a block"
            if kind.values.bare is Any
            else f"a block, each value {describe_type(kind.values)}"
        )
    patterns = [str(getattr(constraint, "pattern", None)) for constraint in kind.constraints]
    names = [_PATTERNS[pattern] for pattern in patterns if pattern in _PATTERNS]
    return names[0] if names else f"{_TYPE_NAMES[kind.bare]}{_describe_bounds(kind)}"


def discriminate_by_key(*keys: str) -> Discriminator:
    """Return a discriminator that chooses the alternative whose tag is the first of these keys in the block."""

    def find_tag(value: Any) -> str | None:
        mapping = (
            value
            if isinstance(value, Mapping)
            else vars(value)
            if isinstance(value, BaseModel)
            else ()
        )
        return next((key for key in keys if key in mapping), None)

    return Discriminator(find_tag)


def discriminator_key(kind: Type) -> str | None:
    """Return the key that discriminates the blocks of a union, or None if the presence of a key does."""
    models = [member.model for member in kind.members if member.model is not None]
    return next(
        (key for key in ("kind", "source") if all(key in model.model_fields for model in models)),
        None,
    )


def describe_choices(kind: Type) -> str:
    """Describe the values of the discriminator of a union of blocks."""
    key = discriminator_key(kind) or ""
    kinds = [
        Type.from_field(member.model.model_fields[key])
        for member in kind.members
        if member.model is not None
    ]
    literals = [str(literal) for kind in kinds for literal in kind.literals]
    other_phrases = [describe_type(key_type) for key_type in kinds if not key_type.literals]
    return f"one of {', '.join(literals)}" + "".join(f", or {phrase}" for phrase in other_phrases)


def _describe_bounds(kind: Type) -> str:
    bounds = {
        key: getattr(constraint, key)
        for key in _BOUNDS
        for constraint in kind.constraints
        if getattr(constraint, key, None) is not None
    }
    if bounds.keys() >= {"ge", "le"}:
        return f" from {_format_bound(bounds['ge'])} to {_format_bound(bounds['le'])}"
    phrases = [
        f"{phrase} {_format_bound(bounds[key])}" for key, phrase in _BOUNDS.items() if key in bounds
    ]
    return f" {' and '.join(phrases)}" if phrases else ""


def _format_bound(bound: float) -> str:
    # An integer is shown with all digits, as the upper bound of a seed has twenty.
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
