"""Examples of commands, for `launcher COMMAND --help` and docs/cli.md."""

from __future__ import annotations

from collections.abc import Mapping

FIRST_EXAMPLES: Mapping[str, str] = {
    "launcher init first && launcher run first.yaml": "train on this machine, on CPU",
    "launcher submit job.yaml --follow --wait": "run on a cluster; exits as the job does",
    "launcher explain NAME": "why a job is pending, or why it failed",
    "launcher help out of memory": "search the documentation",
}

# Command -> its examples, each with its effect.
EXAMPLES: Mapping[str, Mapping[str, str]] = {
    "bundle": {
        "launcher bundle digits": "digits.bundle.tar.gz, to attach to a report",
    },
    "compare": {
        "launcher compare digits runs/other": "two runs: what differs, their loss",
        "launcher compare a b --at hour -o both.html": "as a page",
    },
    "copy": {
        "launcher copy digits:/tmp/profile .": "a folder of rank 0's pod",
        "launcher copy fixed.py digits:src/ --rank 3": "into the working folder of rank 3",
    },
    "dashboard": {
        "launcher dashboard": "the runs below runs/",
        "launcher dashboard runs -n team-a": "and the jobs of a namespace",
    },
    "data": {
        "launcher data photos --pictures sheet.png": "classes, broken files; a contact sheet",
        "launcher data patients.csv --label diagnosis": "columns, missing values",
    },
    "delete": {
        "launcher delete digits": "asks first if it has not ended",
        "launcher delete digits -n team-a --yes": "for scripts",
        "launcher delete runs/digits": "a run of this machine, with its checkpoints",
    },
    "doctor": {
        "launcher doctor": "can this cluster run jobs?",
        "launcher doctor job.yaml -n team-a": "can it run this one, there?",
    },
    "eval": {
        "launcher eval digits": "the newest step of runs/digits",
        "launcher eval digits --best --ema -o json": "its best; for scripts",
        "launcher eval digits --data eval_split='test[:9]'": "other examples",
    },
    "exec": {
        "launcher exec digits -- nvidia-smi": "next to rank 0",
        "launcher exec digits --rank 3 -- python -V": "next to rank 3",
    },
    "explain": {
        "launcher explain digits": "one cause, its evidence, what to do",
        "launcher explain digits.bundle.tar.gz": "what was known when the bundle was written",
        "launcher explain digits -o json": "for scripts",
    },
    "export": {
        "launcher export lm --to lm-hf": "the newest step of runs/lm",
        "launcher export lm --to lm-hf --step best --ema": "its best step, the moving average",
        "launcher export lora --to merged --merged": "adapters, merged into their model",
    },
    "help": {
        "launcher help": "lists the pages",
        "launcher help quickstart": "shows one",
        "launcher help out of memory": "searches them",
        "launcher help job-yaml#train.mesh": "one section of a page",
    },
    "init": {"launcher init first": "writes first.yaml"},
    "list": {
        "launcher list": "the runs in runs/, and the context's namespace",
        "launcher list -A": "all namespaces",
        "launcher list --local -o wide": "only the runs, with their goodput",
    },
    "logs": {
        "launcher logs digits -f": "follow all ranks, across restarts",
        "launcher logs digits --rank 0 --tail 20": "the last lines of rank 0",
        "launcher logs digits --previous": "before the last restart",
    },
    "model": {
        "launcher model check weights/olmo-3-7b": "can its PyTorch code be trained?",
    },
    "plan": {
        "launcher plan job.yaml": "memory per device; exits 2 if too little",
        "launcher plan job.yaml train.remat=full": "with another value",
        "launcher plan job.yaml --cluster": "an error if a cluster could not run it",
        "launcher plan job.yaml --sharding": "how each array is split",
    },
    "port-forward": {
        "launcher port-forward digits 8888": "127.0.0.1:8888 is that of rank 0",
        "launcher port-forward digits 9001:9000 --rank 3": "another port here",
    },
    "predict": {
        "launcher predict photos cat.jpg": "the label of an image, printed",
        "launcher predict photos new/ -o labels.csv --top 3": "of a folder",
        "launcher predict patients new.csv -o new.parquet": "of the rows of a table",
    },
    "prepare": {
        "launcher prepare job.yaml": "text, before a run, on all cores",
        "launcher prepare photos.yaml --to packed --resize 256": "images, into records",
    },
    "profile": {"launcher profile digits --steps 5": "of a run here or on a cluster"},
    "render": {
        "launcher render job.yaml": "what submit would write",
        "launcher render job.yaml | kubectl apply -f -": "submit without launcher",
        "launcher render --slurm job.yaml | sbatch": "on the nodes of Slurm",
    },
    "report": {
        "launcher report digits": "writes digits.html: open it in a browser",
        "launcher report runs/digits -o page.html": "a run by its folder",
    },
    "run": {
        "launcher run job.yaml": "here, until it ends",
        "launcher run job.yaml train.steps=100 hosts=1": "with other values",
        "launcher run gpu.yaml --simulate": "a GPU or TPU job on CPU devices",
        "launcher run job.yaml --hosts a,user@b": "on two machines, through ssh",
    },
    "sample": {
        'launcher sample lm --prompt "def main("': "one greedy continuation",
        'launcher sample lm --prompt "def " -n 4 --temperature 0.8': "four random samples",
        "launcher sample chat --chat": "a conversation",
    },
    "schema": {
        "launcher schema > job.schema.json": "for an editor",
        "launcher schema --markdown": "the page docs/job-yaml.md",
        "launcher schema status > status.schema.json": "of launcher status -o json",
    },
    "shell": {
        "launcher shell digits --rank 3": "Ctrl-D or exit ends it",
    },
    "status": {
        "launcher status digits": "state, step, loss, hosts",
        "launcher status runs/digits -o json": "of a run on this machine; for scripts",
    },
    "stop": {
        "launcher stop digits": "saves first; submit again to resume",
        "launcher stop runs/digits": "the run on this machine, from any terminal",
    },
    "submit": {
        "launcher submit job.yaml": "returns at once",
        "launcher submit job.yaml --follow --wait": "prints its log; exits as the job does",
        "launcher submit job.yaml --dry-run=server": "validated, not kept",
        "launcher submit job.yaml --replace": "after a job of that name has ended",
    },
    "sweep": {
        "launcher sweep job.yaml train.batch=64,128 train.seed=0..2": "six runs, here",
        "launcher sweep job.yaml train.optimizer.lr=1e-4..1e-1 --random 9": "nine random runs",
        "launcher sweep job.yaml train.seed=0..2 --cluster": "jobs in the job's queue",
    },
    "tune": {
        "launcher tune job.yaml --write faster.yaml": "compiles for the job's accelerator",
        "launcher tune job.yaml --over mesh --most 16": "only meshes, but more of them",
        "launcher tune job.yaml --measure": "times each on this machine",
    },
    "validate": {
        "launcher validate job.yaml": "every error at once, without a cluster",
        "launcher validate job.yaml train.batch=256": "with another value",
    },
}


def format_lines(examples: Mapping[str, str]) -> list[str]:
    """Return one line for each example: the command, and its effect as a shell comment."""
    width = max(map(len, examples))
    return [f"{command:<{width}}  # {effect}" for command, effect in examples.items()]


def make_epilog(command: str) -> str | None:
    """Return the examples of a command, as click prints them below its options."""
    examples = EXAMPLES.get(command)
    if examples is None:
        return None
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in format_lines(examples))])
