"""Words and options of other tools, and what does the same here.

Users type what they know from kubectl, Slurm, torchrun, SkyPilot, xpk, Docker and W&B. A word that
only reads is another name of a command (`Alias`). Any other gets one line with the command that
the user means (`Advice`), because a command that changes something must be typed as it is.
habits.py looks words up here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Alias:
    """Another name of a command that only reads.

    Attributes:
        words: What replaces the word.
        with_name: What replaces it if a name follows, if that differs.
        with_file: What replaces it if a job file follows, if that differs.
    """

    words: str
    with_name: str | None = None
    with_file: str | None = None


@dataclasses.dataclass(frozen=True)
class Advice:
    """One line with the right command.

    Attributes:
        text: The line. {name} and {file} are the operands that the user typed, if any.
        with_file: What answers instead if a job file follows.
        with_program: What answers instead if a program follows.
    """

    text: str
    with_file: Advice | None = None
    with_program: Advice | None = None


PROGRAM = Advice(
    "a program is started by a job. Write a job.yaml of three lines, `name: train`, "
    "`accelerator: {{type: cpu}}` and `command: [{program}]`; then `launcher run job.yaml`."
)
_LIST, _EXPLAIN = Alias("list", with_name="status"), Alias("explain")
_STOP = Advice(
    "`launcher stop {name}` saves and ends it; the same submit or run continues from there."
)
_DELETE = Advice(
    "`launcher delete {name}` deletes a job of the cluster, or a run of this machine with its "
    "folder."
)
_SUBMIT = Advice(
    "`launcher submit {file}` runs it on a cluster, `launcher run {file}` on this machine.",
    with_program=PROGRAM,
)
RUN = Advice(
    "`launcher run {file}` trains on this machine, `launcher submit {file}` on a cluster.",
    with_program=PROGRAM,
)
_RESUME = Advice(
    "`launcher submit {file}`, or `launcher run {file}` on this machine, continues a stopped job "
    "from its newest checkpoint."
)
_BATCH = Advice(
    "`launcher submit {file}` runs it on Kubernetes, `launcher render --slurm {file} | sbatch` "
    "under Slurm; `launcher sweep {file} train.seed=0..9` makes an array.",
    with_program=PROGRAM,
)
_CHANGE = Advice(
    "edit the job file, `launcher stop {name}`, then `launcher submit {file} --replace`; it "
    "continues from its checkpoint."
)
_SHELL = Advice(
    "`launcher shell {name} --rank N` opens a shell next to a rank, `launcher exec {name} -- "
    "COMMAND` runs a command there."
)
_COPY = Advice(
    "`launcher copy NAME:PATH .` copies from a pod, `launcher copy FILE NAME:PATH` into it."
)
_PODS = Advice("`launcher status {name} -o wide` names the pod of each host.")
_SHOW_LOAD = Advice(
    "`launcher status {name}` shows the step, its time and the phase, `launcher dashboard` the "
    "curves; `kubectl top pods` shows CPU and memory."
)
_PAGES = Advice(
    "`launcher dashboard` serves the pages of all runs, `launcher report {name}` writes one page."
)
_COST = Advice(
    "launcher knows no prices; `launcher status {name} -o json` has the hosts and the age of a "
    "job, and its goodput."
)
_CONTEXT = Advice(
    "launcher uses the context of kubectl: `kubectl config use-context CONTEXT` changes it, "
    "--context and -n replace it in one command."
)
_COMPLETE = Advice(
    'add eval "$(_LAUNCHER_COMPLETE=bash_source launcher)" to ~/.bashrc; zsh_source is for '
    "~/.zshrc, and fish_source for fish."
)
_TRACK = Advice(
    "write tracker: wandb in the job, or mlflow, tensorboard or trackio; `launcher dashboard` "
    "shows the curves without one."
)
_PUBLISH = Advice("`launcher export {name} --to DIR` writes a folder of Hugging Face.")
_BUILD = Advice(
    "`docker build -t IMAGE . && docker push IMAGE`, then write image: IMAGE in the job; launcher "
    "builds no image."
)
_NODES = Advice(
    "`launcher doctor {file}` checks whether the nodes fit a job; `kubectl get nodes` lists them."
)
_CLUSTER = Advice(
    "launcher uses a cluster that exists, and `launcher doctor` says what it lacks; `launcher help "
    "first-cluster-job` has the commands of gcloud, eksctl and kind that create one."
)
_CREDENTIALS = Advice(
    "`gcloud container clusters get-credentials NAME` and `aws eks update-kubeconfig --name NAME` "
    "write the kubeconfig, which launcher reads."
)
_CHART = Advice(
    "`helm install TEAM helm/launcher -n NAMESPACE` prepares a namespace: `launcher help "
    "kubernetes`; `launcher submit {file}` submits a job."
)
_NO_CONTAINER = Advice(
    "`launcher run` starts processes without a container; image: of a job names that of its pods, "
    "and `launcher submit {file}` starts those."
)
_GIT = Advice(
    "git is a command of its own; code: . in a job ships its folder with each submission."
)
_OTHER_TOOL = Advice("it is a command of its own: type it without `launcher`.")
_SPOT = Advice("write capacity: spot in the job; `launcher submit {file}` runs it.")
_CONVERT = Advice(
    "`launcher export {name} --to DIR` converts a checkpoint, `launcher render {file}` prints the "
    "manifests of a job."
)
_WAIT = Advice(
    "`launcher submit {file} --wait` waits for the end; `launcher logs -f {name}` follows a job "
    "that is there."
)
_SWEEP = Advice(
    "`launcher sweep {file} train.optimizer.lr=1e-4,1e-3` runs every combination, --random N draws."
)
_PROFILE = Advice(
    "`launcher profile {name}` traces the next steps; `launcher tune {file}` finds faster settings."
)
_INIT = Advice("`launcher init NAME` writes a first job, NAME.yaml.")
_PREPARE = Advice("`launcher prepare {file}` packs text, images or a table once.")
_NODE_OUT = Advice(
    "`kubectl cordon NODE` keeps new pods off a node; node_selector: and tolerations: of the job "
    "choose nodes."
)
_SECRETS = Advice(
    "`kubectl create secret generic NAME --from-literal=KEY=VALUE`, then write secrets: "
    "{{VARIABLE: {{name: NAME, key: KEY}}}} in the job."
)
_PORT = Advice(
    "`launcher port-forward {name} PORT` forwards a port; `launcher dashboard -n NAMESPACE` shows "
    "the jobs of a cluster without one."
)
_NOTEBOOK = Advice("in a notebook, jaxlaunch.load('{name}') reads a run: `launcher help api`.")
_UPGRADE = Advice(
    "`git pull && make venv` in a clone, or pip with the wheel of a newer release: `launcher help "
    "upgrades`."
)
_STOP_LATER = Advice(
    "write deadline: 12h in the job, which then saves and ends; ttl: deletes finished jobs."
)
_CRON = Advice("a CronJob of Kubernetes, or cron, calls `launcher submit {file} --replace`.")
_SERVE = Advice(
    "`launcher export {name} --to DIR` writes a folder that vLLM serves; `launcher dashboard` "
    "serves the pages of runs."
)

# One row for each answer: the words, several of which may be two words. They are in lower case.
_WORD_ROWS: tuple[tuple[Alias | Advice, str], ...] = (
    (Alias("--version"), "version, ver, about"),
    (
        _LIST,
        "ls, ps, get, jobs, queue, squeue, sacct, history, runs, ll, lsjobs, workload list, "
        "job list, jobs list, jobs queue, job ls, workloads, list-jobs, get jobs, get runs, "
        "overview, sreport",
    ),
    (Alias("list --watch", with_name="status --watch"), "watch"),
    (
        _EXPLAIN,
        "describe, inspect, why, events, event, get events, reason, diagnose, troubleshoot, "
        "analyze, inspector",
    ),
    (
        Alias("status"),
        "show, info, state, stat, scontrol, scontrol show, seff, job status, jobs status, "
        "progress, job get",
    ),
    (Alias("logs"), "log, job logs, jobs logs, output, cat, stdout"),
    (Alias("logs --follow"), "tail, attach, follow, stream, journalctl"),
    (Alias("validate"), "lint, verify, parse, typecheck"),
    (Alias("doctor", with_file="validate"), "check, checks"),
    (
        Alias("doctor"),
        "preflight, precheck, health, healthcheck, cluster-info, can-i, auth can-i, auth, ping",
    ),
    (Alias("help"), "docs, doc, man, manual, documentation, faq, examples, guide"),
    (Alias("render"), "template, manifest, manifests, yaml, export-yaml, compile"),
    (Alias("compare"), "diff, cmp"),
    (Alias("eval"), "evaluate, evaluation, score"),
    (Alias("sample"), "generate, chat, complete, inference, infer"),
    (Alias("plan"), "estimate, memory, mem, size, fit-check, estimate-memory"),
    (Alias("data"), "dataset, datasets"),
    (Alias("schema"), "schemas, json-schema, spec, reference"),
    (
        _STOP,
        "cancel, scancel, kill, abort, terminate, interrupt, halt, quit, end, suspend, pause, "
        "hold, jobs cancel, job stop, job cancel, workload cancel, signal, sigterm, skill, finish",
    ),
    (
        _DELETE,
        "rm, remove, del, destroy, purge, cleanup, clean, down, teardown, workload delete, "
        "job delete, jobs delete, uninstall, rmi, prune, gc, drop, erase, autodown",
    ),
    (
        _SUBMIT,
        "apply, create, deploy, launch, workload create, workload run, job submit, "
        "jobs launch, job run, ray submit, ray job, enqueue, replace, up, install, "
        "job create, batch, spawn, schedule-job, dispatch, provision",
    ),
    (_BATCH, "sbatch, qsub, bsub, salloc, slurm"),
    (
        RUN,
        "train, start, fit, local, srun, finetune, fine-tune, execute, trainer, pretrain, simulate",
    ),
    (
        PROGRAM,
        "python, python3, torchrun, accelerate, deepspeed, mpirun, mpiexec, horovodrun, uv, "
        "accelerate launch, ipython, torch.distributed.launch, jaxrun, composer, bash, sh",
    ),
    (
        _RESUME,
        "resume, continue, restart, retry, rerun, requeue, rollout, rollout restart, release, "
        "unsuspend, recover, restore, unpause, re-run, relaunch",
    ),
    (_CHANGE, "edit, set, patch, update, scale, resize, modify, reconfigure, scontrol update"),
    (_SHOW_LOAD, "top, stats, htop, monitor, usage, nvidia-smi, utilization, metrics, metric"),
    (_SHELL, "ssh, debug, enter, login-node, console, terminal, connect, rsh"),
    (
        _COPY,
        "artifact get, artifact download, cp, download, pull, rsync, scp, fetch, sync-down",
    ),
    (_PORT, "proxy, expose, tunnel, forward"),
    (_COMPLETE, "completion, completions, autocomplete, install-completion, complete-bash"),
    (
        _CONTEXT,
        "config, context, contexts, use-context, ctx, ns, namespace, namespaces, configure, "
        "config use-context, config get-contexts, switch, profile-use, whoami",
    ),
    (_COST, "cost, costs, cost-report, price, prices, billing, spend"),
    (_TRACK, "wandb, mlflow, tensorboard, trackio, sync, offline, track, login, comet, neptune"),
    (_PAGES, "ui, web, board, open, view, browse, gui, page, plot, curves, charts, graph"),
    (_SERVE, "serve, server, vllm, endpoint, deploy-model"),
    (_PUBLISH, "upload, push, publish, push-to-hub, huggingface, hf, save, artifact, convert-hf"),
    (_CONVERT, "convert"),
    (_BUILD, "build, image, images, docker, docker build, docker push, dockerize, containerize"),
    (
        _NODES,
        "sinfo, nodes, node, gpus, show-gpus, devices, resources, quota, hosts, capacity, "
        "get nodes, get queues, queues, accelerators, tpus",
    ),
    (
        _CLUSTER,
        "cluster, clusters, cluster create, cluster delete, cluster list, nodepool, nodepools, "
        "kind, minikube, gke, eks, bootstrap-cluster, gcloud, eksctl, aws, az, terraform, k3d, k3s",
    ),
    (
        _CREDENTIALS,
        "gcloud auth, gcloud config, aws eks, aws configure, az login, az aks, get-credentials, "
        "update-kubeconfig, kubeconfig",
    ),
    (_CHART, "helm, helm install, helm upgrade, chart"),
    (_NO_CONTAINER, "docker run, podman run, docker compose, compose, docker start"),
    (_GIT, "git, clone, checkout, commit, branch"),
    (
        Advice(
            "`launcher status {name}` names the newest checkpoint, `launcher export {name} --to "
            "DIR` converts one."
        ),
        "checkpoint, checkpoints, checkpoint list, ckpt",
    ),
    (_SPOT, "spot, spot launch, preemptible"),
    (_OTHER_TOOL, "kubectl, sky, xpk, podman, kueuectl, docker-compose, pip, conda, make"),
    (_PODS, "pods, pod, get pods, get pod"),
    (_WAIT, "wait, await, join, block"),
    (_SWEEP, "hpo, search, optuna, grid, agent, sweeps, hyperopt, ray, array, sarray"),
    (_PROFILE, "trace, benchmark, bench, perf, nsys, xprof, profiler, speed"),
    (_INIT, "new, setup, quickstart, scaffold, example, wizard, bootstrap, generate-job, hello"),
    (_PREPARE, "preprocess, tokenize, pack, preprocess-data, prep"),
    (_NODE_OUT, "cordon, drain, uncordon, taint, exclude"),
    (_SECRETS, "secret, secrets, secret create, create secret, env, environment, vars"),
    (_NOTEBOOK, "notebook, jupyter, repl, load"),
    (_UPGRADE, "upgrade, self-update, update-cli"),
    (_STOP_LATER, "autostop, idle, timeout, expire, ttl"),
    (_CRON, "cron, cronjob, schedule"),
    (Advice("`launcher validate {file}` checks a job, `launcher eval {name}` a model."), "test"),
)
WORDS: Mapping[str, Alias | Advice] = {
    word: answer for answer, words in _WORD_ROWS for word in words.split(", ")
}

# Other tools whose name users leave before a word, as in `kubectl get jobs`.
TOOLS = ("kubectl", "docker", "podman", "sky", "xpk", "kueuectl", "wandb", "ray")

_NO_DASH_F = Advice("the file has no option: `launcher {command} {file}`.")
_NAME_OF_FILE = Advice(
    "`launcher {command} {name}` takes the name of the job, which is name: in its file."
)
_NAME_HAS_NO_OPTION = Advice("the name has no option: `launcher {command} {name}`.")
_DRY_RUN = Advice(
    "`launcher validate {file}` checks it, `launcher render {file}` prints its manifests."
)
_SET = Advice("a key is set without an option: `launcher {command} {file} KEY=VALUE`.")
_EVERY_NAME = Advice(
    "`launcher list --cluster -o name` prints the names, several of which `launcher {command}` "
    "takes: launcher list --cluster -o name | xargs launcher {command}."
)
_LABELS = Advice("`kubectl get jobsets -l KEY=VALUE` selects by label; list shows every job.")
_ALL_STATES = Advice("jobs in every state are listed; -A lists all namespaces.")
_LOUD = Advice("there is no such level: doctor, explain and logs show all that they know.")
_BACKGROUND = Advice(
    "`launcher submit {file}` returns at once; here, `nohup launcher run {file} &` runs on."
)
_JSON = Advice("-o json prints JSON, in every command that has data.")
_TIMES = Advice("-o json prints the time of each line.")
_FOLLOW = Advice(
    "`launcher logs -f {name}` follows the lines, `launcher status {name} -w` the state."
)
_KUBECONFIG = Advice("set the variable: KUBECONFIG=FILE launcher …")
_OPEN = Advice("it writes {name}.html, which a browser opens; `launcher dashboard` serves it.")
_DELETED_NOW = Advice("`launcher delete {name} --yes` does not ask; grace: of the job is its time.")
_RETURNS = Advice("it returns at once, unless --wait or --follow is given.")

# Options by command, or by "" for all commands. Keys of the job, such as --hosts, need no row.
_OPTION_ROWS: tuple[tuple[Advice, str, str], ...] = (
    (_NO_DASH_F, "run validate render plan doctor tune prepare sweep", "-f --file --filename"),
    (_NO_DASH_F, "submit", "--file --filename"),
    (
        _NO_DASH_F,
        "run submit validate render plan doctor tune prepare sweep",
        "-c --config --config-file --config_file --job-file --yaml --spec",
    ),
    (
        _NAME_HAS_NO_OPTION,
        "stop delete status explain logs",
        "-j --job --jobs --jobid --job-id --job-name --workload --name",
    ),
    (_NAME_OF_FILE, "stop delete status explain logs", "--file --filename"),
    (_NAME_OF_FILE, "stop delete status explain", "-f"),
    (_DRY_RUN, "run validate render plan doctor", "--dry-run --dryrun --check --noop"),
    (Advice("`launcher validate {file} -o yaml` prints what it requests."), "run", "-o --output"),
    (_SET, "run submit validate render plan sweep", "--set --override --overrides -D --param -p"),
    (_SET, "run submit validate render plan sweep", "--arg --args --opt --opts --cfg-options"),
    (_EVERY_NAME, "stop delete", "--all -a -A -l --selector --all-namespaces"),
    (_LABELS, "list", "-l --selector --label --field-selector"),
    (_ALL_STATES, "list", "-a --all --refresh -u --user --me --mine --sort-by --show-labels"),
    (Advice("-o name prints the names alone."), "list", "-q --quiet --no-headers --noheader"),
    (
        Advice("-o json prints every field, for `jq` or a script; -o name prints the names."),
        "list",
        "--state --states --status --limit --head --filter --filter-by-status -j --name --since",
    ),
    (Advice("it asks the cluster at each call; -w repeats it."), "status", "--refresh -r"),
    (Advice("`launcher list` shows every run and job."), "status", "--all -a -A"),
    (Advice("-r all shows every process, -r N one."), "logs", "--all -a --stderr --stdout"),
    (Advice("it waits, unless --no-wait is given."), "stop delete", "--wait"),
    (Advice("--port N chooses the port."), "dashboard", "-p"),
    (_NO_CONTAINER, "run", "-i -t --rm --interactive --tty --entrypoint --privileged"),
    (Advice("write `command: [python, -m, MODULE]` in the job."), "run submit", "-m --module"),
    (
        Advice("`launcher submit A.yaml --wait && launcher submit B.yaml`: B follows a success."),
        "run submit",
        "--dependency --depends-on --after --afterok",
    ),
    (
        Advice("`launcher sweep {file} train.seed=0..9 --cluster` makes a job of each value."),
        "run submit",
        "--array -a",
    ),
    (
        Advice("--random N draws N combinations."),
        "sweep",
        "--count --trials --n-trials --num-trials --max-trials --num-samples",
    ),
    (_BACKGROUND, "run", "-d --detach --background --daemon"),
    (_RETURNS, "submit", "-d --detach --detach-run --async --no-wait"),
    (Advice("-f follows its log, --wait waits for its end."), "submit", "-w --watch --stream-logs"),
    (_TIMES, "logs", "-t --timestamps --timestamp"),
    (Advice("--tail N prints the last lines of each host."), "logs", "--lines --last --num-lines"),
    (Advice("--rank N shows one process."), "logs", "-c --container --all-containers --pod"),
    (_FOLLOW, "logs explain", "-w --watch"),
    (_DELETED_NOW, "stop delete", "--force --grace-period --now -9 --signal -s --kill"),
    (Advice("it does not ask."), "stop", "-y --yes"),
    (_OPEN, "report compare", "--open --show --browser --serve"),
    (Advice("`launcher run {file}` of the same file resumes."), "run", "--resume --continue"),
    (Advice("`launcher submit {file}` of the same file resumes."), "submit", "--resume --continue"),
    (Advice("write env.NAME=VALUE after the file."), "run submit", "-e --env --envs --env-file"),
    (Advice("--volume NAME=DIR gives a folder to a volume of the job."), "run", "-v --mount"),
    (Advice("write volumes: in the job."), "submit", "-v --volume --mount --file-mounts"),
    (Advice("write capacity=spot after the file."), "submit", "--spot --use-spot --preemptible"),
    (Advice("--simulate uses virtual CPU devices."), "run", "--cpu --cpu-only --fake --no-gpu"),
    (Advice("a second run needs another folder: --run-dir DIR."), "run", "--output-dir --workdir"),
    (_DRY_RUN, "run submit", "--test --fast-dev-run --smoke-test"),
    (_LOUD, "", "-v -vv --verbose --debug -q --quiet --silent --loglevel --log-level --v"),
    (_JSON, "", "--json --format --output-format --yaml"),
    (_KUBECONFIG, "", "--kubeconfig"),
    (
        Advice("--context selects a cluster of the kubeconfig."),
        "",
        "--cluster-name --zone --region",
    ),
    (Advice("-n selects a namespace."), "", "--ns --project"),
)
OPTIONS: Mapping[tuple[str, str], Advice] = {
    (command, option): advice
    for advice, commands, options in _OPTION_ROWS
    for command in (commands.split() or [""])
    for option in options.split()
}

# Command and option -> words for one of its choices.
CHOICES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("init", "--kind"): {
        word: kind
        for kind, words in {
            "lm": "llm gpt text language language-model decoder transformer chat",
            "classify": "vision image images cnn vit resnet classification classifier digits mnist",
            "own": "custom model task mine flax nnx",
            "command": "script program torch pytorch python job",
        }.items()
        for word in words.split()
    },
}
