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
from tests.launcher.invoke import Launcher

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
    process = python("-c", code)
    assert process.stderr == "[]\n"
    assert process.stdout.startswith("Usage: ")
    assert all(name in process.stdout for name in COMMANDS)


def test_render_imports_no_cluster_client(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: x\nimage: i\naccelerator: {type: cpu}\ncommand: [a]\n"
    )
    code = (
        "import sys; from jaxlaunch.launcher.cli.main import cli; cli.main(['render', 'job.yaml'], "
        "standalone_mode=False);print([name for name in ('kubernetes', 'jax', 'urllib3') if name "
        "in sys.modules], file=sys.stderr)"
    )
    process = python("-c", code, cwd=tmp_path)
    assert process.stderr == "[]\n"
    assert process.stdout.startswith("apiVersion: jobset.x-k8s.io/v1alpha2")


@pytest.mark.parametrize("module", ["list", "status", "logs", "stop"])
def test_cluster_commands_do_not_import_the_job_schema(module: str) -> None:
    code = (
        f"import sys, jaxlaunch.launcher.cli.{module};print([name for name in ('pydantic_core', "
        "'jaxlaunch.trainer.spec', 'cryptography') if name in sys.modules])"
    )
    assert python("-c", code).stdout == "[]\n"


def test_launcher_imports_only_the_schema_of_the_trainer() -> None:
    code = (
        "import json, sys; from jaxlaunch.launcher.cli import validate, schema;outer = ('trainer', "
        "'launcher', 'jax', 'numpy');found = [name for name in sys.modules if name[:17] == "
        "'jaxlaunch.trainer' or name.split('.')[0] in outer];print(json.dumps(sorted(found)))"
    )
    modules = json.loads(python("-c", code).stdout)
    assert modules[0] == "jaxlaunch.trainer"
    assert {name.split(".")[2] for name in modules[1:]} == {"spec"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_listed_summary(run_launcher: Launcher, name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None and command.name == name
    assert (command.help or "").split("\n")[0] == COMMANDS[name]
    assert all(option.help for option in command.params if isinstance(option, click.Option))
    result = run_launcher(name, "--help")
    assert (result.code, result.err) == (0, "")


def test_unknown_command_suggests_nearest(run_launcher: Launcher) -> None:
    result = run_launcher("vaildate", "job.yaml")
    assert result.code == 2
    assert "No such command 'vaildate'. Did you mean 'validate'?" in result.err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "--flavour",
            "A key of the job has no dashes, as in hosts=2; arguments of your program "
            "belong in its",
        ),
        (
            "--steps",
            "A key of the job has no dashes: train.steps=VALUE. Arguments of your program "
            "belong in its",
        ),
        ("--simulte", "No such option '--simulte'. Did you mean '--simulate'?"),
    ],
)
def test_unknown_option_suggests_nearest_or_key_syntax(
    run_launcher: Launcher, option: str, message: str
) -> None:
    result = run_launcher("run", "job.yaml", option)
    assert result.code == 2
    assert message in result.err and "--help'?" not in result.err


def test_version_is_printed(run_launcher: Launcher) -> None:
    result = run_launcher("--version")
    assert (result.code, result.out.split()[0]) == (0, "launcher,")


def test_init_writes_valid_job_and_never_overwrites(
    run_launcher: Launcher, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_launcher("init", "first").code == 0
    text = Path("first.yaml").read_text()
    assert len(text.splitlines()) == 10
    result = run_launcher("validate", "first.yaml", "train.epochs=5")
    assert (result.code, result.err) == (0, "")
    assert result.out == (
        "first.yaml: ok\nfirst: 4 devices (1 host × 4) of type cpu, 1 process of 4 devices\nmesh: "
        "dp 4 × fsdp 1 × mp 1\nbatch: 128 examples a step, 32 per device\n"
    )
    result = run_launcher("init", "first")
    assert (result.code, result.out, result.err) == (
        2,
        "",
        "first.yaml already exists.\n  hint: choose another name.\n",
    )
    assert Path("first.yaml").read_text() == text


@pytest.mark.parametrize("name", ["My_Run", "../up", "no/where", "a" * 300, ".", ".yaml"])
def test_init_refuses_invalid_name(
    run_launcher: Launcher, name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_launcher("init", name)
    assert (result.code, result.out) == (2, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("output", "parse"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_validate_prints_data(
    run_launcher: Launcher, output: str, parse: object, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: lm\naccelerator: {type: h100}\nhosts: 4\ntrain: {task: 'a:B', batch: 512, "
        "accumulate: 2}\n"
    )
    result = run_launcher("validate", str(file), "train.mesh={dp: 4, fsdp: 8}", "-o", output)
    assert result.code == 0
    assert parse(result.out) == {  # type: ignore[operator]
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


def test_validate_of_wrong_job_exits_with_2(run_launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: lm\n")
    for output in ("text", "json"):
        result = run_launcher("validate", str(file), "-o", output)
        assert (result.code, result.out) == (2, "")
        assert f"{file}: accelerator is missing." in result.err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.yaml", "no such file.\n  hint: create one with `launcher init`.\n"),
        ("", "is a directory.\n"),
    ],
)
def test_unreadable_job_file_is_refused(
    run_launcher: Launcher, name: str, message: str, tmp_path: Path
) -> None:
    result = run_launcher("validate", str(tmp_path / name))
    assert (result.code, result.err) == (2, f"{tmp_path / name}: {message}")


@pytest.mark.parametrize(
    ("error", "code", "message"),
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
    run_launcher: Launcher, error: BaseException, code: int, message: str, monkeypatch: Patch
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(command_line.cli, "callback", fail)
    result = run_launcher("schema")
    assert (result.code, result.out, result.err.strip()) == (code, "", message.strip())


def test_internal_error_keeps_its_traceback(monkeypatch: Patch) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(command_line.cli, "callback", fail)
    monkeypatch.setattr(sys, "argv", ["launcher", "schema"])
    with pytest.raises(ZeroDivisionError):
        command_line.main()


def test_return_value_is_the_exit_code(run_launcher: Launcher, monkeypatch: Patch) -> None:
    @click.command()
    def run() -> int:
        return 83

    monkeypatch.setattr(command_line.Commands, "get_command", lambda *_: run)
    assert run_launcher("run").code == 83


def test_ascii_terminal_is_supported(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: lm\naccelerator: {type: cpu}\ntrain: {task: 'a:B'}\n")
    process = python(
        "-m",
        "jaxlaunch.launcher.cli.main",
        "validate",
        "job.yaml",
        cwd=tmp_path,
        PYTHONIOENCODING="ascii",
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert "(1 host" in process.stdout


def children_cpu_s() -> float:
    """Return the CPU seconds of ended children; the clock says little while other tests run."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_commands_start_fast(tmp_path: Path, capsys: Capture) -> None:
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
        times_s = []
        for _ in range(3):
            started = children_cpu_s()
            assert python(*arguments, cwd=tmp_path).returncode == 0
            times_s.append(children_cpu_s() - started)
        medians[name] = statistics.median(times_s)
    with capsys.disabled():
        for name, seconds in medians.items():
            print(
                f"\n{name}: {seconds * 1000:.0f} ms, "
                f"{seconds / medians['python -I -c pass']:.1f} ×",
                end="",
            )
    assert medians["launcher render"] <= 3 * 35 * medians["python -I -c pass"]
