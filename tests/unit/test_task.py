"""What a machine checks before it plays for others: whatever differs is named, and no code comes in a message."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from troupe import __version__, task
from troupe.build import build_algorithm, env_spec
from troupe.config import Config
from troupe.envs import make_reference
from troupe.errors import BadMessage, ConfigError, UserError
from troupe.goal import Goal
from troupe.resolve import resolve
from troupe.task import Task


def described(config: Config) -> Task:
    env = make_reference(env_spec(config))
    algorithm = build_algorithm(config, env.observation_space, env.action_space)
    spaces = str(env.observation_space), str(env.action_space)
    env.close()
    return task.describe(config, "run", Goal(475.0), 0, algorithm, spaces, {"hub": "learner"})


@pytest.fixture(scope="module")
def config() -> Config:
    return resolve({"env": "CartPole-v1", "via": "amqp://me:secret@host/", "name": "mine"})


@pytest.fixture(scope="module")
def offered(config: Config) -> Task:
    return described(config)


def test_a_task_crosses_a_message_and_is_accepted_where_everything_is_the_same(config: Config, offered: Task) -> None:
    text = msgspec.json.encode(offered).decode()
    assert "secret" not in text and "host" not in text
    accepted = task.accept(task.read(text), frozenset())
    assert accepted == msgspec.structs.replace(config, via="", name="")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": "0.0.0"}, f"is led by Troupe 0.0.0, this is {__version__}: install the same"),
        ({"observation": "Box(3,)"}, "has the observation space Box(3,), but CartPole-v1 on this machine gives Box("),
        ({"action": "Discrete(9)"}, "has the action space Discrete(9), but CartPole-v1 on this machine gives"),
        ({"fingerprint": "0"}, "has the network 0, but CartPole-v1 on this machine gives"),
    ],
)
def test_whatever_differs_is_named(offered: Task, change: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task.accept(msgspec.structs.replace(offered, **change), frozenset())
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_an_environment_that_is_not_here_is_named(offered: Task) -> None:
    other = msgspec.structs.replace(offered, config={**offered.config, "env": "CartPoll-v1"})
    with pytest.raises(ConfigError, match="did you mean CartPole-v1"):
        task.accept(other, frozenset())
    absent = msgspec.structs.replace(offered, config={**offered.config, "env": "CartPole-v1", "gama": 1})
    with pytest.raises(ConfigError, match="'gama' is not an option of run run"):
        task.accept(absent, frozenset())


@pytest.mark.parametrize("what", ["env", "net"])
def test_code_that_a_message_names_is_not_even_imported(
    offered: Task, what: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "canary"
    package = f"stranger_{what}"  # another one for each case: what was imported stays
    (tmp_path / f"{package}.py").write_text(f"open({str(canary)!r}, 'w').close()\nMaze = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    other = msgspec.structs.replace(offered, config={**offered.config, what: f"{package}:Maze"})
    for allowed in (frozenset[str](), frozenset({"strange"})):
        with pytest.raises(ConfigError, match=f"allow it with --allow {package}"):
            task.accept(other, allowed)
    assert not canary.exists()
    with pytest.raises(UserError):  # it is no environment and no network; but it may be looked at now
        task.accept(other, frozenset({package}))
    assert canary.exists()


@pytest.mark.parametrize("text", ["", "{}", "null", '{"run": 1}', "[" * 10_000, '{"run": "a", "more": 1}'])
def test_what_is_no_task_is_a_bad_message(text: str) -> None:
    with pytest.raises(BadMessage, match="a task that cannot be read"):
        task.read(text)
