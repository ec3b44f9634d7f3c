"""How a program of the trainer's ends."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.trainer.start import process


def test_sys_exit_in_user_code_is_no_result_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    def find() -> dict[str, Any]:
        sys.exit(0)

    assert process.print_result(find) == contract.STARTUP
    told = capsys.readouterr()
    assert not told.out and "sys.exit(0)" in told.err
    with pytest.raises(SystemExit) as raised:
        find()
    assert process.of_exit(raised.value).startswith("sys.exit(0) (tests/trainer/start/test_process.py:")
    assert process.of_exit(ValueError("0")) == ""
