"""What the rows of a corpus are made of: files, tokenizer, packing, order. Equal recipes give equal bytes, anywhere.

The folder of the rows is named by a digest of the recipe, so that what is prepared once is found again, and a change of
a file, of the tokenizer or of a key makes another folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxlaunch import user_cache
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.spec import Text
from jaxlaunch.trainer.text import chats, digests, documents, tokenizer

FORMAT = 3  # of the shards and of how they come about: another number where the same recipe gives other bytes
INDEX = "index.json"  # written last: a folder that has it is complete


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that determines the rows. `paths` are named in the order in which they are read."""

    paths: tuple[str, ...]
    digest: str  # of the files
    tokenizer: str
    tokenizer_digest: str
    field: str | None
    packing: str
    length: int
    eval_split: float
    seed: int
    template: str | None = None  # digest of the chat template; None where rows are texts

    @property
    def address(self) -> str:
        """The name of the folder: a digest of all but where files and tokenizer are."""
        told = {key: value for key, value in dataclasses.asdict(self).items() if key not in ("paths", "tokenizer")}
        if self.template is None:  # texts keep the folders that they had before there were chats
            del told["template"]
        return hashlib.sha256(json.dumps([FORMAT, told], sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The recipe that `to_json` wrote."""
        given: dict[str, Any] = json.loads(text)
        return cls(**{**given, "paths": tuple(given["paths"])})


def of(data: Text, length: int, *, held_out: bool = False, is_stopped: Callable[[], bool] = lambda: False) -> Recipe:
    """The recipe of a data block for rows of `length` targets; `held_out`: that of its eval_path.

    Raises DataError where no file matches, or one holds no chats, SpecError where the tokenizer or its chat template
    cannot be read, Stopped once `is_stopped`.
    """
    assert data.eval_path is not None or not held_out
    if data.eval_path is not None and not held_out:
        documents.found(data.eval_path, "eval_path")  # missed before anything is prepared
    paths = documents.found(data.path) if not held_out else documents.found(data.eval_path or [], "eval_path")
    share = 0.0 if data.eval_path is not None else data.eval_split
    is_chat = data.format == "chat"
    if is_chat and (plain := next((path for path in paths if documents.kind_of(path) == "text"), None)):
        raise DataError(f"{plain} is plain text; chats are rows of JSON lines (.jsonl), Parquet or Arrow")
    if data.field is not None and all(documents.kind_of(path) == "text" for path in paths):
        raise DataError(
            f"{paths[0]} is plain text, by its name, which has no field {data.field!r}; JSON lines (.jsonl), Parquet "
            "and Arrow have. Leave data.field out to read the whole file as text"
        )
    return Recipe(
        paths=tuple(paths),
        digest=digests.of(paths, Path(root(data)), is_stopped),
        tokenizer=data.tokenizer,
        tokenizer_digest=tokenizer.load(data.tokenizer).digest,
        field=data.field or (chats.FIELD if is_chat else None),
        packing=data.packing or "concat",
        length=length,
        eval_split=share,
        seed=data.seed,
        template=chats.load(data.tokenizer).digest if is_chat else None,
    )


def root(data: Text) -> str:
    """The folder that holds the folders of prepared rows: the job's, or one in the user's cache folder."""
    return data.data_dir if data.data_dir is not None else str(user_cache.home("text"))
