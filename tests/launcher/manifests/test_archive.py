"""The user's folder as an archive: its files, its bytes, and how an agent unpacks it."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from jaxlaunch.launcher.agent import agent
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.manifests import archive

LIMIT = 1024 * 1024
RANDOM = "7f3a9c51e0b84d26af19"  # of nothing


def git(folder: Path, *arguments: str) -> None:
    identity = (
        *("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "protocol.file.allow=always"),
    )
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small project, in no repository."""
    return write(
        tmp_path / "mine", {"train.py": "print(1)", "pkg/model.py": "x = 1", "pkg/__init__.py": ""}
    )


def list_names(packed: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        return tar.getnames()


# --- which files ----------------------------------------------------------------------------------


def test_folder_outside_of_repository_is_packed(folder: Path) -> None:
    assert archive.list_files(folder) == ["pkg/__init__.py", "pkg/model.py", "train.py"]


@pytest.mark.parametrize("is_repository", [True, False])
def test_ignored_files_are_left_out(folder: Path, is_repository: bool) -> None:
    if is_repository:
        git(folder, "init")
    write(
        folder,
        {
            ".gitignore": "data/\n*.npz\n",
            "data/a": "a",
            "b.npz": "b",
            "pkg/c.npz": "c",
            "new.py": "",
        },
    )
    assert set(archive.list_files(folder)) == {
        ".gitignore",
        "new.py",
        "pkg/__init__.py",
        "pkg/model.py",
        "train.py",
    }


def test_subfolder_of_repository_is_listed_alone(folder: Path) -> None:
    git(folder, "init")
    write(folder, {".gitignore": "*.log\n", "pkg/x.log": "x"})
    assert list(archive.list_files(folder / "pkg")) == ["__init__.py", "model.py"]


def test_tracked_file_is_packed_although_ignored(folder: Path) -> None:
    git(folder, "init")
    git(folder, "add", "train.py")
    write(folder, {".gitignore": "train.py\n"})
    assert "train.py" in archive.list_files(folder)


def test_excluded_names_are_left_out(folder: Path) -> None:
    for name in sorted(archive.EXCLUDED_NAMES - {".git"}):
        write(folder / name, {"a": "a"})
    write(folder / "pkg" / "__pycache__", {"a.pyc": "a"})
    write(folder, {"b.pyc": "b"})
    assert archive.list_files(folder) == ["pkg/__init__.py", "pkg/model.py", "train.py"]


def test_run_folders_are_left_out(folder: Path) -> None:
    packed = archive.pack_folder(folder, LIMIT)
    write(
        folder / "runs" / "digits", {"job.yaml": "x", "summary.json": "x", "logs/rank-0.log": "x"}
    )
    assert archive.pack_folder(folder, LIMIT) == packed
    write(folder, {"runs/notes.txt": "x", "job.yaml": "x", "summary.json": "x"})
    assert {"runs/notes.txt", "job.yaml", "summary.json", "train.py"} <= set(
        archive.list_files(folder)
    )


def test_nested_repositories_are_packed(folder: Path, tmp_path: Path) -> None:
    inner = write(
        tmp_path / "lib", {"a.py": "a", ".gitignore": "b.py\n*.log\n", "b.py": "b", "kept.log": "c"}
    )
    git(inner, "init")
    git(inner, "add", "--force", "a.py", ".gitignore", "kept.log")
    git(inner, "commit", "-m", "a")
    git(folder, "init")
    git(folder, "submodule", "add", str(inner), "sub")
    git(folder, "clone", str(inner), "clone")
    write(folder, {"sub/b.py": "b", "sub/c.py": "c"})
    files = archive.list_files(folder)
    assert {"sub/a.py", "sub/c.py", "sub/kept.log", "clone/a.py", "clone/kept.log"} <= set(files)
    assert "sub/b.py" not in files and not any(".git/" in name for name in files)


def add_marking_commands(folder: Path) -> Path:
    """Let every setting that names a command leave a mark; return the folder of the marks."""
    marks = folder.parent / f"ran-by-{folder.name}"
    marks.mkdir(exist_ok=True)
    for setting in COMMANDS:
        git(folder, "config", setting, f"touch {marks}/{setting} #")
    for hook in (
        "post-index-change",
        "fsmonitor-watchman",
        "post-checkout",
        "reference-transaction",
    ):
        write(folder / ".git" / "hooks", {hook: f"#!/bin/sh\ntouch {marks}/{hook}\n"})
        (folder / ".git" / "hooks" / hook).chmod(0o755)
    write(folder, {".gitattributes": "* filter=x diff=x\n"})
    return marks


COMMANDS = (
    *(
        *("core.fsmonitor", "core.sshCommand", "core.gitProxy", "core.pager", "core.editor"),
        "core.askPass",
    ),
    *(
        "core.alternateRefsCommand",
        "pager.ls-files",
        "credential.helper",
        "diff.external",
        "diff.x.textconv",
    ),
    *(
        "filter.x.clean",
        "filter.x.smudge",
        "filter.x.process",
        "alias.ls-files",
        "uploadpack.packObjectsHook",
    ),
)


def test_listing_runs_no_command_of_the_repository(folder: Path, tmp_path: Path) -> None:
    inner = write(folder / "inner", {"a.py": "a"})
    for repository in (inner, folder):
        git(repository, "init")
        git(repository, "add", ".")
        git(repository, "commit", "-m", "a")
    marks = [add_marking_commands(repository) for repository in (inner, folder)]
    subprocess.run(["git", "ls-files", "--others"], cwd=inner, check=True, capture_output=True)
    assert [path.name for path in marks[0].iterdir()] == [
        "core.fsmonitor"
    ]  # a listing runs it unless told not to
    (marks[0] / "core.fsmonitor").unlink()
    write(folder, {"train.py": "print(2)", "inner/b.py": "b"})
    assert {"train.py", "inner/a.py", "inner/b.py"} <= set(archive.list_files(folder))
    assert not any(path for mark in marks for path in mark.iterdir())


def test_listing_fetches_nothing(folder: Path, tmp_path: Path) -> None:
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "a")
    git(folder, "config", "uploadpack.allowFilter", "true")
    clone, mark = tmp_path / "clone", tmp_path / "fetched"
    git(tmp_path, "clone", "--no-checkout", "--filter=tree:0", folder.as_uri(), str(clone))
    git(clone, "sparse-checkout", "init", "--cone", "--sparse-index")
    git(clone, "read-tree", "-mu", "HEAD")
    for objects in (clone / ".git" / "objects").iterdir():
        shutil.rmtree(objects)
    git(clone, "config", "remote.origin.uploadpack", f"touch {mark}; git-upload-pack")
    assert archive.list_files(clone) == ["train.py"] and not mark.exists()
    git(clone, "ls-files")
    assert mark.exists()  # as git would do by itself


def make_index(folder: Path, *names: str) -> Path:
    """Make a repository whose index names these files, most of which git itself would refuse."""
    git(folder, "init")
    git(folder, "config", "index.version", "2")
    stand_ins = {f"{'q' * (len(name) - 1)}{at}": name for at, name in enumerate(names)}
    write(folder, dict.fromkeys(stand_ins, "x"))
    git(folder, "add", *stand_ins)
    content = (folder / ".git" / "index").read_bytes()[:-20]
    for stand_in, name in stand_ins.items():
        assert content.count(stand_in.encode()) == 1
        content = content.replace(stand_in.encode(), name.encode())
        (folder / stand_in).unlink()
    (folder / ".git" / "index").write_bytes(content + hashlib.sha1(content).digest())
    return folder


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize(
    "name", ["../secret", "pkg/../../secret", "/etc/hostname", "out/secret", "out/deep/secret"]
)
def test_index_entry_outside_of_folder_is_refused(
    folder: Path, tmp_path: Path, name: str, is_inner: bool
) -> None:
    write(tmp_path, {"secret": "s3cret", "deep/secret": "s3cret"})
    repository = write(folder / "inner", {"a.py": "a"}) if is_inner else folder
    (repository / "out").symlink_to(tmp_path)
    write(repository, {".gitignore": "out\n"})
    make_index(repository, name)
    if is_inner and name == "../secret":
        write(folder, {"secret": "of the outer folder"})
    with pytest.raises(
        UserError, match=r"git's index names .*, which is outside of .*\n.*git rm --cached"
    ):
        archive.pack_folder(folder, LIMIT)


def test_link_to_folder_is_packed_as_link(folder: Path) -> None:
    git(folder, "init")
    write(folder, {"old/model.py": "x = 1"})
    git(folder, "add", ".")
    shutil.rmtree(folder / "old")
    (folder / "old").symlink_to("pkg")
    assert [
        name for name in list_names(archive.pack_folder(folder, LIMIT)) if name.startswith("old")
    ] == ["old"]


def test_broken_git_folders_do_not_block(folder: Path) -> None:
    git(folder, "init")
    for name, pointer in (
        ("loop", "gitdir: .git\n"),
        ("odd", "\0" * 9000),
        ("elsewhere", "gitdir: /nonexistent"),
    ):
        write(folder, {f"{name}/a.py": "a", f"{name}/.git": pointer})
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / ".git")
    write(folder, {"pipe/a.py": "a"})
    assert "train.py" in archive.list_files(folder)


def test_git_variables_are_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nonexistent/index")
    assert "train.py" in archive.list_files(folder)


def test_unreadable_repository_is_refused(folder: Path) -> None:
    (folder / ".git").write_text("gitdir: /nonexistent\n")
    with pytest.raises(UserError, match="git cannot list .* not a git repository"):
        archive.list_files(folder)


def test_folder_is_walked_without_git(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, {"node_modules/a": "a"})
    (folder / "link").symlink_to("pkg")
    monkeypatch.setenv("PATH", "")
    assert archive.list_files(folder) == ["link", "pkg/__init__.py", "pkg/model.py", "train.py"]


def test_gitignore_needs_git(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, {"pkg/.gitignore": "keys\n", "pkg/keys": "secret"})
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="git, which reads it, is not installed"):
        archive.list_files(folder)


# --- one archive ----------------------------------------------------------------------------------


def test_equal_files_give_equal_archive(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = archive.pack_folder(folder, LIMIT)
    copy = write(
        tmp_path / "other", {"pkg/__init__.py": "", "train.py": "print(1)", "pkg/model.py": "x = 1"}
    )
    (copy / "empty").mkdir()
    os.utime(copy / "train.py", (1, 1))
    (copy / "train.py").chmod(0o600)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert archive.pack_folder(copy, LIMIT) == first


def test_changed_file_changes_archive(folder: Path) -> None:
    first = archive.pack_folder(folder, LIMIT)
    write(folder, {"train.py": "print(2)"})
    second = archive.pack_folder(folder, LIMIT)
    (folder / "train.py").chmod(0o755)
    assert len({first, second, archive.pack_folder(folder, LIMIT)}) == 3


def test_archive_has_no_owner_and_time(folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive.pack_folder(folder, LIMIT))) as tar:
        assert {
            (header.uid, header.gid, header.uname, header.gname, header.mtime, header.mode)
            for header in tar
        } == {(0, 0, "", "", 0, 0o644)}


def test_deleted_file_is_left_out(folder: Path) -> None:
    git(folder, "init")
    git(folder, "add", ".")
    (folder / "train.py").unlink()
    assert list_names(archive.pack_folder(folder, LIMIT)) == ["pkg/__init__.py", "pkg/model.py"]


def test_pipes_and_sockets_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    os.mkfifo("fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        assert "train.py" in (packed_names := list_names(archive.pack_folder(folder, LIMIT)))
        assert not {"fifo", "socket"} & set(packed_names)


def test_large_folder_is_refused_with_its_largest_files(folder: Path) -> None:
    noise = {"big.bin": os.urandom(2_000_000), "data/huge.bin": os.urandom(3_000_000)}
    write(folder, {**noise, "small.txt": "x" * 9_000_000})
    with pytest.raises(UserError) as error:
        archive.pack_folder(folder, LIMIT)
    assert "packs to 4.8 MiB, and at most 1.0 MiB fit into its ConfigMap." in str(error.value)
    assert "small.txt (8.6 MiB), data/huge.bin (2.9 MiB), big.bin (1.9 MiB)" in str(error.value)
    assert "hint: leave out in .gitignore" in str(error.value)


def test_huge_folder_is_refused_before_reading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (folder / "sparse").open("wb") as file:
        file.truncate(10 * 1024**3)
    with pytest.raises(UserError, match=r"the folder holds 10240\.0 MiB.*sparse \(10240\.0 MiB\)"):
        archive.pack_folder(folder, LIMIT)


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no file that git does not ignore"):
        archive.pack_folder(tmp_path, LIMIT)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../other", "..", "pkg/../../mine/train.py"])
def test_link_out_of_folder_is_refused(folder: Path, target: str) -> None:
    (folder / "data").symlink_to(target)
    with pytest.raises(UserError, match=r"code: data is a link to .*, outside of the folder"):
        archive.pack_folder(folder, LIMIT)


@pytest.mark.parametrize("is_tracked", [True, False])
def test_credentials_are_refused(folder: Path, is_tracked: bool) -> None:
    write(
        folder,
        {".env": "X=1", "run.sh": f"set -e\nexport WANDB_API_KEY={RANDOM}\n", "a/.netrc": ""},
    )
    if is_tracked:
        git(folder, "init")
        git(folder, "add", ".")
    with pytest.raises(UserError) as error:
        archive.pack_folder(folder, LIMIT)
    first, *files = str(error.value).splitlines()[:4]
    assert first.startswith(
        "code: 3 files to be shipped look like credentials, and anyone who may read ConfigMaps"
    )
    assert files == [
        "  .env (by its name)",
        "  a/.netrc (by its name)",
        "  run.sh (line 2: WANDB_API_KEY)",
    ]
    assert RANDOM not in str(error.value)
    assert "mount a Secret" in str(error.value)
    assert "include: {.env: the reason why}" in str(error.value)


def test_included_files_may_look_like_credentials(folder: Path) -> None:
    write(
        folder,
        {
            ".env.example": "X=",
            "tests/certs/a.p12": "1",
            "tests/certs/deep/b.p12": "1",
            "tests/c.p12": "1",
        },
    )
    with pytest.raises(
        UserError, match=r"code: 1 file to be shipped looks like(.|\n)*tests/c\.p12"
    ):
        archive.pack_folder(folder, LIMIT, [".env.example", "tests/certs/"])
    for include in (
        [".env.example", "./tests"],
        {".env.example": "a template", "./tests": "made for the tests"},
    ):
        packed = archive.pack_folder(folder, LIMIT, include)
        assert {".env.example", "tests/certs/deep/b.p12", "tests/c.p12"} <= set(list_names(packed))


def test_unknown_included_name_is_refused(folder: Path) -> None:
    write(folder, {".gitignore": ".env\n", ".env": "X=1"})
    with pytest.raises(
        UserError, match=r"code\.include: \.env, nowhere: no such file or folder is shipped\."
    ):
        archive.pack_folder(folder, LIMIT, ["nowhere", ".env", "train.py"])


# --- unpacked by the agent ------------------------------------------------------------------------


def write_tarball(path: Path, *members: tarfile.TarInfo) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return str(path)


def make_member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_unpacked_folder_is_equal(folder: Path, tmp_path: Path) -> None:
    write(folder, {"run.sh": "#!/bin/sh", "ümlaut.txt": "ü", "deep/" * 60 + "leaf": "leaf"})
    (folder / "run.sh").chmod(0o750)
    (folder / "pkg" / "link.py").symlink_to("../train.py")
    packed = tmp_path / "code.tar.gz"
    packed.write_bytes(archive.pack_folder(folder, LIMIT))
    agent.unpack_code(str(packed), str(tmp_path / "there"))
    packed_paths, paths = (
        {path.relative_to(at) for path in at.rglob("*")} for at in (folder, tmp_path / "there")
    )
    assert packed_paths == paths
    for path in paths:
        if (at := tmp_path / "there" / path).is_file():
            assert at.read_bytes() == (folder / path).read_bytes()
    assert os.readlink(tmp_path / "there/pkg/link.py") == "../train.py"
    assert os.access(tmp_path / "there/run.sh", os.X_OK)
    assert not os.access(tmp_path / "there/train.py", os.X_OK)


def test_restarted_container_unpacks_the_code_again(folder: Path, tmp_path: Path) -> None:
    (folder / "pkg" / "link.py").symlink_to("../train.py")
    packed, unpacked = tmp_path / "code.tar.gz", tmp_path / "there"
    packed.write_bytes(archive.pack_folder(folder, LIMIT))
    agent.unpack_code(str(packed), str(unpacked))
    # The program has replaced a file by a link to its data, and the link by a file.
    data = tmp_path / "data"
    data.write_text("not code")
    (unpacked / "train.py").unlink()
    (unpacked / "train.py").symlink_to(data)
    (unpacked / "pkg" / "link.py").unlink()
    (unpacked / "pkg" / "link.py").write_text("changed")
    agent.unpack_code(str(packed), str(unpacked))
    assert os.readlink(unpacked / "pkg" / "link.py") == "../train.py"
    assert not (unpacked / "train.py").is_symlink()
    assert (unpacked / "train.py").read_bytes() == (folder / "train.py").read_bytes()
    assert data.read_text() == "not code"


@pytest.mark.parametrize(
    "bad",
    [
        make_member("../a"),
        make_member("/a"),
        make_member("a/../../b"),
        make_member("a", tarfile.SYMTYPE, "/etc"),
        make_member("a", tarfile.SYMTYPE, "../b"),
        make_member("a", tarfile.LNKTYPE, "b"),
        make_member("a", tarfile.CHRTYPE),
        make_member("a", tarfile.FIFOTYPE),
    ],
    ids=lambda bad: f"{bad.name}-{bad.type.decode()}-{bad.linkname}",
)
def test_archive_member_outside_is_refused(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    packed = write_tarball(tmp_path / "a.tar.gz", make_member("b"), bad)
    with pytest.raises(agent.CodeError):
        agent.unpack_code(packed, str(tmp_path / "there"))
    assert {path.name for path in tmp_path.rglob("*")} <= {"a.tar.gz", "there", "b"}


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: b"junk", lambda data: data[: len(data) // 2]]
)
def test_damaged_archive_is_refused(
    folder: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    packed = tmp_path / "code.tar.gz"
    packed.write_bytes(damage(archive.pack_folder(folder, LIMIT)))
    with pytest.raises(agent.CodeError, match="is damaged"):
        agent.unpack_code(str(packed), str(tmp_path / "there"))
