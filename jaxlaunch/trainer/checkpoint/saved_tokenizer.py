"""The files of a tokenizer beside the checkpoints of the model that was trained with it, so that exports have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etils import epath

from jaxlaunch.trainer.checkpoint import manifest

FOLDER = "tokenizer"  # in the folder of checkpoints, beside the steps
MAIN = "tokenizer.json"
# What is carried of a tokenizer's folder, as transformers' save_pretrained writes it.
FILES = (MAIN, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
TEMPLATES = "additional_chat_templates/"  # a folder of NAME.jinja, chat templates besides that


def keep(checkpoints: str, files: Mapping[str, bytes]) -> None:
    """Makes the folder hold these files, each whole or not at all. Raises what the storage raises; by one process."""
    if kept(checkpoints) == dict(files):
        return
    folder = epath.Path(checkpoints) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        manifest.replace(folder / name, content)
    for name in {*FILES, *_templates(folder)} - set(files):  # of the tokenizer before: it would be exported with this
        (folder / name).unlink(missing_ok=True)


def kept(checkpoints: str) -> dict[str, bytes]:
    """The files that `keep` wrote, by name; none where the model was trained without a tokenizer."""
    return read(epath.Path(checkpoints) / FOLDER)


def read(folder: epath.Path, names: Sequence[str] = FILES) -> dict[str, bytes]:
    """Those of a tokenizer's files that a folder holds, by name, and its further chat templates."""
    there = [name for name in names if (folder / name).exists()]
    return {name: bytes((folder / name).read_bytes()) for name in (*there, *_templates(folder))}


def _templates(folder: epath.Path) -> list[str]:
    """The names of the chat templates in a folder of their own."""
    place = folder / TEMPLATES
    return (
        sorted(f"{TEMPLATES}{each.name}" for each in place.iterdir() if each.suffix == ".jinja")
        if place.exists()
        else []
    )
