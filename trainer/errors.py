"""Errors that a person can mend, each with the exit code of the contract it ends a run with.

TrainerError
├── SpecError        64  the specification is wrong: a key, a module that does not import
├── DataError        65  the data is missing, changed or unreadable
├── NotFiniteError   76  loss or gradients are not finite
├── CheckpointError  78  no usable checkpoint, or the folder belongs to another run
├── Stopped          80  told to stop from outside
└── StorageError     84  storage failed while writing or reading

Any other exception is a bug, ours or the user's: 70 before the first step, 83 after it.
"""

from trainer import contract


class TrainerError(Exception):
    """Ends the run with `code`; the message says what, where, both values and what to do."""

    code = contract.CRASH


class SpecError(TrainerError):
    code = contract.BAD_SPEC


class DataError(TrainerError):
    code = contract.BAD_DATA


class NotFiniteError(TrainerError):
    code = contract.NOT_FINITE


class CheckpointError(TrainerError):
    code = contract.NO_CHECKPOINT


class Stopped(TrainerError):
    code = contract.PREEMPTED


class StorageError(TrainerError):
    code = contract.STORAGE
