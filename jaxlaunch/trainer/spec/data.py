"""The data block: the keys, defaults and checks of each data source."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    create_model,
    field_validator,
    model_validator,
)

from jaxlaunch.trainer.spec import block
from jaxlaunch.trainer.spec.augment import Augment, expand_preset
from jaxlaunch.trainer.spec.block import (
    MAX_INT32,
    USER_OBJECT,
    Block,
    Few,
    Fraction,
    Ids,
    Location,
    Many,
    Natural,
    Positive,
    PredicateError,
    Seed,
    Unset,
    Weight,
    allow_text,
    at_most,
    check_bucket_url,
)

# Reader processes per process of a run; a larger number is a typing error.
MAX_WORKERS = 256
# The tokenizer that needs no file.
BYTES_TOKENIZER = "bytes"


class Source(Block):
    """The keys of a data source, and the functions that open it.

    `Data` lists the sources. The function `open_source(data, split, spec)` in the module of a
    source opens a split: it returns a `DataSource`, or None if nothing is held out. All other code
    depends only on these attributes and methods.

    Attributes:
        module: The module that opens it, below `jaxlaunch.trainer`.
        kind: Kind of its examples, or None if it cannot be a part of a mixture. The parts of a
            mixture have the same kind. The source with the name of the kind opens the mixture, by
            `open_mixture` of its module.
        shared_keys: Keys that a mixture has for all of its parts.
        part_example: The example of a part in the documentation: task and model, and two parts.
        part_keys: Types and fields of the keys that differ in a part.
        has_subfolders: Whether the files of a folder include those of its subfolders.
        is_packable: Whether `launcher prepare` packs it into records.
    """

    module: ClassVar[str]
    kind: ClassVar[str | None] = None
    shared_keys: ClassVar[tuple[str, ...]] = ()
    part_example: ClassVar[tuple[str, str, str]]
    part_keys: ClassVar[Mapping[str, Any]] = {}
    has_subfolders: ClassVar[bool] = False
    is_packable: ClassVar[bool] = False
    if TYPE_CHECKING:
        source: str

    shuffle: bool = Field(True, description="a new order every epoch, drawn from the seed")
    trace: bool = Field(False, description="write the example ids of every step to the run folder")
    prefetch: Annotated[int, Field(ge=0), at_most(2**10)] = Field(
        2, description="batches read ahead"
    )
    threads: Few = Field(4, description="threads per process that read examples")
    deterministic: bool | None = Field(
        None,
        description="whether an example is the same each time it is read",
        json_schema_extra=Unset(
            "false for your own dataset or task, whose examples "
            "are read one at a time with seeded generators",
            "default:",
        ),
    )

    @property
    def opener(self) -> str:
        """The function that opens a split, `module:function` below `jaxlaunch.trainer`."""
        return f"{self.module}:open_source"

    @property
    def has_pairs(self) -> bool | None:
        """Whether the examples are pairs of texts; None if it depends on the examples."""
        return None

    @property
    def reader_processes(self) -> int:
        """Processes that read examples, per process of the run; 0 without such a key."""
        return 0

    def texts(self) -> dict[str, Text]:
        """Return the texts of the data by the names of their parts, empty without texts."""
        return {}

    def note_held_out(self, sizes_bytes: Mapping[str, int]) -> str:
        """Return a note on what is held out of these files of `path`, or an empty text."""
        return ""


def _check_readable(path: str | list[str]) -> str | list[str]:
    if not path:
        raise ValueError("names no file")
    for file in [path] if isinstance(path, str) else path:
        scheme, is_url, location = file.partition("://")
        if is_url and scheme.lower() not in (*block.STORES, "stdlib"):
            raise ValueError(f"contains {file}, {_UNREADABLE}")
        if not file or (is_url and scheme != "stdlib" and not location.partition("/")[0]):
            raise ValueError(f"contains {file!r}, which names no {'bucket' if file else 'file'}")
        if (fault := block.bucket_fault(file)) is not None:
            raise ValueError(f"contains {file}, which {fault}")
    return path


def _check_tokenizer(path: str) -> str:
    if not path:
        raise PredicateError("is empty: write bytes, or the folder or file of a tokenizer.json")
    if "://" in path and path.partition("://")[0].lower() not in block.STORES:
        raise PredicateError(f"is {path}, {_UNREADABLE}")
    return check_bucket_url(path)


def _check_folder(path: str) -> str:
    if "://" in path:
        hint = "mount the bucket as a volume"
        raise PredicateError(f"is not a folder, and data can only be prepared in a folder: {hint}")
    return path


_UNREADABLE = "which cannot be read: only folders, gs:// and s3:// can"
_Readable = Annotated[str | list[str], AfterValidator(_check_readable), Location()]
_Builder = Annotated[
    str, Field(description="name of the builder, such as digits, mnist or my_set/config:1.0.0")
]
_Folder = Annotated[str, AfterValidator(_check_folder), Location()] | None
_Tokenizer = Annotated[str, AfterValidator(_check_tokenizer), Location(BYTES_TOKENIZER)]
_Group = Annotated[str, Field(min_length=1)] | None
_SPLIT_SEED = "seed of eval_split: another one holds out other examples"

# Pixels of a side of an image.
MAX_SIDE = 2**15
Side = Annotated[int, Field(gt=0), at_most(MAX_SIDE)]


def _check_size(size: Any) -> Any:
    """Raise ValueError for an invalid size. Pydantic would report an error of each alternative."""
    sides = size if isinstance(size, list) else [size, size]
    is_valid = len(sides) == 2 and all(type(side) is int and 0 < side <= MAX_SIDE for side in sides)
    if size is not None and not is_valid:
        pixels = f"in pixels from 1 to {MAX_SIDE}"
        raise PredicateError(f"is {size}; write [height, width], or one number for both, {pixels}")
    return size


class ImageData(Source):
    """Keys of the sources of images."""

    kind: ClassVar[str | None] = "images"
    shared_keys: ClassVar[tuple[str, ...]] = ("size", "augment")

    size: Annotated[
        Side | Annotated[list[Side], Field(min_length=2, max_length=2)] | None,
        BeforeValidator(_check_size),
    ] = Field(
        None,
        description="images: height and width, or both as one number",
        json_schema_extra=Unset("that of every image"),
    )
    augment: Annotated[Augment | None, BeforeValidator(expand_preset)] = Field(
        None,
        description="images: random changes in training, or the name of a recipe",
        json_schema_extra=Unset("none", "null:", allow_text),
    )

    @property
    def changes_images(self) -> bool:
        """Whether images are read differently from how they are stored."""
        return self.size is not None or self.augment is not None

    @property
    def shape(self) -> tuple[int, int] | None:
        """Height and width, if they are given."""
        if isinstance(self.size, int):
            return self.size, self.size
        return None if self.size is None else (self.size[0], self.size[1])


class Tfds(ImageData):
    """A tensorflow-datasets builder, read without TensorFlow; `digits` is built in.

    ```yaml
    train:
      task: classify
      data: {source: tfds, name: mnist, data_dir: /data/tfds}  # prepared at the first start
    ```
    """

    module = "sources.tfds"
    part_example = (
        "task: classify",
        "mnist: {source: tfds, weight: 3, name: mnist, data_dir: /data/tfds}",
        "digits: {source: tfds, weight: 1, name: digits, eval_split: null}  # only trained on",
    )
    # A part has no default builder.
    part_keys = {"name": (_Builder, ...)}

    source: Literal["tfds"] = Field("tfds", description="this source")
    name: _Builder = "digits"
    split: str = Field("train", description="the split to train on, in tensorflow-datasets' syntax")
    eval_split: str | None = Field(
        "test", description="the split to evaluate on; null: no evaluation"
    )
    data_dir: _Folder = Field(
        None,
        description="folder of prepared data",
        json_schema_extra=Unset("in the user's cache folder"),
    )


class ArrayRecord(ImageData):
    """Files of array_record with tf.train.Examples, as `jaxlaunch.write_records` writes them.

    ```yaml
    train:
      task: classify
      data:
        source: array_record
        path: gs://team-data/train-*.array_record
        eval_split: 0.02  # no eval_path: 2 % of the records are kept back
    ```
    """

    module = "sources.array_record"
    part_example = (
        "task: classify",
        "packed: {source: array_record, weight: 2, path: packed/train-*.array_record}  # "
        "two in three",
        "digits: {source: tfds, weight: 1, name: digits}",
    )

    source: Literal["array_record"] = Field(description="this source")
    path: _Readable = Field(description="files or globs to train on, here or in gs:// or s3://")
    eval_path: _Readable | None = Field(
        None, description="files or globs to evaluate on", json_schema_extra=Unset("none")
    )
    eval_split: Fraction | None = Field(
        None,
        description="share of the records held out when there is no eval_path",
        json_schema_extra=Unset("none"),
    )
    split_seed: Seed = Field(0, description=_SPLIT_SEED)


# Compressions and formats of text files by suffix. Any other file is plain text, which is split
# into documents of TEXT_PIECE_BYTES.
TEXT_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
TEXT_KINDS = dict.fromkeys((".jsonl", ".ndjson", ".json"), "lines")
TEXT_KINDS |= {".parquet": "parquet", ".arrow": "arrow"}
TEXT_PIECE_BYTES = 1 << 20


# Rows of a text and a label, which classifiers train on.
LABEL_FORMAT = "label"
# Formats of rows whose messages a chat template turns into text.
TEMPLATE_FORMATS = ("chat", "messages", "sharegpt", "alpaca", "question")
# Formats whose rows have a column for each part, so that no single field names them.
_FIXED_FORMATS = ("alpaca", "question", "completion")
_RowFormat = Literal["text", "chat", "messages", "sharegpt", "alpaca", "question", "completion"]
_ROW_FORMAT = (
    "format of a row. text: a text; chat: a conversation for the tokenizer's template, with the "
    "assistant's tokens as targets, whose layout is recognized by its columns: messages; sharegpt: "
    "from and value; alpaca: instruction and output; question: question and answer; completion: "
    "prompt and completion; each of these names forces one layout"
)


def _check_distinct(classes: list[str | int] | None) -> list[str | int] | None:
    if classes == []:
        raise ValueError("names no class; leave it out to take those that the data have")
    for label in classes or []:
        if (classes or []).count(label) > 1:
            raise ValueError(f"contains {label!r} twice; name each once")
    return classes


_Classes = Annotated[list[str | int] | None, AfterValidator(_check_distinct)]


class Text(Source):
    """Text files as rows of tokens: one stream of bytes, or documents prepared once.

    ```yaml
    train:
      task: lm
      model: {kind: decoder, vocab: 32000, length: 2048}
      data:
        source: text
        path: corpus/*.jsonl.zst           # rows of {"text": …}
        field: text
        tokenizer: tokenizers/llama        # a folder with tokenizer.json
        # whole documents, several in a row, which never see each other
        packing: first-fit
    ```
    """

    module = "sources.text"
    kind = "text"
    shared_keys = ("tokenizer", "packing", "seed", "data_dir")
    part_example = (
        "task: lm\n  model: {kind: decoder, length: 1024}",
        "web: {source: text, weight: 4, path: web/*.txt}",
        "held: {weight: 0, path: held/*.txt, eval_split: 0.5}  # weight 0: only evaluated",
    )
    # A part has no pairs of texts.
    part_keys = {
        "format": (
            _RowFormat,
            Field("text", description=_ROW_FORMAT),
        ),
    }
    source: Literal["text"] = Field(description="this source")
    path: _Readable = Field(
        description="files or globs, here or in gs:// or s3://; stdlib://*.py names the "
        "interpreter's own library"
    )
    tokenizer: _Tokenizer = Field(
        BYTES_TOKENIZER,
        description="bytes: a token is a byte, vocab 256; else a folder or tokenizer.json of a "
        "Hugging Face tokenizer",
    )
    format: _RowFormat | Literal["preference", "kto", "label"] = Field(
        "text",
        description=f"{_ROW_FORMAT}; preference: chosen and rejected, and optionally prompt, "
        "messages, or system and question; kto: prompt, completion and label, true or false; "
        "label: a text and its label, a name or a number",
    )
    field: str | None = Field(
        None,
        min_length=1,
        description="field of JSON lines, Parquet and Arrow that contains the text",
        json_schema_extra=Unset("text, for chats messages"),
    )
    packing: Literal["concat", "first-fit", "none"] | None = Field(
        None,
        description="how documents are packed into rows: concat cuts them, first-fit keeps "
        "them whole, none gives each its own row; for bytes without a field one stream "
        "without document ends",
        json_schema_extra=Unset("concat"),
    )
    eval_path: _Readable | None = Field(
        None,
        description="files or globs to evaluate on, if documents are prepared",
        json_schema_extra=Unset("none"),
    )
    eval_split: Fraction = Field(
        0.05, description="share of the files, or of the documents, that is held out for evaluation"
    )
    split_seed: Seed = Field(0, description=_SPLIT_SEED)
    group: _Group = Field(
        None,
        description="field of JSON lines, Parquet and Arrow whose values eval_split does not "
        "divide, such as the author",
        json_schema_extra=Unset("none"),
    )
    seed: Seed = Field(0, description="seed of the order in which documents are packed")
    data_dir: _Folder = Field(
        None,
        description="folder of prepared rows",
        json_schema_extra=Unset("in the user's cache folder"),
    )
    label: str | None = Field(
        None,
        min_length=1,
        description="field of the label, with format: label",
        json_schema_extra=Unset("label, labels, class, category, target, fine_label or y"),
    )
    classes: _Classes = Field(
        None,
        description="the labels in the order in which they are numbered, with format: label",
        json_schema_extra=Unset("sorted"),
    )
    apart: bool = Field(
        False,
        description="document masking: attention and loss stop at the boundaries of files, as they "
        "do at those of documents",
    )
    bigram: bool = Field(
        False, description="also report the loss of a bigram model that is counted on the same text"
    )

    @property
    def is_prepared(self) -> bool:
        """Return whether documents are tokenized and packed once."""
        if self.is_read_at_start:
            return False
        keys = self.field, self.packing
        return self.tokenizer != BYTES_TOKENIZER or self.format != "text" or keys != (None, None)

    @property
    def has_pairs(self) -> bool:
        """Whether the rows are preferences, as pairs or as single texts with a label."""
        return self.format in ("preference", "kto")

    @property
    def is_read_at_start(self) -> bool:
        """Whether every process reads all rows when a run starts, without preparing them."""
        return self.has_pairs or self.format == LABEL_FORMAT

    def texts(self) -> dict[str, Text]:
        """Return this source by an empty name, because it is not a part."""
        return {"": self}

    def note_held_out(self, sizes_bytes: Mapping[str, int]) -> str:
        """Return a note if the end of a single text is held out, or an empty text."""
        if len(sizes_bytes) != 1 or self.eval_path or self.format != "text" or not self.eval_split:
            return ""
        ((path, size_bytes),) = sizes_bytes.items()
        is_one_text = not self.is_prepared or size_bytes <= TEXT_PIECE_BYTES
        if not is_one_text or path.lower().endswith((*TEXT_COMPRESSIONS, *TEXT_KINDS)):
            return ""
        return f"its end is held out, by eval_split = {self.eval_split}"

    @model_validator(mode="after")
    def _check_format(self) -> Text:
        if self.group is not None and (self.eval_path is not None or not self.eval_split):
            raise ValueError("group applies to eval_split; leave it out")
        if self.group is not None and not (self.is_prepared or self.is_read_at_start):
            raise ValueError("group applies to rows of JSON lines, Parquet and Arrow; name a field")
        if self.is_read_at_start:
            fields = ("field",) if self.has_pairs else ()
            for key in filter(self.is_changed, (*fields, "packing", "apart", "bigram")):
                columns = "chosen and rejected" if self.format == "preference" else "a label"
                rows = f"whose rows have {columns}"
                raise ValueError(f"{key} does not apply to format: {self.format}, {rows}")
            return self
        if self.is_prepared and (self.apart or self.bigram):
            key, hint = "apart" if self.apart else "bigram", "with a tokenizer, field or packing"
            raise ValueError(f"{key} applies to one stream of bytes; leave it out {hint}")
        if self.format in TEMPLATE_FORMATS and self.tokenizer == BYTES_TOKENIZER:
            raise ValueError(f"format: {self.format} {_NO_TEMPLATE}")
        if self.field is not None and self.format in _FIXED_FORMATS:
            raise ValueError(f"field {_SEVERAL_FIELDS} {self.format}; leave it out")
        if not self.is_prepared and self.eval_path is not None:
            hint = "set packing, for example to concat, or use eval_split"
            raise ValueError(f"eval_path applies to documents; {hint}")
        return self

    @model_validator(mode="after")
    def _check_label(self) -> Text:
        if self.format != LABEL_FORMAT:
            for key in filter(self.is_changed, ("label", "classes")):
                raise ValueError(f"{key} applies to format: {LABEL_FORMAT}; leave it out")
        return self


_SEVERAL_FIELDS = "names one column, and the text of a row is in several with format:"
_NO_TEMPLATE = "needs a tokenizer with a chat template; bytes have none"


# Without eval_path, files are assigned to the splits by the names of files or folders.
_NEXT_TO_TRAIN = Unset("the files that are called val, validation or test, next to train")
_Names = Annotated[list[str], Field(min_length=1)]
_Labels = Annotated[str, Field(min_length=1)] | _Names | None
_Workers = Annotated[int, Field(ge=0, le=MAX_WORKERS)]


def _check_evaluation(data: Any) -> None:
    if data.eval_path is not None and data.eval_split:
        raise ValueError("eval_path and eval_split are both set; keep one")
    if data.group is not None and not data.eval_split:
        raise ValueError("group applies to eval_split; set it, or leave group out")


class Images(ImageData):
    """Image files: folders by class, lists of paths, WebDataset tars, Parquet and Arrow.

    ```yaml
    train:
      task: classify
      model: {preset: vit-s16, classes: 2}
      data:
        source: images
        # photos/cat/1.jpg, photos/dog/2.png …; or photos/train/cat/1.jpg and photos/val/…
        path: photos
        size: 224
        eval_split: 0.1
    ```
    """

    module = "sources.images.source"
    shared_keys = (*ImageData.shared_keys, "channels", "classes", "workers")
    part_example = (
        "task: classify\n  model: {preset: vit-s16, classes: 2}",
        "photos: {source: images, weight: 3, path: photos}",
        "drawings: {source: images, weight: 1, path: drawings.csv, image: file, label: kind}  # "
        "one in four",
    )
    has_subfolders = True
    is_packable = True

    source: Literal["images"] = Field(description="this source")
    path: _Readable = Field(
        description="a folder, files or globs, here or in gs:// or s3://: images, .csv, .tsv or "
        ".jsonl of paths and labels, .tar, .parquet, .arrow"
    )
    eval_path: _Readable | None = Field(
        None, description="what to evaluate on", json_schema_extra=_NEXT_TO_TRAIN
    )
    eval_split: Fraction | None = Field(
        None,
        description="share of the images held out when nothing else is evaluated",
        json_schema_extra=Unset("none"),
    )
    split_seed: Seed = Field(0, description=_SPLIT_SEED)
    group: _Group = Field(
        None,
        description="column whose values eval_split does not divide, such as the patient",
        json_schema_extra=Unset("none"),
    )
    channels: Literal[1, 3] = Field(3, description="3: RGB; 1: grey")
    image: str | None = Field(
        None,
        min_length=1,
        description="column of the image, or of its path",
        json_schema_extra=Unset("it is detected"),
    )
    label: str | None = Field(
        None,
        min_length=1,
        description="column of the label",
        json_schema_extra=Unset("it is detected"),
    )
    classes: _Classes = Field(
        None,
        description="the labels in the order in which they are numbered",
        json_schema_extra=Unset("sorted"),
    )
    on_broken: Literal["stop", "skip"] = Field(
        "stop",
        description="an image that cannot be decoded ends the run; skip: all images are decoded "
        "once, and broken ones are left out",
    )
    workers: _Workers = Field(
        0,
        description="processes that decode images, per process of the run; 0: the threads of "
        "data.threads decode",
    )

    @property
    def reader_processes(self) -> int:
        """Processes that read examples, per process of the run."""
        return self.workers

    @model_validator(mode="after")
    def _check_held_out(self) -> Images:
        _check_evaluation(self)
        return self


_ColumnKind = (
    Literal["category", "date"]
    | Annotated[list[str | int | float], Field(min_length=2), AfterValidator(_check_distinct)]
)


class Table(Source):
    """Rows of a table: columns of numbers and texts as `features`, and a label.

    ```yaml
    train:
      task: classify
      model: {kind: mlp, width: 64, layers: 2, classes: 2}
      data:
        source: table
        path: patients.csv
        label: diagnosis     # every other column is a feature
        eval_split: 0.2
    ```
    """

    module = "sources.tables.source"
    kind = "table"
    shared_keys = ("label", "columns", "missing", "classes")
    part_example = (
        "task: classify\n  model: {kind: mlp, width: 64, layers: 2, classes: 2}",
        "ours: {source: table, weight: 1, path: ours.csv, eval_split: 0.2}",
        "theirs: {source: table, weight: 1, path: theirs.parquet}  # the same columns",
    )
    has_subfolders = True
    is_packable = True

    source: Literal["table"] = Field(description="this source")
    path: _Readable = Field(
        description="a folder, files or globs, here or in gs:// or s3://: .csv, .tsv, .jsonl, "
        ".parquet, .arrow, .npy, .npz"
    )
    eval_path: _Readable | None = Field(
        None, description="what to evaluate on", json_schema_extra=_NEXT_TO_TRAIN
    )
    eval_split: Fraction | None = Field(
        None,
        description="share of the rows held out when nothing else is evaluated",
        json_schema_extra=Unset("none"),
    )
    split_seed: Seed = Field(0, description=_SPLIT_SEED)
    group: _Group = Field(
        None,
        description="column whose values eval_split does not divide, such as the patient; the "
        "column is not a feature",
        json_schema_extra=Unset("none"),
    )
    label: _Labels = Field(
        None,
        description="column of the label, or several",
        json_schema_extra=Unset("one named label, class, target or y"),
    )
    columns: _Names | dict[str, _ColumnKind] | None = Field(
        None,
        description="columns that are read as features, or the kind of some by name: category, "
        "date, or the list of the values of an ordinal in their order",
        json_schema_extra=Unset("all but the label"),
    )
    missing: Literal["stop", "mean"] = Field(
        "stop",
        description="a feature without a value ends the run; mean: it gets the mean of its column "
        "in the training rows, and a text becomes all zeros",
    )
    classes: _Classes = Field(
        None,
        description="the labels in the order in which they are numbered",
        json_schema_extra=Unset("sorted"),
    )

    @property
    def declared_columns(self) -> dict[str, Any]:
        """The kinds of columns that the job declares."""
        return dict(self.columns) if isinstance(self.columns, dict) else {}

    @model_validator(mode="after")
    def _check_held_out(self) -> Table:
        _check_evaluation(self)
        for name in [self.label] if isinstance(self.label, str) else self.label or []:
            if name in (self.columns or []):
                raise ValueError(f"columns contains {name!r}, which is the label")
        return self


# Sources that can be parts of a mixture, in the order of the documentation.
_PartSource = Text | Images | Table | ArrayRecord | Tfds


def _source_name(source: type[Source]) -> str:
    name: str = get_args(source.model_fields["source"].annotation)[0]
    return name


_PART_SOURCES: Mapping[str, type[_PartSource]] = {
    _source_name(source): source for source in get_args(_PartSource)
}


class Part(Block):
    """A set of examples of a mixture: its weight, and the keys that the mixture lacks."""

    weight: Weight = Field(
        description="share of the examples, relative to the other parts; 0: the part is only "
        "evaluated, on its held-out files or else on all of it"
    )
    if TYPE_CHECKING:
        source: str

    @model_validator(mode="after")
    def _check_held_out(self) -> Part:
        if self.source in ("images", "table"):
            _check_evaluation(self)
        return self


# Keys of a source that a part of a mixture never has.
_EXCLUDED_KEYS = {*Source.model_fields, "source", "apart", "bigram"}
# Those of one source, because others have keys of the same names.
_EXCLUDED_TEXT_KEYS = {"label", "classes"}


def _make_part_model(source: str) -> type[Part]:
    source_type = _PART_SOURCES[source]
    task, first, second = source_type.part_example
    default = "text" if source == "text" else ...
    keys: dict[str, Any] = {
        "source": (Literal[source], Field(default, description="the source of this part"))
    }
    excluded = _EXCLUDED_KEYS | (_EXCLUDED_TEXT_KEYS if source == "text" else set())
    for name, field in source_type.model_fields.items():
        if name not in excluded and name not in source_type.shared_keys:
            keys[name] = field.rebuild_annotation(), field
    model: type[Part] = create_model(
        f"PartOf{source_type.__name__}",
        __base__=Part,
        __module__=__name__,
        __doc__=f"A part of a mixture: the keys of `source: {source}` that the mixture does not "
        f"have for all parts.\n\n```yaml\ntrain:\n  {task}\n  data:\n    source: mixture\n    "
        f"parts:\n      {first}\n      {second}\n```\n",
        **{**keys, **source_type.part_keys},
    )
    return model


if TYPE_CHECKING:
    _Parts = Part
else:
    _Parts = functools.reduce(operator.or_, map(_make_part_model, _PART_SOURCES))


class Mixture(ImageData):
    """Several sets of examples in fixed proportions: the position of an example determines its set.

    ```yaml
    train:
      task: lm
      model: {kind: decoder, length: 1024}
      data:
        source: mixture
        packing: concat
        parts:
          web: {weight: 0.8, path: web/*.txt}
          code: {weight: 0.2, path: code/*.py}   # one example in five
    ```
    """

    kind = None

    source: Literal["mixture"] = Field(description="this source")
    parts: dict[str, Annotated[_Parts, Field(discriminator="source")]] = Field(
        description="by name; all are text (the default), or all tables, or each is images, "
        "array_record or tfds"
    )
    tokenizer: _Tokenizer = Field(
        BYTES_TOKENIZER,
        description="text: tokenizer of all parts, bytes, or the folder or tokenizer.json of a "
        "Hugging Face tokenizer",
    )
    packing: Literal["concat", "first-fit", "none"] = Field(
        "concat", description="text: how documents are packed into rows, as for source: text"
    )
    seed: Seed = Field(0, description="text: seed of the order in which documents are packed")
    data_dir: _Folder = Field(
        None,
        description="text: folder of prepared rows",
        json_schema_extra=Unset("in the user's cache folder"),
    )
    channels: Literal[1, 3] = Field(3, description="images: 3 is RGB, 1 is grey")
    workers: _Workers = Field(
        0,
        description="images: processes that decode, per process of the run; 0: the threads of "
        "data.threads decode",
    )

    @property
    def reader_processes(self) -> int:
        """Processes that read examples, per process of the run."""
        return self.workers

    classes: _Classes = Field(
        None,
        description="images and tables: the labels in the order in which they are numbered",
        json_schema_extra=Unset("those of the parts, which then must be the same"),
    )
    label: _Labels = Field(
        None,
        description="tables: column of the label, or several",
        json_schema_extra=Unset("one named label, class, target or y"),
    )
    columns: _Names | None = Field(
        None,
        description="tables: columns that are read as features",
        json_schema_extra=Unset("all but the label"),
    )
    missing: Literal["stop", "mean"] = Field(
        "stop",
        description="tables: a feature without a value ends the run; mean: it gets the mean of its "
        "column in the training rows of all parts",
    )

    @field_validator("parts", mode="before")
    @classmethod
    def _fill_sources(cls, parts: Any) -> Any:
        if not isinstance(parts, dict):
            return parts
        with_sources = {
            name: {"source": "text"} | part if isinstance(part, dict) else part
            for name, part in parts.items()
        }
        for name, part in with_sources.items():
            if not isinstance(part, dict):
                continue
            source = part["source"]
            source_type = SOURCES.get(str(source))
            if source_type is not None and source not in _PART_SOURCES:
                *names, last_name = _PART_SOURCES
                hint = f"a part is {', '.join(names)} or {last_name}"
                raise ValueError(f"holds {name} with source = {source}; {hint}")
            for key in part:
                if source_type is not None and key in source_type.shared_keys:
                    hint = f"all parts have one, train.data.{key}"
                    raise ValueError(f"holds {name} with a {key} of its own; {hint}")
        return with_sources

    @field_validator("parts")
    @classmethod
    def _check_kinds(cls, parts: dict[str, _Parts]) -> dict[str, _Parts]:
        for name, part in parts.items():
            first_name, first_part = next(iter(parts.items()))
            kinds = {_PART_SOURCES[source].kind for source in (first_part.source, part.source)}
            if len(kinds) > 1:
                raise ValueError(
                    f"holds {first_name} with source = {first_part.source} and {name} with source "
                    f"= {part.source}, whose examples have no keys in common; mix text with text, "
                    "tables with tables, and images, array_record and tfds with each other"
                )
        return parts

    @field_validator("parts")
    @classmethod
    def _check_weights(cls, parts: dict[str, _Parts]) -> dict[str, _Parts]:
        total = sum(part.weight for part in parts.values())
        if not 0 < total < math.inf:
            hint = "give each part its share of the examples"
            raise ValueError(f"has weights that sum to {total:g}; {hint}")
        return parts

    @model_validator(mode="after")
    def _check_chat_template(self) -> Mixture:
        for name, part in self.parts.items():
            keys = part.model_dump()
            row_format = keys.get("format")
            if row_format in _FIXED_FORMATS and keys.get("field") is not None:
                problem = f"parts.{name}.field {_SEVERAL_FIELDS} {row_format}"
                raise ValueError(f"{problem}; leave it out")
            if row_format in TEMPLATE_FORMATS and self.tokenizer == BYTES_TOKENIZER:
                raise ValueError(f"parts.{name}.format: {row_format} {_NO_TEMPLATE}")
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> Mixture:
        sources = {part.source: None for part in self.parts.values()}
        shared_keys = {name: source.shared_keys for name, source in _PART_SOURCES.items()}
        usable = {key for source in sources for key in shared_keys[source]}
        for key in dict.fromkeys(key for keys in shared_keys.values() for key in keys):
            if key not in usable and self.is_changed(key):
                sources_with_key = [source for source, keys in shared_keys.items() if key in keys]
                raise ValueError(
                    f"{key} applies to parts of {', '.join(sources_with_key)}, and these are of "
                    f"{', '.join(sources)}; leave it out"
                )
        return self

    @property
    def part_kind(self) -> str:
        """The kind of all parts: text, table or images."""
        kind = _PART_SOURCES[next(iter(self.parts.values())).source].kind
        assert kind is not None, "a source that can be a part has a kind"
        return kind

    @property
    def opener(self) -> str:
        """The function that opens a split, `module:function` below `jaxlaunch.trainer`."""
        return f"{_PART_SOURCES[self.part_kind].module}:open_mixture"

    @property
    def has_pairs(self) -> bool:
        """False, because the parts of a mixture have no pairs of texts."""
        return False

    def texts(self) -> dict[str, Text]:
        """Return the text parts by name. A part with weight 0 is evaluated on all of its files."""
        texts = {}
        for name, text in self.part_sources().items():
            if isinstance(text, Text):
                texts[name] = text
                if not self.parts[name].weight:
                    files = text.path if text.eval_path is None else text.eval_path
                    texts[name] = text.model_copy(update={"path": files, "eval_path": files})
        return texts

    def part_sources(self) -> dict[str, _PartSource]:
        """Return each part as a source of its own, without worker processes."""
        sources = {}
        for name, part in self.parts.items():
            source = _PART_SOURCES[part.source]
            shared_keys = [key for key in source.shared_keys if key != "workers"]
            keys = {key: getattr(self, key) for key in (*shared_keys, "shuffle")}
            keys |= part.model_dump(exclude={"weight"})
            sources[name] = source.model_validate(keys)
        return sources


class Torch(Source):
    """A dataset as in PyTorch, `module:name`: a class, an object or a DataLoader, without torch.

    ```yaml
    train:
      task: classify
      data:
        source: torch
        dataset: my_package.data:Images   # __len__ and __getitem__(index, rng)
        args: {folder: /data/train}       # Images(folder="/data/train")
        eval_args: {folder: /data/test}
    ```
    """

    module = "sources.torch"

    source: Literal["torch"] = Field(description="this source")
    dataset: str = Field(
        pattern=USER_OBJECT,
        description="module:name of a class or object with __len__ and __getitem__",
    )
    args: dict[str, Any] = Field({}, description="arguments, if the dataset is a class")
    eval_args: dict[str, Any] | None = Field(
        None,
        description="arguments of the same class for evaluation",
        json_schema_extra=Unset("none"),
    )
    eval_dataset: str | None = Field(
        None,
        pattern=USER_OBJECT,
        description="the dataset for evaluation, if it is another one",
        json_schema_extra=Unset("the training dataset with eval_args"),
    )
    workers: _Workers | None = Field(
        None,
        description="worker processes that read examples, per process of the run",
        json_schema_extra=Unset(
            "num_workers of a DataLoader, else 0, and data.threads read", "default:"
        ),
    )

    @property
    def reader_processes(self) -> int:
        """Processes that read examples, per process of the run."""
        return self.workers or 0

    def map_paths(self, map_path: Callable[[str], str], map_value: Callable[[Any], Any]) -> Self:
        """Return the dataset with mapped arguments of its class. It has no paths of its own."""
        keys = [key for key in ("args", "eval_args") if getattr(self, key)]
        return self.model_copy(update={key: map_value(getattr(self, key)) for key in keys})


class Synthetic(Source):
    """Random but learnable examples, each a function of its index: for smoke tests and benchmarks.

    ```yaml
    train:
      task: classify
      data: {source: synthetic, examples: 1024, shape: [28, 28]}  # no files: for a test of speed
    ```
    """

    module = "sources.synthetic"

    source: Literal["synthetic"] = Field(description="this source")
    examples: Positive = Field(4096, description="examples of an epoch")
    eval_examples: Natural = Field(512, description="examples of an evaluation")
    shape: list[Many] | None = Field(
        None, description="of an image", json_schema_extra=Unset("[28, 28]")
    )
    classes: Ids = Field(10, description="of an image: labels are 0 to classes - 1")

    @field_validator("shape")
    @classmethod
    def _check_shape(cls, shape: list[int] | None) -> list[int] | None:
        if shape is not None and math.prod(shape) > MAX_INT32:
            raise ValueError(f"has {math.prod(shape)} numbers, and a device counts to {MAX_INT32}")
        return shape


Data = Annotated[
    Tfds | ArrayRecord | Text | Images | Table | Mixture | Torch | Synthetic,
    Field(discriminator="source"),
]
# The registered sources by name.
SOURCES: Mapping[str, type[Source]] = {
    _source_name(source): source for source in get_args(get_args(Data)[0])
}
