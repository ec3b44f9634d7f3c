"""Compares the architecture of a folder with PyTorch: the program of `launcher model check`.

The argument is the folder. The result is printed as JSON.
"""

from __future__ import annotations

import sys
from typing import Any

import jax

from jaxlaunch.trainer.start.process import print_result
from jaxlaunch.trainer.torch_models import checked, compare, modules

# The devices of the mesh on which the comparison runs.
DEVICES = compare.MESH_DEVICES


def main() -> int:
    """Compare the folder of the argument, print the result, and return the exit code."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    return print_result(lambda: check_folder(sys.argv[1]))


def check_folder(folder: str) -> dict[str, Any]:
    """Compare the architecture of a folder, keep the result, and return it. Raises SpecError."""
    modules.import_libraries()
    comparison = compare.compare_folder(folder)
    checked.store_comparison(comparison)
    return {
        **comparison._asdict(),
        "is_equal": comparison.is_equal,
        "packs_rows": comparison.packs_rows,
        "versions": checked.library_versions(),
        "notes": [],
    }


if __name__ == "__main__":
    sys.exit(main())
