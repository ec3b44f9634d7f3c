"""The root folder of the images: this machine's Python, a shell, tools and their libraries.

Nothing is downloaded, so a base image needs no registry. Python is in /usr/local, as in the
official images.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

TOOLS = [
    "sh",
    "bash",
    "env",
    "cat",
    "ls",
    "cp",
    "mv",
    "rm",
    "mkdir",
    "rmdir",
    "ln",
    "chmod",
    "chown",
    "touch",
    "find",
    "grep",
    "sed",
    "tar",
    "gzip",
    "head",
    "tail",
    "sort",
    "cut",
    "tr",
    "wc",
    "du",
    "df",
    "id",
    "kill",
    "ps",
    "hostname",
    "date",
    "sleep",
    "true",
    "false",
    "timeout",
    "getent",
    "readlink",
    "dirname",
    "basename",
    "uname",
    "sha256sum",
    "xargs",
    "test",
    "[",
]
# Loaded by name at run time, or by libraries that are added later (jaxlib): no ldd of ours finds
# them.
LIBRARIES = [
    "librt.so.1",
    "libpthread.so.0",
    "libdl.so.2",
    "libutil.so.1",
    "libm.so.6",
    "libresolv.so.2",
    "libnss_files.so.2",
    "libnss_dns.so.2",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libgomp.so.1",
    "libz.so.1",
]
LIBRARY_FOLDERS = [
    Path("/lib/x86_64-linux-gnu"),
    Path("/usr/lib/x86_64-linux-gnu"),
    Path("/lib64"),
    Path("/usr/lib64"),
]
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
UNUSED = {
    "test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "lib2to3",
    "__pycache__",
    "site-packages",
    "dist-packages",
}
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
FILES = {
    "etc/passwd": (
        "root:x:0:0:root:/root:/bin/sh\n"
        "app:x:1000:1000::/tmp:/bin/sh\n"
        "nobody:x:65534:65534::/:/bin/sh\n"
    ),
    "etc/group": "root:x:0:\napp:x:1000:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


def find_interpreter() -> Path:
    """Return the real file of the interpreter below this venv."""
    return Path(sys.executable).resolve()


def make_root(root: Path) -> None:
    for name in ("bin", "lib", "lib64", "sbin"):  # merged, as in Debian
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("tmp", "proc", "sys", "dev", "run", "root", "var", "etc"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    for name, content in FILES.items():
        (root / name).write_text(content)
    copy_tools(root)
    copy_python(root)
    if CERTIFICATES.exists():
        place_file(CERTIFICATES, root / CERTIFICATES.relative_to("/"))


def copy_tools(root: Path) -> None:
    for tool in TOOLS:
        if path := shutil.which(tool, path="/usr/bin:/bin"):
            place_file(Path(path), root / "usr/bin" / tool)
            copy_libraries(root, Path(path))
    for name in LIBRARIES:
        for folder in LIBRARY_FOLDERS:
            if (folder / name).exists():
                place_file(folder / name, root / "usr/lib" / folder.name / name)
                break


def copy_python(root: Path) -> None:
    ignore = shutil.ignore_patterns(*UNUSED, "config-*", "*.a")
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, root / "usr/local/lib" / VERSION, ignore=ignore, symlinks=True)
    place_file(find_interpreter(), root / "usr/local/bin" / VERSION)
    wheels = sysconfig.get_config_var("WHEEL_PKG_DIR")  # where Debian's ensurepip has pip
    if wheels and Path(wheels).exists():
        shutil.copytree(wheels, root / Path(wheels).relative_to("/"))
    for alias in ("python3", "python"):
        (root / "usr/local/bin" / alias).symlink_to(VERSION)
    for binary in (find_interpreter(), *library.rglob("*.so")):
        copy_libraries(root, binary)
    compile_all(root / "usr/local/lib" / VERSION)


def copy_libraries(root: Path, binary: Path) -> None:
    """Copy the shared libraries of `binary`; libpython goes among the system's."""
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True).stdout
    for library in re.findall(r"(?:=> )?(/\S+) \(0x", listed):
        folder = "lib64" if "ld-linux" in library else "lib/x86_64-linux-gnu"
        place_file(Path(library), root / "usr" / folder / os.path.basename(library))


def place_file(source: Path, target: Path) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source.resolve(), target)


def compile_all(folder: Path) -> None:
    """Compile bytecode that ignores times: uncompiled, jax takes 8 s more to import."""
    options = ["-q", "-j", "2", "--invalidation-mode", "unchecked-hash", "-x", "/tests?/"]
    subprocess.run([sys.executable, "-m", "compileall", *options, folder], capture_output=True)
