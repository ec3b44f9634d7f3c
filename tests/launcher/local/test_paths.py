import json
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.local import paths, run
from jaxlaunch.launcher.manifests.jobset import resolve
from jaxlaunch.trainer.spec import Mixture, Text


def load_spec(folder: Path, **keys: Any) -> JobSpec:
    document: dict[str, Any] = {
        "name": "t",
        "accelerator": {"type": "cpu"},
        "train": {"task": "a.b:C"},
    } | keys
    (folder / "job.yaml").write_text(json.dumps(document))
    return jobs.load_job(folder / "job.yaml")


VOLUMES = [
    {"claim": "ckpt", "path": "/ckpt"},
    {"bucket": "gs://corpus/a", "path": "/data", "read_only": True},
]


def test_volume_is_a_folder_of_the_run(tmp_path: Path) -> None:
    job = load_spec(tmp_path, volumes=VOLUMES)
    mapped = paths.map_paths(job, tmp_path, tmp_path / "run", {"corpus": Path("/mnt/corpus")})
    assert mapped.resolve_path("/ckpt/lm") == str(tmp_path / "run/volumes/ckpt/lm")
    assert mapped.resolve_path("/data/*.txt") == "/mnt/corpus/*.txt"
    assert mapped.resolve_path("/ckptother") == "/ckptother"


def test_relative_path_starts_at_job_file_and_url_is_unchanged(tmp_path: Path) -> None:
    mapped = paths.map_paths(load_spec(tmp_path), tmp_path, tmp_path / "run", {})
    assert mapped.resolve_path("data/*.txt") == str(tmp_path / "data/*.txt")
    assert mapped.resolve_path("gs://bucket/x") == "gs://bucket/x"
    assert mapped.resolve_path("stdlib://*.py") == "stdlib://*.py"


def test_only_paths_below_volumes_are_mapped_in_a_command(tmp_path: Path) -> None:
    mapped = paths.map_paths(load_spec(tmp_path, volumes=VOLUMES), tmp_path, tmp_path / "run", {})
    below = str(tmp_path / "run/volumes/ckpt/x")
    assert [
        mapped.map_argument(part)
        for part in ("train.py", "/ckpt/x", "--out=/ckpt/x", "--lr=3e-4", "a=/ckpt/x")
    ] == ["train.py", below, f"--out={below}", "--lr=3e-4", "a=/ckpt/x"]


def test_environment_maps_paths_of_volumes_and_of_the_code(tmp_path: Path) -> None:
    job = load_spec(tmp_path, volumes=VOLUMES, code="project")
    mapped = paths.map_paths(job, tmp_path, tmp_path / "run", {"corpus": Path("/mnt/corpus")})
    assert mapped.map_env(
        {
            "PYTHONPATH": "src:/code/lib:/data/lib:/opt/lib",
            "OUT": "/ckpt/x",
            "URL": "http://a:80/data/x",
        }
    ) == {
        "PYTHONPATH": f"src:{tmp_path}/project/lib:/mnt/corpus/lib:/opt/lib",
        "OUT": str(tmp_path / "run/volumes/ckpt/x"),
        "URL": "http://a:80/data/x",
    }
    inside = load_spec(tmp_path, code="project", workdir="/code/sub")
    assert paths.map_paths(inside, tmp_path, tmp_path, {}).find_workdir(inside) == (
        tmp_path / "project/sub"
    )


def test_every_path_of_the_train_block_is_mapped(tmp_path: Path) -> None:
    train = {
        "task": "a.b:C",
        "data": {"source": "text", "path": ["/data/*.txt", "more/*.txt"]},
        "checkpoint": {"path": "/ckpt/lm"},
        "compile_cache": "cache",
        "model": {"kind": "decoder", "init_from": "weights"},
        "lora": {"init_from": "/data/adapters"},
    }
    job = load_spec(tmp_path, volumes=VOLUMES, train=train)
    mapped = paths.map_paths(job, tmp_path, tmp_path / "run", {})
    assert job.train is not None
    volumes = tmp_path / "run/volumes"
    assert mapped.map_train(job.train).model_dump(exclude_unset=True) == {
        "task": "a.b:C",
        "data": {"source": "text", "path": [f"{volumes}/corpus/*.txt", f"{tmp_path}/more/*.txt"]},
        "checkpoint": {"path": f"{volumes}/ckpt/lm"},
        "compile_cache": f"{tmp_path}/cache",
        "model": {"kind": "decoder", "init_from": f"{tmp_path}/weights"},
        "lora": {"init_from": f"{volumes}/corpus/adapters"},
    }


def test_tokenizer_and_mixture_parts_are_mapped(
    tmp_path: Path,
) -> None:
    parts = {
        "a": {"weight": 1, "path": "/data/a"},
        "b": {"weight": 2, "path": ["b/*"], "eval_path": "gs://team-c"},
    }
    data = {"source": "mixture", "tokenizer": "tok", "data_dir": "/data/made", "parts": parts}
    job = load_spec(tmp_path, volumes=VOLUMES, train={"task": "mine:Task", "data": data})
    assert job.train is not None
    train = (
        paths.map_paths(job, tmp_path, tmp_path / "run", {"corpus": Path("/x")})
        .map_train(job.train)
        .data
    )
    assert isinstance(train, Mixture)
    assert (train.tokenizer, train.data_dir) == (f"{tmp_path}/tok", "/x/made")
    assert [block.path for block in train.part_sources().values()] == ["/x/a", [f"{tmp_path}/b/*"]]
    assert train.part_sources()["b"].eval_path == "gs://team-c"
    bare = job.train.model_copy(update={"data": Text(source="text", path="/data/a")})
    assert (
        paths.map_paths(job, tmp_path, tmp_path / "run", {}).map_train(bare).data.tokenizer
        == "bytes"
    )  # type: ignore[union-attr]


def test_omitted_paths_stay_omitted(tmp_path: Path) -> None:
    job = load_spec(tmp_path)
    assert job.train is not None
    assert paths.map_paths(job, tmp_path, tmp_path, {}).map_train(job.train).model_dump(
        exclude_unset=True
    ) == {"task": "a.b:C"}


def test_unknown_volume_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no volume of that name") as raised:
        paths.map_paths(
            load_spec(tmp_path, volumes=VOLUMES), tmp_path, tmp_path, {"ckpnt": Path("/x")}
        )
    assert "ckpt, corpus" in str(raised.value)


@pytest.mark.parametrize("code", [".", {"folder": ".", "include": [".env.example"]}])
def test_resolved_job_is_the_same_from_any_folder(tmp_path: Path, code: object) -> None:
    """`launcher run runs/one/job.yaml` trains what `launcher run job.yaml` did."""
    train = {
        "task": "mine:Task",
        "data": {
            "source": "array_record",
            "path": ["/data/a", "b/*.rec", "gs://team-c"],
            "eval_path": "/elsewhere/e",
        },
        "checkpoint": {"path": "kept"},
        "compile_cache": "cache",
        "model": {"kind": "gpt2", "init_from": "../weights"},
    }
    job = load_spec(tmp_path, volumes=VOLUMES, train=train, code=code, workdir="inside")
    (tmp_path / "runs" / "one").mkdir(parents=True)
    resolved = tmp_path / "runs" / "one" / "job.yaml"
    mapped = paths.map_paths(job, tmp_path, resolved.parent, {})
    resolved.write_text(jobs.dump_job(mapped.map_job(job)))
    reloaded = jobs.load_job(resolved)
    remapped = paths.map_paths(reloaded, resolved.parent, resolved.parent, {})
    assert job.train is not None and reloaded.train is not None
    assert remapped.map_train(reloaded.train) == mapped.map_train(job.train)
    assert run.make_agent_job(reloaded, remapped, False) == run.make_agent_job(job, mapped, False)
    assert (remapped.base / str(reloaded.code_folder), remapped.base / str(reloaded.workdir)) == (
        tmp_path,
        tmp_path / "inside",
    )
    assert reloaded.code_include == job.code_include
    assert jobs.dump_job(remapped.map_job(reloaded)) == resolved.read_text()
    assert (
        resolve(reloaded, ClusterDefaults()).code.workdir
        == resolve(job, ClusterDefaults()).code.workdir
        == "/code/inside"
    )


def test_one_claim_at_two_mounts_is_one_folder(tmp_path: Path) -> None:
    job = load_spec(
        tmp_path,
        volumes=[{"claim": "c", "path": "/a"}, {"claim": "c", "path": "/b", "read_only": True}],
    )
    mapped = paths.map_paths(job, tmp_path, tmp_path / "run", {})
    assert (
        mapped.resolve_path("/a/x")
        == mapped.resolve_path("/b/x")
        == str(tmp_path / "run/volumes/c/x")
    )
    assert mapped.resolve_path("/a") != "/a"
    with_option = paths.map_paths(job, tmp_path, tmp_path / "run", {"/b": Path("/mnt")})
    assert with_option.resolve_path("/a/x") == "/mnt/x"


def test_volumes_with_equal_names_have_their_own_folders(tmp_path: Path) -> None:
    volumes = [
        {"bucket": "gs://corpus/a", "path": "/a"},
        {"bucket": "gs://corpus/b", "path": "/b"},
        {"claim": "corpus", "path": "/c"},
        {"ephemeral": "1Gi", "path": "/corpus"},
    ]
    job = load_spec(tmp_path, volumes=volumes)
    mapped = paths.map_paths(job, tmp_path, tmp_path / "run", {"/b": Path("/mnt/b")})
    assert len({mapped.resolve_path(path) for path in ("/a", "/b", "/c", "/corpus")}) == 4
    assert (mapped.resolve_path("/a"), mapped.resolve_path("/b")) == (
        str(tmp_path / "run/volumes/corpus"),
        "/mnt/b",
    )
    with pytest.raises(
        UserError, match=r"has 4 of that name.\n  hint: name one by its path: /a, /b, /c or /corpus"
    ):
        paths.map_paths(job, tmp_path, tmp_path, {"corpus": Path("/x")})


@pytest.mark.parametrize("turned", [False, True])
def test_innermost_mount_counts(turned: bool, tmp_path: Path) -> None:
    volumes = [{"claim": "outer", "path": "/data"}, {"claim": "inner", "path": "/data/deep/er"}]
    job = load_spec(tmp_path, volumes=volumes[::-1] if turned else volumes)
    mapped, base = paths.map_paths(job, tmp_path, tmp_path, {}), tmp_path / "volumes"
    assert mapped.resolve_path("/data/deep/er/x") == str(base / "inner/x")
    assert mapped.resolve_path("/data/deep/erst") == str(base / "outer/deep/erst")
    assert mapped.resolve_path("/data/deep/er/../x") == str(base / "outer/deep/x")
    assert mapped.resolve_path("/data/../etc/x") == "/data/../etc/x"


def test_mounted_paths_in_values_of_user_code_are_mapped(
    tmp_path: Path,
) -> None:
    args = {
        "root": "/data/images",
        "deep": [{"at": "/data"}],
        "name": "data",
        "other": "/dataset",
        "n": 3,
    }
    below = str(tmp_path / "volumes/corpus")
    mine = {
        "root": f"{below}/images",
        "deep": [{"at": below}],
        "name": "data",
        "other": "/dataset",
        "n": 3,
    }
    train = {
        "task": "a.b:C",
        "data": {"source": "torch", "dataset": "a.b:D", "args": args, "eval_args": args},
    }
    job = load_spec(
        tmp_path,
        volumes=VOLUMES,
        train=train | {"model": {"kind": "a.b:Net", "words": "/data/words"}},
    )
    assert job.train is not None
    mapped = paths.map_paths(job, tmp_path, tmp_path, {}).map_train(job.train)
    settings = mapped.model_dump(exclude_unset=True)
    assert (settings["data"]["args"], settings["data"]["eval_args"]) == (mine, mine)
    assert settings["model"] == {"kind": "a.b:Net", "words": f"{below}/words"}


def test_working_folder_and_variables_are_mapped(
    tmp_path: Path,
) -> None:
    keys = {
        "train": None,
        "command": ["a"],
        "workdir": "/data/code",
        "env": {"DATA": "/data/x", "A": "/dat"},
    }
    job = load_spec(tmp_path, volumes=VOLUMES, **keys)
    mapped = paths.map_paths(job, tmp_path, tmp_path, {})
    environ = run.make_agent_environ(job, mapped, run.LocalRun(tmp_path, tmp_path), "uid")
    assert (environ["DATA"], environ["A"]) == (str(tmp_path / "volumes/corpus/x"), "/dat")
    assert run.make_agent_job(job, mapped, False).workdir == str(tmp_path / "volumes/corpus/code")
