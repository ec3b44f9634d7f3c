"""Jobs as Python objects: their keys, the cluster, and what is printed."""

from __future__ import annotations

import importlib.machinery
import json
import linecache
import os
import pickle
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import jaxlaunch
from jaxlaunch import contract
from jaxlaunch.launcher.client import call, cluster_call, function, values
from jaxlaunch.launcher.client.function import JobFunction
from jaxlaunch.launcher.errors import ClusterError, UnreachableError, UserError
from jaxlaunch.launcher.jobs.status import collect
from jaxlaunch.launcher.jobs.status.job_status import State
from jaxlaunch.launcher.kubernetes import watch
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, NAMESPACES
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local.run_folders import Run
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Server
from tests.launcher.invoke import launcher
from tests.launcher.report import made_runs

JOB = "name: x\nimage: i\naccelerator: {type: cpu}\ncommand: [python, train.py, --lr, 3e-4]\n"


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


@pytest.fixture
def cluster(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    server.put(NAMESPACES.path(None, "team-a"), {})
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url)))
    return server


# --- keys -----------------------------------------------------------------------------------------


def test_job_has_the_manifests_and_the_plan_of_the_commands(
    job_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_command(*words: str) -> str:
        return launcher(capsys, monkeypatch, *words, "job.yaml", "hosts=2", "env.A=b").out

    job = jaxlaunch.Job.load("job.yaml", hosts=2, env={"A": "b"})
    outputs = job.render(), job.validate(), job.plan()
    assert capsys.readouterr() == ("", "")
    assert list(yaml.safe_load_all(read_command("render"))) == outputs[0]
    assert json.loads(read_command("validate", "-o", "json")) == outputs[1]
    assert json.loads(read_command("plan", "-o", "json")) == outputs[2]


def test_keys_are_those_of_a_file(job_file: Path) -> None:
    keys = {"command": ("python", Path("train.py"), "--lr", "3e-4"), "accelerator": "cpu"}
    assert (
        jaxlaunch.Job(name="x", image="i", **keys).render() == jaxlaunch.Job.load(job_file).render()
    )
    changed = jaxlaunch.Job.load(
        job_file,
        accelerator={"per_host": 2},
        labels={"example.com/team": "a"},
        env={"TEXT": 'a: "b" # é'},
    )
    assert changed.validate()["devices"] == 2
    (jobset, *_) = changed.render()
    assert jobset["metadata"]["labels"]["example.com/team"] == "a"
    assert 'a: "b" # é' in str(jobset["spec"])


def test_all_faults_of_keys_are_one_error() -> None:
    with pytest.raises(jaxlaunch.UserError) as error_info:
        jaxlaunch.Job(name="x", accelerator="cpu", hots=2, command=[])
    assert error_info.value.exit_code == 2
    assert 'Job(...):4: unknown key "hots"' in str(error_info.value)
    assert "command" in str(error_info.value)


def test_import_brings_neither_jax_nor_the_launcher() -> None:
    program = (
        "import sys, jaxlaunch; before = set(sys.modules); jaxlaunch.Job, jaxlaunch.job; "
        "print('pydantic' in before, 'jaxlaunch.launcher' in before, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False False False\n", done.stderr


# --- a cluster ------------------------------------------------------------------------------------


def test_job_is_submitted_and_read_again_by_its_name(
    job_file: Path, cluster: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = jaxlaunch.Job.load(job_file, hosts=2).submit(namespace="team-a")
    assert repr(handle) == "jaxlaunch.attach('x', namespace='team-a')"
    path = JOBSETS.path("team-a", "x")
    assert cluster.objects[path]["spec"].get("suspend") is not True
    again = jaxlaunch.attach("x")
    assert again.status().state == "Creating" and again.status().hosts == 2
    assert again.explain().name == "x" and again.result is None
    with pytest.raises(
        jaxlaunch.WaitTimeoutError, match=r"Job x has not ended after 0 s\."
    ) as late:
        again.wait(timeout_s=0)
    assert late.value.exit_code == 124
    again.stop()
    assert cluster.objects[path]["spec"]["suspend"] is True
    with pytest.raises(jaxlaunch.JobFailedError) as stopped:
        again.wait(timeout_s=60)
    assert (stopped.value.exit_code, stopped.value.verdict) == (80, None)
    again.delete()
    assert path not in cluster.objects
    with pytest.raises(jaxlaunch.UserError, match="x"):
        jaxlaunch.attach("x", namespace="team-a")
    assert capsys.readouterr() == ("", "")


def test_failure_has_the_code_of_the_job(cluster: Server, job_file: Path) -> None:
    name = {"metadata": {"name": "lm", "namespace": "team-a"}}
    status = objects.ended("Failed", "FailJobSet", "lm-w-0 failed with exit code 71")
    jobset = objects.jobset(1, status=status)
    cluster.put(JOBSETS.path("team-a", "lm"), apiserver.merge_patch(jobset, name))
    with pytest.raises(jaxlaunch.JobFailedError, match="lm Failed") as error_info:
        jaxlaunch.attach("lm").wait()
    assert error_info.value.exit_code == 71


# --- a run on this machine ------------------------------------------------------------------------


def test_run_is_read_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made_runs.run(tmp_path / "runs" / "<lm>", (137, 65), points=3)
    handle = jaxlaunch.attach("runs/<lm>")
    assert handle.result is not None and handle.result["code"] == 65
    assert [row["step"] for row in handle.metrics()] == [333, 666, 1000]
    html = handle._repr_html_()
    assert html.startswith("<b>&lt;lm&gt;</b>: Failed, step 1000 of 1000")
    with pytest.raises(jaxlaunch.JobFailedError) as error_info:
        handle.wait()
    assert error_info.value.exit_code == 65
    with pytest.raises(jaxlaunch.UserError, match="is not running"):
        handle.stop()
    handle.delete()
    assert not (tmp_path / "runs" / "<lm>").exists()
    assert capsys.readouterr() == ("", "")


def test_timeouts_of_a_run_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s = list[float]()

    def wait_for_end(_: Run, limit_s: float) -> bool:
        limits_s.append(limit_s)
        return False

    made_runs.run(tmp_path / "lm", (0,))
    handle = jaxlaunch.attach(str(tmp_path / "lm"))
    monkeypatch.setattr(run_folders, "wait_for_end", wait_for_end)
    monkeypatch.setattr(run_folders, "stop_run", lambda run: None)
    with pytest.raises(jaxlaunch.WaitTimeoutError, match=r"has not ended after 600 s\."):
        handle.wait(timeout_s=600, on_line=print)
    with pytest.raises(jaxlaunch.WaitTimeoutError, match=r"has not ended after 0 s\."):
        handle.stop(timeout_s=0)
    assert 0 < limits_s[0] <= 600 and limits_s[1] <= 0


# --- values ---------------------------------------------------------------------------------------


def test_values_return_as_they_were_sent(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, "é"], "array": {"fields": np.arange(6.0).reshape(2, 3)}}
    values.write_value(tmp_path / "value.zip", value)
    read = values.read_value(tmp_path / "value.zip")
    assert read["a"] == value["a"]
    np.testing.assert_array_equal(read["array"]["fields"], value["array"]["fields"])
    assert [path.name for path in tmp_path.iterdir()] == ["value.zip"]


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, {3}, b"x", np.array([object()]), np.array("x")]
)
def test_other_values_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match="cannot be passed on"):
        values.write_value(tmp_path / "value.zip", value)


def test_pickles_of_strangers_are_refused(tmp_path: Path) -> None:
    class Strange:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/run",)

    file = tmp_path / "value.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("value.json", '{"array": 0}')
        with archive.open("0.npy", "w") as member:
            np.lib.format.write_array(member, np.array([Strange()], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        values.read_value(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("value.json", pickle.dumps(Strange()))
    with pytest.raises(ValueError, match=r"."):
        values.read_value(file)
    assert not (tmp_path / "run").exists()


def test_function_of_a_notebook_travels_as_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = '@jaxlaunch.job(accelerator="cpu")\ndef add(a, b):\n    return a + b\n'
    monkeypatch.setitem(linecache.cache, "<cell 1>", (len(cell), None, cell.splitlines(True), "1"))
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.setitem(sys.modules, call.SCRIPT_MODULE, sys)
    monkeypatch.setattr(function, "is_in_rank", False)
    notebook: dict[str, Any] = {"__name__": "__main__", "jaxlaunch": jaxlaunch}
    exec(compile(cell, "<cell 1>", "exec"), notebook)
    module, file = function.locate_function(notebook["add"].function, tmp_path)
    request = {"module": module, "file": file, "function": "add", "path": [], "args": [1]}
    values.write_value(tmp_path / function.CALL, {**request, "keywords": {"b": 2}})
    call.run_call(tmp_path / function.CALL, tmp_path)
    assert values.read_value(tmp_path / function.VALUE) == 3
    with pytest.raises(jaxlaunch.UserError, match="was called while a process of a job imports it"):
        notebook["add"](1, 2)


@pytest.mark.parametrize("is_module", [True, False])
def test_function_of_a_module_or_of_a_script_without_suffix_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_module: bool
) -> None:
    package = tmp_path / "made_package"
    package.mkdir()
    (package / "numbers.py").write_text("ONE = 1\n")
    program = package / ("train.py" if is_module else "train")
    source = "from .numbers import ONE\n" if is_module else "ONE = 1\n"
    program.write_text(f"{source}def add(a):\n    return a + ONE\n")
    monkeypatch.syspath_prepend(tmp_path)
    main = types.ModuleType("__main__")
    main.__file__ = str(program)
    main.add = lambda a: a  # type: ignore[attr-defined]
    main.add.__module__, main.add.__qualname__ = "__main__", "add"
    if is_module:
        main.__spec__ = importlib.machinery.ModuleSpec("made_package.train", None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    for name in (call.SCRIPT_MODULE, "made_package", "made_package.train", "made_package.numbers"):
        monkeypatch.setitem(sys.modules, name, sys)
        del sys.modules[name]
    monkeypatch.setattr(function, "is_in_rank", False)
    module, file = function.locate_function(main.add, tmp_path)
    request = {"module": module, "file": file, "function": "add", "path": [], "args": [1]}
    values.write_value(tmp_path / function.CALL, {**request, "keywords": {}})
    call.run_call(tmp_path / function.CALL, tmp_path)
    assert values.read_value(tmp_path / function.VALUE) == 2


def test_call_on_a_cluster_has_the_paths_of_a_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("made.train")
    module.__file__ = str(tmp_path / "src" / "made" / "train.py")
    monkeypatch.setitem(sys.modules, "made.train", module)
    request = {"module": "made.train", "file": None, "path": [str(tmp_path / "src"), "/elsewhere"]}
    root, temporary = str(tmp_path / "src"), tmp_path / "temporary"
    assert cluster_call._choose_code(request, {}, temporary) == (root, [])
    code = {"folder": str(tmp_path), "include": {"key": "a reason"}}
    assert cluster_call._choose_code(request, {"code": code}, temporary) == (
        str(tmp_path),
        {"key": "a reason"},
    )
    assert cluster_call._map_call(request, str(tmp_path))["path"] == ["/code/src"]
    script = {**request, "file": str(tmp_path / "src" / "script.py")}
    assert cluster_call._choose_code(script, {}, temporary) == (root, [])
    assert cluster_call._map_call(script, root)["file"] == "/code/script.py"
    with pytest.raises(jaxlaunch.UserError, match="which defines the function, is not in code"):
        cluster_call._map_call(script, "/elsewhere")
    installed = {**request, "module": "pytest"}
    assert cluster_call._choose_code(installed, {}, temporary)[0] == str(
        temporary / "jaxlaunch-call"
    )


def test_cell_of_a_notebook_travels_with_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cell.py").write_text("def add(a):\n    return a + 1\n")
    cell = str(tmp_path / "cell.py")
    request: dict[str, Any] = {"module": "__main__", "file": cell, "path": [], "args": [1]}
    sent = list[jaxlaunch.Job]()

    def refuse(job: jaxlaunch.Job, *arguments: object, **options: object) -> None:
        sent.append(job)
        raise jaxlaunch.UserError("the cluster has no room.")

    monkeypatch.setattr(jaxlaunch.Job, "_prepare_submission", refuse)
    keys = {"name": "add", "accelerator": "cpu", "image": "example.org/jax"}
    with pytest.raises(jaxlaunch.UserError, match="no room"):
        cluster_call.run_on_cluster(request, keys, tmp_path, None)
    files = sent[0]._file.code_files
    assert sorted(files) == ["jaxlaunch-call/call.zip", "jaxlaunch-call/cell.py"]
    (tmp_path / "sent.zip").write_bytes(files["jaxlaunch-call/call.zip"])
    assert values.read_value(tmp_path / "sent.zip")["file"] == "/code/jaxlaunch-call/cell.py"
    assert list(sent[0].render()[-1]["binaryData"]) == ["agent.pyz", "code.tar.gz"]


@pytest.mark.parametrize("is_submitted", [False, True])
def test_failed_call_deletes_its_job_and_raises_the_first_error(
    cluster: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_submitted: bool,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster_call, "_await_result", interrupt)
    if is_submitted:
        cluster.on("DELETE", "jobsets", apiserver.refuse_with(403))
    else:
        cluster.on("POST", "configmaps", apiserver.refuse_with(403))
    request: dict[str, Any] = {"module": "pytest", "file": None, "path": [], "args": [1]}
    keys = {"name": "neg", "accelerator": "cpu", "image": "i"}
    folder = tmp_path / "temporary"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt if is_submitted else ClusterError):
        cluster_call.run_on_cluster(request, keys, folder, None)
    assert cluster.count("POST", "jobsets") and cluster.count("DELETE", "jobsets") == 1
    assert len(cluster.stored("jobsets")) == is_submitted
    assert caplog.text.count("`launcher delete -n team-a neg` deletes it.") == is_submitted


def test_outages_and_the_end_of_its_pod_do_not_fail_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads, no_answer = list[str](), UnreachableError("no answer")

    def replay(*results: object) -> Callable[..., Any]:
        remaining = iter(results)

        def call_next(*_: object, **__: object) -> object:
            result = next(remaining)
            if isinstance(result, Exception):
                raise result
            return result

        return call_next

    def make_view(state: State) -> SimpleNamespace:
        report = SimpleNamespace(heartbeat=SimpleNamespace(phases={"done": [0]}))
        status, snapshot = SimpleNamespace(state=state), SimpleNamespace(report=report)
        return SimpleNamespace(status=status, snapshot=snapshot)

    class LostCopy:
        def __init__(self, pod: object, *, is_download: bool, say: object) -> None:
            self.is_download = is_download

        def run(self, source: str, target: str) -> None:
            if self.is_download:
                Path(target).touch(exist_ok=False)
                return
            uploads.append(source)
            raise ClusterError("The copy ended in pod x-w-0-0: exit code 137.")

    states = [no_answer, State.RUNNING, no_answer, State.RUNNING, State.RUNNING, State.DONE]
    monkeypatch.setattr(collect, "read_snapshot", replay(*states))
    monkeypatch.setattr(cluster_call, "ClusterView", make_view)
    ended = UserError("Host 0 of x does not run.")
    monkeypatch.setattr(cluster_call, "_find_pod", replay(ended, object(), object()))
    monkeypatch.setattr(cluster_call, "Copy", LostCopy)
    monkeypatch.setattr(cluster_call, "_POLL_S", 0.0)
    monkeypatch.setattr(watch, "_PAUSE_S", 0.0)
    server: Any = SimpleNamespace(silent_s=0.0)
    handle: Any = SimpleNamespace(namespace="team-a", name="x", wait=replay(no_answer, None))
    cluster_call._await_result(server, handle, tmp_path)
    assert (tmp_path / function.VALUE).exists()
    assert uploads == [str(tmp_path / function.TAKEN)] * 2


def test_value_stays_until_it_was_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, reports = tmp_path / "results", list[object]()

    def copy_value(fd: int, message: object) -> None:
        assert values.read_value(folder / function.VALUE) == 3
        reports.append(message)
        (folder / function.TAKEN).touch()

    monkeypatch.setenv(contract.PROGRESS_FD, "-1")
    monkeypatch.setattr(contract, "send", copy_value)
    monkeypatch.setattr(function, "is_in_rank", False)
    request: dict[str, Any] = {"module": "operator", "file": None, "function": "add", "path": []}
    values.write_value(tmp_path / function.CALL, {**request, "args": [1, 2], "keywords": {}})
    call.run_call(tmp_path / function.CALL, folder)
    assert reports == [{"phase": "done"}]


def test_function_that_exits_returns_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jaxlaunch.Job, "run", lambda job: None)
    decorated = jaxlaunch.job(accelerator="cpu")(test_all_faults_of_keys_are_one_error)
    with pytest.raises(jaxlaunch.JobFailedError, match="ended before the function returned") as end:
        decorated()
    assert end.value.exit_code == 83


def test_function_that_no_process_finds_is_refused() -> None:
    decorated: JobFunction[[], int] = jaxlaunch.job(accelerator="cpu")(lambda: 1)
    with pytest.raises(jaxlaunch.UserError, match="so no other process finds it"):
        decorated()
