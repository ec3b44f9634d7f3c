"""`jaxlaunch.run`: joins the other processes, drives a program's own step, and says how that ended.

Below an agent a run that ends early ends the process with its code, as the built-in trainer does; alone it raises.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import jax

from jaxlaunch import contract
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.errors import SpecError, Stopped, TrainerError
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.loop.options import Options
from jaxlaunch.trainer.loop.place import Place
from jaxlaunch.trainer.loop.state import Named, Tree
from jaxlaunch.trainer.loop.user_training import UserTraining
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.start import distributed, preflight
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.process import exit_code, leave, of_exit, print_error

TOO_LATE = "jax.distributed.initialize() must be called before"  # JAX's words, where a program used JAX before


def run(step: Any, state: Any, data: Any = None, **options: Any) -> Tree:
    """The state after the last step; jaxlaunch.run says how it comes about. Raises TrainerError, and what the program's
    functions raise; below an agent the process ends instead."""
    # A rank of a gang, and not a process that a rank's program has started.
    gang = contract.PROGRESS_FD in os.environ and os.environ.get(contract.REPORTER) == str(os.getpid())
    stop = Stop()
    report = Progress(int(os.environ[contract.PROGRESS_FD]) if gang else None)
    loop: Loop[Named] | None = None
    try:
        report.hello()
        report.phase("init", 0)
        chosen = Options(**options)
        if gang:
            _join(report)
            stop.arm()
        place = Place.from_environ() if gang else _alone()
        folder = _checkpoints(chosen, (gang and os.environ.get(contract.RUN_URL)) or place.run_dir)
        training = UserTraining(step, state, data, chosen, folder, place, report)
        loop = Loop(training, place, stop, report)
        found = training.state.tree(loop.run())
        report.close()
        return found
    except BaseException as error:  # every end below an agent has a code
        if loop is not None and not isinstance(error, Stopped):
            loop.end_saves(releases=not gang)
        if not gang:
            if isinstance(error, Stopped):
                print(f"jaxlaunch.run: {error}", file=sys.stderr)
                raise SystemExit(contract.PREEMPTED) from None
            raise
        _end(error, loop is not None and loop.is_stepping, report)
    finally:
        stop.forget()
        gc.enable()


def _alone() -> Place:
    """Where a run without an agent keeps its files: `runs/NAME`, after the script."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    name = "notebook" if script is None else Path(script).stem
    return Place(run_dir=os.path.join("runs", name), uid=f"local-{os.getpid()}")


def _checkpoints(options: Options, home: str | None) -> str:
    """Path or URL of the checkpoint folder. Raises SpecError where there is no run folder to keep them in."""
    if options.folder is not None:
        return os.fspath(options.folder)
    if home is None:
        raise SpecError("jaxlaunch.run: this job has no run folder to keep checkpoints in; give folder=")
    return f"{home.rstrip('/')}/checkpoints"


def _join(report: Progress) -> None:
    """Joins the processes of the gang, unless the program has. Raises SpecError for other devices than the job's."""
    if not jax.distributed.is_initialized():
        preflight.check_driver()
        preflight.check_name()
        try:
            distributed.initialize()
            report.joined()
        except RuntimeError as error:
            if TOO_LATE not in str(error):
                raise
            if os.environ.get(contract.NUM_PROCESSES) != "1":
                raise SpecError(
                    "jaxlaunch.run: the program used JAX before it joined the other processes; give the state as a "
                    "function that makes it, run(step, make_state, …), or begin with jax.distributed.initialize()"
                ) from None
    preflight.check_devices()


def _end(error: BaseException, has_stepped: bool, report: Progress) -> NoReturn:
    """Reports what ended a run, with the line that raised it, and leaves with its code."""
    code, place = exit_code(error, has_stepped=has_stepped), ""
    if not isinstance(error, TrainerError):
        said, place = user_code.told(error)
        place = of_exit(error) or (f"{said} ({place})" if place else "")
    if code != contract.PREEMPTED:
        print_error(error, code)
    report.error(error, code, place)
    leave(code, report)
