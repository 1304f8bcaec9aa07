"""Environments: what really followed each step is what is bootstrapped from, under every kind of autoreset."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from troupe import envs as module
from troupe import returns
from troupe.algos.actor_critic import ActorCriticAgent, Values, samples
from troupe.envs import Environments, EnvSpec, as_observation, check_name, envpool_has, make, make_reference, to_action
from troupe.errors import ConfigError, EnvironmentFault, MissingExtra
from troupe.roles.evaluator import evaluation_seeds
from troupe.roles.play import Player
from troupe.types import Array, Decision, Rollout, State, Step

HERE = __name__
EPISODE = 1000.0  # observations of one episode lie this far from those of the next


class Counting(gymnasium.Env[Array, np.int64]):
    """Rewards 1, 2, 3..., ends at step `end`. Observations say environment, episode and step; the final one, + 0.5."""

    def __init__(self, end: int = 5, how: str = "terminated", first: float = 0.0) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.end, self.how, self.first = end, how, first
        self.episode, self.t = -1, 0
        self.log: list[tuple[float, float, bool, bool, float]] = []  # o, o', terminated, truncated, reward
        self.seeds: list[int | None] = []

    def see(self, final: bool = False) -> Array:
        code = self.first + EPISODE * self.episode + self.t + 0.5 * final
        return np.array([code, -code], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.t = self.episode + 1, 0
        return self.see(), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        before = self.see()
        self.t += 1
        ended = self.t == self.end
        terminated, truncated = ended and self.how != "truncated", ended and self.how != "terminated"
        after = self.see(final=ended)
        self.log.append((float(before[0]), float(after[0]), terminated, truncated, float(self.t)))
        return after, float(self.t), terminated, truncated, {}


class Faulty(gymnasium.Env[Array, np.int64]):
    """Goes wrong at its third step, or at its first or second reset."""

    def __init__(self, fault: str = "") -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.fault, self.steps, self.resets = fault, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self.resets += 1
        if self.fault == f"raise in reset {self.resets}":
            raise ValueError("two lines:\nthe level file is not there")
        value = np.nan if self.fault == f"nan in reset {self.resets}" else 0.0
        return np.array([0.0, 0.0, value], np.float32), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        now = self.steps == 3
        if now and self.fault == "raise in step":
            raise ZeroDivisionError("float division by zero")
        observation = np.array([0.0, np.inf if now and self.fault == "inf in step" else 0.0, 0.0], np.float32)
        reward = float("nan") if now and self.fault == "nan reward" else 1.0
        return observation, reward, self.steps % 5 == 0, False, {}


def made_by_function(end: int = 3) -> Counting:
    return Counting(end, "truncated")


def needs_a_library() -> gymnasium.Env[Any, Any]:
    raise gymnasium.error.DependencyNotInstalled("Box2D is not installed, run `pip install swig`")


def no_environment() -> int:
    return 3


def breaks() -> gymnasium.Env[Any, Any]:
    raise RuntimeError("no display")


class Known:
    """A network whose value is a known function of the observation; what it plays is of no matter."""

    def __init__(self, weights: tuple[float, ...] = (1.0, 0.0)) -> None:
        self.weights = torch.tensor(weights)

    def values(self, observations: torch.Tensor) -> torch.Tensor:
        return observations @ self.weights


class KnownAgent(ActorCriticAgent):
    """Acts by a function of the observations, so that episodes go where a test wants them."""

    def __init__(self, network: Known, choose: Any) -> None:
        super().__init__(network, SimpleNamespace(version=0), np.random.default_rng(0))  # type: ignore[arg-type]
        self.choose = choose

    def act(self, observations: Array, rng: np.random.Generator, *, greedy: bool = False) -> Decision:
        actions = self.choose(observations, rng)
        return Decision(actions, np.zeros(len(actions), np.float32))


def idle(observations: Array, rng: np.random.Generator) -> Array:
    return np.zeros(len(observations), np.int64)


def played(environments: Environments, agent: Any, rollouts: int, steps: int) -> list[tuple[Rollout, Values]]:
    player = Player(environments, np.random.default_rng(0))
    found = []
    for _ in range(rollouts):
        rollout = player.play(agent, steps)
        found.append((rollout, agent.values(rollout, 1.0)))
    return found


def vector(mode: AutoresetMode, how: str) -> tuple[Environments, list[Counting]]:
    """Four environments of different episode lengths, one of them shorter than a rollout's half, one longer than it."""
    singles = [Counting(end, how, first=100_000.0 * i) for i, end in enumerate((1, 3, 5, 19))]
    rng = np.random.default_rng(0) if mode is AutoresetMode.DISABLED else None
    sync = SyncVectorEnv([lambda env=env: env for env in singles], autoreset_mode=mode)  # type: ignore[misc]
    return Environments(sync, "counting", len(singles), mode, rng=rng), singles


MODES = list(AutoresetMode)


@pytest.mark.parametrize("how", ["terminated", "truncated", "both"])
@pytest.mark.parametrize("mode", MODES)
def test_the_value_of_what_really_followed_is_bootstrapped_from(mode: AutoresetMode, how: str) -> None:
    environments, singles = vector(mode, how)
    parts = played(environments, KnownAgent(Known(), idle), rollouts=4, steps=11)
    truth: list[list[tuple[float, ...]]] = [[] for _ in singles]
    for rollout, v in parts:
        bootstrapped = v.next_values * ~v.terminated
        one_step = returns.gae(v.rewards, v.values, v.next_values, v.terminated, v.ended, gamma=0.5, lam=0.0)
        for t, b in np.ndindex(rollout.valid.shape):
            if not rollout.valid[t, b]:
                assert mode is AutoresetMode.NEXT_STEP
                continue
            value, reward = float(v.values[t, b]), float(v.rewards[t, b])
            truth[b].append((value, float(bootstrapped[t, b]), reward))
            assert one_step[t, b] == np.float32(reward) + np.float32(0.5) * bootstrapped[t, b] - np.float32(value)
    for env, found in zip(singles, truth, strict=True):
        expected = [(o, 0.0 if terminated else after, r) for o, after, terminated, _, r in env.log]
        assert found == expected[: len(found)]
        assert len(env.log) == len(found) >= 22  # every step of the environment is there, once
        assert any(after % 1 == 0.5 for _, after, *_ in env.log)  # final observations were among them


@pytest.mark.parametrize("mode", MODES)
def test_n_step_returns_of_counted_rewards_are_exact(mode: AutoresetMode) -> None:
    environments, _ = vector(mode, "terminated")
    for rollout, v in played(environments, KnownAgent(Known(), idle), rollouts=3, steps=11):
        found = returns.n_step_returns(v.rewards, v.next_values, v.terminated, v.ended, gamma=1.0)
        for t, b in np.argwhere(rollout.valid & (np.cumsum(rollout.terminated[::-1], 0)[::-1] > 0)):
            end = (1, 3, 5, 19)[b]
            assert found[t, b] == sum(range(int(rollout.rewards[t, b]), end + 1))


def test_reset_steps_are_not_learned_from() -> None:
    environments, _ = vector(AutoresetMode.NEXT_STEP, "terminated")
    ((rollout, v),) = played(environments, KnownAgent(Known(), idle), rollouts=1, steps=40)
    ended = rollout.terminated | rollout.truncated
    np.testing.assert_array_equal(rollout.valid[1:], ~ended[:-1])
    kept = samples(rollout, v.values, v.values)
    assert len(kept) == rollout.steps < rollout.valid.size
    assert not bool((kept.observations[:, 0] % 1 == 0.5).any())  # nobody acts upon a final observation


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_where_an_episode_ended_a_new_one_is_seen_at_once(mode: AutoresetMode) -> None:
    environments, _ = vector(mode, "truncated")
    environments.reset()
    step = environments.step(np.zeros(4, np.int64))
    assert step.final_index.tolist() == [0]
    assert step.final_observations[:, 0].tolist() == [1.5]
    assert step.observations[:, 0].tolist() == [1000.0, 100_001.0, 200_001.0, 300_001.0]
    assert step.valid.all()
    assert not step.terminated.any()
    assert step.truncated.tolist() == [True, False, False, False]


# EnvPool --------------------------------------------------------------------------------------------------------------


def physics(env: Any, observation: Array, action: int) -> Array:
    """Where Gymnasium's own CartPole goes from here."""
    inner = env.unwrapped
    env.reset(seed=0)
    inner.state = tuple(float(x) for x in observation)
    return np.asarray(inner.step(action)[0])


def pool(batch: int) -> Environments:
    assert envpool_has(EnvSpec("CartPole-v1"))
    return make(EnvSpec("CartPole-v1"), batch, rng=np.random.default_rng(1))


def lean(observations: Array, rng: np.random.Generator) -> Array:
    """Keeps the pole up for 500 steps in most environments, and falls in the first."""
    choice = observations[:, 2] + 0.3 * observations[:, 3] + 0.05 * observations[:, 0] + 0.1 * observations[:, 1] > 0
    choice[0] = rng.random() < 0.5
    return choice.astype(np.int64)


def test_the_same_is_true_of_envpool() -> None:
    weights = (0.7, -0.3, 1.9, 0.4)
    parts = played(pool(4), KnownAgent(Known(weights), lean), rollouts=6, steps=100)
    ended_before: Array = np.zeros(4, bool)
    seen = {"terminated": 0, "truncated": 0, "reset": 0}
    reference = gymnasium.make("CartPole-v1")
    for rollout, v in parts:
        assert len(rollout.final_index) == 0
        for t in range(100):
            np.testing.assert_array_equal(rollout.valid[t], ~ended_before)
            ended_before = rollout.terminated[t] | rollout.truncated[t]
            for b in range(4):
                if not rollout.valid[t, b]:  # its action was ignored: a new episode begins after it
                    seen["reset"] += 1
                    assert np.abs(rollout.observations[t + 1, b]).max() <= 0.05
                    assert rollout.rewards[t, b] == 0
                    continue
                if not (t % 10 == 0 or ended_before[b]):
                    continue
                true = physics(reference, rollout.observations[t, b], int(rollout.actions[t, b]))
                assert v.next_values[t, b] == pytest.approx(float(true @ np.array(weights)), abs=1e-4)
                seen["terminated"] += int(rollout.terminated[t, b])
                seen["truncated"] += int(rollout.truncated[t, b] and not rollout.terminated[t, b])
    assert seen["terminated"] > 3
    assert seen["truncated"] > 0
    assert seen["reset"] > 3
    reference.close()


def test_envpool_says_that_it_cannot_rebuild_episodes() -> None:
    environments = pool(2)
    environments.reset()
    assert environments.state() is None
    environments.close()


def test_envpool_is_only_taken_for_what_it_simulates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not envpool_has(EnvSpec("CartPole-v1", backend="gymnasium"))
    assert not envpool_has(EnvSpec("CartPole-v1", {"sutton_barto_reward": True}))
    assert not envpool_has(EnvSpec(f"{HERE}:Counting"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not envpool_has(EnvSpec("CartPole-v1"))
    with pytest.raises(MissingExtra, match=r"EnvPool is not installed: install it with  pip install 'troupe\[fast\]'"):
        make(EnvSpec("CartPole-v1", backend="envpool"), 1, rng=np.random.default_rng(0))


def test_envpool_asked_for_where_it_cannot_be_had() -> None:
    spec = EnvSpec("CartPole-v1", {"sutton_barto_reward": True}, backend="envpool")
    with pytest.raises(ConfigError, match="EnvPool cannot simulate CartPole-v1 as asked: use --backend gymnasium"):
        make(spec, 1, rng=np.random.default_rng(0))


# Faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("raise in reset 1", "raised in reset: ValueError: the level file is not there"),
        ("raise in reset 2", "raised in reset: ValueError: the level file is not there"),
        ("raise in step", "raised in step: ZeroDivisionError: float division by zero"),
        ("nan in reset 1", "returned nan in an observation of reset (environment 0 of 2)"),
        ("nan in reset 2", "returned nan in an observation of reset (environment 0 of 2)"),
        ("inf in step", "returned inf in an observation of step (environment 0 of 2)"),
        ("nan reward", "returned nan in a reward of step (environment 0 of 2)"),
    ],
)
def test_an_environment_that_fails_is_named_with_the_place(fault: str, sentence: str) -> None:
    environments = make(EnvSpec(f"{HERE}:Faulty", {"fault": fault}), 2, rng=np.random.default_rng(0))
    with pytest.raises(EnvironmentFault) as caught:
        environments.reset()
        for _ in range(6):
            environments.step(np.zeros(2, np.int64))
    assert str(caught.value) == f"{HERE}:Faulty {sentence}"
    assert caught.value.exit_code == 2


def test_an_environment_that_fails_while_it_is_rebuilt_is_named() -> None:
    environments = make(EnvSpec(f"{HERE}:Faulty"), 1, rng=np.random.default_rng(0))
    environments.reset()
    for _ in range(4):
        environments.step(np.zeros(1, np.int64))
    state = environments.state()
    assert state is not None
    broken = make(EnvSpec(f"{HERE}:Faulty", {"fault": "raise in step"}), 1, rng=np.random.default_rng(0))
    with pytest.raises(EnvironmentFault, match="Faulty raised in step: ZeroDivisionError"):
        broken.restore(state)


@pytest.mark.parametrize(("wrong", "near"), [("CartPol-v1", "CartPole-v1"), ("LunarLander3", "LunarLander-v3")])
def test_an_unknown_environment_suggests_the_nearest(wrong: str, near: str) -> None:
    for call in (check_name, make_reference, lambda spec: make(spec, 1, rng=np.random.default_rng(0))):
        with pytest.raises(ConfigError, match=rf"there is no environment '{wrong}': did you mean {near}\?"):
            call(EnvSpec(wrong))
    with pytest.raises(ConfigError, match="give a Gymnasium id, or your own as module:Class"):
        check_name(EnvSpec("qqqqqq"))


def test_an_environment_of_the_users_own_by_class_or_function_with_its_options() -> None:
    env = make_reference(EnvSpec(f"{HERE}:Counting", {"end": 2, "how": "truncated"}))
    assert isinstance(env, Counting)
    assert (env.end, env.how) == (2, "truncated")
    by_function = make_reference(EnvSpec(f"{HERE}:made_by_function", {"end": 7}))
    assert isinstance(by_function, Counting)
    assert by_function.end == 7
    pole: Any = make_reference(EnvSpec("CartPole-v1", {"sutton_barto_reward": True}))
    assert pole.unwrapped._sutton_barto_reward is True
    environments = make(EnvSpec(f"{HERE}:Counting", {"end": 2}), 3, rng=np.random.default_rng(0))
    assert environments.reset().shape == (3, 2)
    assert len({id(env) for env in environments._vector.envs}) == 3


@pytest.mark.parametrize(
    ("name", "options", "kind", "sentence"),
    [
        (f"{HERE}:Absent", {}, ConfigError, f"environment {HERE}:Absent: module '{HERE}' has no 'Absent'"),
        ("no_such_module_here:X", {}, ConfigError, "there is no module 'no_such_module_here' to import here"),
        (f"{HERE}:no_environment", {}, ConfigError, f"{HERE}:no_environment made a int, not a gymnasium.Env"),
        (f"{HERE}:breaks", {}, EnvironmentFault, f"{HERE}:breaks could not be made: RuntimeError: no display"),
        (f"{HERE}:Counting", {"ends": 3}, EnvironmentFault, "unexpected keyword argument 'ends'"),
        ("CartPole-v1", {"gravity": 3}, EnvironmentFault, "CartPole-v1 could not be made: TypeError: .*gravity"),
        (f"{HERE}:needs_a_library", {}, MissingExtra, r"pip install 'troupe\[box2d\]'"),
    ],
)
def test_what_cannot_be_made_is_said_in_a_sentence(
    name: str, options: Any, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence) as caught:
        make_reference(EnvSpec(name, options))
    assert "\n" not in str(caught.value)


# Seeds, and episodes rebuilt ------------------------------------------------------------------------------------------


def test_training_seeds_and_evaluation_seeds_can_never_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = make(EnvSpec(f"{HERE}:Counting", {"end": 2}), 50, rng=np.random.default_rng(0))
    environments.reset()
    for _ in range(100):
        environments.step(np.zeros(50, np.int64))
    seeds = [seed for env in environments._vector.envs for seed in env.seeds]
    assert len(seeds) == 50 * 51
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) > 2500  # every episode has its own
    assert max(seeds) > 2**30
    evaluated = evaluation_seeds(np.random.default_rng(0), 1000)
    assert len(set(evaluated)) == 1000
    assert all(2**31 <= seed < 2**32 for seed in evaluated)

    asked: list[int] = []

    def make_gymnasium(name: str, num_envs: int, num_threads: int, seed: int) -> Any:
        asked.append(seed)
        return gymnasium.make_vec(name, num_envs)

    fake = SimpleNamespace(list_all_envs=lambda: ["CartPole-v1"], make_gymnasium=make_gymnasium)
    monkeypatch.setattr(module, "_envpool", lambda: fake)
    make(EnvSpec("CartPole-v1"), 8, rng=SimpleNamespace(integers=lambda high: high - 1))  # type: ignore[arg-type]
    assert asked[0] + 7 < 2**31  # environment i is given seed + i


def same(a: Step, b: Step) -> bool:
    return all(getattr(a, f.name).tobytes() == getattr(b, f.name).tobytes() for f in fields(Step))


OPEN = [("CartPole-v1", 4, 57, 80), ("LunarLander-v3", 3, 90, 70)]


@pytest.mark.parametrize(("name", "batch", "before", "after"), OPEN)
def test_open_episodes_are_rebuilt_exactly(name: str, batch: int, before: int, after: int) -> None:
    spec = EnvSpec(name, backend="gymnasium")
    environments = make(spec, batch, rng=np.random.default_rng(5))
    stream = np.random.default_rng(6)
    count = int(environments.action_space.n)  # type: ignore[attr-defined]
    now = environments.reset()
    for _ in range(before):
        now = environments.step(stream.integers(count, size=batch)).observations
    found = environments.state()
    assert found is not None
    state = State()
    state.put("open", found)
    actions = stream.integers(count, size=(after, batch))
    expected = [environments.step(a) for a in actions]
    assert sum(int((s.terminated | s.truncated).sum()) for s in expected) > 0  # new episodes begin as well

    again = make(spec, batch, rng=np.random.default_rng(99))
    np.testing.assert_array_equal(again.restore(state.get("open")), now)
    assert all(same(x, again.step(a)) for x, a in zip(expected, actions, strict=True))
    assert [s.tobytes() for s in state_arrays(environments)] == [s.tobytes() for s in state_arrays(again)]
    environments.close()
    again.close()


def state_arrays(environments: Environments) -> list[Array]:
    state = environments.state()
    assert state is not None
    return [state.arrays["actions"], np.array(state.values["seeds"])]


def test_a_state_holds_only_the_actions_of_open_episodes_however_long_the_run() -> None:
    spec = EnvSpec("CartPole-v1", backend="gymnasium")
    environments = make(spec, 2, rng=np.random.default_rng(5))
    stream = np.random.default_rng(6)
    environments.reset()
    for _ in range(4300):
        now = environments.step(stream.integers(2, size=2)).observations
    state = environments.state()
    assert state is not None
    assert len(state.arrays["actions"]) < 300
    again = make(spec, 2, rng=np.random.default_rng(0))
    np.testing.assert_array_equal(again.restore(state), now)


# Into and out of numpy ------------------------------------------------------------------------------------------------


def test_actions_are_brought_within_bounds_and_to_the_spaces_dtype() -> None:
    convert = to_action(spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 2.0]), dtype=np.float64))
    taken = convert(np.array([[-3.0, 3.0], [0.5, 0.5]], np.float32))
    assert taken.tolist() == [[-1.0, 2.0], [0.5, 0.5]]
    assert taken.dtype == np.float64
    assert to_action(spaces.Discrete(3))(np.array([2])).dtype == np.int64


def test_doubles_are_fed_as_floats_and_all_else_as_it_is() -> None:
    assert as_observation([1.0, 2.0], spaces.Box(0, 9, (2,), np.float64)).dtype == np.float32
    assert as_observation([1, 2], spaces.Box(0, 9, (2,), np.uint8)).dtype == np.uint8
    assert as_observation(2, spaces.Discrete(3)).dtype == np.int64
