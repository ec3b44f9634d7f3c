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

from jaxlaunch.launcher.errors import SHOWN_FAULTS, Fault, KeyPath
from jaxlaunch.launcher.job import credentials, introspection
from jaxlaunch.launcher.job.introspection import Spot, Type, Words
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.wording import LONGEST_SHOWN, cut, dotted, either
from jaxlaunch.launcher.yaml import reader
from jaxlaunch.launcher.yaml.reader import Document
from jaxlaunch.spelling import in_full, nearest

_LONGEST_SEARCHED = 1000
# The error type of a default that depends on another key that is wrong.
_FOLLOWS = "default_factory_not_called"
# Errors of one file that are translated.
_MOST_TRANSLATED = 1000
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
            data = data[key] if isinstance(data, list) and isinstance(key, int) and key < len(data) else None
    return data


def shown(document: Document, path: KeyPath) -> str | None:
    """Return a scalar as written in the file; None if it is not a scalar or must not be shown."""
    value = value_at(document.data, path)
    if credentials.is_private(path) or isinstance(value, dict | list):
        return None
    text = document.texts.get(path) or json.dumps(value, ensure_ascii=False)
    if credentials.in_value(text[:_LONGEST_SEARCHED]):
        return None
    return cut(text)


def describe(document: Document, path: KeyPath) -> str:
    """Return the subject of a sentence about a path: `hosts = 6`, or only `env.TOKEN`."""
    value = shown(document, path)
    return dotted(path) if value is None else f"{dotted(path)} = {value}"


def translate(error: ValidationError, document: Document, schema: type[BaseModel] = JobSpec) -> Iterator[Fault]:
    """Yield the faults of a file with this schema, at most one per path, sorted by line and limited in number."""
    some = error.errors(include_url=False, include_input=False)[:_MOST_TRANSLATED]
    details = [(introspection.find(schema, detail["loc"]), detail) for detail in some if detail["type"] != _FOLLOWS]
    details.sort(key=lambda pair: document.locate(Fault(pair[0].path, "")).line)
    labels: dict[KeyPath, set[str]] = {}
    for spot, _ in details:
        if spot.union is not None:
            labels.setdefault(spot.union, set()).add(str(spot.label))
    seen: set[tuple[KeyPath, bool]] = set()
    for spot, detail in details:
        if spot.union is not None and len(labels[spot.union]) > 1:
            settled = _settle(spot, spot.union, document)
            if settled is None:
                continue
            spot = settled
        if (spot.path, spot.is_key) not in seen and len(seen) <= 2 * SHOWN_FAULTS:
            seen.add((spot.path, spot.is_key))
            yield _fault(spot, detail, document)


def _settle(spot: Spot, union: KeyPath, document: Document) -> Spot | None:
    """Return the spot if its alternative has the form of the value, None if another has, the union if none has."""
    value, kind = value_at(document.data, union), introspection.at(spot.root, union)[0]
    form = "model" if isinstance(value, dict) else "items" if isinstance(value, list) else None
    meant = [member for member in kind.members if form is not None and getattr(member, form) is not None]
    if not meant:
        return Spot(union, kind, spot.block, root=spot.root)
    return spot if kind.member(spot.label) in meant else None


def _fault(spot: Spot, detail: ErrorDetails, document: Document) -> Fault:
    if detail["type"] == "extra_forbidden":
        return _unknown_key(spot)
    if detail["type"] == "missing":
        hint = _EXAMPLES.get(spot.path)
        if hint is None and spot.block is not None and spot.kind is not None:
            key = str(spot.path[-1])
            meaning = f"{key}: {introspection.fields(spot.block)[key].description}."
            hint = f"it is {introspection.words(spot.kind)}." if spot.kind.literals else meaning
        return Fault(spot.path, f"{dotted(spot.path)} is missing.", hint)
    if detail["type"].startswith("union_tag"):
        return _unknown_block(spot, document)
    if spot.is_key:
        wanted = introspection.words(spot.kind) if spot.kind is not None else "one of its keys"
        name = json.dumps(cut(str(spot.path[-1])), ensure_ascii=False)
        return Fault(spot.path, f"{dotted(spot.path[:-1])} has the key {name}, which is not {wanted}.")
    # The value is not a block, so all alternatives are named.
    if spot.path == spot.union and spot.kind is not None:
        spot = Spot(spot.path, introspection.at(spot.root, spot.path)[0], spot.block, root=spot.root)
    error = detail.get("ctx", {}).get("error")
    if not isinstance(error, ValueError):
        return _wrong_value(spot, document)
    # Our validators raise either a predicate or a sentence.
    if re.match(r"(does|needs|is|must) ", str(error)):
        return Fault(spot.path, f"{describe(document, spot.path)} {error}.")
    return Fault(spot.path, f"{dotted(spot.path)}: {error}.")


def with_wanted_number(fault: Fault) -> Fault:
    """Add the expected number to a fault about .nan or .inf; return other faults unchanged."""
    if fault.not_finite is None or not fault.path:
        return fault
    kinds = introspection.at(JobSpec, fault.path)
    numbers = [member for kind in kinds for member in (kind.members or (kind,)) if member.bare in (int, float)]
    if not numbers:
        return fault
    wanted = introspection.words(numbers[0]).replace("a number", "a finite number")
    message = f"{dotted(fault.path)} = {cut(fault.not_finite)} is not {wanted}."
    return dataclasses.replace(fault, message=message, hint=None)


def _words_of(kind: Type) -> Words | None:
    return next((constraint for constraint in kind.constraints if isinstance(constraint, Words)), None)


def _unknown_key(spot: Spot) -> Fault:
    key, above = str(spot.path[-1]), dotted(spot.path[:-1]) or spot.root.__name__.removesuffix("Spec").lower()
    name = "…" if credentials.in_value(key) else cut(key)
    message = f'unknown key "{name}" in {above}.'
    known = list(introspection.fields(spot.block)) if spot.block is not None else []
    if spot.union is not None and (sibling := _alternative_with(key, spot)):
        return Fault(spot.path, message, sibling)
    short = key[:LONGEST_SHOWN]
    meant = [f'"{near}"' for near in nearest(short, known)] or _elsewhere(key, spot)
    meant = meant or [f'"{near}"' for near in in_full(short, known)]
    if meant:
        return Fault(spot.path, f"{message} Did you mean {either(meant)}?")
    if len(known) > 20 and spot.root is JobSpec:
        return Fault(spot.path, message, "`launcher schema --markdown` lists every key.")
    return Fault(spot.path, message, f"its keys are {', '.join(known)}.")


def _elsewhere(key: str, spot: Spot) -> list[str]:
    """Return the quoted keys with this name that are nearest to the top of the schema, empty if there are many."""
    paths = dict.fromkeys(path for path, _ in introspection.walk(spot.root) if path[-1] == key)
    nearest_paths = [path for path in paths if len(path) == min(map(len, paths))]
    quoted = [f'"{dotted(path)}"' + (" at the top level" if len(path) == 1 else "") for path in nearest_paths]
    return quoted if len(quoted) <= 3 else []


def _alternative_with(key: str, spot: Spot) -> str | None:
    """Return a hint for a key that belongs to another alternative of the union."""
    kind = introspection.at(spot.root, spot.union or ())[0]
    blocks = (member.model for member in kind.members if member.model is not None)
    models = [block for block in blocks if key in introspection.fields(block)]
    chooser = introspection.discriminator(kind)
    if not models:
        return None
    if chooser is None:
        return f"keep {introspection.words(kind).removeprefix('a block with ')}."
    names = [str(name) for model in models for name in Type.of_field(model.model_fields[chooser]).literals]
    return f"it goes with {chooser}: {either(names)}." if names else None


def _unknown_block(spot: Spot, document: Document) -> Fault:
    """Return the fault of a union of blocks whose discriminator is missing or unknown."""
    kind, value = introspection.at(spot.root, spot.path)[0], value_at(document.data, spot.path)
    key = introspection.discriminator(kind)
    if not isinstance(value, dict):
        return Fault(spot.path, _is_not(document, spot.path, introspection.words(kind)))
    if key is None:
        wanted = introspection.words(kind).removeprefix("a block with one of ")
        return Fault(spot.path, f"{dotted(spot.path)} has none of {wanted}.")
    path = (*spot.path, key)
    wanted = introspection.choices(kind)
    if key not in value:
        return Fault(path, f"{dotted(path)} is missing.", f"it is {wanted}.")
    offered = re.findall(r"[\w-]+", wanted)
    return Fault(path, f"{_is_not(document, path, wanted)}{_near(value[key], offered)}")


def _is_not(document: Document, path: KeyPath, wanted: str) -> str:
    value = value_at(document.data, path)
    if value and isinstance(value, dict | list):
        return f"{dotted(path)} is a {'block' if isinstance(value, dict) else 'list'}, not {wanted}."
    if value is None:
        return f"{dotted(path)} is empty, not {wanted}."
    return f"{describe(document, path)} is not {wanted}."


def _wrong_value(spot: Spot, document: Document) -> Fault:
    value = value_at(document.data, spot.path)
    kind = spot.kind or Type(Any)
    wanted = introspection.words(kind)
    message = _is_not(document, spot.path, wanted)
    if shown(document, spot.path) is None:
        if spot.path[:1] != ("secrets",) or len(spot.path) > 2:
            return Fault(spot.path, message)
        name = spot.path[1] if len(spot.path) > 1 else "NAME"
        hint = f"write {name}: {{name: my-secret, key: token}}; the value itself stays in the Secret."
        return Fault(spot.path, message, hint)
    members = () if _words_of(kind) else kind.members or (kind,)
    literals = [str(literal) for member in members for literal in member.literals]
    return Fault(spot.path, message + _near(value, literals), _suggestion(kind, value, document.texts.get(spot.path)))


def _suggestion(kind: Type, value: Any, written: str | None) -> str | None:
    """Return the valid value that was clearly meant, or None. `written` is the text in the file."""
    described = _words_of(kind)
    if described is not None:
        return described.suggest(value) if isinstance(value, str) else None
    if kind.members:
        return next(filter(None, (_suggestion(member, value, written) for member in kind.members)), None)
    if isinstance(value, str):
        return _of_text(kind, value)
    if kind.bare is str and written is not None and _is_legal(kind, written):
        return f'write "{written}", in quotes.'
    if isinstance(value, float) and kind.bare is int and value.is_integer() and _is_legal(kind, int(value)):
        return f"write {int(value)}."
    return None


def _of_text(kind: Type, text: str) -> str | None:
    if kind.bare is bool and text.lower() in ("yes", "on", "y", "no", "off", "n"):
        return f"YAML 1.2 reads {text} as text; write {'true' if text.lower() in ('yes', 'on', 'y') else 'false'}."
    if kind.bare in (int, float):
        found = _number(text.strip(), kind)
        how = (
            "with a decimal point" if kind.bare is float and _COMMA.fullmatch(text) else "without quotes or separators"
        )
        return None if found is None else f"write {found}, {how}."
    if "module:Name" in introspection.words(kind) and re.fullmatch(r"\w+(\.\w+)+", text):
        return f"write {':'.join(text.rsplit('.', 1))}."
    return None


# Before three digits, a comma separates thousands in some countries and a fraction in others.
_GROUPED = re.compile(r"[-+]?[1-9][0-9]{0,2}(?:(?P<by>[_, ])[0-9]{3})(?:(?P=by)[0-9]{3})*(?P<rest>\.[0-9]+)?")
_UNDERSCORES = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)+")
_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+")


def _number(text: str, kind: Type) -> str | None:
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
    return digits if is_number and not reader.has_two_readings(digits) and _is_legal(kind, number) else None


def _is_legal(kind: Type, value: Any) -> bool:
    annotation: Any = Annotated[kind.bare, *kind.constraints] if kind.constraints else kind.bare
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _near(value: Any, options: list[str]) -> str:
    near = nearest(value, options) or in_full(value, options) if isinstance(value, str) else []
    return f' Did you mean "{near[0]}"?' if near else ""
