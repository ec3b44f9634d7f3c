"""Entry point of a trainer process: reads the spec, joins the other processes, trains, and exits.

Exceptions become exit codes only here. The process ends with `os._exit`, because JAX's atexit
barrier would delay the exit code by minutes.
"""

from __future__ import annotations

import gc
import os
from typing import Any, NoReturn

from jaxlaunch import contract
from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.errors import Stopped, TrainerError
from jaxlaunch.trainer.huggingface import folder
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.prepare import text as prepare
from jaxlaunch.trainer.start import distributed, preflight
from jaxlaunch.trainer.start.process import (
    describe_exit,
    exit_code,
    exit_process,
    fit_to_processes,
    get_ready,  # noqa: F401  # the agent's standby process calls it
    print_error,
    read_spec,
    requested_exit_code,
    to_user_error,
)
from jaxlaunch.trainer.step.executable import check_jit
from jaxlaunch.trainer.train import build_loop


def main() -> NoReturn:
    """Train as TRAIN_SPEC specifies and exit with a code of the contract."""
    gc.freeze()
    # The agent's site hook has disabled garbage collection for the imports.
    gc.enable()
    stop = distributed.Stop()
    progress_fd = os.environ.get(contract.PROGRESS_FD)
    report = Progress(int(progress_fd) if progress_fd else None)
    report.report_hello()
    loop: Loop[Any] | None = None
    try:
        report.report_phase("init", 0)
        preflight.check_driver()
        preflight.check_name()
        check_jit()
        prepare.prepare_before_start(
            os.environ, lambda: stop.is_requested, lambda: report.report_phase("prepare", 0)
        )
        report.report_phase("init", 0)
        distributed.initialize()
        report.report_joined()
        preflight.check_devices()
        stop.forward_early_signal()
        spec, task = read_spec(os.environ)
        spec = fit_to_processes(spec, os.environ, report.report_note)
        spec = peft.resolve_lora(folder.resolve_spec(spec))
        loop = build_loop(spec, task, RunContext.from_environ(), stop, report)
        loop.run()
        code = contract.DONE
    except BaseException as exception:
        error = to_user_error(exception)
        code = exit_code(error, has_stepped=loop is not None and loop.has_stepped)
        if loop is not None and not isinstance(error, Stopped):
            loop.end_saves()
        if (requested_code := requested_exit_code(error)) is not None:
            exit_process(requested_code, report)
        if (
            progress_fd
            and isinstance(error, TrainerError)
            and contract.outcome_for_code(code).is_user_fixable
        ):
            report.report_refusal(str(error), code)
        else:
            print_error(error, code)
        report.report_error(error, code, describe_exit(error))
    exit_process(code, report)


if __name__ == "__main__":
    main()
