"""The train block of job.yaml: its keys, their types and defaults. Never imports jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from jaxlaunch.contract import MESH_AXES, PROFILE_STEPS
from jaxlaunch.trainer import architectures
from jaxlaunch.trainer.adapters.keys import Lora as Lora
from jaxlaunch.trainer.architectures import GPT2 as GPT2
from jaxlaunch.trainer.architectures import MLP as MLP
from jaxlaunch.trainer.architectures import STORES as STORES
from jaxlaunch.trainer.architectures import Block as Block
from jaxlaunch.trainer.architectures import CustomModel as CustomModel
from jaxlaunch.trainer.architectures import Decoder as Decoder
from jaxlaunch.trainer.architectures import Fraction, Model, Weight
from jaxlaunch.trainer.architectures import Natural as Natural
from jaxlaunch.trainer.architectures import Place as Place
from jaxlaunch.trainer.architectures import Positive as Positive
from jaxlaunch.trainer.architectures import Published as Published
from jaxlaunch.trainer.architectures import RopeScaling as RopeScaling
from jaxlaunch.trainer.architectures import ViT as ViT
from jaxlaunch.trainer.optim.keys import OPTIMIZERS as OPTIMIZERS
from jaxlaunch.trainer.optim.keys import Optimizer as Optimizer
from jaxlaunch.trainer.optim.keys import Schedule as Schedule

MOST_WORKERS = 256  # processes that read for one process of a run; more than this is a typing error
EVAL = "eval/"  # before the name of a metric that an evaluation gives

Steps = Annotated[int, Field(gt=0, le=2**31 - 1)]  # a device counts them in 32 bits
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]  # a key of JAX holds 64 bits; an order of examples, any number


# --- data -------------------------------------------------------------------------------------------------------------


class Source(Block):
    """Keys that every data source has."""

    shuffle: bool = Field(True, description="a new order every epoch, drawn from the seed")
    trace: bool = Field(False, description="write the example ids of every step to the run folder")
    prefetch: Natural = Field(2, description="batches read ahead")
    threads: Positive = Field(4, description="threads per process that read examples")
    deterministic: bool | None = Field(
        None,
        description="whether an example is the same each time it is read; default: false for a dataset or a task of "
        "yours, whose examples are read one at a time with seeded generators",
    )


def _readable(path: str | list[str] | None) -> str | list[str] | None:
    """Raises ValueError for an empty list, and for a URL of a store that the sources cannot read."""
    if path is not None and not path:
        raise ValueError("names no file")
    for each in [path] if isinstance(path, str) else path or []:
        scheme, found, place = each.partition("://")
        if found and scheme not in (*STORES, "stdlib"):
            raise ValueError(f"holds {each}, which cannot be read: folders, gs:// and s3:// can")
        if not each or (scheme in STORES and found and not place.partition("/")[0]):
            raise ValueError(f"holds {each!r}, which names no {'bucket' if each else 'file'}")
    return path


def _one_readable(path: str) -> str:
    """Raises ValueError for an empty name, and for a URL of a store that cannot be read."""
    if not path:
        raise ValueError("is empty: name bytes, or a folder or file of a tokenizer.json")
    if "://" in path and path.partition("://")[0] not in STORES:
        raise ValueError(f"is {path}, which cannot be read: folders, gs:// and s3:// can")
    return path


def _mounted(path: str | None) -> str | None:
    """Raises ValueError for a URL."""
    if path is not None and "://" in path:
        raise ValueError("is not a folder, which is needed to prepare data in: mount the bucket as a volume")
    return path


class Tfds(Source):
    """A tensorflow-datasets builder, read without TensorFlow; `digits` is ours and needs no network.

    ```yaml
    train:
      task: classify
      data: {source: tfds, name: mnist, data_dir: /data/tfds}  # prepared at the first start
    ```
    """

    source: Literal["tfds"] = Field("tfds", description="this source")
    name: str = Field("digits", description="of the builder, such as digits, mnist or my_set/config:1.0.0")
    split: str = Field("train", description="what to train on, in tensorflow-datasets' split syntax")
    eval_split: str | None = Field("test", description="what to evaluate on; null: no evaluation")
    data_dir: Annotated[str | None, AfterValidator(_mounted)] = Field(
        None, description="folder of prepared data; default in the user's cache folder"
    )


class ArrayRecord(Source):
    """Files of array_record; a record is a tf.train.Example, as `jaxlaunch.write_records` writes it.

    ```yaml
    train:
      task: classify
      data:
        source: array_record
        path: gs://team-data/train-*.array_record
        eval_split: 0.02  # no eval_path: 2 % of the records are kept back
    ```
    """

    source: Literal["array_record"] = Field(description="this source")
    path: Annotated[str | list[str], AfterValidator(_readable)] = Field(
        description="files or globs to train on, here or in gs:// or s3://"
    )
    eval_path: Annotated[str | list[str] | None, AfterValidator(_readable)] = Field(
        None, description="files or globs to evaluate on"
    )
    eval_split: Fraction | None = Field(None, description="share of the records kept back when there is no eval_path")


class Text(Source):
    """Text files as rows of tokens of the model's length: one stream of bytes, or documents prepared once.

    ```yaml
    train:
      task: lm
      model: {kind: decoder, vocab: 32000, length: 2048}
      data:
        source: text
        path: corpus/*.jsonl.zst           # rows of {"text": …}
        field: text
        tokenizer: tokenizers/llama        # a folder with tokenizer.json
        packing: first-fit                 # whole documents, several in a row, which never see each other
    ```
    """

    source: Literal["text"] = Field(description="this source")
    path: Annotated[str | list[str], AfterValidator(_readable)] = Field(
        description="files or globs, here or in gs:// or s3://; stdlib://*.py names the interpreter's own library"
    )
    tokenizer: Annotated[str, AfterValidator(_one_readable)] = Field(
        "bytes",
        description="bytes: a token is a byte, vocab 256; else a folder or tokenizer.json of a Hugging Face tokenizer",
    )
    format: Literal["text", "chat", "preference"] = Field(
        "text",
        description="of a row: text; chat: messages for the tokenizer's template, targets the assistant's tokens; "
        "preference: chosen and rejected, and prompt or messages, texts or messages",
    )
    field: str | None = Field(
        None,
        min_length=1,
        description="of JSON lines, Parquet and Arrow: what holds the text; default text, of chats messages",
    )
    packing: Literal["concat", "first-fit", "none"] | None = Field(
        None,
        description="of documents into rows: concat cuts them, first-fit keeps them whole, none gives each a row; "
        "default concat, and of bytes without a field one stream that no document ends",
    )
    eval_path: Annotated[str | list[str] | None, AfterValidator(_readable)] = Field(
        None, description="files or globs to evaluate on, where documents are prepared"
    )
    eval_split: Fraction = Field(0.05, description="share kept back for evaluation: of the files, or of the documents")
    seed: Seed = Field(0, description="of the order in which documents are packed")
    data_dir: Annotated[str | None, AfterValidator(_mounted)] = Field(
        None, description="folder of prepared rows; default in the user's cache folder"
    )
    apart: bool = Field(
        False, description="document masking: attention and loss stop at file boundaries, as they do at documents'"
    )
    bigram: bool = Field(False, description="also report what a bigram model counted on the same text reaches")

    @property
    def is_prepared(self) -> bool:
        """Whether documents are tokenized and packed once, rather than bytes read as they lie, or pairs."""
        if self.format == "preference":
            return False
        return self.tokenizer != "bytes" or self.field is not None or self.packing is not None

    @model_validator(mode="after")
    def _is_one_or_the_other(self) -> Text:
        if self.format == "preference":
            given = [key for key in ("field", "packing", "apart", "bigram") if getattr(self, key)]
            if given:
                raise ValueError(f"{given[0]} is not of format: preference, whose rows have chosen and rejected")
            return self
        if self.is_prepared and (self.apart or self.bigram):
            key = "apart" if self.apart else "bigram"
            raise ValueError(f"{key} is of one stream of bytes; leave it out with a tokenizer, field or packing")
        if self.format == "chat" and self.tokenizer == "bytes":
            raise ValueError("format: chat needs a tokenizer with a chat template; bytes have none")
        if not self.is_prepared and self.eval_path is not None:
            raise ValueError("eval_path is of documents; give packing, such as concat, or use eval_split")
        return self


class Part(Block):
    """One set of files of a mixture, and how much of it a batch holds.

    ```yaml
    train:
      task: lm
      model: {kind: decoder, length: 1024}
      data:
        source: mixture
        parts:
          web: {weight: 4, path: web/*.txt}
          held: {weight: 0, path: held/*.txt, eval_split: 0.5}  # weight 0: only evaluated
    ```
    """

    weight: Weight = Field(
        description="share of the examples, relative to the others'; 0: only evaluated, on all of its documents"
    )
    path: Annotated[str | list[str], AfterValidator(_readable)] = Field(description="files or globs to train on")
    format: Literal["text", "chat"] = Field(
        "text",
        description="of a row: text; chat: messages for the tokenizer's template, targets the assistant's tokens",
    )
    field: str | None = Field(
        None,
        min_length=1,
        description="of JSON lines, Parquet and Arrow: what holds the text; default text, of chats messages",
    )
    eval_path: Annotated[str | list[str] | None, AfterValidator(_readable)] = Field(
        None, description="files or globs to evaluate on"
    )
    eval_split: Fraction = Field(0.05, description="share of the documents kept back for evaluation")

    @property
    def only_evaluated(self) -> dict[str, Any]:
        """Of a part that is not trained on, the files to evaluate on in place of both."""
        files = self.path if self.eval_path is None else self.eval_path
        return {} if self.weight else {"path": files, "eval_path": files}


class Mixture(Source):
    """Several sets of text files in fixed proportions: which one an example is of is a function of its position.

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

    source: Literal["mixture"] = Field(description="this source")
    parts: dict[str, Part] = Field(description="by name")
    tokenizer: Annotated[str, AfterValidator(_one_readable)] = Field(
        "bytes", description="of all parts: bytes, or the folder or tokenizer.json of a Hugging Face tokenizer"
    )
    packing: Literal["concat", "first-fit", "none"] = Field("concat", description="of documents into rows, as of text")
    seed: Seed = Field(0, description="of the order in which documents are packed")
    data_dir: Annotated[str | None, AfterValidator(_mounted)] = Field(
        None, description="folder of prepared rows; default in the user's cache folder"
    )

    @field_validator("parts")
    @classmethod
    def _weigh(cls, parts: dict[str, Part]) -> dict[str, Part]:
        total = sum(part.weight for part in parts.values())
        if not 0 < total < math.inf:
            raise ValueError(f"has weights that sum to {total:g}; give each part the share of the examples it is to be")
        return parts

    @model_validator(mode="after")
    def _has_a_template(self) -> Mixture:
        chat = next((name for name, part in self.parts.items() if part.format == "chat"), None)
        if chat is not None and self.tokenizer == "bytes":
            raise ValueError(f"parts.{chat}.format: chat needs a tokenizer with a chat template; bytes have none")
        return self

    def texts(self) -> dict[str, Text]:
        """Each part as the text source that reads it."""
        shared = {key: getattr(self, key) for key in ("tokenizer", "packing", "seed", "data_dir")}
        return {
            name: Text(source="text", **shared, **(part.model_dump(exclude={"weight"}) | part.only_evaluated))
            for name, part in self.parts.items()
        }


class Torch(Source):
    """A dataset as PyTorch has them, `module:name`: a class, an object or a DataLoader; torch need not be installed.

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

    source: Literal["torch"] = Field(description="this source")
    dataset: Annotated[
        str, Field(pattern=r"^[\w.]+:[\w.]+$", description="module:name of what has __len__ and __getitem__")
    ]
    args: dict[str, Any] = Field({}, description="the arguments of a class")
    eval_args: dict[str, Any] | None = Field(None, description="the same class with these arguments evaluates")
    eval_dataset: Annotated[
        str | None, Field(pattern=r"^[\w.]+:[\w.]+$", description="what evaluates, where it is another")
    ] = None
    workers: Annotated[
        int | None,
        Field(
            ge=0,
            le=MOST_WORKERS,
            description="worker processes that read examples, per process of the run; default: num_workers of a "
            "DataLoader, else 0, and data.threads read",
        ),
    ] = None


class Synthetic(Source):
    """Random but learnable examples, each a function of its index: for smoke tests and benchmarks.

    ```yaml
    train:
      task: classify
      data: {source: synthetic, examples: 1024, shape: [28, 28]}  # no files: for a test of speed
    ```
    """

    source: Literal["synthetic"] = Field(description="this source")
    examples: Positive = Field(4096, description="of an epoch")
    eval_examples: Natural = Field(512, description="of an evaluation")
    shape: list[Positive] | None = Field(None, description="of an image; default [28, 28]")
    classes: Positive = Field(10, description="of an image: labels are 0 to classes - 1")


Data = Annotated[Tfds | ArrayRecord | Text | Mixture | Torch | Synthetic, Field(discriminator="source")]

# --- the rest ---------------------------------------------------------------------------------------------------------


class Mesh(Block):
    """Devices per axis. Axes left out are 1; one may be -1 and takes what remains.

    ```yaml
    slices: 2
    accelerator: {type: v5e, topology: 4x4}
    train:
      task: lm
      mesh: {dp: 2, fsdp: -1, mp: 4, dcn: {dp: 2}}  # -1 is 32 / (2 × 4) = 4; dp spans the two slices
    ```
    """

    dp: int = Field(1, description="data parallel: the batch is split, the state is copied")
    fsdp: int = Field(1, description="the batch and the state are split")
    ep: int = Field(1, description="the batch and the experts of a mixture are split")
    mp: int = Field(1, description="model parallel: weights and activations are split")
    dcn: dict[Literal["dp", "fsdp", "ep", "mp"], Positive] = Field({}, description="how often an axis spans slices")

    @model_validator(mode="after")
    def _axes(self) -> Mesh:
        sizes = [getattr(self, axis) for axis in MESH_AXES]
        if any(size == 0 or size < -1 for size in sizes):
            raise ValueError("an axis is a positive number of devices, or -1 for what remains")
        if sizes.count(-1) > 1:
            raise ValueError("only one axis may be -1")
        return self

    def resolve(self, devices: int) -> tuple[int, int, int, int]:
        """Sizes of dp, fsdp, ep, mp over `devices`. Raises ValueError when they do not multiply to that."""
        sizes = [getattr(self, axis) for axis in MESH_AXES]
        known = 1
        for size in sizes:
            known *= size if size > 0 else 1
        if devices % known or (-1 not in sizes and known != devices):
            shape = said(dict(zip(MESH_AXES, sizes, strict=True)))
            asked = f"asks for a multiple of {known}" if -1 in sizes else f"asks for {known}"
            raise ValueError(f"{shape} {asked} devices, there {'is' if devices == 1 else 'are'} {devices}")
        dp, fsdp, ep, mp = (size if size > 0 else devices // known for size in sizes)
        return dp, fsdp, ep, mp


def said(sizes: Mapping[str, int]) -> str:
    """Sizes of axes for a reader: `dp 4 × fsdp 1 × mp 2`, with ep where it is not 1."""
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if axis != "ep" or size != 1)


class Dpo(Block):
    """Direct preference optimization, of dpo.

    ```yaml
    train:
      task: dpo
      model: {init_from: weights/qwen3-0.6b, length: 1024}
      data: {source: text, path: "pairs/*.jsonl", format: preference, tokenizer: weights/qwen3-0.6b}
      loss: {dpo: {beta: 0.1}}  # larger: stays nearer to the model that it starts from
    ```
    """

    kind: Literal["sigmoid", "ipo"] = Field("sigmoid", description="loss of a pair: DPO's (sigmoid) or IPO's")
    beta: Annotated[float, Field(gt=0)] = Field(
        0.1, description="strength of the penalty for diverging from the reference model"
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="assumed share of pairs whose labels are swapped"
    )

    @model_validator(mode="after")
    def _is_of_the_kind(self) -> Dpo:
        if self.kind == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing is of kind sigmoid; leave it out with ipo")
        return self


class Loss(Block):
    """What training minimizes in addition to the cross-entropy, and how. Evaluation reports the cross-entropy alone.

    ```yaml
    train:
      task: lm
      loss: {chunks: 8, z: 1e-4}  # logits of an eighth of a sequence at a time: less memory
    ```
    """

    chunks: Literal["auto"] | Positive = Field(
        "auto", description="tokens: sequence chunks for chunked cross-entropy; must divide length"
    )
    z: Weight = Field(0.0, description="weight of the z-loss (squared log of the softmax normalizer), such as 1e-4")
    smoothing: Fraction = Field(0.0, description="label smoothing: share of a label's weight spread over all classes")
    dpo: Dpo = Field(Dpo(), description="preferences: the loss of a pair")
    mixup: Weight = Field(0.0, description="images: alpha of the Beta distribution that blends pairs; 0: none")


class Samples(Block):
    """Samples generated from prompts at each evaluation.

    ```yaml
    train:
      task: lm
      eval:
        every: 500
        samples: {prompts: ["def ", "import "], max_tokens: 32, temperature: 0.8}  # 0: the likeliest token
    ```
    """

    prompts: Annotated[list[str | list[Natural]], Field(min_length=1)] = Field(
        description="texts, or token ids where the data has no tokenizer"
    )
    max_tokens: Positive = Field(64, description="tokens of a sample")
    temperature: Weight = Field(0.0, description="0: greedy")


class Eval(Block):
    """Evaluation on the held-out set, every example once.

    ```yaml
    train:
      task: lm
      eval: {every: 500, batches: 20}  # 20 batches of the held-out set, and at the end
    ```
    """

    every: Positive | None = Field(500, description="steps between evaluations; null: only at the end")
    batches: Positive | None = Field(
        None, description="batches per evaluation, at least one per part of a mixture; null: all"
    )
    samples: Samples | None = Field(
        None, description="prompts to generate from, into samples.jsonl of the run folder; null: none"
    )


def _of_evaluation(metric: str) -> str:
    if not metric.startswith(EVAL) or metric == EVAL:
        raise ValueError(f"is not a metric of an evaluation; write {EVAL}loss, or another that it gives")
    return metric


FALLING = ("loss", "bits_per_byte")  # ends of the names of metrics that are known to be better when smaller


class Watched(Block):
    """A metric of the evaluations, and which way it gets better."""

    metric: Annotated[str, AfterValidator(_of_evaluation)] = Field(
        "eval/loss", description="eval/loss, or eval/ and another that the task's evaluation gives"
    )
    mode: Literal["min", "max"] = Field("min", description="which values are better; must be given but for a loss")

    @model_validator(mode="after")
    def _says_which(self) -> Watched:
        if "mode" not in self.model_fields_set and not self.metric.endswith(FALLING):
            raise ValueError(f"needs mode for metric = {self.metric}: min or max, whichever values are better")
        return self


class Best(Watched):
    """Steps that are kept for how well they evaluated, besides the newest.

    ```yaml
    train:
      task: classify
      eval: {every: 100}
      checkpoint: {best: {metric: eval/accuracy, mode: max, keep: 2}}  # besides the newest
    ```
    """

    keep: Positive = Field(1, description="best steps kept")


class StopEarly(Watched):
    """The end of a run that no longer gets better: a success.

    ```yaml
    train:
      task: lm
      eval: {every: 100}
      stop_early: {metric: eval/loss, patience: 5, min_delta: 0.001}  # five in a row without a better one
    ```
    """

    patience: Positive = Field(description="evaluations in a row without a better value")
    min_delta: Weight = Field(0.0, description="by how much a value must be better to count")


class Checkpoint(Block):
    """What is saved, where and how often. A run resumes from its newest verified step.

    ```yaml
    train:
      task: lm
      checkpoint: {path: gs://team-runs/lm, every: 500, keep: 3}  # without path: the run folder, or the claim
    ```
    """

    path: Place | None = Field(
        None, description="a folder or gs://, s3:// URL; default the run folder, or the volume of the cluster defaults"
    )
    every: Positive | None = Field(500, description="steps between saves; null: only at the end")
    keep: Positive = Field(3, description="newest verified steps kept")
    best: Best | None = Field(None, description="steps also saved and kept for a metric; null: none")

    def kept(self) -> int:
        """The most steps that are kept at a time."""
        return self.keep + (self.best.keep if self.best is not None else 0)


class Profile(Block):
    """Steps whose time is traced and split: matrix products, attention, element-wise work, collectives, host.

    ```yaml
    train:
      task: lm
      profile: {at: 100, steps: 5}  # steps 101 to 105; at any time: launcher profile RUN
    ```
    """

    at: Natural | None = Field(None, description="steps that are complete when it begins; null: on demand alone")
    steps: Annotated[int, Field(ge=1, le=PROFILE_STEPS)] = Field(5, description="how many are traced")


class OnNonfinite(Block):
    """What to do when loss or gradients are not finite. The step that saw it changes nothing.

    ```yaml
    train:
      task: lm
      on_nonfinite: {action: stop}  # exit code 76; the checkpoint before it stays
    ```
    """

    action: Literal["stop"] = Field("stop", description="end the run with exit code 76")


class Policy(Block):
    """Precision in full: dtypes of parameters, compute and outputs, and the matmul precision of XLA.

    ```yaml
    train:
      task: lm
      precision: {params: bfloat16, compute: bfloat16}  # less memory than the usual precision: bf16
    ```
    """

    params: Literal["float32", "bfloat16"] = Field("float32", description="dtype the parameters are kept in")
    compute: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of layers and activations")
    output: Literal["float32", "bfloat16"] = Field("float32", description="dtype of what the model returns")
    matmul: Literal["default", "tensorfloat32", "highest"] = Field("default", description="XLA's matmul precision")


Precision = Literal["fp32", "tf32", "bf16", "fp16"] | Policy
Remat = Literal["none", "full", "dots", "dots_no_batch", "offload"] | list[str]

LM, CLASSIFY, DPO = "lm", "classify", "dpo"
# Where the built-in tasks are, by the name that `task` takes. Version 0.1 named them by these paths.
TASKS: Mapping[str, str] = {
    CLASSIFY: "jaxlaunch.trainer.tasks.classify:Classify",
    LM: "jaxlaunch.trainer.tasks.lm:NextToken",
    DPO: "jaxlaunch.trainer.tasks.dpo:Preference",
}

DEFAULT_STEPS = 1000

# Defaults of the built-in tasks. A task of the user's has the same as its class attribute `defaults`.
TASK_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    CLASSIFY: {"model": {"kind": "mlp"}, "data": {"source": "tfds", "name": "digits"}},
    LM: {"model": {"kind": "decoder"}, "data": {"source": "synthetic"}},
    DPO: {"model": {"kind": "decoder"}, "data": {"source": "synthetic"}},
}


def task_name(task: Any) -> Any:
    """The name of a built-in task that is given by its path, as version 0.1 had it; others stay as they are."""
    named = {path.removeprefix(prefix): name for name, path in TASKS.items() for prefix in ("", "jaxlaunch.")}
    return named.get(task, task) if isinstance(task, str) else task


class TrainSpec(Block):
    """The configuration of the trainer.

    ```yaml
    train:
      task: lm                  # or classify, or your own
      model: {kind: decoder, layers: 12, width: 768, heads: 12, vocab: 256, length: 1024}
      data: {source: text, path: "corpus/*.txt"}
      mesh: {fsdp: -1}                                  # all devices split batch and state
      precision: bf16
      batch: 64                                         # over all devices
      steps: 10000
      optimizer: {lr: 3e-4, schedule: {warmup: 200}}
      checkpoint: {every: 500}
    ```

    Raises pydantic's ValidationError, with all errors at once.
    """

    task: Literal["classify", "lm", "dpo"] | Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] = Field(
        description="a built-in task, or module:Class of a task of yours"
    )
    model: Model = Field(MLP(), description="by kind; default the task's own")
    data: Data = Field(Tfds(), description="by source; default the task's own")
    mesh: Mesh = Field(Mesh(dp=-1), description="devices per mesh axis; default: all on dp")
    precision: Precision = Field("fp32", description="a named policy, or the dtype of each part")
    batch_norm: Literal["global", "device"] = Field(
        "global",
        description="batch norm in a model of yours: statistics of the whole micro-batch, or of each device's part; "
        "running statistics are averaged over devices",
    )
    remat: Remat = Field("none", description="activation checkpointing; a list names the activations to save")
    batch: Positive = Field(128, description="global batch: examples per step, over all devices and micro-batches")
    accumulate: Positive = Field(1, description="gradient accumulation: micro-batches per step")
    steps: Steps | None = Field(None, description=f"optimizer steps; or epochs; default {DEFAULT_STEPS} steps")
    epochs: Positive | None = Field(None, description="passes over the training set, in place of steps")
    seed: Seed = Field(0, description="seed of the initial weights, the order of examples and a task's random numbers")
    optimizer: Optimizer = Field(Optimizer(), description="by name, with its schedule")
    lora: Lora | None = Field(None, description="adapters that are trained in place of the model; null: none")
    loss: Loss = Field(Loss(), description="terms added to the loss in training, and label smoothing")
    eval: Eval = Field(Eval(), description="on the held-out set")
    checkpoint: Checkpoint = Field(Checkpoint(), description="where and how often")
    stop_early: StopEarly | None = Field(
        None, description="early stopping: end when evaluations no longer improve; null: never"
    )
    attention: Literal["auto", "xla", "cudnn", "splash"] = Field(
        "auto",
        description="implementation; auto: cudnn or splash if devices, precision and sizes allow, else xla; the log "
        "says which",
    )
    compile_cache: Place | None = Field(None, description="folder or URL of XLA's compilation cache; null: none")
    on_nonfinite: OnNonfinite = Field(OnNonfinite(), description="when loss or gradients are not finite")
    steps_per_dispatch: Positive = Field(1, description="steps per dispatch to the device; more for tiny models")
    profile: Profile = Field(Profile(), description="which steps are traced")
    log_every: Positive = Field(10, description="steps between two lines of metrics")

    @model_validator(mode="before")
    @classmethod
    def _task_defaults(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        named = {**raw, "task": task_name(raw["task"])} if "task" in raw else raw
        return over_task(named, TASK_DEFAULTS.get(str(named.get("task")), {}))

    @field_validator("data")
    @classmethod
    def _is_read_by_the_task(cls, data: Data, info: ValidationInfo) -> Data:
        task, form = info.data.get("task"), getattr(data, "format", None)
        if task == DPO and (isinstance(data, Mixture) or form not in (None, "preference")):
            raise ValueError(f"has no pairs of texts, which {DPO} trains on; give source: text, format: preference")
        if task == LM and form == "preference":
            raise ValueError(f"format: preference has pairs of texts, which the task {DPO} trains on")
        return data

    @field_validator("loss")
    @classmethod
    def _is_of_the_task(cls, loss: Loss, info: ValidationInfo) -> Loss:
        task = info.data.get("task")
        if task in (LM, DPO) and loss.mixup:
            raise ValueError("mixup blends images; it does not apply to tokens")
        if task == DPO and (loss.z or loss.smoothing):
            raise ValueError("z and smoothing are of a cross-entropy; preferences have dpo.label_smoothing")
        if task in (LM, CLASSIFY) and loss.dpo != Dpo():
            raise ValueError(f"dpo is of preferences, which the task {DPO} trains on")
        if task == CLASSIFY and loss.chunks != "auto":
            raise ValueError("chunks are of tokens; they do not apply to images")
        model = info.data.get("model")
        is_known = model is not None and ("length" in model.model_fields_set or not getattr(model, "is_partial", False))
        length = getattr(model, "length", None) if is_known else None
        if length is not None and loss.chunks != "auto" and length % loss.chunks:
            raise ValueError(f"chunks = {loss.chunks} does not divide model.length = {length}")
        return loss

    @field_validator("batch_norm")
    @classmethod
    def _is_of_a_custom_model(cls, batch_norm: str, info: ValidationInfo) -> str:
        model = info.data.get("model")
        if batch_norm != "global" and model is not None and not isinstance(model, CustomModel):
            raise ValueError(f"is of a model of yours, and train.model.kind = {model.kind} has no batch norm")
        return batch_norm

    @field_validator("lora")
    @classmethod
    def _has_products(cls, lora: Lora | None, info: ValidationInfo) -> Lora | None:
        model = info.data.get("model")
        if lora is not None and model is not None and not isinstance(model, Decoder | GPT2):
            raise ValueError(f"is of a decoder or gpt2, and train.model.kind = {model.kind}")
        return lora

    @field_validator("epochs")
    @classmethod
    def _one_length(cls, epochs: int | None, info: Any) -> int | None:
        if epochs is not None and info.data.get("steps") is not None:
            raise ValueError("steps and epochs are both given; keep one")
        return epochs

    @field_validator("optimizer")
    @classmethod
    def _schedule_fits(cls, optimizer: Optimizer, info: ValidationInfo) -> Optimizer:
        if (
            "steps" in info.data and info.data.get("epochs") is None
        ):  # with epochs trainer/optim/schedules checks it, once the data is read
            optimizer.schedule.decay_steps(info.data["steps"] or DEFAULT_STEPS)
        return optimizer

    @field_validator("stop_early")
    @classmethod
    def _is_evaluated(cls, stop_early: StopEarly | None, info: ValidationInfo) -> StopEarly | None:
        if stop_early is not None and "eval" in info.data and info.data["eval"].every is None:
            raise ValueError("needs evaluations on the way; give eval.every")
        return stop_early

    @field_validator("profile")
    @classmethod
    def _is_reached(cls, profile: Profile, info: ValidationInfo) -> Profile:
        steps = None if info.data.get("epochs") is not None else info.data.get("steps") or DEFAULT_STEPS
        if profile.at is not None and steps is not None and profile.at >= steps:
            raise ValueError(f"at = {profile.at} is not below the {steps} steps of the run")
        return profile

    def total_steps(self, examples: int) -> int:
        """Optimizer steps of the whole run over a set of `examples`; batches run across epoch ends."""
        if self.epochs is not None:
            return -(-self.epochs * examples // self.batch)
        return self.steps or DEFAULT_STEPS


def over_task(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The train block `given` over the `defaults` of its task, of whose model a folder to start from leaves little."""
    if "model" in given:
        given = {**given, "model": architectures.named(given["model"])}
    model, below = given.get("model"), architectures.named(defaults.get("model"))
    if isinstance(model, Mapping) and model.get("init_from") is not None and isinstance(below, Mapping):
        defaults = {**defaults, "model": _beside_folder(model, below)}
    return with_defaults(given, defaults)


def _beside_folder(model: Mapping[str, Any], default: Mapping[str, Any]) -> Mapping[str, Any]:
    """What stays of a task's default model beside a folder, whose config.json says the sizes and, unasked, the kind."""
    kind = default.get("kind")
    if ":" in str(kind):  # init_from is an argument of the user's model
        return default
    kept = {key: default[key] for key in ("length", "scan") if key in default}
    if "kind" in model:
        return {**kept, "kind": kind}
    return {**kept, "kind": "vit"} if kind in ("mlp", "vit") else kept


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `defaults`, key by key; a block of another kind, source or optimizer replaces the default."""
    merged = dict(defaults)
    for key, value in given.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping) and _same_kind(value, below):
            value = with_defaults(value, below)
        merged[key] = value
    return merged


def _same_kind(given: Mapping[str, Any], default: Mapping[str, Any]) -> bool:
    # The name of an optimizer or a schedule says which keys apply; that of a data source only says which data.
    if "chain" in given:
        return False
    keys = ["kind", "source", *(["name"] if "name" in default and "source" not in default else [])]
    return all(given.get(key, default.get(key)) == default.get(key) for key in keys)
