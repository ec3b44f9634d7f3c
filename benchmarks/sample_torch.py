"""transformers' side of benchmarks.sample: eager PyTorch with its key-value cache, one thread."""

from __future__ import annotations

import json
import pathlib
import sys

import torch
import transformers

from benchmarks.side import serve_steps


def main() -> None:
    torch.set_num_threads(1)
    folder = pathlib.Path(sys.argv[1])
    options = json.loads((folder / "asked.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "weights").eval()
    rows = torch.tensor(options["prompts"])

    def run_step() -> float:
        with torch.no_grad():
            tokens = model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=options["tokens"],
                do_sample=False,
                pad_token_id=0,
            )
        new = tokens[:, rows.shape[1] :].tolist()
        return float(sum((at + 1) * token for ids in new for at, token in enumerate(ids)))

    serve_steps(f"torch {torch.__version__}, transformers {transformers.__version__}", run_step)


if __name__ == "__main__":
    main()
