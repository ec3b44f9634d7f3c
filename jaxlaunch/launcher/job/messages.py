"""Translation of pydantic's validation errors into messages with a suggestion.

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
from jaxlaunch.launcher.job import credentials, foreign_keys, introspection
from jaxlaunch.launcher.job.introspection import ErrorLocation, Type, TypeDescription
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.wording import MAX_SHOWN_CHARS, format_key_path, join_choices, shorten_text
from jaxlaunch.launcher.yaml import reader
from jaxlaunch.launcher.yaml.reader import Document
from jaxlaunch.spelling import find_completions, find_nearest
from jaxlaunch.trainer.spec import PredicateError

# Only this many characters of a value are searched for credentials.
_MAX_SEARCHED_CHARS = 1000
# The error type of a default that depends on another key that is wrong.
_DEFAULT_NOT_CALLED = "default_factory_not_called"
# At most this many errors of one file are translated.
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
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            return None
    return data


def shown_value(document: Document, path: KeyPath) -> str | None:
    """Return a scalar as written in the file; None if it is not a scalar or must not be shown."""
    value = value_at(document.data, path)
    if credentials.is_private_path(path) or isinstance(value, dict | list):
        return None
    text = document.texts.get(path) or json.dumps(value, ensure_ascii=False)
    is_hidden = credentials.has_credential(text[:_MAX_SEARCHED_CHARS])
    return None if is_hidden else shorten_text(text)


def describe_setting(document: Document, path: KeyPath) -> str:
    """Return the subject of a sentence about a path: `hosts = 6`, or only `env.TOKEN`."""
    value = shown_value(document, path)
    return format_key_path(path) if value is None else f"{format_key_path(path)} = {value}"


def translate_errors(
    error: ValidationError, document: Document, schema: type[BaseModel] = JobSpec
) -> Iterator[Fault]:
    """Yield the faults of a file, at most one per path, sorted by line and limited in number."""
    errors = error.errors(include_url=False, include_input=False)[:_MAX_TRANSLATED_ERRORS]
    details = [
        (introspection.locate_error(schema, detail["loc"]), detail)
        for detail in errors
        if detail["type"] != _DEFAULT_NOT_CALLED
    ]
    details.sort(key=lambda pair: document.locate(Fault(pair[0].path, "")).line)
    # The alternatives of each union that report errors.
    labels: dict[KeyPath, set[str]] = {}
    for original_location, _ in details:
        if original_location.union is not None:
            labels.setdefault(original_location.union, set()).add(str(original_location.label))
    reported: set[tuple[KeyPath, bool]] = set()
    for original_location, detail in details:
        location: ErrorLocation | None = original_location
        if original_location.union is not None and len(labels[original_location.union]) > 1:
            location = _resolve_alternative(original_location, original_location.union, document)
        if location is None or len(reported) > 2 * MAX_SHOWN_FAULTS:
            continue
        if (location.path, location.is_key) not in reported:
            reported.add((location.path, location.is_key))
            yield _translate_error(location, detail, document)


def _resolve_alternative(
    location: ErrorLocation, union: KeyPath, document: Document
) -> ErrorLocation | None:
    """Return the location if its alternative fits the value, that of the union if none does."""
    value, kind = value_at(document.data, union), introspection.types_at(location.root, union)[0]
    candidates = [
        member
        for member in kind.members
        if (member.model is not None and isinstance(value, dict))
        or (member.items is not None and isinstance(value, list))
    ]
    if not candidates:
        return ErrorLocation(union, kind, location.block, root=location.root)
    return location if kind.find_member(location.label) in candidates else None


def _translate_error(location: ErrorLocation, detail: ErrorDetails, document: Document) -> Fault:
    path, setting = location.path, format_key_path(location.path)
    if detail["type"] == "extra_forbidden":
        return _unknown_key_fault(location)
    if detail["type"] == "missing":
        hint = _EXAMPLES.get(path)
        if hint is None and location.block is not None and location.kind is not None:
            field = introspection.block_fields(location.block)[str(path[-1])]
            hint = f"{path[-1]}: {field.description}."
            if location.kind.literals:
                hint = f"it is {introspection.describe_type(location.kind)}."
        return Fault(path, f"{setting} is missing.", hint)
    if detail["type"].startswith("union_tag"):
        return _unknown_block_fault(location, document)
    if location.is_key:
        expected = (
            introspection.describe_type(location.kind) if location.kind else "one of its keys"
        )
        name = json.dumps(shorten_text(str(path[-1])), ensure_ascii=False)
        parent = format_key_path(path[:-1])
        return Fault(path, f"{parent} has the key {name}, which is not {expected}.")
    # The value is not a block, so all alternatives are named.
    if path == location.union and location.kind is not None:
        location = ErrorLocation(
            path, introspection.types_at(location.root, path)[0], location.block, root=location.root
        )
    error = detail.get("ctx", {}).get("error")
    if not isinstance(error, ValueError):
        return _wrong_value_fault(location, document)
    if isinstance(error, PredicateError):
        return Fault(path, f"{describe_setting(document, path)} {error}.")
    return Fault(path, f"{setting}: {error}.")


def add_expected_number(fault: Fault) -> Fault:
    """Add the expected number to a fault about .nan or .inf; return other faults unchanged."""
    if fault.not_finite is None or not fault.path:
        return fault
    for kind in introspection.types_at(JobSpec, fault.path):
        for member in kind.members or (kind,):
            if member.bare in (int, float):
                setting = f"{format_key_path(fault.path)} = {shorten_text(fault.not_finite)}"
                expected = introspection.describe_type(member, is_finite=True)
                message = f"{setting} is not {expected}."
                return dataclasses.replace(fault, message=message, hint=None)
    return fault


def _find_description(kind: Type) -> TypeDescription | None:
    return next((item for item in kind.constraints if isinstance(item, TypeDescription)), None)


def _unknown_key_fault(location: ErrorLocation) -> Fault:
    key = str(location.path[-1])
    parent = (
        format_key_path(location.path[:-1]) or location.root.__name__.removesuffix("Spec").lower()
    )
    name = "…" if credentials.has_credential(key) else shorten_text(key)
    message = f'unknown key "{name}" in {parent}.'
    keys = list(introspection.block_fields(location.block)) if location.block is not None else []
    if location.union is not None and (sibling_hint := _alternative_hint(key, location)):
        return Fault(location.path, message, sibling_hint)
    key_prefix = key[:MAX_SHOWN_CHARS]
    # The names of other tools are known, and would also resemble keys that mean something else.
    if location.root is JobSpec and (counterpart := foreign_keys.find_counterpart(key_prefix)):
        return Fault(location.path, message, counterpart.hint)
    suggestions = (
        [f'"{match}"' for match in find_nearest(key_prefix, keys)]
        or _find_in_other_blocks(key, location)
        or [f'"{match}"' for match in find_completions(key_prefix, keys)]
    )
    if suggestions:
        return Fault(location.path, f"{message} Did you mean {join_choices(suggestions)}?")
    hint = f"its keys are {', '.join(keys)}."
    if len(keys) > 20 and location.root is JobSpec:
        hint = "`launcher schema --markdown` lists every key."
    return Fault(location.path, message, hint)


def _find_in_other_blocks(key: str, location: ErrorLocation) -> list[str]:
    """Return the quoted paths of this key that are nearest to the top of the schema, if few."""
    paths = [path for path, _ in introspection.walk_fields(location.root) if path[-1] == key]
    depth = min(map(len, paths), default=0)
    nearest_paths = dict.fromkeys(path for path in paths if len(path) == depth)
    suffix = " at the top level" if depth == 1 else ""
    quoted = [f'"{format_key_path(path)}"{suffix}' for path in nearest_paths]
    return quoted if len(quoted) <= 3 else []


def _alternative_hint(key: str, location: ErrorLocation) -> str | None:
    """Return a hint for a key that belongs to another alternative of the union."""
    kind = introspection.types_at(location.root, location.union or ())[0]
    models = [block for block in kind.models if key in introspection.block_fields(block)]
    discriminator = introspection.discriminator_key(kind)
    if not models:
        return None
    if discriminator is None:
        return f"keep one of the keys {introspection.list_first_keys(kind)}."
    choices = (Type.from_field(model.model_fields[discriminator]).literals for model in models)
    names = [str(name) for literals in choices for name in literals]
    return f"it goes with {discriminator}: {join_choices(names)}." if names else None


def _unknown_block_fault(location: ErrorLocation, document: Document) -> Fault:
    """Return the fault of a union of blocks whose discriminator is missing or unknown."""
    kind = introspection.types_at(location.root, location.path)[0]
    value, expected = value_at(document.data, location.path), introspection.describe_type(kind)
    key = introspection.discriminator_key(kind)
    if not isinstance(value, dict):
        return Fault(location.path, _mismatch_message(document, location.path, expected))
    if key is None:
        keys = introspection.list_first_keys(kind)
        setting = format_key_path(location.path)
        return Fault(location.path, f"{setting} has none of the keys {keys}.")
    path = (*location.path, key)
    expected = introspection.describe_choices(kind)
    if key not in value:
        return Fault(path, f"{format_key_path(path)} is missing.", f"it is {expected}.")
    suggestion = _format_suggestion(value[key], introspection.discriminator_values(kind))
    return Fault(path, _mismatch_message(document, path, expected) + suggestion)


def _mismatch_message(document: Document, path: KeyPath, expected: str) -> str:
    value, key = value_at(document.data, path), format_key_path(path)
    if value and isinstance(value, dict | list):
        return f"{key} is a {'block' if isinstance(value, dict) else 'list'}, not {expected}."
    if value is None:
        return f"{key} is empty, not {expected}."
    return f"{describe_setting(document, path)} is not {expected}."


def _wrong_value_fault(location: ErrorLocation, document: Document) -> Fault:
    path, kind = location.path, location.kind or Type(Any)
    value = value_at(document.data, path)
    message = _mismatch_message(document, path, introspection.describe_type(kind))
    if shown_value(document, path) is None:
        if path[:1] != ("secrets",) or len(path) > 2:
            return Fault(path, message)
        name = path[1] if len(path) > 1 else "NAME"
        advice = f"write {name}: {{name: my-secret, key: token}}"
        return Fault(path, message, f"{advice}; the value itself stays in the Secret.")
    members = () if _find_description(kind) else kind.members or (kind,)
    message += _format_suggestion(
        value, [str(item) for member in members for item in member.literals]
    )
    return Fault(path, message, _suggest_value(kind, value, document.texts.get(path)))


def _suggest_value(kind: Type, value: Any, source_text: str | None) -> str | None:
    """Return a hint with the value that was clearly meant, or None.

    `source_text` is the value as written in the file.
    """
    if (description := _find_description(kind)) is not None:
        return description.suggest(value) if isinstance(value, str) else None
    if kind.members:
        suggestions = (_suggest_value(member, value, source_text) for member in kind.members)
        return next(filter(None, suggestions), None)
    if isinstance(value, str):
        return _suggest_for_text(kind, value)
    if kind.bare is str and source_text is not None and _is_valid(kind, source_text):
        return f'write "{source_text}", in quotes.'
    if kind.bare is int and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}." if _is_valid(kind, int(value)) else None
    return None


def _suggest_for_text(kind: Type, text: str) -> str | None:
    if kind.bare is bool and text.lower() in ("yes", "on", "y", "no", "off", "n"):
        meaning = "true" if text.lower() in ("yes", "on", "y") else "false"
        return f"YAML 1.2 reads {text} as text; write {meaning}."
    if kind.bare in (int, float):
        number = _parse_number(text.strip(), kind)
        has_comma = kind.bare is float and _DECIMAL_COMMA.fullmatch(text)
        form = "with a decimal point" if has_comma else "without quotes or separators"
        return None if number is None else f"write {number}, {form}."
    if introspection.is_user_object(kind) and re.fullmatch(r"\w+(\.\w+)+", text):
        return f"write {':'.join(text.rsplit('.', 1))}."
    return None


# Before three digits, a comma separates thousands in some countries and a fraction in others.
_GROUPED_DIGITS = re.compile(
    r"[-+]?[1-9][0-9]{0,2}(?:(?P<separator>[_, ])[0-9]{3})(?:(?P=separator)[0-9]{3})*(?:\.[0-9]+)?"
)
_UNDERSCORED_DIGITS = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)+")
_DECIMAL_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+")


def _parse_number(text: str, kind: Type) -> str | None:
    """Return the number in a text with quotes or separators, or None if it is ambiguous."""
    grouped, digits = _GROUPED_DIGITS.fullmatch(text), text
    if _DECIMAL_COMMA.fullmatch(text) and kind.bare is float:
        if grouped is not None:
            return None
        digits = text.replace(",", ".")
    elif grouped or _UNDERSCORED_DIGITS.fullmatch(text):
        digits = re.sub(r"[_, ]", "", text)
    try:
        number = reader.resolve_scalar(digits)
    except ValueError:
        return None
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    return digits if not reader.has_two_readings(digits) and _is_valid(kind, number) else None


def _is_valid(kind: Type, value: Any) -> bool:
    annotation: Any = Annotated[kind.bare, *kind.constraints] if kind.constraints else kind.bare
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _format_suggestion(value: Any, options: list[str]) -> str:
    if not isinstance(value, str):
        return ""
    matches = find_nearest(value, options) or find_completions(value, options)
    return f' Did you mean "{matches[0]}"?' if matches else ""
