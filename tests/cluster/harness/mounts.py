"""Mounts below a folder, which keep it from being removed."""

import subprocess
from pathlib import Path


def unmount_below(*folders: Path) -> None:
    """Unmount everything below the folders, the innermost first."""
    roots = tuple(f"{folder}/" for folder in folders)
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(roots)), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=True)
