"""The run directory: names, the lock, the config and manifest on disk, and what fresh may remove."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe import rundir
from troupe.checkpoints import TEMPORARY
from troupe.errors import RunDirError
from troupe.rundir import RunDir, runs_root, toml_text
from troupe.types import Json, State


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_runs_are_under_the_variable_or_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_RUNS", "/somewhere")
    assert runs_root() == Path("/somewhere")
    monkeypatch.delenv("TROUPE_RUNS")
    assert runs_root() == Path("runs")


def test_a_new_run_has_its_layout_and_is_private(root: Path) -> None:
    run = RunDir.create("a", fresh=False, root=root)
    run.release()
    assert run.path == root / "a"
    assert sorted(os.listdir(run.path)) == ["best", "checkpoints", "eval", "lock", "logs", "manifest.json", "video"]
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert all((run.path / name).stat().st_mode & 0o077 == 0 for name in os.listdir(run.path))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", ".a", "-a", "a b", "a\n", "a\0", "é", "x" * 129])
def test_a_name_that_is_more_than_a_name_is_refused(root: Path, name: str) -> None:
    with pytest.raises(RunDirError, match="cannot be a run's name"):
        RunDir.create(name, fresh=True, root=root)
    assert not root.exists()


def test_an_existing_run_is_only_replaced_when_asked(root: Path) -> None:
    run = RunDir.create("a", fresh=False, root=root)
    run.save(10, 1, State(), np.zeros(3, np.float32))
    run.write_config({"x": 1})
    run.release()
    with pytest.raises(RunDirError, match=r"a exists: .*--fresh"):
        RunDir.create("a", fresh=False, root=root)
    again = RunDir.create("a", fresh=True, root=root)
    assert again.load_latest() is None
    assert not (again.path / "config.toml").exists()
    again.release()


def test_fresh_never_removes_what_is_not_a_run(root: Path) -> None:
    (root / "mine").mkdir(parents=True)
    (root / "mine" / "thesis.tex").write_text("x")
    (root / "mine" / "manifest.json").write_text('{"other": "tool"}')
    with pytest.raises(RunDirError, match="mine is not a run directory"):
        RunDir.create("mine", fresh=True, root=root)
    (root / "link").symlink_to(root / "mine")
    (root / "file").write_text("x")
    for name in ("link", "file"):
        with pytest.raises(RunDirError, match="in the way"):
            RunDir.create(name, fresh=True, root=root)
    assert (root / "mine" / "thesis.tex").exists()


def test_fresh_removes_a_link_and_not_what_it_points_to(root: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kept").write_text("x")
    run = RunDir.create("a", fresh=False, root=root)
    (run.path / "data").symlink_to(tmp_path / "data")
    run.release()
    RunDir.create("a", fresh=True, root=root).release()
    assert (tmp_path / "data" / "kept").exists()
    assert not (root / "a" / "data").is_symlink()


@pytest.mark.parametrize("left", [[], ["lock"], ["lock", f"{TEMPORARY}x"]])
def test_a_run_whose_maker_died_at_once_is_made_again(root: Path, left: list[str]) -> None:
    (root / "a").mkdir(parents=True)
    for name in left:
        (root / "a" / name).touch()
    run = RunDir.create("a", fresh=False, root=root)
    assert run.read_manifest()["troupe_run"] == "a"
    run.release()


def test_open_takes_a_name_or_a_path(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunDir.create("cartpole-ppo-1", fresh=False, root=root).release()
    assert RunDir.open("cartpole-ppo-1", root=root).name == "cartpole-ppo-1"
    assert RunDir.open(root / "cartpole-ppo-1").path == root / "cartpole-ppo-1"
    monkeypatch.chdir(root / "cartpole-ppo-1")
    assert RunDir.open(".").name == "cartpole-ppo-1"


def test_open_says_what_is_wrong_and_what_is_near(root: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="it has none yet"):
        RunDir.open("any", root=root)
    for name in ("cartpole-ppo-1", "lunarlander-impala-1"):
        RunDir.create(name, fresh=False, root=root).release()
    (root / "cartpole-ppo").mkdir()  # not a run: never suggested
    with pytest.raises(RunDirError, match=r"no run cartpol-ppo-1 in .*: did you mean cartpole-ppo-1\?"):
        RunDir.open("cartpol-ppo-1", root=root)
    with pytest.raises(RunDirError, match="it has cartpole-ppo-1, lunarlander-impala-1"):
        RunDir.open("zzz", root=root)
    with pytest.raises(RunDirError, match="is not a run directory"):
        RunDir.open(tmp_path)
    with pytest.raises(RunDirError, match="there is no run"):
        RunDir.open("", root=root)
    (root / "link").symlink_to(root / "cartpole-ppo-1")
    with pytest.raises(RunDirError, match="symbolic link"):
        RunDir.open("link", root=root)
    (root / "cartpole-ppo-1" / "manifest.json").write_text('{"troupe_run": "x", "schema": 2}')
    with pytest.raises(RunDirError, match="has schema 2, but this troupe reads up to 1"):
        RunDir.open("cartpole-ppo-1", root=root)


def test_one_learner_at_a_time_and_the_lock_dies_with_it(root: Path) -> None:
    RunDir.create("a", fresh=False, root=root).release()
    code = "import sys; from pathlib import Path; from troupe.rundir import RunDir\n"
    code += "run = RunDir.open('a', root=Path(sys.argv[1])); run.acquire(); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(root)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        run = RunDir.open("a", root=root)
        with pytest.raises(RunDirError, match=f"in use by process {holder.pid}:"):
            run.acquire()
        with pytest.raises(RunDirError, match="in use"):
            RunDir.create("a", fresh=True, root=root)
        assert (root / "a" / "manifest.json").exists()
        holder.send_signal(signal.SIGKILL)
    with run:
        run.acquire()  # held already: nothing to do
        with pytest.raises(RunDirError, match="in use"):
            RunDir.open("a", root=root).acquire()
    with RunDir.open("a", root=root):
        pass


def test_acquire_clears_what_a_killed_learner_left_and_open_does_not(root: Path, tmp_path: Path) -> None:
    run = RunDir.create("a", fresh=False, root=root)
    run.release()
    (run.path / "checkpoints" / f"{TEMPORARY}1").mkdir()
    (run.path / "checkpoints" / f"{TEMPORARY}1" / "arrays.safetensors").touch()
    (run.path / "best" / f"{TEMPORARY}2").symlink_to(tmp_path)
    (run.path / f"{TEMPORARY}3").touch()
    again = RunDir.open("a", root=root)
    assert len(list(run.path.rglob(f"{TEMPORARY}*"))) == 3
    again.acquire()
    assert list(run.path.rglob(f"{TEMPORARY}*")) == []
    assert tmp_path.exists()
    again.release()


def test_latest_and_best_are_kept_apart(root: Path) -> None:
    with RunDir.create("a", fresh=False, root=root) as run:
        assert run.load_best() is None
        run.save_best(10, 1, State(), np.ones(3, np.float32), info={"score": 475.0})
        run.save(20, 2, State(values={"x": 1}), np.zeros(3, np.float32))
        with run.journal() as written:
            written.write("start")
    latest, best = run.load_latest(), run.load_best()
    assert latest is not None
    assert (latest.steps, latest.state.values) == (20, {"x": 1})
    assert best is not None
    assert (best.steps, best.info) == (10, {"score": 475.0})
    assert run.metrics.stat().st_size > 0


def test_the_manifest_says_what_made_the_run_and_keeps_when_it_began(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create("a", fresh=False, root=root)
    manifest = json.loads((run.path / "manifest.json").read_text())
    (run.path / "manifest.json").write_text(json.dumps(manifest | {"started": "2026-01-01T00:00:00+00:00"}))
    run.write_manifest({"seed": 3})
    facts = run.read_manifest()
    assert (facts["schema"], facts["troupe_run"], facts["seed"]) == (1, "a", 3)
    assert facts["started"] == "2026-01-01T00:00:00+00:00"
    assert facts["packages"]["numpy"] == np.__version__
    assert set(facts["packages"]) == {"python", *rundir.PACKAGES}
    assert facts["machine"]["cores"] >= 1
    assert facts["machine"]["memory_bytes"] > 1 << 20
    assert set(facts["machine"]) == {"cores", "memory_bytes", "cpu", "platform"}
    run.release()


def test_the_git_state_is_commit_and_dirty_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert rundir.git_state(tmp_path) is None
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false", "-C", str(tmp_path)]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "m"], ["tag", "v1"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert rundir.git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "file").write_text("2")
    assert rundir.git_state(tmp_path) == {"commit": commit, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert rundir.git_state(tmp_path) is None


scalars = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
keys = st.text(st.characters(exclude_categories=["Cs"]))
lists = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=2))
tables = st.recursive(
    st.dictionaries(keys, lists, max_size=4),
    lambda inner: st.dictionaries(keys, lists | inner, max_size=4),
    max_leaves=8,
)


@given(tables)
def test_the_config_reads_back_as_it_was_written(table: dict[str, Json]) -> None:
    assert tomllib.loads(toml_text(table)) == table


def test_the_config_file_is_readable(root: Path) -> None:
    with RunDir.create("a", fresh=False, root=root) as run:
        config = {"net": {"hidden": (64, 64), "none": None}, "algo": "ppo", "lr": np.float32(0.5), "nan": float("nan")}
        run.write_config(config)
        text = (run.path / "config.toml").read_text()
        assert text == 'algo = "ppo"\nlr = 0.5\nnan = nan\n\n[net]\nhidden = [64, 64]\n'
        assert run.read_config()["net"] == {"hidden": [64, 64]}
        with pytest.raises(RunDirError, match="config value when is a PosixPath"):
            run.write_config({"when": Path("x")})
        assert (run.path / "config.toml").read_text() == text
        (run.path / "config.toml").write_text("x = ")
        with pytest.raises(RunDirError, match="is not valid TOML"):
            run.read_config()
        (run.path / "config.toml").unlink()
        with pytest.raises(RunDirError, match="cannot read"):
            run.read_config()


def test_no_two_lives_of_a_run_have_a_number_though_nothing_was_saved(root: Path) -> None:
    with RunDir.create("a", fresh=False, root=root) as run:
        assert run.begin_life() == 0
    with RunDir.open("a", root=root) as again:
        assert [again.begin_life(), again.begin_life()] == [1, 2]
    with RunDir.create("a", fresh=True, root=root) as fresh:
        assert fresh.begin_life() == 0
