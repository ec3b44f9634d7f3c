"""Words and options of other tools, and what does the same here.

Users type what they know from kubectl, Slurm, torchrun, SkyPilot, xpk, Docker and W&B. A word that
only reads is another name of a command (`Alias`). Any other gets one line with the command that
the user means (`Advice`), because a command that changes something must be typed as it is.

The module is imported only for a word or an option that launcher does not have.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath

import click

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.runs import layout

# What kubectl and others write between a verb and a name.
RESOURCES = ("job", "jobs", "jobset", "jobsets", "run", "runs", "workload", "workloads")
JOB_SUFFIXES = (".yaml", ".yml")
# The words after these options are values.
_OPTIONS_WITH_VALUES = ("-n", "--namespace", "--context", "-o", "--output", "-u", "--user")


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
    """

    text: str


_LIST, _EXPLAIN = Alias("list", with_name="status"), Alias("explain")
_STOP = Advice(
    "`launcher stop {name}` saves and ends it; the same submit or run continues from there."
)
_DELETE = Advice(
    "`launcher delete {name}` deletes a job of the cluster; a run of this machine is a folder: "
    "`rm -r runs/{name}`."
)
_SUBMIT = Advice(
    "`launcher submit {file}` runs it on a cluster, `launcher run {file}` on this machine."
)
_RUN = Advice(
    "`launcher run {file}` trains on this machine, `launcher submit {file}` on a cluster."
)
_RESUME = Advice(
    "`launcher submit {file}`, or `launcher run {file}` on this machine, continues a stopped job "
    "from its newest checkpoint."
)
_CHANGE = Advice(
    "edit the job file, `launcher stop {name}`, then `launcher submit {file} --replace`; it "
    "continues from its checkpoint."
)
_SHELL = Advice(
    "`launcher status {name} -o wide` names the pod of each host; `kubectl exec -it POD -- bash` "
    "opens a shell in it."
)
_COPY = Advice(
    "`kubectl cp POD:PATH PATH` copies from a pod; `launcher status {name} -o wide` names the pods."
)
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
    "write tracker: {{name: wandb}} in the job, or mlflow or trackio; `launcher dashboard` shows "
    "the curves without one."
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
    "launcher uses a cluster that exists, and `launcher doctor` says what it lacks; gcloud, eksctl "
    "or `kind create cluster` make one."
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
_PROGRAM = Advice(
    "a program is started by a job. Write a job.yaml of three lines, `name: train`, "
    "`accelerator: {{type: cpu}}` and `command: [{program}]`; then `launcher run job.yaml`."
)
_SECRETS = Advice(
    "`kubectl create secret generic NAME --from-literal=KEY=VALUE`, then write secrets: "
    "{{VARIABLE: {{name: NAME, key: KEY}}}} in the job."
)
_PORT = Advice(
    "`launcher dashboard -n NAMESPACE` shows the jobs of a cluster without a forwarded port; "
    "`kubectl port-forward POD PORT` forwards one."
)
_NOTEBOOK = Advice("in a notebook, jaxlaunch.load('{name}') reads a run: `launcher help api`.")
_UPGRADE = Advice("`pip install --upgrade jaxlaunch`, in the environment of launcher.")
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
    (Alias("render"), "template, manifest, manifests, yaml, convert, export-yaml, compile"),
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
        "apply, create, sbatch, deploy, launch, workload create, workload run, job submit, "
        "jobs launch, job run, enqueue, replace, up, install, qsub, bsub, salloc, job create, "
        "batch, spawn, schedule-job, dispatch, provision",
    ),
    (
        _RUN,
        "train, start, fit, local, srun, finetune, fine-tune, execute, trainer, pretrain, simulate",
    ),
    (
        _PROGRAM,
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
    (_SHELL, "exec, ssh, shell, debug, enter, login-node, console, terminal, connect, rsh"),
    (_COPY, "cp, download, pull, rsync, scp, fetch, sync-down, copy"),
    (_PORT, "port-forward, proxy, expose, tunnel, forward"),
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
    (_BUILD, "build, image, images, docker, docker build, docker push, dockerize, containerize"),
    (
        _NODES,
        "sinfo, nodes, node, gpus, show-gpus, devices, resources, quota, hosts, capacity, "
        "get nodes, get queues, queues, accelerators, tpus",
    ),
    (
        _CLUSTER,
        "cluster, clusters, cluster create, cluster delete, cluster list, nodepool, nodepools, "
        "kind, minikube, gke, eks, bootstrap-cluster",
    ),
    (_SHELL, "pods, pod, get pods, get pod"),
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

_NO_DASH_F = Advice("the file has no option: `launcher {command} {file}`.")
_NAME_OF_FILE = Advice(
    "`launcher {command} {name}` takes the name of the job, which is name: in its file."
)
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


# --- answers --------------------------------------------------------------------------------------


def translate_words(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with an alias replaced. Raises UserError with the advice for a word.

    Arguments that begin with no word of another tool are returned as they are.
    """
    first = arguments[0]
    suffix = PurePath(first).suffix
    if suffix in JOB_SUFFIXES:
        raise UserError(f"{first} is a file, not a command.", _fill_in(_RUN, arguments))
    if suffix == ".py":
        raise UserError(f"{first} is a program, not a command.", _fill_in(_PROGRAM, arguments))
    for length in (2, 1):
        words = " ".join(arguments[:length]).lower()
        if (answer := WORDS.get(words)) is not None and len(arguments) >= length:
            break
    else:
        return list(arguments)
    rest = arguments[length:]
    if isinstance(answer, Advice):
        raise UserError(f"launcher has no command {words}.", _fill_in(answer, rest))
    if rest[:1] and rest[0].lower() in RESOURCES:
        rest = rest[1:]
    operands = _list_operands(rest)
    replacement = answer.words
    if operands and operands[0].endswith(JOB_SUFFIXES):
        replacement = answer.with_file or answer.words
    elif operands and not _is_folder_of_runs(operands[0]):
        replacement = answer.with_name or answer.words
    return [*replacement.split(), *rest]


def _is_folder_of_runs(operand: str) -> bool:
    return os.path.isdir(operand) and not os.path.exists(os.path.join(operand, layout.LOCK))


def explain_program(program: str) -> UserError:
    """Return the error about a program in the place of a job file."""
    arguments = sys.argv[2:]
    return UserError(f"{program} is a program, not a job.", _fill_in(_PROGRAM, arguments))


def explain_error(error: click.UsageError, commands: Mapping[str, str]) -> click.ClickException:
    """Return an error of the command line with the command, option or value that is meant."""
    context = error.ctx
    if context is None:
        return error
    if isinstance(error, click.NoSuchOption):
        return _explain_option(error, context, commands)
    if isinstance(error, click.MissingParameter):
        hint = _MISSING_HINTS.get(getattr(error.param, "name", None) or "")
        if hint is not None:
            message = f"Missing argument '{_metavar(error.param, context)}'. {hint}"
            return click.UsageError(message, context)
    if isinstance(error, click.BadParameter) and isinstance(error.param, click.Option):
        for option in error.param.opts:
            words = CHOICES.get((context.info_name or "", option), {})
            if match := next((word for word in _typed_values(option) if word in words), None):
                message = f"'{match}' is '{words[match]}' here: {option} {words[match]}."
                return click.BadParameter(message, context, error.param)
    return error


_MISSING_HINTS = {
    "name": "`launcher list` shows the names.",
    "names": "`launcher list` shows the names.",
    "run": "`launcher list --local` shows the runs.",
    "runs": "`launcher list --local` shows the runs.",
    "job_file": "`launcher init` writes a first one.",
}


def _metavar(parameter: click.Parameter | None, context: click.Context) -> str:
    assert parameter is not None
    return parameter.make_metavar(context).removesuffix("...")


def _typed_values(option: str) -> list[str]:
    """Return the values that the user typed after an option."""
    words = sys.argv[1:]
    values = [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return values + [words[index + 1] for index, word in enumerate(words[:-1]) if word == option]


def _explain_option(
    error: click.NoSuchOption, context: click.Context, commands: Mapping[str, str]
) -> click.ClickException:
    from jaxlaunch.spelling import find_nearest

    option, words = error.option_name, sys.argv[1:]
    no_option = f"No such option '{option}'."
    if context.parent is None:
        # An option of a command before the command, as kubectl allows it.
        index = next((index for index, word in enumerate(words) if word in commands), None)
        if index is None:
            return click.NoSuchOption(
                option, no_option, find_nearest(option, ["--version", "--help"]), context
            )
        moved = shlex.join(["launcher", *words[index:], *words[:index]])
        return click.NoSuchOption(
            option, f"{no_option} It follows the command: `{moved}`.", ctx=context
        )
    command, parameters = context.info_name or "", context.command.params
    has_overrides = any(parameter.name == "overrides" for parameter in parameters)
    has_job = any(parameter.name == "job_file" for parameter in parameters)
    if has_job and any(word.endswith(".py") for word in words[1:]):
        return click.NoSuchOption(
            option, f"{no_option} {_capitalize(_fill_in(_PROGRAM, words[1:]))}", ctx=context
        )
    advice = OPTIONS.get((command, option)) or OPTIONS.get(("", option))
    if advice is not None:
        text = _fill_in(advice, words[1:], command)
        return click.NoSuchOption(option, f"{no_option} {_capitalize(text)}", ctx=context)
    if has_overrides and (example := _find_key(option.lstrip("-"))) is not None:
        message = f"{no_option} {example} Arguments of your program belong in its command:."
        return click.NoSuchOption(option, message, ctx=context)
    names = [
        name
        for parameter in parameters
        if isinstance(parameter, click.Option)
        for name in parameter.opts
    ]
    suggestions = find_nearest(option, names)
    if not suggestions and has_overrides:
        no_option += " A key of the job has no dashes, as in hosts=2; arguments of your program "
        no_option += "belong in its command:."
    return click.NoSuchOption(option, no_option, suggestions, context)


def _find_key(word: str) -> str | None:
    """Return a sentence with the key of the job that an option names, or None."""
    # Imported here, because most errors need no schema.
    from jaxlaunch.launcher.job import foreign_keys, introspection
    from jaxlaunch.launcher.job.schema import JobSpec
    from jaxlaunch.launcher.wording import format_key_path

    name = word.replace("-", "_")
    if (counterpart := foreign_keys.find_counterpart(word)) is not None:
        if counterpart.key is None:
            return _capitalize(counterpart.note)
        key = counterpart.key
    else:
        paths = [path for path, _ in introspection.walk_fields(JobSpec)]
        matches = [path for path in paths if name in (path[-1], format_key_path(path))]
        depth = min(map(len, matches), default=0)
        keys = {format_key_path(path) for path in matches if len(path) == depth}
        if len(keys) != 1:
            return None
        key = keys.pop()
    return f"A key of the job has no dashes: {key}=VALUE."


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list_operands(arguments: Sequence[str]) -> list[str]:
    """Return the words that are neither options, nor their values, nor KEY=VALUE."""
    words = zip(["", *arguments], arguments, strict=False)
    return [
        word
        for previous, word in words
        if not word.startswith("-") and "=" not in word and previous not in _OPTIONS_WITH_VALUES
    ]


def _fill_in(advice: Advice, arguments: Sequence[str], command: str = "") -> str:
    """Return the line of an answer with the name and the file that the user typed."""
    operands = [word for word in _list_operands(arguments) if word.lower() not in RESOURCES]
    files = [word for word in operands if word.endswith(JOB_SUFFIXES)]
    names = [word for word in operands if PurePath(word).suffix not in (*JOB_SUFFIXES, ".py")]
    programs = [word for word in operands if word.endswith(".py")]
    values = {
        "command": command,
        "file": shlex.quote(files[0]) if files else "JOB_FILE",
        "name": shlex.quote(names[0].rpartition("/")[2] or names[0]) if names else "NAME",
        "program": f"python, {shlex.quote(programs[0])}" if programs else "python, train.py",
    }
    return advice.text.format_map(values)
