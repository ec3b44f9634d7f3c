from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.errors import JobFaultsError
from jaxlaunch.launcher.job import checks, foreign_keys, introspection
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.job.schema import VERBATIM_KEYS
from jaxlaunch.launcher.wording import format_key_path
from jaxlaunch.trainer import spec

LM = "lm"

FULL_JOB = """
schema: 1
name: lm-small
image: registry.example/train:1.4
hosts: 4
slices: 1
processes_per_host: 1
accelerator: {type: h100, per_host: 8}
platform: gke
namespace: team-a
queue: research
priority: normal
capacity: {reservation: big-one}
placement: {preferred: rack}
network: {profile: rdma, resource: rdma/ib, count: 8}
network_policy: true
gang_secret: false
resources: {cpu: 8, memory: 32Gi, ephemeral: 10Gi, shm: 8Gi}
restarts: {crash: 5, in_place: 3}
grace: 60s
deadline: 2d
ttl: 3d
timeouts: {rendezvous: 30m, init: 5m, restore: 10m, compile: 30m, step: auto, data: 10m, save: 20m}
volumes:
  - {claim: ckpt, path: /ckpt}
  - {bucket: gs://team-b, path: /data, read_only: true}
  - {ephemeral: 100Gi, path: /scratch}
  - {secret: s, path: /s}
  - {configmap: c, path: /c}
env: {A: b, N: 010, F: 3e-4, T: true}
secrets: {TOKEN: {name: my-secret, key: token}}
code: .
workdir: null
service_account: x
image_pull_secrets: [y]
labels: {team: 7}
annotations: {note: "no"}
node_selector: {pool: 1.0}
tolerations: [{key: a, operator: Exists, effect: NoExecute, tolerationSeconds: 30}]
init: [{name: fetch, image: busybox}]
agent: auto
pod: {spec: {hostIPC: false, containers: [{name: main, securityContext: {runAsUser: 7}}]}}
train:
  task: lm
  model: {kind: decoder, layers: 12, width: 768, heads: 12, vocab: 50304, length: 1024}
  data: {source: text, path: /data/*.txt, tokenizer: bytes, eval_split: 0.05}
  mesh: {dp: 4, fsdp: 8, mp: 1}
  precision: bf16
  remat: none
  batch: 512
  accumulate: 1
  steps: 20000
  seed: 0
  optimizer:
    {name: adamw, lr: 3e-4, weight_decay: 0.1, clip: 1.0, ema: null, schedule: {name: cosine}}
  eval: {every: 500, batches: null}
  checkpoint: {path: /ckpt/lm-small, every: 500, keep: 3}
  attention: auto
  compile_cache: null
  on_nonfinite: {action: stop}
  log_every: 10
"""


def make_job(text: str = "", **parts: Any) -> JobSpec:
    """A job of the least a job needs, with `text` in front and `parts` on top."""
    least: dict[str, Any] = {
        "name": "lm",
        "accelerator": {"type": "cpu", "per_host": 8},
        "train": {"task": LM},
    }
    return jobs.parse_job(text + yaml.safe_dump(least | parts, sort_keys=False))


def parse_faults(text: str) -> str:
    with pytest.raises(JobFaultsError) as faults:
        jobs.parse_job(text)
    return str(faults.value)


def test_full_schema_is_read() -> None:
    job = jobs.parse_job(FULL_JOB)
    assert (job.devices, job.host_count, job.processes, job.devices_per_process) == (32, 4, 4, 8)
    assert (job.grace, job.deadline, job.ttl) == (60.0, 172800.0, 259200.0)
    assert [volume.name for volume in job.volumes] == ["ckpt", "team-b", "scratch", "s", "c"]
    assert isinstance(job.train, spec.TrainSpec)
    assert job.train.optimizer.lr == 3e-4


def test_texts_for_programs_stay_as_written() -> None:
    job = jobs.parse_job(FULL_JOB)
    assert job.env == {"A": "b", "N": "010", "F": "3e-4", "T": "true"}
    assert (job.labels, job.node_selector) == ({"team": "7"}, {"pool": "1.0"})
    command = jobs.parse_job(
        "name: a\naccelerator: {type: cpu}\ncommand: [python, x.py, --lr, 3e-4, --n, "
        "010, --yes, no]"
    ).command
    assert command == ["python", "x.py", "--lr", "3e-4", "--n", "010", "--yes", "no"]


@pytest.mark.parametrize(
    "text",
    [
        FULL_JOB,
        "name: a\naccelerator: {type: v6e, topology: 4x4}\ncommand: ['3e-4', 'no', '010', '']\n",
    ],
)
def test_dumped_job_is_read_back_equal(text: str) -> None:
    first = jobs.parse_job(text)
    dumped = jobs.dump_job(first)
    assert jobs.parse_job(dumped) == first
    assert jobs.dump_job(jobs.parse_job(dumped)) == dumped
    assert yaml.safe_load(dumped)["name"] == first.name


def test_dump_omits_defaults_of_the_task() -> None:
    job = jobs.parse_job(
        "name: a\naccelerator: {type: cpu}\ntrain: {task: 'my.tasks:Mine', batch: 8}\n"
    )
    assert yaml.safe_load(jobs.dump_job(job))["train"] == {"task": "my.tasks:Mine", "batch": 8}


def test_ambiguous_texts_survive_a_dump() -> None:
    """PyYAML quotes by YAML 1.1, under which 3e-4 is text; ours reads a number there."""
    texts = [
        "3e-4",
        "1e3",
        "no",
        "010",
        "12:30",
        "~",
        "null",
        ".inf",
        "0o7",
        "9" * 50,
        "a: b",
        "*x",
        " x ",
        "ü",
        "\n",
        "",
    ]
    args = {f"k{index}": text for index, text in enumerate(texts)}
    job = make_job(train={"task": LM, "data": {"source": "torch", "dataset": "a:B", "args": args}})
    assert jobs.parse_job(jobs.dump_job(job)) == job


def test_user_model_keeps_its_keys() -> None:
    job = make_job(
        train={
            "task": "my.tasks:Mine",
            "model": {"kind": "my.models:Net", "blocks": [1, 2], "drop": 0.1},
        }
    )
    assert job.train is not None
    assert job.train.model.model_dump() == {"kind": "my.models:Net", "blocks": [1, 2], "drop": 0.1}
    assert jobs.parse_job(jobs.dump_job(job)) == job


@pytest.mark.parametrize(
    ("parts", "hosts", "devices", "processes", "devices_per_process"),
    [
        ({"accelerator": {"type": "cpu"}}, 1, 1, 1, 1),
        ({"accelerator": {"type": "h100"}, "hosts": 2}, 2, 16, 2, 8),
        ({"accelerator": {"type": "h100"}, "hosts": 2, "processes_per_host": "all"}, 2, 16, 16, 1),
        (
            {"accelerator": {"type": "cpu", "per_host": 4}, "hosts": 2, "processes_per_host": 2},
            2,
            8,
            4,
            2,
        ),
        ({"accelerator": {"type": "l4"}}, 1, 1, 1, 1),
        ({"accelerator": {"type": "gb200"}}, 1, 4, 1, 4),
        ({"accelerator": {"type": "v6e", "topology": "1x1"}}, 1, 1, 1, 1),
        ({"accelerator": {"type": "v6e", "topology": "4x4"}}, 4, 16, 4, 4),
        ({"accelerator": {"type": "v5e", "topology": "2x4"}}, 2, 8, 2, 4),
        ({"accelerator": {"type": "v5e", "topology": "2x4", "per_host": 8}}, 1, 8, 1, 8),
        ({"accelerator": {"type": "v5p", "topology": "4x4x8"}, "slices": 2}, 32, 256, 64, 4),
        ({"accelerator": {"type": "7x", "topology": "2x2x2"}}, 2, 16, 2, 8),
    ],
)
def test_devices_and_processes_follow_from_the_accelerator(
    parts: dict[str, Any], hosts: int, devices: int, processes: int, devices_per_process: int
) -> None:
    job = make_job(**parts, train=None, command=["x"])
    assert (job.hosts, job.devices, job.processes, job.devices_per_process) == (
        hosts,
        devices,
        processes,
        devices_per_process,
    )


def test_timeouts_are_converted_to_seconds() -> None:
    timeouts = make_job(timeouts={"init": "90s", "save": None, "step": 5}).timeouts.to_seconds()
    assert (timeouts["init"], timeouts["save"], timeouts["step"], timeouts["compile"]) == (
        90.0,
        None,
        5.0,
        1800.0,
    )
    assert make_job().timeouts.to_seconds()["step"] is None


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        {"dp": -1, "mp": 2},
        {"dp": 2, "fsdp": 2, "mp": 2},
        {"dp": 8, "dcn": {}},
        {"mp": 4, "fsdp": 2},
    ],
)
def test_fitting_mesh_is_accepted(mesh: dict[str, Any]) -> None:
    job = make_job(train={"task": LM, **({"mesh": mesh} if mesh else {})}, processes_per_host=2)
    assert job.train is not None
    assert job.train.mesh.resolve(job.devices)


@pytest.mark.parametrize("devices", [1, 2, 6, 8, 12, 16, 36, 64, 97, 256, 1024, 9216])
def test_offered_divisors_divide(devices: int) -> None:
    offered = checks.nearest_divisors(devices, target=devices // 2)
    assert offered == sorted(offered)
    assert all(devices % divisor == 0 for divisor in offered)


@pytest.mark.parametrize(
    "mesh", [{"dp": 3}, {"fsdp": 5}, {"dp": 2, "mp": 2}, {"dp": 16}, {"dp": 4, "mp": 4}]
)
def test_mesh_of_hint_is_accepted(mesh: dict[str, int]) -> None:
    with pytest.raises(JobFaultsError) as faults:
        make_job(train={"task": LM, "mesh": mesh})
    hint = faults.value.faults[0].hint or ""
    axis, size = re.findall(r"(dp|fsdp|mp): (\d+)", hint)[0] if "write" in hint else ("dp", "-1")
    assert make_job(
        train={"task": LM, "mesh": mesh | {axis: int(size)} if "write" in hint else {"dp": -1}}
    )


def test_batches_of_hint_are_accepted() -> None:
    with pytest.raises(JobFaultsError) as faults:
        make_job(train={"task": LM, "batch": 100, "accumulate": 3})
    offered = re.findall(r"\d+", faults.value.faults[0].hint or "")
    assert offered == ["96", "120"]
    for batch in offered:
        assert make_job(train={"task": LM, "batch": int(batch), "accumulate": 3})


def test_longest_name_of_hint_is_accepted() -> None:
    with pytest.raises(JobFaultsError, match="use at most 49 characters"):
        make_job(name="a" * 63, slices=2, hosts=101, train={"task": LM, "batch": 1616})
    assert make_job(name="a" * 49, slices=2, hosts=101, train={"task": LM, "batch": 1616})


def test_counterparts_of_foreign_keys_exist() -> None:
    keys = {format_key_path(path) for path, _ in introspection.walk_fields(JobSpec)}
    counterparts = {counterpart.key for counterpart in foreign_keys.WORDS.values()}
    assert counterparts - {None} <= keys
    assert not foreign_keys.WORDS.keys() & JobSpec.model_fields.keys()


def test_overrides_are_yaml_and_named_in_faults(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: a\naccelerator: {type: cpu, per_host: 8}\ntrain: {task: 'a:B', batch: 64}\n"
    )
    job = jobs.load_job(
        file,
        ["train.steps=100", "train.mesh={mp: 2, dp: -1}", "train.optimizer.lr=1e-3", "env.N=010"],
    )
    assert job.train is not None
    assert (job.train.steps, job.train.mesh.mp, job.train.optimizer.lr) == (100, 2, 1e-3)
    assert job.env == {"N": "010"}
    with pytest.raises(JobFaultsError) as faults:
        jobs.load_job(
            file, ["train.steps=abc", "train.mesh.fsdp=3", "train.stesp=1", "train.optimzer.lr=1"]
        )
    assert str(faults.value).splitlines() == [
        "train.steps=abc (override): train.steps = abc is not a whole number above 0 and of at "
        "most 2147483647.",
        'train.stesp=1 (override): unknown key "stesp" in train. Did you mean "steps"?',
        'train.optimzer.lr=1 (override): unknown key "optimzer" in train. Did you mean '
        '"optimizer"?',
        "train.mesh.fsdp=3 (override): train.mesh.fsdp = 3 does not divide 8 devices (1 host × 8).",
        "  hint: use 1, 2, 4 or 8, or -1 to take what remains.",
    ]


def test_conflict_with_override_is_attributed_to_it(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    text = "name: a\nhosts: 2\naccelerator: {type: cpu, per_host: 4}\n"
    file.write_text(f"{text}train: {{task: 'a:B', mesh: {{dp: 4, mp: 2}}, batch: 64}}\n")
    with pytest.raises(JobFaultsError) as faults:
        jobs.load_job(file, ["accelerator.per_host=3", "train.steps=2"])
    message = "train.mesh.dp = 4 does not divide 6 devices (2 hosts × 3)."
    expected = f"accelerator.per_host=3 (override) with {file}:4: {message}"
    assert str(faults.value).splitlines()[0] == expected
    with pytest.raises(JobFaultsError) as faults:
        jobs.load_job(file, ["train.mesh={dp: 8}", "hosts=3"])
    (fault,) = faults.value.faults
    assert fault.location == "train.mesh={dp: 8} (override)"


def test_non_finite_override_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\naccelerator: {type: cpu}\ntrain: {task: 'a:B'}\n")
    with pytest.raises(JobFaultsError) as faults:
        jobs.load_job(file, ["train.optimizer.lr=.nan", "hosts=-.inf", "train.loss.z=.inf"])
    assert str(faults.value).splitlines() == [
        "train.optimizer.lr=.nan (override): train.optimizer.lr = .nan is not a finite "
        "number above 0.",
        "hosts=-.inf (override): hosts = -.inf is not a whole number above 0.",
        "train.loss.z=.inf (override): train.loss.z = .inf is not a finite number of at least 0.",
    ]


@pytest.mark.parametrize("argument", ["steps", "--steps", "--steps=3"])
def test_malformed_override_gets_an_example(argument: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\naccelerator: {type: cpu}\ncommand: [a]\n")
    with pytest.raises(JobFaultsError) as faults:
        jobs.load_job(file, [argument])
    assert "hosts=2" in str(faults.value) and "train.steps" not in str(faults.value)


def test_override_below_missing_entry_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\naccelerator: {type: cpu}\ncommand: [a]\n")
    messages = {
        "command.1=b": "command has no entry 1.",
        "volumes.0.path=/x": "volumes has no entry 0.",
        "name.first=a": "name has no entry first.",
        "env.\udcff=a": "is not UTF-8.",
    }
    with pytest.raises(JobFaultsError) as faults:
        jobs.load_job(file, list(messages))
    assert [fault.message for fault in faults.value.faults] == list(messages.values())


CANARY = "correct-horse-battery-staple"
SECRET_PLACES = {
    "env": f"env: {{HF_TOKEN: {CANARY}, PASSWORD: {CANARY}, 'BAD NAME': {CANARY}, L: [{CANARY}]}}",
    "env as a text": f"env: {CANARY}",
    "env as a list": f"env: [HF_TOKEN={CANARY}]",
    "secrets": f"secrets: {{HF_TOKEN: {CANARY}}}",
    "secrets as a text": f"secrets: {CANARY}",
    "a secret's key": f"secrets: {{HF_TOKEN: {{name: 'Not A Name {CANARY}', key: '? {CANARY}'}}}}",
    "pod": "pod: {spec: {containers: [{name: main, command: 5, env: [{name: API_KEY, value: "
    f"{CANARY}}}]}}]}}}}",
    "pod as a text": f"pod: {CANARY}",
    "init": f"init: [{CANARY}]",
    "annotations": f"annotations: [{CANARY}]",
    "command": f"command: {CANARY}",
    "a URL": f"train: {{task: 'a:B', checkpoint: {{path: ['https://me:{CANARY}@host/x']}}, "
    f"compile_cache: 'https://me:{CANARY}@h'}}",
    "a token elsewhere": f"image: 'ghp_{CANARY.replace('-', '')} x'",
    "a syntax error": f"env: {{HF_TOKEN: '{CANARY}",
    "a tab": f"env:\n\tHF_TOKEN: {CANARY}",
    "an alias": f"env: {{HF_TOKEN: *{CANARY}}}",
    "a tag": f"env: {{HF_TOKEN: !{CANARY} x}}",
}


@pytest.mark.parametrize("place", SECRET_PLACES)
def test_faults_never_repeat_secrets(place: str) -> None:
    message = parse_faults(f"name: lm\naccelerator: {{type: cpu}}\n{SECRET_PLACES[place]}\n")
    assert message
    assert CANARY not in message
    assert CANARY.replace("-", "") not in message


def test_allowed_literal_needs_a_reason() -> None:
    text = (
        "name: a\naccelerator: {type: cpu}\nenv: {BROKER: 'redis://:test@cache', OTHER: "
        "'redis://:test@cache'}\n"
    )
    text += "command: [a, 'https://me:test@host/x']\n"
    reasons = "env.BROKER: of a test, env.OTHER: of a test, command.1: of a test"
    expected = "redis://:test@cache"
    assert jobs.parse_job(text + f"allow_literal: {{{reasons}}}\n").env["BROKER"] == expected
    for allowed in ("{env.BROKER: of a test}", "{env.BROKER: of a test, env.OTHER: ''}"):
        message = parse_faults(text + f"allow_literal: {allowed}\n")
        assert "env.BROKER" not in message
        assert "env.OTHER holds a credential" in message
        assert "command.1 holds" in message


def _paths() -> list[str]:
    return sorted({".".join(map(str, path)) for path, _ in introspection.walk_fields(JobSpec)})


ODD_VALUES = ("[[1]]", "{zz: {y: 1}}", "0.5", "-7", "true", "null", "'?!'", "2026-01-01")


@pytest.mark.parametrize("value", ODD_VALUES)
def test_any_value_at_any_key_is_accepted_or_refused(value: str, tmp_path: Path) -> None:
    # Every type error of every key is translated: none may crash or show pydantic.
    file = tmp_path / "job.yaml"
    file.write_text(FULL_JOB)
    # Keys share few types, so that each value at every second key reaches all of them.
    for path in _paths()[ODD_VALUES.index(value) % 2 :: 2]:
        dotted = (
            path.replace("volumes.", "volumes.0.")
            .replace("tolerations.", "tolerations.0.")
            .replace("secrets.", "secrets.TOKEN.")
        )
        try:
            assert isinstance(jobs.load_job(file, [f"{dotted}={value}"]), JobSpec)
        except JobFaultsError as faults:
            assert faults.faults
            text = str(faults)
            assert not re.search(
                r"Input should|valid |pydantic|literal\[|Value error|None|\bdict\b|\bstr\b|<", text
            ), text


def test_as_written_keys_are_in_the_schema() -> None:
    assert set(VERBATIM_KEYS) <= set(introspection.block_fields(JobSpec))


# --- roles ----------------------------------------------------------------------------------------

ROLES = """
name: chase
accelerator: {type: h100}
env: {A: 010, B: b}
train: {task: classify}
jobs:
  trainer: {hosts: 2, ends: true, needs: {sampler: started}}
  sampler:
    accelerator: {type: cpu}
    env: {B: 3e-4}
    command: [python, sample.py, --lr, 3e-4]
"""


def read_roles(folder: Path, text: str, *overrides: str) -> jobs.JobFile:
    file = folder / "job.yaml"
    file.write_text(text)
    return jobs.read_job(file, overrides, may_have_roles=True)


def test_roles_are_jobs_with_the_defaults_of_the_file(tmp_path: Path) -> None:
    file = read_roles(tmp_path, ROLES, "jobs.trainer.hosts=4", "restarts.crash=1")
    assert file.name == "chase"
    assert file.lead is not None and file.spec is file.lead.file.spec
    assert [role.name for role in file.roles] == ["sampler", "trainer"]
    sampler, trainer = (role.file.spec for role in file.roles)
    assert (sampler.name, sampler.accelerator.type, sampler.hosts) == ("chase-sampler", "cpu", 1)
    assert sampler.command == ["python", "sample.py", "--lr", "3e-4"]
    assert sampler.train is None
    assert sampler.env == {"A": "010", "B": "3e-4"}
    assert (trainer.name, trainer.accelerator.type, trainer.hosts) == ("chase-trainer", "h100", 4)
    assert trainer.train is not None
    assert trainer.env == {"A": "010", "B": "b"}
    assert trainer.restarts.crash == sampler.restarts.crash == 1
    for role in (sampler, trainer):
        assert jobs.parse_job(jobs.dump_job(role)) == role


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["jobs.trainer.ends=false"], ["job.yaml:6: jobs has no role with ends: true"]),
        (["jobs.trainer.may_fail=true"], ["jobs.trainer has both ends: true and may_fail"]),
        (["jobs.trainer.needs={x: started}"], ["jobs.trainer.needs.x: there is no other role"]),
        (["jobs.sampler.needs={trainer: started}"], ["these roles need each other: "]),
        (["jobs.sampler.queue=a"], ["jobs.sampler.queue is set, but queue applies to the whole"]),
        (["jobs.sampler.spares=1"], ["jobs.sampler: spares = 1 is not supported together with"]),
        (
            ["jobs.sampler.hots=1"],
            ['jobs.sampler: unknown key "hots" in job. Did you mean "hosts"'],
        ),
        (
            ["jobs.sampler.may_fail=true", "jobs.sampler.accelerator={type: v5e, topology: 2x4}"],
            ["jobs.sampler: may_fail = true is not supported on TPUs"],
        ),
        (["jobs.sampler.hosts={min: 1, max: 2}"], ["jobs.sampler: hosts = {min, max} is not"]),
        (["hosts=0", "grace=x"], ["hosts=0 (override): hosts = 0 is not", "grace = x is not"]),
        (["jobs=3"], ["jobs=3 (override): jobs = 3 is not a block"]),
        (["jobs.A={}"], ['jobs has the key "A", which is not a name']),
        (["jobs.sampler.command=[]"], ["jobs.sampler: command is not a list of arguments"]),
    ],
)
def test_faults_of_roles(overrides: list[str], messages: list[str], tmp_path: Path) -> None:
    with pytest.raises(JobFaultsError) as faults:
        read_roles(tmp_path, ROLES, *overrides)
    # A fault of a default is shown once, and not for each role.
    assert len(faults.value.faults) == len(messages)
    for message in messages:
        assert message in str(faults.value).replace(str(tmp_path) + "/", "")


def test_faults_of_roles_have_their_lines(tmp_path: Path) -> None:
    text = ROLES.replace("accelerator: {type: h100}\n", "").replace("hosts: 2", "hosts: 0")
    with pytest.raises(JobFaultsError) as faults:
        read_roles(tmp_path, text)
    assert [(fault.line, fault.message[:28]) for fault in faults.value.faults] == [
        (6, "jobs.trainer: accelerator is"),
        (6, "jobs.trainer: hosts = 0 is n"),
    ]


def test_commands_without_roles_refuse_them(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(ROLES)
    with pytest.raises(JobFaultsError) as faults:
        jobs.load_job(tmp_path / "job.yaml")
    (fault,) = faults.value.faults
    assert (fault.line, fault.path) == (6, ("jobs",))
