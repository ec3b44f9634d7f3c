"""What pydantic found wrong with a job, in our own words: what stands there, what is wanted, what was probably meant.

No word of pydantic's reaches a reader, and no value that may be a secret.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launcher import credentials, keys, scalars
from launcher.document import Document
from launcher.errors import SHOWN_FAULTS, Fault, KeyPath
from launcher.keys import Spot, Type, Words
from launcher.schema import JobSpec
from launcher.wording import LONGEST_SHOWN, cut, dotted, either

_LONGEST_SEARCHED = 1000
_FOLLOWS = "default_factory_not_called"  # a default that rests on another key, itself wrong
_MOST_TRANSLATED = 1000  # of one file's errors
_EXAMPLES: Mapping[KeyPath, str] = {
    ("name",): "for example name: my-run",
    ("accelerator",): "for example accelerator: {type: cpu, per_host: 4}",
    ("train", "task"): "trainer.tasks.classify:Classify, trainer.tasks.lm:NextToken, or module:Name of your own.",
}


def value_at(data: Any, path: KeyPath) -> Any:
    """What stands at a path of plain data; None where nothing does."""
    for key in path:
        if isinstance(data, dict):
            data = data.get(key)
        else:
            data = data[key] if isinstance(data, list) and isinstance(key, int) and key < len(data) else None
    return data


def shown(document: Document, path: KeyPath) -> str | None:
    """A scalar as it is written in the file; None for a value that is not to be repeated, or is no scalar."""
    value = value_at(document.data, path)
    if credentials.is_private(path) or isinstance(value, dict | list):
        return None
    text = document.texts.get(path) or json.dumps(value, ensure_ascii=False)
    if credentials.in_value(text[:_LONGEST_SEARCHED]):
        return None
    return cut(text)


def describe(document: Document, path: KeyPath) -> str:
    """The subject of a sentence about a path: `hosts = 6`, or only `env.TOKEN`."""
    value = shown(document, path)
    return dotted(path) if value is None else f"{dotted(path)} = {value}"


def translate(error: ValidationError, document: Document, schema: type[BaseModel] = JobSpec) -> Iterator[Fault]:
    """The faults of a file of this schema, no more than anyone reads, with one for each path."""
    some = error.errors(include_url=False, include_input=False)[:_MOST_TRANSLATED]
    details = [(keys.find(schema, detail["loc"]), detail) for detail in some if detail["type"] != _FOLLOWS]
    details.sort(key=lambda one: document.locate(Fault(one[0].path, "")).line)
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
    """The spot where its alternative is the one that was meant, none where another is, the union where none is."""
    value, kind = value_at(document.data, union), keys.at(spot.root, union)[0]
    meant = [
        member
        for member in kind.members
        if (isinstance(value, dict) and member.model is not None)
        or (isinstance(value, list) and member.items is not None)
    ]
    if not meant:
        return Spot(union, kind, spot.block, root=spot.root)
    return spot if kind.member(spot.label) in meant else None


def _fault(spot: Spot, detail: ErrorDetails, document: Document) -> Fault:
    if detail["type"] == "extra_forbidden":
        return _unknown_key(spot)
    if detail["type"] == "missing":
        return Fault(spot.path, f"{dotted(spot.path)} is missing.", _EXAMPLES.get(spot.path) or _meaning(spot))
    if detail["type"].startswith("union_tag"):
        return _unknown_block(spot, document)
    if spot.is_key:
        return _wrong_key(spot)
    if spot.path == spot.union and spot.kind is not None:  # not a block at all: name every alternative
        spot = Spot(spot.path, keys.at(spot.root, spot.path)[0], spot.block, root=spot.root)
    told = detail.get("ctx", {}).get("error")
    if isinstance(told, ValueError):
        return _told(spot, str(told), document)
    return _wrong_value(spot, document)


def _meaning(spot: Spot) -> str | None:
    """What a missing key is for."""
    if spot.block is None or spot.kind is None:
        return None
    if spot.kind.literals:
        return f"it is {keys.words(spot.kind)}."
    return f"{spot.path[-1]}: {keys.fields(spot.block)[str(spot.path[-1])].description}."


def _words_of(kind: Type) -> Words | None:
    return next((constraint for constraint in kind.constraints if isinstance(constraint, Words)), None)


def _told(spot: Spot, text: str, document: Document) -> Fault:
    """A fault that the schema's own validators put in words: a predicate, or a sentence."""
    if re.match(r"(does|needs|is|must) ", text):
        return Fault(spot.path, f"{describe(document, spot.path)} {text}.")
    return Fault(spot.path, f"{dotted(spot.path)}: {text}.")


def _unknown_key(spot: Spot) -> Fault:
    key, above = str(spot.path[-1]), dotted(spot.path[:-1]) or _called(spot.root)
    name = "…" if credentials.in_value(key) else cut(key)
    message = f'unknown key "{name}" in {above}.'
    known = list(keys.fields(spot.block)) if spot.block is not None else []
    if near := _near(key[:LONGEST_SHOWN], known):
        return Fault(spot.path, message + near)
    if spot.union is not None and (sibling := _alternative_with(key, spot)):
        return Fault(spot.path, message, sibling)
    elsewhere = dict.fromkeys(dotted(path) for path, _ in keys.walk(spot.root) if path[-1] == key)
    if 0 < len(elsewhere) <= 3:
        return Fault(spot.path, message, f"there is {' and '.join(elsewhere)}.")
    if len(known) <= 20:
        return Fault(spot.path, message, f"its keys are {', '.join(known)}.")
    page = (
        "`launcher schema --markdown` lists every key." if spot.root is JobSpec else f"its keys are {', '.join(known)}."
    )
    return Fault(spot.path, message, page)


def _called(schema: type[BaseModel]) -> str:
    return schema.__name__.removesuffix("Spec").lower()


def _alternative_with(key: str, spot: Spot) -> str | None:
    """What to do about a key of another alternative of the union that was passed on the way."""
    kind = keys.at(spot.root, spot.union or ())[0]
    models = [member.model for member in kind.members if member.model is not None and key in keys.fields(member.model)]
    chooser = keys.discriminator(kind)
    if not models:
        return None
    if chooser is None:
        return f"keep {keys.words(kind).removeprefix('a block with ')}."
    names = [str(name) for model in models for name in Type.of_field(model.model_fields[chooser]).literals]
    return f"it goes with {chooser}: {either(names)}." if names else None


def _unknown_block(spot: Spot, document: Document) -> Fault:
    """A union of blocks whose discriminator is missing, or names none of them."""
    kind, value = keys.at(spot.root, spot.path)[0], value_at(document.data, spot.path)
    key = keys.discriminator(kind)
    if not isinstance(value, dict):
        return Fault(spot.path, _is_not(document, spot.path, keys.words(kind)))
    if key is None:
        wanted = keys.words(kind).removeprefix("a block with one of ")
        return Fault(spot.path, f"{dotted(spot.path)} has none of {wanted}.")
    path = (*spot.path, key)
    wanted = keys.choices(kind)
    if key not in value:
        return Fault(path, f"{dotted(path)} is missing.", f"it is {wanted}.")
    offered = re.findall(r"[\w-]+", wanted)
    return Fault(path, f"{_is_not(document, path, wanted)}{_near(value[key], offered)}")


def _wrong_key(spot: Spot) -> Fault:
    wanted = keys.words(spot.kind) if spot.kind is not None else "one of its keys"
    name = json.dumps(cut(str(spot.path[-1])), ensure_ascii=False)
    return Fault(spot.path, f"{dotted(spot.path[:-1])} has the key {name}, which is not {wanted}.")


def _is_not(document: Document, path: KeyPath, wanted: str) -> str:
    """The sentence that says what stands at a path, and what should."""
    value = value_at(document.data, path)
    if value and isinstance(value, dict | list):
        return f"{dotted(path)} is a {'block' if isinstance(value, dict) else 'list'}, not {wanted}."
    return (
        f"{dotted(path)} is empty, not {wanted}." if value is None else f"{describe(document, path)} is not {wanted}."
    )


def _wrong_value(spot: Spot, document: Document) -> Fault:
    value = value_at(document.data, spot.path)
    kind = spot.kind or Type(Any)
    wanted = keys.words(kind)
    message = _is_not(document, spot.path, wanted)
    if shown(document, spot.path) is None:
        return Fault(spot.path, message, _where_it_belongs(spot.path))
    literals = [str(literal) for member in (kind.members or (kind,)) for literal in member.literals]
    return Fault(spot.path, message + _near(value, literals), _suggestion(kind, value))


def _where_it_belongs(path: KeyPath) -> str | None:
    """What to do about a value that is not repeated: in place of a secret stands where the Secret keeps it."""
    if path[:1] != ("secrets",) or len(path) > 2:
        return None
    name = path[1] if len(path) > 1 else "NAME"
    return f"write {name}: {{name: my-secret, key: token}}; the value itself stays in the Secret."


def _suggestion(kind: Type, value: Any) -> str | None:
    """The legal value that was probably meant, where it follows from the one that was given."""
    told = _words_of(kind)
    if told is not None:
        return told.suggest(value) if isinstance(value, str) else None
    members = kind.members or (kind,)
    found = [_suggestion(member, value) if kind.members else _plain_suggestion(member, value) for member in members]
    return next(filter(None, found), None)


def _plain_suggestion(kind: Type, value: Any) -> str | None:
    if isinstance(value, float) and kind.bare is int and value.is_integer():
        return f"write {int(value)}."
    if not isinstance(value, str):
        return f'write "{value}", in quotes.' if kind.bare is str and isinstance(value, int | float) else None
    if kind.bare is bool and value.lower() in ("yes", "on", "y", "no", "off", "n"):
        return f"YAML 1.2 reads {value} as text; write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'}."
    if kind.bare in (int, float):
        return _number(value, kind.bare)
    if "module:Name" in keys.words(kind) and re.fullmatch(r"\w+(\.\w+)+", value):
        return f"write {':'.join(value.rsplit('.', 1))}."
    return None


def _number(text: str, wanted: type[int] | type[float]) -> str | None:
    """The number in a text that only quotes or separators keep from being one."""
    digits = re.sub(r"(?<=\d)[_,](?=\d)", "", text.strip())
    try:
        number = scalars.resolve(digits)
    except ValueError:
        return None
    is_one = isinstance(number, int | wanted) and not isinstance(number, bool)
    return f"write {digits}, without quotes or separators." if is_one else None


def _near(value: Any, options: list[str]) -> str:
    """The option that a word resembles, as a sentence to append."""
    near = difflib.get_close_matches(value.lower(), options, n=1) if isinstance(value, str) else []
    return f' Did you mean "{near[0]}"?' if near else ""


# --- what is part of the schema and not built yet ---------------------------------------------------------------------

_NOT_BUILT: tuple[KeyPath, ...] = (("jobs",),)


def unsupported(document: Document) -> Iterator[Fault]:
    """The keys of a job that are not built yet, by name."""
    for path in _NOT_BUILT:
        if value_at(document.data, path) is not None:
            yield Fault(path, f"{dotted(path)} is not supported yet.", "leave it out.")
