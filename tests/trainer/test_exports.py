"""Exports of every family in transformers 4.57 and 5: logits, tokens, answers that end, pixels."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from etils import epath
from flax import nnx
from PIL import Image

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.checkpoint import saved_files
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.data.augment import Transform
from jaxlaunch.trainer.export import export
from jaxlaunch.trainer.huggingface import folder as folders
from jaxlaunch.trainer.huggingface.families import FAMILIES
from jaxlaunch.trainer.sources.images.picture import Picture
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.spec.augment import Augment
from jaxlaunch.trainer.step.state import ModelArrays
from jaxlaunch.trainer.tasks.classify import Classify
from jaxlaunch.trainer.tasks.lm import NextToken
from jaxlaunch.trainer.text.chats import ChatTemplates
from jaxlaunch.trainer.text.tokenizer import HuggingFaceTokenizer
from tests import environments, needs
from tests.trainer.references import train_spec
from tests.trainer.text import corpora

pytestmark = pytest.mark.extended

PROGRAM = Path(__file__).with_name("transformers_reads.py")
# The packages that precede those of the environment with transformers 4.57.
VERSIONS = {"4.57": ["torchvision"], "5": ["transformers5", "torchvision"]}

# Models as they were read from their fixtures, with other options than these have.
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 32}
YARN_OPTIONS = {"beta_fast": 16.0, "attention_factor": 1.3, "truncate": False}
LINEAR = {"kind": "linear", "factor": 8.0}
READ: dict[str, dict[str, Any]] = {
    "llama_tiny": {"biases": ["qkv", "out", "mlp"]},
    "llama3_tiny": {},
    "qwen2_tiny": {"rope_scaling": YARN},
    "qwen3_tiny": {"rope_scaling": {**YARN, **YARN_OPTIONS}},
    "mistral_tiny": {"rope_scaling": LINEAR},
    "gemma2_tiny": {},
    "gemma3_tiny": {"rope_scaling": LINEAR},
    "olmo2_tiny": {"biases": ["qkv", "out"]},
    "mixtral_tiny": {"balance": 0.02},
    "qwen3_moe_tiny": {"dense_layers": [1], "experts_normalized": False},
    "gpt2_tiny": {},
    "vit_tiny": {},
    "vit_tiny_rect": {},
    "vit_tiny_patch16": {},
}
DECODER: dict[str, Any] = {"kind": "decoder", "layers": 3, "width": 64, "heads": 4, "kv_heads": 2}
DECODER |= {"hidden": 160, "vocab": 97, "length": 47}
GEMMA = {**DECODER, "norms": "both", "norm_from_one": True, "embedding_scale": True, "tied": True}
GEMMA |= {"activation": "gelu_tanh", "norm_eps": 1e-6}
WINDOWS = {"window": 8, "pattern": ["window", "window", "full"]}
EXPERTS = {"experts": 4, "experts_per_token": 2, "experts_normalized": True}
ODD = {"heads": 3, "kv_heads": 1, "head_size": 16}
# Models that a job describes by its own keys.
WRITTEN: dict[str, dict[str, Any]] = {
    # Llama of transformers 5 needs heads that divide the width, so Mistral's name is taken.
    "heads of their own size": {**DECODER, **ODD},
    "gemma2 without windows": {**GEMMA, "family": "gemma2", "query_scalar": 24.0},
    "gemma3": {**GEMMA, **WINDOWS, "qk_norm": "head", "rope_local_theta": 1e4, "logit_cap": 20.0},
    "gemma3 without windows": {**GEMMA, "qk_norm": "head", "family": "gemma3_text"},
    "qwen3 with windows": {**DECODER, **WINDOWS, "qk_norm": "head", "biases": ["qkv", "out"]},
    "olmo2": {**DECODER, "norms": "after", "qk_norm": "whole"},
    "mixtral with windows": {**DECODER, **EXPERTS, **ODD, "window": 8},
    "qwen3_moe": {
        **DECODER,
        **EXPERTS,
        "qk_norm": "head",
        "expert_hidden": 48,
        "dense_layers": [0],
    },
    "grey vit": {"kind": "vit", "layers": 2, "image": [16, 32], "patch": 8, "channels": 1},
    "resnet of two stages": {"kind": "resnet", "depths": [1, 2], "widths": [16, 32]},
    "grey bottlenecks": {"kind": "resnet", "depths": [1, 1, 1], "widths": [16, 32, 64]}
    | {"block": "bottleneck", "stem_width": 16, "channels": 1},
    "convnext of one stage": {"kind": "convnext", "depths": [2], "widths": [16]},
    "convnext of three stages": {"kind": "convnext", "depths": [1, 2, 1], "widths": [16, 24, 32]}
    | {"patch": 2, "channels": 1, "norm_eps": 1e-5},
    "convnext of five stages": {"kind": "convnext", "depths": [1] * 5, "patch": 2}
    | {"widths": [16, 24, 32, 40, 48], "layer_scale": 0.5},
}
LABELS = ["a cat", "猫", "LABEL_7"]

TURN_END = "<|turn_end|>"
TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message.role }}\n{{ message.content }}<|turn_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module", params=VERSIONS)
def read_exports(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Any]]]:
    """A function that has a version of transformers, which starts once, answer requests."""
    needs.packages("torch")
    folders_first = [str(needs.packages(name)) for name in VERSIONS[request.param]]
    command = [str(environments.find_python("torch")), "-I", str(PROGRAM), *folders_first]
    pipe, environ = subprocess.PIPE, os.environ | environments.LAZY
    with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdin is not None and program.stdout is not None
        assert json.loads(program.stdout.readline()).startswith(f"{request.param}.")

        def ask(requests: list[tuple[str, dict[str, Any]]]) -> list[Any]:
            answers = []
            for keys in requests:
                print(json.dumps(keys), file=program.stdin, flush=True)
                answers.append(json.loads(program.stdout.readline()))
            return answers

        yield ask
        program.stdin.close()
        assert program.wait() == 0


# --- logits ---------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A model as an export, with inputs and its logits."""

    folder: str
    inputs: np.ndarray[Any, Any]
    logits: np.ndarray[Any, Any]


def save_checkpoint(model: Any, arrays: dict[str, Any], target: Path) -> Path:
    store = Store(str(target), keep=1, uid="mine")
    store.claim()
    params = {name: array for name, array in arrays.items() if not is_statistic(name)}
    buffers = {name: array for name, array in arrays.items() if is_statistic(name)}
    tree = {"params": params} | ({"rest": buffers} if buffers else {})
    store.save(1, tree, {"model": model.model_dump(mode="json")})
    store.close()
    return target


def is_statistic(name: str) -> bool:
    return name.endswith((".norm.mean", ".norm.variance"))


def draw_arrays(
    model: Any, draw: np.random.Generator, size: list[int]
) -> tuple[Any, dict[str, Any]]:
    """Return the model as a function of its arrays, and random arrays."""

    class Pictures(Classify):
        def source(self, spec: Any, split: str) -> Any:
            return [{"image": np.zeros((*size, model.channels), np.float32), "label": 0}]

    task = Pictures() if isinstance(model, spec.ImageModel) else NextToken()
    train = TrainSpec.model_validate({"task": "tests:Exported", "model": model, "attention": "xla"})
    built = ModelArrays(nnx.eval_shape(lambda: task.model(train, nnx.Rngs(0))))
    arrays = {}
    for name, leaf in {**built.params, **built.buffers}.items():
        arrays[name] = draw.normal(0, 0.1, leaf.shape).astype(np.float32)
        if name.endswith(".variance"):
            arrays[name] = draw.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
        elif name.endswith(".scale") and not getattr(model, "norm_from_one", False):
            arrays[name] += 1

    @jax.jit
    def run_model(params: Any, buffers: Any, inputs: Any) -> Any:
        built_model = built.merge_model(params, buffers, jax.random.key(0))
        built_model.eval()
        if isinstance(model, spec.ImageModel):
            return built_model(inputs.transpose(0, 2, 3, 1))
        return built_model(inputs, None)

    def compute(inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        params, buffers = (
            {name: arrays[name] for name in leaves} for leaves in (built.params, built.buffers)
        )
        return np.asarray(run_model(params, buffers, inputs))

    return compute, arrays


def write_export(model: Any, target: Path) -> Written:
    draw = np.random.default_rng(0)
    size = model.image if isinstance(model, spec.ViT) else [40, 56]
    compute, arrays = draw_arrays(model, draw, size)
    if isinstance(model, spec.ImageModel):
        inputs = draw.normal(0, 1, (2, model.channels, *size)).astype(np.float32)
    else:
        inputs = draw.integers(0, model.vocab, (2, model.length)).astype(np.int32)
    checkpoints = save_checkpoint(model, arrays, target / "checkpoints")
    if isinstance(model, spec.ImageModel) and model.classes == len(LABELS):
        saved_files.save_inputs(str(checkpoints), {"kind": "images", "classes": LABELS})
    export(str(checkpoints), str(target / "export"))
    return Written(str(target / "export"), inputs, compute(inputs))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    target = tmp_path_factory.mktemp("exports")
    models = {case: train_spec(case, None, model=options).model for case, options in READ.items()}
    pixels = {"classes": len(LABELS), "pixel_std": [1.0] * 3, "pixel_mean": [0.0] * 3}
    for name, keys in WRITTEN.items():
        if keys["kind"] != "decoder":
            keys = {**pixels, **keys}
            for key in ("pixel_mean", "pixel_std"):
                keys[key] = keys[key][: keys.get("channels", 3)]
        models[name] = TrainSpec.model_validate({"task": "tests:Exported", "model": keys}).model
    return {name: write_export(model, target / name) for name, model in models.items()}


def test_every_family_has_equal_logits(
    read_exports: Callable[..., list[Any]], written: dict[str, Written]
) -> None:
    answers = read_exports(
        [
            ("compute_logits", {"folder": case.folder, "inputs": case.inputs.tolist()})
            for case in written.values()
        ]
    )
    classes = set()
    for (name, case), answer in zip(written.items(), answers, strict=True):
        assert (answer["faults"], answer["dtype"]) == ({}, "torch.float32"), name
        error = np.abs(case.logits - np.array(answer["logits"])).max()
        assert error <= 1e-5, (name, error)
        if name in WRITTEN and answer["labels"] is not None:
            assert answer["labels"] == LABELS
        classes.add(answer["class"])
    assert classes == {family.architecture for family in FAMILIES.values()}


# --- tokens and chats -----------------------------------------------------------------------------


def save_chat_tokenizer(folder: Path) -> HuggingFaceTokenizer:
    """A tokenizer whose template ends a turn with another token than a text."""
    tokenizer = corpora.train_bpe()
    tokenizer.add_special_tokens([TURN_END])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": corpora.BEGIN, "eos_token": corpora.END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceTokenizer("the tokenizer", saved_files.read_tokenizer(epath.Path(folder)))


def test_exported_chats_end_with_their_turn(
    read_exports: Callable[..., list[Any]], tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    tokenizer = save_chat_tokenizer(checkpoints / saved_files.TOKENIZER_FOLDER)
    end = tokenizer.encode_batch([TURN_END])[0][0]
    keys = {**DECODER, "vocab": tokenizer.vocab, "length": 64, "tied": False}
    model: Any = TrainSpec.model_validate({"task": "lm", "model": keys}).model
    _, arrays = draw_arrays(model, np.random.default_rng(0), [])
    # Every position has the same state, in which the end of a turn is the likeliest token.
    arrays = {name: np.zeros_like(array) for name, array in arrays.items()}
    arrays["embedding"] += 1
    arrays["norm.scale"] += 1
    arrays["head"][:, end] = 1
    save_checkpoint(model, arrays, checkpoints)
    exported = tmp_path / "export"
    assert export(str(checkpoints), str(exported))["notes"] == []
    texts = [*corpora.make_texts(20), " a space", f"a{corpora.END}b"]
    requests: list[tuple[str, dict[str, Any]]] = [
        ("generate_answer", {"folder": str(exported), "chat": CHAT}),
        ("encode_texts", {"folder": str(exported), "texts": texts, "chats": [CHAT]}),
    ]
    answer, tokens = read_exports(requests)
    assert answer["ids"] == [end]
    assert tokens["texts"] == [tokenizer.encode(text) for text in texts]
    rendered = ChatTemplates(tokenizer).render_text(CHAT)
    assert tokens["chats"] == tokenizer.encode_batch([rendered])


# transformers 5 has an own tokenizer for every folder of the type qwen2.
TOKENIZED = ("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "olmo2", "mixtral", "gpt2")


def test_exported_tokenizers_give_equal_tokens(
    read_exports: Callable[..., list[Any]], tmp_path: Path
) -> None:
    texts, requests, expected = [*corpora.make_texts(10), " a space"], [], []
    for kind in corpora.KINDS:
        for style in ("no configuration", "no class", "the class of transformers 5"):
            config: dict[str, Any] = {}
            if style.startswith("the"):
                config["tokenizer_class"] = "TokenizersBackend"
            if kind == "bpe":
                config["bos_token"] = corpora.BEGIN
            source = tmp_path / kind / style
            corpora.save_tokenizer(source, kind, **config)
            if style == "no configuration" and kind != "bpe":
                (source / "tokenizer_config.json").unlink()
            files = saved_files.read_tokenizer(epath.Path(source))
            ids = [HuggingFaceTokenizer(style, files).encode(text) for text in texts]
            for name in TOKENIZED:
                folder = source / name
                folder.mkdir()
                for file, content in folders.complete_tokenizer_config(files).items():
                    (folder / file).write_bytes(content)
                block = {"model_type": name, "architectures": [FAMILIES[name].architecture]}
                (folder / "config.json").write_text(json.dumps(block))
                keys = {"folder": str(folder), "texts": texts, "chats": []}
                requests.append(("encode_texts", keys))
                expected.append(ids)
    answers = read_exports(requests)
    for (_, keys), ids, answer in zip(requests, expected, answers, strict=True):
        assert answer["texts"] == ids, keys["folder"]


# --- pixels ---------------------------------------------------------------------------------------


def draw_picture(draw: np.random.Generator, height: int, width: int, channels: int) -> Image.Image:
    """Smooth colours with noise."""
    coarse = draw.integers(0, 256, (height // 7 + 2, width // 7 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    noisy = np.clip(smooth + draw.integers(-20, 20, smooth.shape), 0, 255).astype(np.uint8)
    return Image.fromarray(noisy if channels == 3 else noisy[..., 0])


def test_processors_give_equal_pixels(
    read_exports: Callable[..., list[Any]], tmp_path: Path
) -> None:
    draw, requests, expected = np.random.default_rng(0), [], []
    # In the fourth torchvision's crop begins a pixel later.
    sizes = [(64, 64), (333, 500), (375, 500), (64, 70), (100, 31), (48, 64), (1000, 700)]
    for number, (height, width) in enumerate(sizes):
        for channels in (3, 1):
            path = tmp_path / f"{number}-{channels}.png"
            draw_picture(draw, height, width, channels).save(path)
            for side, share in ((32, 1.0), (96, 0.875), (32, 0.875)):
                mean, deviation = [120.0, 110.0, 100.0][:channels], [60.0] * channels
                model = spec.ResNet(channels=channels, pixel_mean=mean, pixel_std=deviation)
                block = folders.render_preprocessor(model, (side, side), share)
                folder = tmp_path / f"{number}-{channels}-{side}-{share}"
                folder.mkdir()
                (folder / "preprocessor_config.json").write_text(json.dumps(block))
                (folder / "config.json").write_text(json.dumps({"model_type": "resnet"}))
                automatic = "AutoProcessor" if number == 0 else "AutoImageProcessor"
                keys = {"folder": str(folder), "image": str(path)}
                requests.append(("read_pixels", keys | {"automatic": automatic}))
                transform = Transform(Augment(eval_crop=share), (side, side), "eval")
                pixels = transform(Picture(path.read_bytes(), channels)).astype(np.float64)
                expected.append(((pixels - mean) / deviation).transpose(2, 0, 1))
    answers = read_exports(requests)
    for (_, keys), pixels, answer in zip(requests, expected, answers, strict=True):
        actual = np.array(answer["pixels"])
        assert actual.shape == pixels.shape, keys["folder"]
        # torchvision rounds the weights of a resize, by which a byte may differ.
        assert np.abs(actual - pixels).max() <= 2.01 / 60.0, keys["folder"]
