from pathlib import Path

import pytest

from jaxlaunch import user_cache
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.errors import DataError


def test_matching_files_are_sorted_and_unique(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md", "d.txt/inner.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    result = files.match_files([f"{tmp_path}/*.txt", f"{tmp_path}/a*"])
    assert [Path(path).name for path in result] == ["a.txt", "b.txt"]
    assert len(files.match_files(f"{tmp_path}/**")) == 4


def test_file_name_with_brackets_matches(tmp_path: Path) -> None:
    path = tmp_path / "part[1].txt"
    path.write_text("x")
    assert files.match_files(str(path)) == [str(path)]


def test_stdlib_pattern_excludes_site_packages() -> None:
    result = files.match_files("stdlib://**/*.py")
    assert any(path.endswith("/json/decoder.py") for path in result)
    assert not any("site-packages" in path for path in result)


@pytest.mark.parametrize(
    ("pattern", "hint"), [("/nowhere/at/all/*", "/ holds"), ("stdlib://*.c", "holds")]
)
def test_unmatched_pattern_has_a_hint(pattern: str, hint: str) -> None:
    with pytest.raises(DataError, match="matches no file; .*" + hint):
        files.match_files(pattern)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/data/a.txt"], ["a.txt"]),
        (["/data/a.txt", "/data/b/c.txt"], ["a.txt", "b/c.txt"]),
        (["gs://bucket/a.txt", "gs://bucket/b/c.txt"], ["a.txt", "b/c.txt"]),
        (["/data/a.txt", "gs://bucket/b.txt"], ["data/a.txt", "gs://bucket/b.txt"]),
    ],
)
def test_names_do_not_depend_on_the_working_directory(
    paths: list[str], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert files.relative_names(paths) == names


def test_digest_samples_names_sizes_and_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(bytes(2**20))
    second.write_bytes(b"x")
    observed = {files.sample_digest([str(first), str(second)])}
    second.write_bytes(b"y")
    observed.add(files.sample_digest([str(first), str(second)]))
    first.write_bytes(b"\1" + bytes(2**20 - 1))
    observed.add(files.sample_digest([str(first), str(second)]))
    first.write_bytes(b"\1" + bytes(2**20))
    observed.add(files.sample_digest([str(first), str(second)]))
    observed.add(files.sample_digest([str(first)]))
    assert len(observed) == 5


def test_cache_is_in_the_user_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(user_cache.cache_folder("tfds")) == "/cache/jaxlaunch/tfds"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert str(user_cache.cache_folder("text")) == "/home/me/.cache/jaxlaunch/text"
