"""The files of a tokenizer beside the checkpoints of the model that was trained with it, so that exports have them."""

from __future__ import annotations

from collections.abc import Mapping

from etils import epath

FOLDER = "tokenizer"  # in the folder of checkpoints, beside the steps
MAIN = "tokenizer.json"
# What is carried of a tokenizer's folder, as transformers' save_pretrained writes it.
FILES = (MAIN, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def keep(checkpoints: str, files: Mapping[str, bytes]) -> None:
    """Writes the files where they are not yet. Raises what the storage raises; called by one process."""
    folder = epath.Path(checkpoints) / FOLDER
    for name, content in files.items():
        place = folder / name
        if not (place.exists() and place.read_bytes() == content):
            folder.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)


def kept(checkpoints: str) -> dict[str, bytes]:
    """The files that `keep` wrote, by name; none where the model was trained without a tokenizer."""
    folder = epath.Path(checkpoints) / FOLDER
    return {name: bytes((folder / name).read_bytes()) for name in FILES if (folder / name).exists()}
