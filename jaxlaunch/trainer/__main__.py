"""The trainer process: reads the spec, joins the other processes, trains, and exits with a code of the contract.

Exceptions of the training become exit codes only here. The process exits by os._exit, because JAX's atexit barrier
would delay the exit code by minutes.
"""

from __future__ import annotations

import gc
import os
from typing import Any, NoReturn

from jaxlaunch import contract
from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.errors import TrainerError
from jaxlaunch.trainer.huggingface import folder
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.loop.training import Place
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.prepare import text as prepare
from jaxlaunch.trainer.start import distributed, preflight
from jaxlaunch.trainer.start.process import (
    exit_code,
    get_ready,  # noqa: F401  # the agent's standby process calls it
    leave,
    of_all_hosts,
    of_exit,
    print_error,
    read_spec,
    refused,
)
from jaxlaunch.trainer.train import loop_of


def main() -> NoReturn:
    """Train as TRAIN_SPEC specifies and exit with a code of the contract."""
    gc.freeze()
    # The agent's site hook has disabled garbage collection for the imports.
    gc.enable()
    stop = distributed.Stop()
    fd = os.environ.get(contract.PROGRESS_FD)
    report = Progress(int(fd) if fd else None)
    report.hello()
    loop: Loop[Any] | None = None
    try:
        report.phase("init", 0)
        preflight.check_driver()
        preflight.check_name()
        prepare.at_start(os.environ, lambda: stop.is_requested, lambda: report.phase("prepare", 0))
        report.phase("init", 0)
        distributed.initialize()
        report.joined()
        preflight.check_devices()
        stop.arm()
        spec, task = read_spec(os.environ)
        spec = of_all_hosts(spec, os.environ, report.note)
        loop = loop_of(peft.resolved(folder.resolve_spec(spec)), task, Place.from_environ(), stop, report)
        loop.run()
        code = contract.DONE
    except BaseException as raised:
        error = refused(raised)
        code = exit_code(error, has_stepped=loop is not None and loop.is_stepping)
        if loop is not None and code != contract.PREEMPTED:
            loop.end_saves()
        if fd and isinstance(error, TrainerError) and code in contract.SENTENCES:
            report.refusal(str(error), code)
        else:
            print_error(error, code)
        report.error(error, code, of_exit(error))
    leave(code, report)


if __name__ == "__main__":
    main()
