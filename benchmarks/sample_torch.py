"""transformers' side of benchmarks.sample: PyTorch in eager mode with its own key-value cache, on one thread."""

from __future__ import annotations

import json
import pathlib
import sys

import torch
import transformers

from benchmarks.side import serve


def main() -> None:
    torch.set_num_threads(1)
    folder = pathlib.Path(sys.argv[1])
    asked = json.loads((folder / "asked.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "weights").eval()
    rows = torch.tensor(asked["prompts"])

    def step() -> float:
        with torch.no_grad():
            made = model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=asked["tokens"],
                do_sample=False,
                pad_token_id=0,
            )
        new = made[:, rows.shape[1] :].tolist()
        return float(sum((at + 1) * token for ids in new for at, token in enumerate(ids)))

    serve(f"torch {torch.__version__}, transformers {transformers.__version__}", step)


if __name__ == "__main__":
    main()
