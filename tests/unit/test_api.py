"""The Python API: train, load, act, resume; the same shape as the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import troupe
from troupe import api
from troupe.config import Config, to_dict
from troupe.errors import ConfigError, EnvironmentFault, RunDirError, UserError
from troupe.journal import Journal
from troupe.resolve import resolve
from troupe.rundir import RunDir
from troupe.types import Array

HERE = __name__
TINY: dict[str, Any] = {
    "algo": "ppo", "scheme": "local", "via": "memory", "backend": "gymnasium", "envs": 8, "rollout_steps": 32,
    "minibatch": 64, "epochs": 1, "net": "8", "eval_episodes": 3, "eval_from": 1e9, "checkpoint_every_s": 1e9,
}  # fmt: skip


class Fuse(gymnasium.Env[Array, np.int64]):
    """Works for `steps` steps, counted over all of its kind, and then raises."""

    count: ClassVar[int] = 0

    def __init__(self, steps: int = 10, where: str = "step") -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.steps, self.where, self.t = steps, where, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        if self.where == "reset":
            raise ValueError("no level")
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        Fuse.count += 1
        if Fuse.count > self.steps:
            raise ValueError("burnt")
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t % 5 == 0, False, {}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[troupe.Outcome]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TROUPE_RUNS", str(tmp_path_factory.mktemp("api") / "runs"))
        yield troupe.train("CartPole-v1", name="mine", until="steps=2000", seed=3, **TINY)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TROUPE_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def small(**changes: Any) -> dict[str, Any]:
    return {**TINY, "until": "steps=512", **changes}


def test_a_run_ends_where_its_budget_does(trained: troupe.Outcome) -> None:
    assert (trained.met, trained.reason, trained.exit_code) == (True, "limit", 0)
    assert 2000 <= trained.steps < 2000 + 8 * 32
    assert trained.seconds > 0
    assert trained.evaluation is not None
    assert trained.evaluation.episodes == 3
    assert trained.evaluation.low <= trained.evaluation.mean <= trained.evaluation.high
    path = Path(trained.run)
    assert path.name == "mine"
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["seed"], manifest["env"], manifest["algo"]) == (3, "CartPole-v1", "ppo")
    assert manifest["parameters"] == (4 * 8 + 8) * 2 + (8 * 2 + 2) + (8 + 1)
    assert any("Linear(in_features=4, out_features=8" in line for line in manifest["network"])


@pytest.mark.parametrize("which", ["best", "latest"])
def test_an_agent_acts_on_one_observation_or_a_batch(trained: troupe.Outcome, which: str) -> None:
    agent = troupe.load(trained.run, which=which)
    observations = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    batch = agent.act(observations)
    assert batch.shape == (20,)
    one = [agent.act(o) for o in observations]
    assert all(agent.action_space.contains(action) for action in one)
    assert batch.tolist() == one  # greedy by default, and so the same each time
    assert agent.act(observations.tolist()).tolist() == one  # lists and doubles will do
    assert agent.act(observations[:1]).shape == (1,)
    drawn = {int(agent.act(observations[0], greedy=False)) for _ in range(200)}
    assert drawn == {0, 1}


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((2, 3)), np.zeros((2, 2, 4)), np.zeros(()), np.zeros((0,))])
def test_an_observation_of_another_shape_is_refused(trained: troupe.Outcome, wrong: Array) -> None:
    with pytest.raises(ConfigError, match=r"an observation of CartPole-v1 is \[4\], or a batch of them, not \["):
        troupe.load(trained.run).act(wrong)


def test_an_evaluation_repeats_by_its_seed(trained: troupe.Outcome) -> None:
    agent = troupe.load(trained.run)
    first, again, other = agent.evaluate(5, seed=1), agent.evaluate(5, seed=1), agent.evaluate(5, seed=2)
    np.testing.assert_array_equal(first.returns, again.returns)
    assert first.returns.tolist() != other.returns.tolist()
    assert (len(first.returns), first.complete) == (5, True)
    np.testing.assert_array_equal(first.returns, first.lengths)  # CartPole gives 1 a step


def test_the_latest_weights_stand_where_training_ended(trained: troupe.Outcome) -> None:
    latest = troupe.load(trained.run, which="latest").checkpoint
    assert latest.steps == trained.steps
    assert latest.version > 0
    with pytest.raises(ConfigError, match="which='newest': there are 'best' and 'latest'"):
        troupe.load(trained.run, which="newest")


def test_what_is_no_run_cannot_be_loaded(runs: Path) -> None:
    with pytest.raises(RunDirError, match="there is no run nothing"):
        troupe.load("nothing")
    config = resolve({"env": "CartPole-v1", **small()})
    with RunDir.create("empty", fresh=False) as run:
        run.write_config(to_dict(config))
    with pytest.raises(RunDirError, match="has no checkpoint yet"):
        troupe.load("empty")


def test_the_same_name_goes_on_and_fresh_starts_again(runs: Path) -> None:
    first = troupe.train("CartPole-v1", name="a", **small())
    second = troupe.train("CartPole-v1", name="a", until="steps=1024")
    assert second.run == first.run
    assert second.steps == 1024 > first.steps
    assert second.seconds > first.seconds
    starts = [record for record in Journal.read(runs / "a" / "metrics.jsonl") if record["kind"] == "start"]
    assert [(record["life"], record["steps"]) for record in starts] == [(0, 0), (1, first.steps)]
    config = resolve(api.flat_dict(RunDir.open("a")))
    assert (config.net, config.until, config.hyper["minibatch"]) == ("8", "steps=1024", 64)  # the rest is as it was
    third = troupe.train("CartPole-v1", name="a", fresh=True, **small())
    assert third.steps == first.steps
    starts = [record for record in Journal.read(runs / "a" / "metrics.jsonl") if record["kind"] == "start"]
    assert [record["life"] for record in starts] == [0]


@pytest.mark.parametrize(
    ("env", "changes", "key"),
    [
        ("CartPole-v1", {"net": "16"}, "net"),
        ("CartPole-v1", {"activation": "elu"}, "activation"),
        ("CartPole-v1", {"observation_scale": [2.0]}, "observation_scale"),
        ("CartPole-v1", {"optimiser": "rmsprop"}, "optimiser"),
        ("CartPole-v1", {"env_options": {"sutton_barto_reward": True}}, "env_options"),
        ("Acrobot-v1", {}, "env"),
        ("CartPole-v1", {"algo": "a3c"}, "algo"),
    ],
)
def test_a_run_cannot_go_on_as_another(trained: troupe.Outcome, env: str, changes: dict[str, Any], key: str) -> None:
    config = (Path(trained.run) / "config.toml").read_text()
    with pytest.raises(ConfigError, match=f"the run mine was made with {key} = .*: it cannot go on with"):
        troupe.train(env, name="mine", **changes)
    assert (Path(trained.run) / "config.toml").read_text() == config


def test_names_are_free_and_fit_a_folder(runs: Path) -> None:
    def name(env: str) -> str:
        return api.free_name(Config(env=env, algo="ppo"))

    assert name("CartPole-v1") == "cartpole-v1-ppo-1"
    for taken in ("cartpole-v1-ppo-1", "cartpole-v1-ppo-2"):
        (runs / taken).mkdir(parents=True)
    assert name("CartPole-v1") == "cartpole-v1-ppo-3"
    for env in ("my.package.envs:Room", "ALE/Pong-v5", "_private:Env", "möbel:Env", "m:" + "x" * 300):
        RunDir.create(name(env), fresh=False).release()
    assert name("my.package.envs:Room") == "my.package.envs-room-ppo-2"


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ("CartPol-v1", {}),
        ("CartPole-v1", {"workers": 2}),
        ("CartPole-v1", {"until": "never"}),
        ("CartPole-v1", {"net": "no.such:Net"}),
        ("CartPole-v1", {"minibatch": 10_000}),
        ("CartPole-v1", {"observation_scale": [1.0, 2.0]}),
        ("Blackjack-v1", {}),
        (f"{HERE}:Fuse", {"env_options": {"where": "reset"}}),
        (f"{HERE}:Fuse", {}),
    ],
)
def test_what_never_began_leaves_nothing_behind(runs: Path, env: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        troupe.train(env, name="a", **small(**changes))
    assert not runs.exists() or list(runs.iterdir()) == []


def test_fresh_with_what_is_wrong_leaves_the_run_as_it_was(runs: Path) -> None:
    before = troupe.train("CartPole-v1", name="a", **small())
    with pytest.raises(ConfigError):
        troupe.train("CartPole-v1", name="a", fresh=True, **small(net="no.such:Net"))
    assert troupe.load("a", which="latest").checkpoint.steps == before.steps


def test_a_run_that_had_begun_is_kept_when_its_environment_fails(runs: Path) -> None:
    Fuse.count = 0
    with pytest.raises(EnvironmentFault, match=f"{HERE}:Fuse raised in step: ValueError: burnt"):
        changes = {"checkpoint_every_s": 1e-6, "until": "steps=100000", "env_options": {"steps": 9000}}
        troupe.train(f"{HERE}:Fuse", name="a", **small(**changes))
    steps = troupe.load("a", which="latest").checkpoint.steps
    assert steps > 0
    Fuse.count = -100_000
    assert troupe.train(f"{HERE}:Fuse", name="a", until=f"steps={steps + 256}").steps >= steps + 256


def test_the_public_names_are_these() -> None:
    assert sorted(troupe.__all__) == ["Agent", "Outcome", "load", "train"]
    for name in troupe.__all__:
        assert getattr(troupe, name) is getattr(api, name)
    with pytest.raises(AttributeError, match="module 'troupe' has no attribute 'nothing'"):
        troupe.nothing  # noqa: B018
