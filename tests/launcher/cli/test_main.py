from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from jaxlaunch.launcher.cli import main as command_line
from jaxlaunch.launcher.cli.main import COMMANDS, cli
from jaxlaunch.launcher.errors import ClusterError
from tests.launcher.invoke import launcher

ROOT = Path(__file__).parents[3]
HEAVY = ("pydantic", "yaml", "kubernetes", "jax", "numpy")

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def python(*arguments: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {"PYTHONPATH": str(ROOT), "PATH": ""} | environ
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from jaxlaunch.launcher.cli.main import cli; cli.main(['--help'], "
        "standalone_mode=False);"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    said = python("-c", code)
    assert said.stderr == "[]\n"
    assert said.stdout.startswith("Usage: ")
    assert all(name in said.stdout for name in COMMANDS)


def test_rendering_imports_no_client_of_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: x\nimage: i\naccelerator: {type: cpu}\ncommand: [a]\n"
    )
    code = (
        "import sys; from jaxlaunch.launcher.cli.main import cli; cli.main(['render', 'job.yaml'], "
        "standalone_mode=False);print([name for name in ('kubernetes', 'jax', 'urllib3') if name "
        "in sys.modules], file=sys.stderr)"
    )
    said = python("-c", code, cwd=tmp_path)
    assert said.stderr == "[]\n"
    assert said.stdout.startswith("apiVersion: jobset.x-k8s.io/v1alpha2")


@pytest.mark.parametrize("module", ["list", "status", "logs", "stop"])
def test_commands_on_a_submitted_job_do_not_wait_for_what_reads_a_job_file(module: str) -> None:
    code = (
        f"import sys, jaxlaunch.launcher.cli.{module};print([name for name in ('pydantic_core', "
        "'jaxlaunch.trainer.spec', 'cryptography') if name in sys.modules])"
    )
    assert python("-c", code).stdout == "[]\n"


def test_the_launcher_never_imports_the_jax_side() -> None:
    code = (
        "import json, sys; from jaxlaunch.launcher.cli import validate, schema;outer = ('trainer', "
        "'launcher', 'jax', 'numpy');found = [name for name in sys.modules if name[:17] == "
        "'jaxlaunch.trainer' or name.split('.')[0] in outer];print(json.dumps(sorted(found)))"
    )
    found = json.loads(python("-c", code).stdout)
    assert found[0] == "jaxlaunch.trainer"
    assert {name.split(".")[2] for name in found[1:]} == {"spec"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_found_and_says_what_the_list_says(
    name: str, capsys: Capture, monkeypatch: Patch
) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None and command.name == name
    assert (command.help or "").split("\n")[0] == COMMANDS[name]
    assert all(option.help for option in command.params if isinstance(option, click.Option))
    left = launcher(capsys, monkeypatch, name, "--help")
    assert (left.code, left.err) == (0, "")


def test_a_command_that_does_not_exist_is_a_usage_error(
    capsys: Capture, monkeypatch: Patch
) -> None:
    left = launcher(capsys, monkeypatch, "vaildate", "job.yaml")
    assert left.code == 2
    assert "No such command 'vaildate'. Did you mean 'validate'?" in left.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "--steps",
            "A key of the job has no dashes, as in hosts=2; arguments of your program "
            "belong in its",
        ),
        ("--simulte", "No such option '--simulte'. Did you mean '--simulate'?"),
    ],
)
def test_an_option_that_does_not_exist_names_the_nearest_or_how_a_key_is_set(
    given: str, said: str, capsys: Capture, monkeypatch: Patch
) -> None:
    left = launcher(capsys, monkeypatch, "run", "job.yaml", given)
    assert left.code == 2
    assert said in left.err and "--help'?" not in left.err


def test_the_version_is_the_packages(capsys: Capture, monkeypatch: Patch) -> None:
    left = launcher(capsys, monkeypatch, "--version")
    assert (left.code, left.out.split()[0]) == (0, "launcher,")


def test_init_writes_a_job_that_validates_and_never_overwrites(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launcher(capsys, monkeypatch, "init", "first").code == 0
    text = Path("first.yaml").read_text()
    assert len(text.splitlines()) == 10
    left = launcher(capsys, monkeypatch, "validate", "first.yaml", "train.epochs=5")
    assert (left.code, left.err) == (0, "")
    assert left.out == (
        "first.yaml: ok\nfirst: 4 devices (1 host × 4) of type cpu, 1 process of 4 devices\nmesh: "
        "dp 4 × fsdp 1 × mp 1\nbatch: 128 examples a step, 32 per device\n"
    )
    left = launcher(capsys, monkeypatch, "init", "first")
    assert (left.code, left.out, left.err) == (
        2,
        "",
        "first.yaml already exists.\n  hint: choose another name.\n",
    )
    assert Path("first.yaml").read_text() == text


@pytest.mark.parametrize("name", ["My_Run", "../up", "no/where", "a" * 300])
def test_init_refuses_a_name_that_is_none(
    name: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    left = launcher(capsys, monkeypatch, "init", name)
    assert (left.code, left.out) == (2, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("output", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_validate_answers_a_script(
    output: str, read: object, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: lm\naccelerator: {type: h100}\nhosts: 4\ntrain: {task: 'a:B', batch: 512, "
        "accumulate: 2}\n"
    )
    left = launcher(
        capsys, monkeypatch, "validate", str(file), "train.mesh={dp: 4, fsdp: 8}", "-o", output
    )
    assert left.code == 0
    assert read(left.out) == {  # type: ignore[operator]
        "name": "lm",
        "slices": 1,
        "hosts": 4,
        "devices": 32,
        "processes": 4,
        "devices_per_process": 8,
        "accelerator": "h100",
        "mesh": {"dp": 4, "fsdp": 8, "ep": 1, "mp": 1},
        "batch": 512,
        "accumulate": 2,
        "batch_per_device": 8,
    }


def test_a_job_with_faults_leaves_2_and_says_nothing_on_stdout(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: lm\n")
    for output in ("text", "json"):
        left = launcher(capsys, monkeypatch, "validate", str(file), "-o", output)
        assert (left.code, left.out) == (2, "")
        assert f"{file}: accelerator is missing." in left.err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.yaml", "no such file.\n  hint: create one with `launcher init`.\n"),
        ("", "is a directory.\n"),
    ],
)
def test_a_file_that_cannot_be_read_is_told(
    name: str, said: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    left = launcher(capsys, monkeypatch, "validate", str(tmp_path / name))
    assert (left.code, left.err) == (2, f"{tmp_path / name}: {said}")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (
            ClusterError("api.example: refused.", "is the VPN up?"),
            3,
            "api.example: refused.\n  hint: is the VPN up?\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_codes(
    raised: BaseException, code: int, said: str, capsys: Capture, monkeypatch: Patch
) -> None:
    def fail(**_: object) -> None:
        raise raised

    monkeypatch.setattr(command_line.cli, "callback", fail)
    left = launcher(capsys, monkeypatch, "schema")
    assert (left.code, left.out, left.err.strip()) == (code, "", said.strip())


def test_an_error_of_ours_keeps_its_traceback(monkeypatch: Patch) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(command_line.cli, "callback", fail)
    monkeypatch.setattr(sys, "argv", ["launcher", "schema"])
    with pytest.raises(ZeroDivisionError):
        command_line.main()


def test_what_a_command_returns_is_the_exit_code(capsys: Capture, monkeypatch: Patch) -> None:
    @click.command()
    def run() -> int:
        return 83

    monkeypatch.setattr(command_line.Commands, "get_command", lambda *_: run)
    assert launcher(capsys, monkeypatch, "run").code == 83


def test_a_terminal_without_unicode_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: lm\naccelerator: {type: cpu}\ntrain: {task: 'a:B'}\n")
    left = python(
        "-m",
        "jaxlaunch.launcher.cli.main",
        "validate",
        "job.yaml",
        cwd=tmp_path,
        PYTHONIOENCODING="ascii",
    )
    assert (left.returncode, left.stderr) == (0, "")
    assert "(1 host" in left.stdout


def processor_time_of_children() -> float:
    """In seconds, of those that have ended: beside other tests the clock says little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_command_starts_soon(tmp_path: Path, capsys: Capture) -> None:
    """With three times the ratio that the bench allows; see benchmarks/cli.py."""
    (tmp_path / "job.yaml").write_text(
        "name: lm\nimage: i\naccelerator: {type: cpu}\ntrain: {task: 'a:B', checkpoint: {path: "
        "'gs://team-b/lm'}}\n"
    )
    lines = {
        "python -I -c pass": ("-I", "-c", "pass"),
        "launcher --help": ("-m", "jaxlaunch.launcher.cli.main", "--help"),
        "launcher validate": ("-m", "jaxlaunch.launcher.cli.main", "validate", "job.yaml"),
        "launcher render": ("-m", "jaxlaunch.launcher.cli.main", "render", "job.yaml"),
    }
    medians = {}
    for name, arguments in lines.items():
        taken = []
        for _ in range(3):
            started = processor_time_of_children()
            assert python(*arguments, cwd=tmp_path).returncode == 0
            taken.append(processor_time_of_children() - started)
        medians[name] = statistics.median(taken)
    with capsys.disabled():
        for name, seconds in medians.items():
            print(
                f"\n{name}: {seconds * 1000:.0f} ms, "
                f"{seconds / medians['python -I -c pass']:.1f} ×",
                end="",
            )
    assert medians["launcher render"] <= 3 * 35 * medians["python -I -c pass"]
