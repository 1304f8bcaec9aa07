"""A run that was stopped, or killed, and goes on: to the last bit where it had been left to run (T36, quick form)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from troupe import api
from troupe.algos import ALGORITHMS
from troupe.checkpoints import Checkpoint, Checkpoints
from troupe.errors import ConfigError, RunDirError
from troupe.journal import Journal
from troupe.resolve import hyper_class
from troupe.types import Json

SMALL = {  # where the algorithm has the option
    "rollout_steps": 32, "minibatch": 128, "epochs": 2, "passes": 2,
    "batch": 32, "learning_starts": 300, "train_every": 16.0, "target_every": 50, "replay_size": 2000,
}  # fmt: skip
WHOLE = 6000  # environment steps: many episodes and a step size that falls
CLOCKS = {"seconds", "life"}  # fields of the books that a resumed run has its own of
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TROUPE_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def options(algo: str, steps: int, **more: Any) -> dict[str, Any]:
    """Of a run in one process; its step size falls with its steps, wherever it is stopped."""
    own = {field.name for field in msgspec.structs.fields(hyper_class(algo))}
    small = {key: value for key, value in SMALL.items() if key in own}
    common = {
        "algo": algo, "scheme": "local", "via": "memory", "backend": "gymnasium", "envs": 8, "horizon": WHOLE,
        "eval_episodes": 2, "until": f"score=1e9,steps={steps}",
    }  # fmt: skip
    return {**small, **common, **more}


def train(name: str, env: str, algo: str, steps: int, **more: Any) -> Checkpoint:
    api.train(env, name=name, fresh=True, **options(algo, steps, **more))
    return latest(name)


def go_on(name: str, steps: int) -> Checkpoint:
    api.resume(name, until=f"score=1e9,steps={steps}")
    return latest(name)


def latest(name: str) -> Checkpoint:
    return api.load(name, which="latest").checkpoint


def events(runs: Path, name: str) -> str:
    return "\n".join(line["text"] for line in Journal.read(runs / name / "metrics.jsonl") if line["kind"] == "event")


def without_clocks(values: Json) -> Json:
    return {**values, "books": {k: v for k, v in values["books"].items() if k not in CLOCKS}}


def assert_same(got: Checkpoint, expected: Checkpoint) -> None:
    """Weights, moments, random streams, counters, the window, and where every open episode stands."""
    assert (got.steps, got.version) == (expected.steps, expected.version)
    assert np.array_equal(got.weights, expected.weights)
    assert set(got.state.arrays) == set(expected.state.arrays)
    for name, array in expected.state.arrays.items():
        assert got.state.arrays[name].dtype == array.dtype, name
        assert np.array_equal(got.state.arrays[name], array), name
    assert without_clocks(got.state.values) == without_clocks(expected.state.values)
    assert dict(got.info) == dict(expected.info)


CASES = [("CartPole-v1", algo) for algo in sorted(ALGORITHMS)]
CASES += [("LunarLander-v3", algo) for algo in ("ppo", "impala")]


@pytest.mark.parametrize(("env", "algo"), CASES)
def test_stopped_half_way_and_resumed_is_never_stopped(env: str, algo: str) -> None:
    whole = train("whole", env, algo, WHOLE)
    half = train("half", env, algo, WHOLE // 2)
    assert WHOLE // 2 <= half.steps < whole.steps and whole.version > half.version > 5
    open_episodes = half.state.arrays["player/open/actions"]
    assert len(open_episodes) > 0, "episodes were open when it stopped, so there was something to rebuild"
    assert_same(go_on("half", WHOLE), whole)


def test_stopped_twice_and_again_is_never_stopped() -> None:
    whole = train("whole", "CartPole-v1", "ppo", WHOLE)
    train("pieces", "CartPole-v1", "ppo", 1000)
    for steps in (1001, 2500, 2500, 4000):  # a limit that is behind already costs one rollout, and no more
        go_on("pieces", steps)
    assert latest("pieces").state.get("books").values["life"] == 4
    assert_same(go_on("pieces", WHOLE), whole)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_and_resumed_is_never_killed(number: signal.Signals, runs: Path, tmp_path: Path) -> None:
    """In a process of its own; SIGKILL after a checkpoint, SIGTERM whenever it comes."""
    steps = 40_000
    arguments = {**options("ppo", steps), "checkpoint_every_s": 0.2}
    words = [f"--{key.replace('_', '-')}={value}" for key, value in arguments.items()]
    command = [sys.executable, "-m", "troupe", "train", "CartPole-v1", "--name", "killed", "--quiet", *words]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        folder, deadline = Checkpoints(runs / "killed" / "checkpoints"), time.monotonic() + PATIENCE_S
        while len(folder.names()) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        code = process.wait(PATIENCE_S)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 143), (tmp_path / "log").read_text()
    assert latest("killed").steps < steps, "it was killed before its end"
    resumed = go_on("killed", steps)
    assert resumed.state.get("books").values["life"] == 1
    assert_same(resumed, train("whole", "CartPole-v1", "ppo", steps))


def test_where_episodes_cannot_be_rebuilt_they_begin_anew_and_all_else_is_exact(runs: Path) -> None:
    half = train("half", "CartPole-v1", "ppo", WHOLE // 2, backend="envpool")
    assert "player/open/actions" not in half.state.arrays
    shutil.copytree(runs / "half", runs / "twin", copy_function=shutil.copy)
    once, twice = go_on("half", WHOLE), go_on("twin", WHOLE)
    assert_same(once, twice)
    assert once.steps >= WHOLE and once.state.get("books").values["contributed"] == {"worker-0": once.steps}
    assert "they begin anew, all else is exact" in events(runs, "half")
    assert f"resumed at {half.steps:,} steps, version {half.version}" in events(runs, "half")


def test_a_resumed_run_is_told_apart_from_one_that_lost_its_moments(runs: Path) -> None:
    """The tests above would see it: a half whose moments are gone ends elsewhere."""
    whole = train("whole", "CartPole-v1", "ppo", WHOLE)
    half = train("half", "CartPole-v1", "ppo", WHOLE // 2)
    half.state.arrays["parameters/moment.exp_avg"][:] = 0
    shutil.rmtree(runs / "half" / "checkpoints")
    Checkpoints(runs / "half" / "checkpoints").save(half.steps, half.version, half.state, half.weights, half.info)
    assert not np.array_equal(go_on("half", WHOLE).weights, whole.weights)


@pytest.mark.parametrize(
    ("change", "value"), [("net", "32x32"), ("env", "Acrobot-v1"), ("algo", "a3c"), ("optimiser", "rmsprop")]
)
def test_what_the_weights_depend_on_cannot_change(change: str, value: Any) -> None:
    before = train("run", "CartPole-v1", "ppo", 500)
    with pytest.raises(ConfigError, match=rf"\b{change}\b.*{value}"):
        api.resume("run", **{change: value})
    assert latest("run").path == before.path, "and nothing was changed"


def test_training_another_environment_under_the_name_of_a_run_is_refused() -> None:
    before = train("run", "CartPole-v1", "ppo", 500)
    with pytest.raises(ConfigError, match=r"CartPole-v1.*Acrobot-v1"):
        api.train("Acrobot-v1", name="run")
    assert latest("run").path == before.path


def test_what_may_change_changes() -> None:
    train("run", "CartPole-v1", "ppo", 500)
    api.resume("run", until="score=1e9,steps=800", learning_rate=1e-5)
    agent = api.load("run", which="latest")
    assert agent.config.hyper["learning_rate"] == 1e-5
    assert agent.checkpoint.steps >= 800


def test_a_damaged_newest_checkpoint_is_skipped_by_name_and_the_older_one_used(runs: Path) -> None:
    older = train("run", "CartPole-v1", "ppo", WHOLE // 2)
    newest = go_on("run", WHOLE)
    arrays = newest.path / "arrays.safetensors"
    data = bytearray(arrays.read_bytes())
    data[len(data) // 2] ^= 1  # one bit
    arrays.write_bytes(data)
    assert latest("run").path == older.path
    again = go_on("run", WHOLE)
    said = events(runs, "run")
    assert f"checkpoint {newest.path.name} was skipped" in said and "SHA-256" in said
    assert [line for line in said.splitlines() if "resumed" in line][-1].startswith(f"resumed at {older.steps:,} steps")
    assert_same(again, train("whole", "CartPole-v1", "ppo", WHOLE))


def test_a_run_with_nothing_but_damaged_checkpoints_is_not_started_anew_unasked(runs: Path) -> None:
    only = train("run", "CartPole-v1", "ppo", 500)
    (only.path / "values.json").write_text("{")
    with pytest.raises(RunDirError, match=r"no checkpoint in .* is usable"):
        api.resume("run")
    assert list((runs / "run" / "checkpoints").iterdir()) == [only.path]
