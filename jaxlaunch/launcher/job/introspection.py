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
from jaxlaunch.trainer.spec.block import USER_OBJECT


@dataclasses.dataclass(frozen=True)
class TypeDescription:
    """The description of a type in messages.

    Attributes:
        text: End of the sentence "hosts = x is not …".
        suggest: Returns a hint for an invalid text that is close to a valid one, or None.
    """

    text: str
    suggest: Callable[[str], str | None] = lambda text: None


@dataclasses.dataclass(frozen=True)
class Type:
    """An annotation split into the bare type, its constraints, and whether null is allowed."""

    bare: Any
    constraints: tuple[Any, ...] = ()
    nullable: bool = False

    @classmethod
    def from_annotation(cls, annotation: Any, constraints: tuple[Any, ...] = ()) -> Type:
        """Split an annotation, and add constraints of an outer one."""
        nullable = False
        while True:
            origin, arguments = get_origin(annotation), get_args(annotation)
            if origin is Annotated:
                annotation, constraints = arguments[0], constraints + arguments[1:]
            elif origin in (Union, types.UnionType) and type(None) in arguments:
                members = [member for member in arguments if member is not type(None)]
                annotation, nullable = functools.reduce(operator.or_, members), True
            else:
                break
        flattened = itertools.chain.from_iterable(
            item.metadata if isinstance(item, FieldInfo) else [item] for item in constraints
        )
        return cls(annotation, tuple(flattened), nullable)

    @classmethod
    def from_field(cls, field: FieldInfo) -> Type:
        """Return the type of a pydantic field."""
        return cls.from_annotation(field.annotation, tuple(field.metadata))

    @property
    def members(self) -> tuple[Type, ...]:
        """The alternatives of a union, empty for any other type."""
        is_union = get_origin(self.bare) in (Union, types.UnionType)
        return tuple(map(Type.from_annotation, get_args(self.bare))) if is_union else ()

    @property
    def models(self) -> list[type[BaseModel]]:
        """The blocks among the alternatives of a union."""
        return [member.model for member in self.members if member.model is not None]

    @property
    def model(self) -> type[BaseModel] | None:
        """The model, if the type is a block."""
        is_model = isinstance(self.bare, type) and issubclass(self.bare, BaseModel)
        return self.bare if is_model else None

    def _argument(self, origin: type, index: int) -> Type | None:
        if get_origin(self.bare) is not origin:
            return None
        return Type.from_annotation(get_args(self.bare)[index])

    @property
    def items(self) -> Type | None:
        """The type of a list's items."""
        return self._argument(list, 0)

    @property
    def keys(self) -> Type | None:
        """The type of a mapping's keys."""
        return self._argument(dict, 0)

    @property
    def values(self) -> Type | None:
        """The type of a mapping's values."""
        return self._argument(dict, 1)

    @property
    def literals(self) -> tuple[Any, ...]:
        """The values of a Literal, empty for any other type."""
        return get_args(self.bare) if get_origin(self.bare) is Literal else ()

    def find_member(self, label: Any) -> Type | None:
        """Return the alternative that pydantic calls `label`: a tag, a class or a literal."""
        for member in self.members:
            tags = {item.tag for item in member.constraints if isinstance(item, Tag)}
            if member.model is not None:
                tags.add(member.model.__name__)
                for key in {"kind", "source"} & member.model.model_fields.keys():
                    tags.update(Type.from_field(member.model.model_fields[key]).literals)
            if label in tags or (member.items is not None and str(label).startswith("list")):
                return member
        return None


def block_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a block by the names that job.yaml uses."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


@dataclasses.dataclass(frozen=True)
class ErrorLocation:
    """The location of a validation error in a document and in its schema.

    Attributes:
        path: Path of the value, or of the key if `is_key`.
        kind: Type that the schema expects there; None for an unknown key.
        block: Block that contains the key.
        union: Path of the innermost union that contains the value, or None.
        label: Pydantic's name of the alternative of that union.
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


def locate_error(model: type[BaseModel], loc: tuple[str | int, ...]) -> ErrorLocation:
    """Resolve the `loc` of a validation error, which mixes keys with names of alternatives."""
    location, key_type = ErrorLocation((), Type(model), None, root=model), None
    for element in loc:
        kind = location.kind
        if element == "[key]":
            return dataclasses.replace(location, kind=key_type, is_key=True)
        if kind is not None and kind.members:
            member = kind.find_member(element)
            location = dataclasses.replace(
                location, kind=member, union=location.path, label=element
            )
            continue
        location = dataclasses.replace(location, path=(*location.path, element))
        if kind is None:
            continue
        if kind.model is not None:
            field = block_fields(kind.model).get(str(element))
            field_type = None if field is None else Type.from_field(field)
            location = dataclasses.replace(location, kind=field_type, block=kind.model)
        else:
            key_type = kind.keys
            location = dataclasses.replace(location, kind=kind.items or kind.values)
    return location


def types_at(model: type[BaseModel], path: KeyPath) -> list[Type]:
    """Return every type that the schema allows at a path, over all alternatives of unions."""
    kinds = [Type(model)]
    for key in path:
        alternatives = [member for kind in kinds for member in (kind.members or (kind,))]
        kinds = []
        for kind in alternatives:
            field = None if kind.model is None else block_fields(kind.model).get(str(key))
            if field is not None:
                kinds.append(Type.from_field(field))
            elif (item := kind.items or kind.values) is not None:
                kinds.append(item)
    return kinds


def walk_fields(model: type[BaseModel], path: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Yield every key of the schema with its field, over all alternatives of unions."""
    for key, field in block_fields(model).items():
        yield (*path, key), field
        for block in nested_blocks(Type.from_field(field)):
            yield from walk_fields(block, (*path, key))


def nested_blocks(kind: Type) -> list[type[BaseModel]]:
    """Return the blocks that a type may contain: itself, its alternatives, or its items."""
    if (inner := kind.items or kind.values) is not None:
        return nested_blocks(inner)
    return kind.models if kind.model is None else [kind.model]


# --- descriptions of types in messages ------------------------------------------------------------

_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
_TYPE_NAMES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Any: "a value",
}


def describe_type(kind: Type, *, is_finite: bool = False) -> str:
    """Describe a type, as the end of "hosts = x is not …".

    `is_finite` adds that a number has to be finite, for a value that is not.
    """
    texts = [
        constraint.text
        for constraint in kind.constraints
        if isinstance(constraint, TypeDescription)
    ]
    if texts:
        return texts[-1]
    if kind.members:
        return _describe_union(kind)
    if kind.literals:
        text = ", ".join(map(str, kind.literals))
        return f"{text}, its only value" if len(kind.literals) == 1 else f"one of {text}"
    if kind.model is not None:
        keys = list(block_fields(kind.model))
        return f"a block with the key{'s' * (len(keys) > 1)} {', '.join(keys)}"
    if kind.items is not None:
        is_text = kind.items.bare is str
        return "a list of texts" if is_text else f"a list, each item {describe_type(kind.items)}"
    if kind.values is not None:
        is_any = kind.values.bare is Any
        return "a block" if is_any else f"a block, each value {describe_type(kind.values)}"
    if is_user_object(kind):
        return "a name of the form module:Name"
    name = "a finite number" if is_finite and kind.bare is float else _TYPE_NAMES[kind.bare]
    return f"{name}{_describe_bounds(kind)}"


def is_user_object(kind: Type) -> bool:
    """Return whether the values of a type are names of the user's objects, `module:Name`."""
    return any(getattr(item, "pattern", None) == USER_OBJECT for item in kind.constraints)


def _describe_union(kind: Type) -> str:
    if len(kind.models) < len(kind.members):
        texts = [
            str(member.literals[0]) if len(member.literals) == 1 else describe_type(member)
            for member in kind.members
        ]
        return ", or ".join(dict.fromkeys(texts))
    if (key := discriminator_key(kind)) is not None:
        return f"a block whose {key} is {describe_choices(kind)}"
    return f"a block with one of the keys {list_first_keys(kind)}"


def list_first_keys(kind: Type) -> str:
    """Return the first key of each block of a union, by which they are told apart."""
    return ", ".join(next(iter(block_fields(model))) for model in kind.models)


def discriminate_by_key(*keys: str) -> Discriminator:
    """Return a discriminator that selects a block by the first of these keys that it has."""

    def find_tag(value: Any) -> str | None:
        mapping = vars(value) if isinstance(value, BaseModel) else value
        if not isinstance(mapping, Mapping):
            return None
        return next((key for key in keys if key in mapping), None)

    return Discriminator(find_tag)


def discriminator_key(kind: Type) -> str | None:
    """Return the key that discriminates the blocks of a union, or None."""
    for key in ("kind", "source"):
        if all(key in model.model_fields for model in kind.models):
            return key
    return None


def describe_choices(kind: Type) -> str:
    """Describe the values of the discriminator of a union of blocks."""
    key_types = _discriminator_types(kind)
    other_phrases = [describe_type(key_type) for key_type in key_types if not key_type.literals]
    literals = ", ".join(discriminator_values(kind))
    return f"one of {literals}" + "".join(f", or {phrase}" for phrase in other_phrases)


def discriminator_values(kind: Type) -> list[str]:
    """Return the values of the discriminator of a union of blocks that are fixed words."""
    return [str(word) for key_type in _discriminator_types(kind) for word in key_type.literals]


def _discriminator_types(kind: Type) -> list[Type]:
    key = discriminator_key(kind) or ""
    return [Type.from_field(model.model_fields[key]) for model in kind.models]


def _describe_bounds(kind: Type) -> str:
    # Integers are shown with all digits. The format `g` would round the largest seed, which has 20.
    bounds = {
        key: str(bound) if isinstance(bound, int) else f"{bound:g}"
        for key in _BOUNDS
        for constraint in kind.constraints
        if (bound := getattr(constraint, key, None)) is not None
    }
    if bounds.keys() >= {"ge", "le"}:
        return f" from {bounds['ge']} to {bounds['le']}"
    phrases = [f"{phrase} {bounds[key]}" for key, phrase in _BOUNDS.items() if key in bounds]
    return f" {' and '.join(phrases)}" if phrases else ""
