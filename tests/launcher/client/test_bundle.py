"""The archive of a job: what it has, what it hides, and what `explain` reads from it."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxlaunch.launcher.client import bundle
from jaxlaunch.launcher.client.job_view import ClusterView
from jaxlaunch.launcher.diagnose.explain.explanation import explain_job
from jaxlaunch.launcher.errors import ClusterError
from jaxlaunch.launcher.job import credentials
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, NAMESPACES, PODS
from jaxlaunch.launcher.kubernetes.labels import SUBMITTED_WORDS
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.local import logs as local_logs
from jaxlaunch.runs import layout
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Server
from tests.launcher.diagnose.explain.test_explanation import CASES
from tests.launcher.invoke import CommandResult, launcher
from tests.launcher.report import made_runs

Call = Callable[..., CommandResult]
# The part of each secret that must not be in a bundle, and the text in which a program, a file or
# an object has it.
SECRETS = [
    ("hunter2canary1", "DB_PASSWORD=hunter2canary1"),
    ("canary2canary2", 'password: "canary2canary2"'),
    ("canary3canary3", "https://user:canary3canary3@registry.example/v2"),
    ("canary4canary4canary4", "Authorization: Bearer canary4canary4canary4"),
    ("ghp_canary5canary5canary5", "cloned with ghp_canary5canary5canary5"),
    ("hf_canary6canary6canary6", "login(token='hf_canary6canary6canary6')"),
    ("sk-proj-canary7canary7canary7", "sk-proj-canary7canary7canary7 was used"),
    ("AKIACANARY8CANARY8C0", "AKIACANARY8CANARY8C0 is denied"),
    ("wJalrcanary9/K7MDENG+bPx", "aws_secret_access_key = wJalrcanary9/K7MDENG+bPx"),
    ("xoxb-canary10-canary10", "slack xoxb-canary10-canary10"),
    ("MIIEcanary11canary11", "-----BEGIN PRIVATE KEY-----\nMIIEcanary11canary11\n"),
    ("canary12==", f"-----BEGIN RSA PRIVATE KEY-----\n{'MIIE' * 16}\ncanary12==\n-----END RSA"),
    ("canary13canary13", "machine example.com login me password canary13canary13"),
    ("Y2FuYXJ5MTRjYW5hcnkxNA", '{"auths": {"r.example": {"auth": "Y2FuYXJ5MTRjYW5hcnkxNA=="}}}'),
    ("canary15canary15", '{\\"API_KEY\\": \\"canary15canary15\\"}'),
    ("canary16canary16", "MY_SERVICE_TOKEN: canary16canary16"),
    (
        "0123456789abcdef0123456789abcdef01234567",
        'wandb.login(key="0123456789abcdef0123456789abcdef01234567")',
    ),
    ("glpat-canary18canary18", "glpat-canary18canary18"),
    (
        "canary19Canary19canary19Canary19canary",
        "https://s3/x?X-Amz-Signature=canary19Canary19canary19Canary19canary",
    ),
    ("eyJcanary20aa.eyJcanary20bb", "cookie eyJcanary20aa.eyJcanary20bb.sig"),
    ("AIzacanary21canary21canary21canary21", "AIzacanary21canary21canary21canary21"),
    ("canary22canary22", "launcher run job.yaml env.PLAIN=canary22canary22"),
    ("canary23canary23", "os.environ['CLIENT_SECRET'] = 'canary23canary23'"),
    ("canary24canary24==", "AccountKey=canary24canary24canary24canary24canary24canary24=="),
]


# Arguments of a submission, as they are recorded.
WORDS = ["env.PASSPHRASE=correct horse's canary31x", 'env={"WEBHOOK": "canary32x"}']


@pytest.fixture
def call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Call:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: launcher(capsys, monkeypatch, *arguments)


def read_bundle(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            member.name: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }


def test_bundle_of_run_explains_and_hides_secrets(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    # Two in job.yaml, and one that a program prints and that came from a Secret.
    monkeypatch.setenv("PRIVATE", "canary25 of the environment")
    secrets = "secrets: {PRIVATE: {name: s, key: k}}\n"
    job = made_runs.JOB.replace("not-to-be-shown", "canary26x") + secrets
    job = job.replace("TOKEN: canary26x", "{PLAIN: canary27x, TOKEN: canary26x}".strip("{}"))
    folder = tmp_path / "runs" / "lm"
    made_runs.run(folder, (137, 65), job=job)
    log = layout.log_path(layout.start_folder(folder, 1), 0)
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(["step 7", *(text for _, text in SECRETS), "of the environment"]))
    with log.open("a") as file:
        file.write(" canary25 of the environment\nlast line\n")
    (folder / "starts" / "1" / "job.yaml").write_text(job)
    for start in (1, 2):
        words = ["job.yaml", "hosts=2", *WORDS]
        command = {"folder": str(tmp_path), "words": words}
        (folder / "starts" / str(start)).mkdir(exist_ok=True)
        (folder / "starts" / str(start) / "command.json").write_text(json.dumps(command))
    (folder / "slurm.json").write_text(json.dumps(command))
    told = call("explain", "runs/lm")
    assert call("bundle", "runs/lm").out == "lm.bundle.tar.gz\n"
    assert "canary31x" in told.out
    assert call("explain", "lm.bundle.tar.gz").out.count("env.PASSPHRASE=…") == 1
    files = read_bundle(tmp_path / "lm.bundle.tar.gz")
    assert {"job.yaml", "summary.json", "attempts.jsonl", "versions.json", "status.json"} <= {
        *files
    }
    for words in ("step 7", "is denied", "slack", "machine example.com", "cookie", "last line"):
        assert words in files["logs/rank-0.log"]
    assert json.loads(files["summary.json"])["verdict"]["code"] == 65
    whole = "".join(files.values())
    planted = [secret for secret, _ in SECRETS] + ["canary25 of", "canary26x", "canary27x"]
    planted += ["canary31x", "canary32x"]
    for name in ("starts/1/command.json", "slurm.json"):
        words = json.loads(files[name])["words"]
        assert words == ["job.yaml", "hosts=2", "env.PASSPHRASE=…", "env=…"]
    assert [secret for secret in planted if secret in whole] == []


def test_bundle_of_job_explains_and_hides_secrets(
    server: Server, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    server.put(NAMESPACES.path(None, "team"), {})
    jobset = objects.jobset(1, env={"PLAIN": "canary28x"})
    jobset["metadata"]["annotations"]["note"] = "GIT_TOKEN=canary29x"
    jobset["metadata"]["annotations"][SUBMITTED_WORDS] = json.dumps(["job.yaml", *WORDS])
    last_applied = {"spec": {"env": [{"name": "PLAIN", "value": "canary33x"}]}}
    name = "kubectl.kubernetes.io/last-applied-configuration"
    jobset["metadata"]["annotations"][name] = json.dumps(last_applied)
    server.put(JOBSETS.path("team", "lm"), jobset)
    pod: Obj = objects.pending(0, "0/3 nodes are available: REGISTRY_PASSWORD=canary30x")
    server.put(PODS.path("team", pod["metadata"]["name"]), pod)
    told = call("explain", "lm")
    assert call("bundle", "lm", "-o", "job.tar.gz").out == "job.tar.gz\n"
    shown = call("explain", "job.tar.gz")
    files = read_bundle(tmp_path / "job.tar.gz")
    assert shown.out == told.out.replace("canary30x", "…")
    assert {"jobset.yaml", "pods.yaml", "events.json", "records.log", "versions.json"} <= {*files}
    whole = "".join(files.values())
    assert "registry.example/train:1" in whole and "node" in whole
    assert [number for number in range(28, 34) if f"canary{number}x" in whole] == []


@pytest.mark.parametrize(
    "situation",
    [
        "done with steps",
        "failed with a verdict",
        "killed for memory, one process",
        "stopped",
        "quota",
        "a policy",
        "tainted",
        "an unbound claim",
        "no right to the image",
        "hosts are missing",
        "a crash loop",
        "a node is lost",
    ],
)
def test_bundle_explains_as_its_source(tmp_path: Path, situation: str) -> None:
    job, _ = CASES[situation]
    path = tmp_path / "job.tar.gz"
    bundle.write_bundle(ClusterView(job), [], path)
    assert bundle.read_explanation(path) == explain_job(job)


@pytest.mark.parametrize(
    ("text", "hidden_text"),
    [
        ("serve --api-key=9f8e --lr 3", "serve --api-key=… --lr 3"),
        ("--secret-key='a b' -v", "--secret-key='…' -v"),
        ("--access-key abc123", "--access-key …"),
        ("-token abc; --hf_token 'x y'", "-token … --hf_token '…'"),
        ("- --token\n    - abc\n    - -v\n", "- --token\n    - …\n    - -v\n"),
        ('["--token",\n  "abc", "-v"]', '["--token",\n  "…", "-v"]'),
        (r'{"a": "[\"--token\", \"abc\", 1]"}', r'{"a": "[\"--token\", \"…\", 1]"}'),
        ('{"password": "correct horse", "a": 1}', '{"password": "…", "a": 1}'),
    ],
)
def test_values_of_options_are_hidden(text: str, hidden_text: str) -> None:
    assert credentials.redact_text(text) == hidden_text


@pytest.mark.parametrize(
    "text",
    [
        '{"nll_per_token": 1e-05, "loss_per_token": -1.25, "per_token": 2.5E+3}',
        '{"nll_per_token":NaN,"a_token":-Infinity,"b_token":.5,"token":"","c":"x"}',
        "nll_per_token 1.5, nll_per_token: 1.5.\nnll_per_token=7",
        "--print-token --verbose",
        "--token-budget 100 --max-token 5",
        '["--token=","--token","-v"]',
        # A pattern that backtracks would take minutes.
        pytest.param("a" * 300_000, id="long word"),
    ],
)
def test_numbers_and_other_options_are_not_hidden(text: str) -> None:
    assert credentials.redact_text(text) == text


def test_bundle_names_logs_that_it_has_not(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "lm"
    made_runs.run(folder, (0,))
    for rank in range(2):
        log = layout.log_path(layout.start_folder(folder, 1), rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("0123456789\n")
    monkeypatch.setattr(bundle, "_MAX_LOG_BYTES", 15)
    assert call("bundle", "runs/lm").code == 0
    files = read_bundle(tmp_path / "lm.bundle.tar.gz")
    assert [name for name in files if "logs/" in name] == ["logs/rank-0.log", "logs/left_out.txt"]
    assert files["logs/left_out.txt"].splitlines()[1:] == ["logs/rank-1.log"]

    def fail(*_: object) -> None:
        raise ClusterError("The API server does not answer.")

    monkeypatch.setattr(bundle, "_MAX_LOG_BYTES", 100)
    monkeypatch.setattr(local_logs, "read_logs", fail)
    assert call("bundle", "runs/lm").code == 0
    files = read_bundle(tmp_path / "lm.bundle.tar.gz")
    assert files["logs/unread.txt"] == "The API server does not answer.\n"


def test_bundle_of_nothing_says_so(
    server: Server, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    assert call("bundle", "nothing").code == 0
    assert call("explain", "nothing.bundle.tar.gz") == call("explain", "nothing")
    (tmp_path / "other.tar.gz").write_bytes(b"no archive")
    result = call("explain", "other.tar.gz")
    assert result.code == 2 and "other.tar.gz is not a bundle" in result.err
