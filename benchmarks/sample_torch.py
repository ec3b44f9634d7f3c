"""The side of transformers in benchmarks.sample: eager PyTorch with a key-value cache."""

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
    request = json.loads((folder / "request.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "weights").eval()
    rows = torch.tensor(request["prompts"])

    def run_step() -> float:
        """Return a checksum of the tokens."""
        with torch.no_grad():
            tokens = model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=request["tokens"],
                do_sample=False,
                pad_token_id=0,
            )
        new_tokens = tokens[:, rows.shape[1] :].tolist()
        return float(
            sum(number * token for ids in new_tokens for number, token in enumerate(ids, start=1))
        )

    serve_steps(f"torch {torch.__version__}, transformers {transformers.__version__}", run_step)


if __name__ == "__main__":
    main()
