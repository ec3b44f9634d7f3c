"""Runs a program of the trainer in a process of its own: the launcher never imports jax."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxlaunch import contract, installation, isolated
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.trainer.spec import TrainSpec


def is_installed() -> bool:
    """Whether the trainer is installed; the base install does not have it."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax", "flax", "optax"))


def install_hint() -> str:
    """The command that adds the trainer to this installation."""
    return f"{installation.hint('train')}."


def require(what: str) -> None:
    """Raises UserError where the trainer, which `what` needs, is not installed here."""
    if not is_installed():
        raise UserError(f"{what} needs the trainer, which is not installed here.", install_hint())


def environ(job: JobSpec, train: TrainSpec, base: Path) -> dict[str, str]:
    """The environment of a program that reads `train` on the CPU: the job's own variables, and its code from `base`."""
    code = [str(base / job.code_folder)] if job.code_folder else []
    path = os.pathsep.join(filter(None, (*code, os.environ.get("PYTHONPATH"))))
    return {
        **os.environ,
        **job.env,
        **({"PYTHONPATH": path} if path else {}),
        "JAX_PLATFORMS": "cpu",
        contract.TRAIN_SPEC: train.model_dump_json(exclude_unset=True),
    }


def run(
    module: str,
    *arguments: str,
    environ: Mapping[str, str],
    hint: str | None = None,
    show: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The JSON object that `python -m module` prints; `show` gets what it says meanwhile, line by line.

    Raises UserError with its own message, and `hint`.
    """
    command, environ = isolated.command(module, *arguments), isolated.environ(environ)
    if show is None:
        ended = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    else:
        ended = _shown(command, environ, show)
    _check(module, ended.returncode, ended.stderr, hint, has_result=bool(ended.stdout.strip()))
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def _shown(
    command: list[str], environ: Mapping[str, str], show: Callable[[str], None]
) -> subprocess.CompletedProcess[str]:
    """The program when it has ended. What it says but for its refusal is shown as it comes."""
    pipe, said = subprocess.PIPE, []
    with subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        for line in child.stderr:  # its result is one line, which its pipe holds meanwhile
            said.append(line)
            if contract.refusal_message(line.rstrip()) is None:
                show(line.rstrip())
        printed = child.stdout.read()
    return subprocess.CompletedProcess(command, child.returncode, printed, "".join(said))


def events(
    module: str, *arguments: str, environ: Mapping[str, str], hear: Callable[[], str | None] | None = None
) -> Iterator[dict[str, Any]]:
    """The JSON objects that `python -m module` prints, one a line, as they come. Raises UserError as `run` does.

    Where `hear` is given, an object with `ask` is answered by what it returns, once the caller has seen it; None
    ends the program's input.
    """
    command, environ, has_result = isolated.command(module, *arguments), isolated.environ(environ), False
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        given = subprocess.DEVNULL if hear is None else subprocess.PIPE
        process = subprocess.Popen(command, env=environ, stdin=given, stdout=subprocess.PIPE, stderr=errors, text=True)
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    has_result = True
                    yield (event := json.loads(line))
                    if hear is not None and "ask" in event:
                        _answer(process, hear())
            except BaseException:
                process.kill()  # nobody reads it any more
                raise
        errors.seek(0)
        _check(module, process.returncode, errors.read(), None, has_result=has_result)


def _answer(process: subprocess.Popen[str], text: str | None) -> None:
    """Gives a program one line of JSON; without a text, the end of its input."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, and what it printed says why
        if text is None:
            process.stdin.close()
        else:
            print(json.dumps(text), file=process.stdin, flush=True)


def _check(module: str, code: int, said: str, hint: str | None, *, has_result: bool) -> None:
    if code in contract.SENTENCES:
        raise UserError(_refusal_in(said), hint)
    if code:
        raise UserError(f"{said.strip()}\n`python -m {module}` failed (exit {code}).")
    if not has_result:  # code of the job's has ended the process, by os._exit(0)
        raise UserError(f"{said.strip()}\n`python -m {module}` ended without a result (exit 0).".lstrip())


def _refusal_in(log: str) -> str:
    """The message of the last refusal in a log; the log's last line where it has none."""
    lines = log.strip().splitlines() or [""]
    messages = map(contract.refusal_message, reversed(lines))
    return next((message for message in messages if message is not None), lines[-1])
