"""Translation of pydantic's validation errors into messages with the value, the expected type and a suggestion.

Pydantic's own texts and values that may be secret are never shown.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from jaxlaunch.launcher.errors import MAX_SHOWN_FAULTS, Fault, KeyPath
from jaxlaunch.launcher.job import credentials, introspection
from jaxlaunch.launcher.job.introspection import Spot, Type, Words
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.wording import MAX_SHOWN_CHARS, format_key_path, join_choices, shorten_text
from jaxlaunch.launcher.yaml import reader
from jaxlaunch.launcher.yaml.reader import Document
from jaxlaunch.spelling import find_completions, find_nearest

_MAX_SEARCHED_LENGTH = 1000
# The error type of a default that depends on another key that is wrong.
_DEFAULT_NOT_CALLED = "default_factory_not_called"
# Errors of one file that are translated.
_MAX_TRANSLATED_ERRORS = 1000
_EXAMPLES: Mapping[KeyPath, str] = {
    ("name",): "for example name: my-run",
    ("accelerator",): "for example accelerator: {type: cpu, per_host: 4}",
    ("train", "task"): "classify, lm, dpo, or module:Name of your own.",
}


def value_at(data: Any, path: KeyPath) -> Any:
    """Return the value at a path of plain data, or None."""
    for key in path:
        if isinstance(data, dict):
            data = data.get(key)
        else:
            data = (
                data[key]
                if isinstance(data, list) and isinstance(key, int) and key < len(data)
                else None
            )
    return data


def shown_value(document: Document, path: KeyPath) -> str | None:
    """Return a scalar as written in the file; None if it is not a scalar or must not be shown."""
    value = value_at(document.data, path)
    if credentials.is_private_path(path) or isinstance(value, dict | list):
        return None
    text = document.texts.get(path) or json.dumps(value, ensure_ascii=False)
    if credentials.has_credential(text[:_MAX_SEARCHED_LENGTH]):
        return None
    return shorten_text(text)


def describe_setting(document: Document, path: KeyPath) -> str:
    """Return the subject of a sentence about a path: `hosts = 6`, or only `env.TOKEN`."""
    value = shown_value(document, path)
    return format_key_path(path) if value is None else f"{format_key_path(path)} = {value}"


def translate_errors(
    error: ValidationError, document: Document, schema: type[BaseModel] = JobSpec
) -> Iterator[Fault]:
    """Yield the faults of a file with this schema, at most one per path, sorted by line and limited in number."""
    errors = error.errors(include_url=False, include_input=False)[:_MAX_TRANSLATED_ERRORS]
    details = [
        (introspection.find_spot(schema, detail["loc"]), detail)
        for detail in errors
        if detail["type"] != _DEFAULT_NOT_CALLED
    ]
    details.sort(key=lambda pair: document.locate(Fault(pair[0].path, "")).line)
    labels: dict[KeyPath, set[str]] = {}
    for spot, _ in details:
        if spot.union is not None:
            labels.setdefault(spot.union, set()).add(str(spot.label))
    reported: set[tuple[KeyPath, bool]] = set()
    for spot, detail in details:
        if spot.union is not None and len(labels[spot.union]) > 1:
            settled = _settle_alternative(spot, spot.union, document)
            if settled is None:
                continue
            spot = settled
        if (spot.path, spot.is_key) not in reported and len(reported) <= 2 * MAX_SHOWN_FAULTS:
            reported.add((spot.path, spot.is_key))
            yield _translate_error(spot, detail, document)


def _settle_alternative(spot: Spot, union: KeyPath, document: Document) -> Spot | None:
    """Return the spot if its alternative has the form of the value, None if another has, the union if none has."""
    value, kind = value_at(document.data, union), introspection.types_at(spot.root, union)[0]
    attribute = "model" if isinstance(value, dict) else "items" if isinstance(value, list) else None
    candidates = [
        member
        for member in kind.members
        if attribute is not None and getattr(member, attribute) is not None
    ]
    if not candidates:
        return Spot(union, kind, spot.block, root=spot.root)
    return spot if kind.find_member(spot.label) in candidates else None


def _translate_error(spot: Spot, detail: ErrorDetails, document: Document) -> Fault:
    if detail["type"] == "extra_forbidden":
        return _unknown_key_fault(spot)
    if detail["type"] == "missing":
        hint = _EXAMPLES.get(spot.path)
        if hint is None and spot.block is not None and spot.kind is not None:
            key = str(spot.path[-1])
            meaning = f"{key}: {introspection.block_fields(spot.block)[key].description}."
            hint = (
                f"it is {introspection.describe_type(spot.kind)}."
                if spot.kind.literals
                else meaning
            )
        return Fault(spot.path, f"{format_key_path(spot.path)} is missing.", hint)
    if detail["type"].startswith("union_tag"):
        return _unknown_block_fault(spot, document)
    if spot.is_key:
        expected = (
            introspection.describe_type(spot.kind) if spot.kind is not None else "one of its keys"
        )
        name = json.dumps(shorten_text(str(spot.path[-1])), ensure_ascii=False)
        return Fault(
            spot.path,
            f"{format_key_path(spot.path[:-1])} has the key {name}, which is not {expected}.",
        )
    # The value is not a block, so all alternatives are named.
    if spot.path == spot.union and spot.kind is not None:
        spot = Spot(
            spot.path, introspection.types_at(spot.root, spot.path)[0], spot.block, root=spot.root
        )
    error = detail.get("ctx", {}).get("error")
    if not isinstance(error, ValueError):
        return _wrong_value_fault(spot, document)
    # Our validators raise either a predicate or a sentence.
    if re.match(r"(does|needs|is|must) ", str(error)):
        return Fault(spot.path, f"{describe_setting(document, spot.path)} {error}.")
    return Fault(spot.path, f"{format_key_path(spot.path)}: {error}.")


def with_expected_number(fault: Fault) -> Fault:
    """Add the expected number to a fault about .nan or .inf; return other faults unchanged."""
    if fault.not_finite is None or not fault.path:
        return fault
    kinds = introspection.types_at(JobSpec, fault.path)
    numbers = [
        member
        for kind in kinds
        for member in (kind.members or (kind,))
        if member.bare in (int, float)
    ]
    if not numbers:
        return fault
    expected = introspection.describe_type(numbers[0]).replace("a number", "a finite number")
    message = f"{format_key_path(fault.path)} = {shorten_text(fault.not_finite)} is not {expected}."
    return dataclasses.replace(fault, message=message, hint=None)


def _find_words(kind: Type) -> Words | None:
    return next(
        (constraint for constraint in kind.constraints if isinstance(constraint, Words)), None
    )


def _unknown_key_fault(spot: Spot) -> Fault:
    key = str(spot.path[-1])
    above = format_key_path(spot.path[:-1]) or spot.root.__name__.removesuffix("Spec").lower()
    name = "…" if credentials.has_credential(key) else shorten_text(key)
    message = f'unknown key "{name}" in {above}.'
    keys = list(introspection.block_fields(spot.block)) if spot.block is not None else []
    if spot.union is not None and (sibling := _alternative_hint(key, spot)):
        return Fault(spot.path, message, sibling)
    key_start = key[:MAX_SHOWN_CHARS]
    suggestions = [f'"{near}"' for near in find_nearest(key_start, keys)] or _find_elsewhere(
        key, spot
    )
    suggestions = suggestions or [f'"{near}"' for near in find_completions(key_start, keys)]
    if suggestions:
        return Fault(spot.path, f"{message} Did you mean {join_choices(suggestions)}?")
    if len(keys) > 20 and spot.root is JobSpec:
        return Fault(spot.path, message, "`launcher schema --markdown` lists every key.")
    return Fault(spot.path, message, f"its keys are {', '.join(keys)}.")


def _find_elsewhere(key: str, spot: Spot) -> list[str]:
    """Return the quoted keys with this name that are nearest to the top of the schema, empty if there are many."""
    paths = dict.fromkeys(
        path for path, _ in introspection.walk_fields(spot.root) if path[-1] == key
    )
    nearest_paths = [path for path in paths if len(path) == min(map(len, paths))]
    quoted = [
        f'"{format_key_path(path)}"' + (" at the top level" if len(path) == 1 else "")
        for path in nearest_paths
    ]
    return quoted if len(quoted) <= 3 else []


def _alternative_hint(key: str, spot: Spot) -> str | None:
    """Return a hint for a key that belongs to another alternative of the union."""
    kind = introspection.types_at(spot.root, spot.union or ())[0]
    blocks = (member.model for member in kind.members if member.model is not None)
    models = [block for block in blocks if key in introspection.block_fields(block)]
    chooser = introspection.discriminator_key(kind)
    if not models:
        return None
    if chooser is None:
        return f"keep {introspection.describe_type(kind).removeprefix('a block with ')}."
    names = [
        str(name)
        for model in models
        for name in Type.from_field(model.model_fields[chooser]).literals
    ]
    return f"it goes with {chooser}: {join_choices(names)}." if names else None


def _unknown_block_fault(spot: Spot, document: Document) -> Fault:
    """Return the fault of a union of blocks whose discriminator is missing or unknown."""
    kind = introspection.types_at(spot.root, spot.path)[0]
    value = value_at(document.data, spot.path)
    key = introspection.discriminator_key(kind)
    if not isinstance(value, dict):
        return Fault(
            spot.path, _mismatch_message(document, spot.path, introspection.describe_type(kind))
        )
    if key is None:
        expected = introspection.describe_type(kind).removeprefix("a block with one of ")
        return Fault(spot.path, f"{format_key_path(spot.path)} has none of {expected}.")
    path = (*spot.path, key)
    expected = introspection.describe_choices(kind)
    if key not in value:
        return Fault(path, f"{format_key_path(path)} is missing.", f"it is {expected}.")
    offered = re.findall(r"[\w-]+", expected)
    return Fault(
        path, f"{_mismatch_message(document, path, expected)}{_did_you_mean(value[key], offered)}"
    )


def _mismatch_message(document: Document, path: KeyPath, expected: str) -> str:
    value = value_at(document.data, path)
    if value and isinstance(value, dict | list):
        return (
            f"{format_key_path(path)} is a {'block' if isinstance(value, dict) else 'list'}, "
            f"not {expected}."
        )
    if value is None:
        return f"{format_key_path(path)} is empty, not {expected}."
    return f"{describe_setting(document, path)} is not {expected}."


def _wrong_value_fault(spot: Spot, document: Document) -> Fault:
    value = value_at(document.data, spot.path)
    kind = spot.kind or Type(Any)
    expected = introspection.describe_type(kind)
    message = _mismatch_message(document, spot.path, expected)
    if shown_value(document, spot.path) is None:
        if spot.path[:1] != ("secrets",) or len(spot.path) > 2:
            return Fault(spot.path, message)
        name = spot.path[1] if len(spot.path) > 1 else "NAME"
        hint = (
            f"write {name}: {{name: my-secret, key: token}}; the value itself stays in the Secret."
        )
        return Fault(spot.path, message, hint)
    members = () if _find_words(kind) else kind.members or (kind,)
    literals = [str(literal) for member in members for literal in member.literals]
    return Fault(
        spot.path,
        message + _did_you_mean(value, literals),
        _suggest_value(kind, value, document.texts.get(spot.path)),
    )


def _suggest_value(kind: Type, value: Any, written: str | None) -> str | None:
    """Return the valid value that was clearly meant, or None. `written` is the text in the file."""
    words = _find_words(kind)
    if words is not None:
        return words.suggest(value) if isinstance(value, str) else None
    if kind.members:
        return next(
            filter(None, (_suggest_value(member, value, written) for member in kind.members)), None
        )
    if isinstance(value, str):
        return _suggest_for_text(kind, value)
    if kind.bare is str and written is not None and _is_legal(kind, written):
        return f'write "{written}", in quotes.'
    if (
        isinstance(value, float)
        and kind.bare is int
        and value.is_integer()
        and _is_legal(kind, int(value))
    ):
        return f"write {int(value)}."
    return None


def _suggest_for_text(kind: Type, text: str) -> str | None:
    if kind.bare is bool and text.lower() in ("yes", "on", "y", "no", "off", "n"):
        return (
            f"YAML 1.2 reads {text} as text; write "
            f"{'true' if text.lower() in ('yes', 'on', 'y') else 'false'}."
        )
    if kind.bare in (int, float):
        number = _parse_number(text.strip(), kind)
        how = (
            "with a decimal point"
            if kind.bare is float and _COMMA.fullmatch(text)
            else "without quotes or separators"
        )
        return None if number is None else f"write {number}, {how}."
    if "module:Name" in introspection.describe_type(kind) and re.fullmatch(r"\w+(\.\w+)+", text):
        return f"write {':'.join(text.rsplit('.', 1))}."
    return None


# Before three digits, a comma separates thousands in some countries and a fraction in others.
_GROUPED = re.compile(
    r"[-+]?[1-9][0-9]{0,2}(?:(?P<by>[_, ])[0-9]{3})(?:(?P=by)[0-9]{3})*(?P<rest>\.[0-9]+)?"
)
_UNDERSCORES = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)+")
_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+")


def _parse_number(text: str, kind: Type) -> str | None:
    """Return the number in a text with quotes or separators, or None if it is ambiguous."""
    grouped = _GROUPED.fullmatch(text)
    if _COMMA.fullmatch(text) and kind.bare is float:
        if grouped is not None:
            return None
        digits = text.replace(",", ".")
    else:
        digits = re.sub(r"[_, ]", "", text) if grouped or _UNDERSCORES.fullmatch(text) else text
    try:
        number = reader.resolve_scalar(digits)
    except ValueError:
        return None
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return (
        digits
        if is_number and not reader.has_two_readings(digits) and _is_legal(kind, number)
        else None
    )


def _is_legal(kind: Type, value: Any) -> bool:
    annotation: Any = Annotated[kind.bare, *kind.constraints] if kind.constraints else kind.bare
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _did_you_mean(value: Any, options: list[str]) -> str:
    near = (
        find_nearest(value, options) or find_completions(value, options)
        if isinstance(value, str)
        else []
    )
    return f' Did you mean "{near[0]}"?' if near else ""
