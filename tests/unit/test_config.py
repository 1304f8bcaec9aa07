"""The config: what the user gave, over the preset, over the defaults; whatever is wrong is named in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.algos import ALGORITHMS
from troupe.config import HELD_FIXED, Config, convert, nearest, to_dict, without_password
from troupe.errors import ConfigError
from troupe.goal import Goal, parse_goal
from troupe.resolve import check_pairs, flat, hyper_class, load_toml, preset, presets, resolve
from troupe.rundir import RunDir
from troupe.schemes import SCHEMES
from troupe.transports import REMOTE, TRANSPORTS

ENVS = ["CartPole-v1", "LunarLander-v3", "MountainCar-v0", "my.module:Env"]


def refused(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve({"env": "CartPole-v1", **given}, strict=False)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


# What wins over what ------------------------------------------------------------------------------------------------


def test_what_was_given_wins_over_the_preset_and_that_over_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"E": {"envs": 8, "net": "8", "workers": 2, "ppo": {"envs": 16, "gamma": 0.5}, "a3c": {"gamma": 0.25}}}
    monkeypatch.setattr("troupe.resolve.presets", lambda: tables)
    config = resolve({"env": "E", "net": "4x4"})
    assert (config.net, config.envs, config.workers) == ("4x4", 16, 2)  # given; algorithm's table; general table
    assert (config.hyper["gamma"], config.hyper["clip"]) == (0.5, 0.2)  # preset; default
    assert config.seed == 1
    other = resolve({"env": "E", "algo": "a3c", "gamma": 0.75})
    assert (other.envs, other.hyper["gamma"]) == (8, 0.75)
    assert set(other.hyper) == {f.name for f in msgspec.structs.fields(hyper_class("a3c"))}


@pytest.mark.parametrize("env", [*presets(), "MountainCar-v0"])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_preset_resolves_with_every_algorithm_and_makes_sense(env: str, algo: str) -> None:
    config = resolve({"env": env, "algo": algo})
    assert (config.env, config.algo) == (env, algo)
    check_pairs(config)
    parse_goal(config.until, config.solved_at)


def test_every_key_of_a_preset_is_an_option_and_every_table_an_algorithm() -> None:
    general = {field.name for field in msgspec.structs.fields(Config)} - {"env", "hyper", "name"}
    for env, table in presets().items():
        for key, value in table.items():
            if isinstance(value, dict):
                assert set(value) <= general | {f.name for f in msgspec.structs.fields(hyper_class(key))}, (env, key)
            else:
                assert key in general, (env, key)


def test_an_environment_without_a_preset_gets_the_default_one() -> None:
    assert preset("Nothing-v0", None) == {**preset("Other-v0", None), "env": "Nothing-v0"}


# What is wrong, in one sentence -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"worker": "2"}, "'worker' is not an option of troupe train with ppo; did you mean workers?"),
        ({"gama": "0.9"}, "'gama' is not an option of troupe train with ppo; did you mean gamma?"),
        ({"algo": "a3c", "clip": "0.2"}, "'clip' is not an option of troupe train with a3c"),
        ({"qqqqq": "1"}, "'qqqqq' is not an option of troupe train with ppo ("),
        ({"algo": "imapla"}, "there is no algorithm 'imapla'; did you mean impala?"),
        ({"workers": "-1"}, "workers '-1' is wrong: expected `int` >= 0"),
        ({"workers": "two"}, "workers 'two' is wrong: expected `int`"),
        ({"workers": "1.5"}, "workers '1.5' is wrong"),
        ({"envs": "0"}, "envs '0' is wrong"),
        ({"seed": "-1"}, "seed '-1' is wrong"),
        ({"dropout": "1"}, "dropout '1' is wrong: expected `float` < 1.0"),
        ({"activation": "sigmoid"}, "activation 'sigmoid' is wrong: invalid enum value"),
        ({"eval_every_s": "0"}, "eval_every_s '0' is wrong"),
        ({"eval_episodes": "1"}, "eval_episodes '1' is wrong: expected `int` >= 2"),
        ({"gamma": "1.5"}, "the options of ppo: gamma '1.5' is wrong: expected `float` <= 1.0"),
        ({"learning_rate": "nan"}, "the options of ppo: learning_rate 'nan' is wrong"),
        ({"minibatch": "0"}, "the options of ppo: minibatch '0' is wrong"),
        ({"overlap": "perhaps"}, "overlap 'perhaps' is wrong"),
        ({"observation_scale": ["1", "x"]}, "observation_scale ['1', 'x'] is wrong"),
        ({"hyper": "x"}, "hyper 'x' is wrong"),
        ({"hyper": {"gama": 1}}, "'gama' is not an option of the options of ppo; did you mean gamma?"),
        ({"env": 3}, "env 3 is wrong: give a name"),
        ({"algo": ["ppo"]}, "algo ['ppo'] is wrong: give a name"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given: dict[str, Any], sentence: str) -> None:
    assert sentence in refused(**given)


def test_no_environment_says_how_to_name_one() -> None:
    with pytest.raises(ConfigError, match="no environment was named: troupe train ENV"):
        resolve({"algo": "ppo"})


def test_texts_are_converted_only_where_they_come_from_a_command_line() -> None:
    given = {"env": "CartPole-v1", "workers": "2", "overlap": "false", "gamma": "0.5"}
    config = resolve(given, strict=False)
    assert (config.workers, config.overlap, config.hyper["gamma"]) == (2, False, 0.5)
    with pytest.raises(ConfigError):
        resolve(given)


def test_a_config_that_was_stored_by_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="'workerz' is not an option of the config; did you mean workers"):
        convert(Config, {"env": "E", "workerz": 1}, "the config")
    with pytest.raises(ConfigError, match="the config: config is wrong: object missing required field `env`"):
        convert(Config, {}, "the config")


def test_a_name_far_from_all_is_not_guessed_at() -> None:
    assert nearest("cartpole", ["CartPole-v1", "ppo"]) == "; did you mean CartPole-v1?"
    assert nearest("xyz", ["CartPole-v1", "ppo"]) == ""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("workers = ", "is not a TOML file"),
        ("hyper = 3\n", "hyper is a table of the algorithm's options, not 3"),
        (None, "cannot read the config file"),
    ],
)
def test_a_config_file_that_cannot_be_used(tmp_path: Path, text: str | None, sentence: str) -> None:
    file = tmp_path / "mine.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_toml(file)
    assert str(file) in str(caught.value)


def test_a_config_file_is_flat_or_has_the_algorithms_own_table(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('env = "E"\ngamma = 0.5\n')
    assert load_toml(file) == {"env": "E", "gamma": 0.5}
    file.write_text('env = "E"\n[hyper]\ngamma = 0.5\n')
    assert load_toml(file) == {"env": "E", "gamma": 0.5}
    file.write_bytes(b'env = "\xff"')
    with pytest.raises(ConfigError, match="is not a TOML file"):
        load_toml(file)


# Stored and read again ----------------------------------------------------------------------------------------------

numbers = st.floats(1e-6, 1.0)
scalars = st.booleans() | st.integers(-9, 9) | numbers | st.text("ab\"'\\ =")
options = st.fixed_dictionaries(
    {"env": st.sampled_from(ENVS), "algo": st.sampled_from(list(ALGORITHMS))},
    optional={
        "env_options": st.dictionaries(st.text("abc_", min_size=1), scalars),
        "workers": st.integers(1, 64),
        "seed": st.integers(0, 2**62),
        "dropout": st.floats(0, 0.99),
        "solved_at": st.floats(-1e6, 1e6),
        "eval_from": st.floats(-1e6, 1e6),
        "observation_scale": st.lists(st.floats(-10, 10), max_size=4),
        "tensorboard": st.booleans(),
        "name": st.text(max_size=5),
        "max_gradient_norm": numbers,
        "learning_rate": numbers,
        "rollout_steps": st.integers(1, 999),
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return RunDir.create("a", fresh=False, root=tmp_path_factory.mktemp("runs"))


@given(given=options)
def test_a_stored_config_reads_back_equal_and_resolves_to_itself(run: RunDir, given: dict[str, Any]) -> None:
    config = resolve(given)
    run.write_config(to_dict(config))
    stored = run.read_config()
    assert convert(Config, stored, "the config") == config
    assert resolve(load_toml(run.path / "config.toml")) == config
    assert resolve(flat(config)) == config


def test_a_config_cannot_be_changed() -> None:
    config = resolve({"env": "CartPole-v1"})
    with pytest.raises(AttributeError):
        config.workers = 3  # type: ignore[misc]
    assert set(HELD_FIXED) <= {field.name for field in msgspec.structs.fields(Config)}


# What goes with what ------------------------------------------------------------------------------------------------


def test_pairs_that_make_no_sense_are_refused_with_what_to_use_instead() -> None:
    base = resolve({"env": "CartPole-v1"})

    def why(**changes: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            check_pairs(msgspec.structs.replace(base, **changes))
        return str(caught.value)

    assert "--workers 2 makes no sense: use --scheme actor-learner" in why(scheme="local", workers=2, envs=8)
    assert "take --envs 8" in why(scheme="actor-learner", workers=4, envs=10)
    assert "take --envs 4" in why(scheme="actor-learner", workers=4, envs=1)
    assert "there is no scheme 'actor-lerner'; did you mean actor-learner?" in why(scheme="actor-lerner")
    assert "there is no transport 'sharde'; did you mean shared?" in why(via="sharde")
    assert "--workers 0: nobody would play" in why(workers=0)
    assert "--delivery means nothing to --via shared" in why(delivery="fresh")
    assert "--queue means nothing to --via memory" in why(via="memory", queue=5)
    assert "--share means nothing to --via shared" in why(share="other")
    check_pairs(msgspec.structs.replace(base, scheme="actor-learner", via="amqp://me@host/", workers=0, queue=5))


def test_an_address_keeps_its_password_out_of_sentences_and_records() -> None:
    base = resolve({"env": "CartPole-v1", "via": "amqpp://me:secret@host/"})
    with pytest.raises(ConfigError, match="there is no transport 'amqpp'") as caught:
        check_pairs(base)
    assert "secret" not in str(caught.value)
    for address in ("amqp://me:secret@host:1/v", "amqps://me:sec@ret@host/?cafile=a"):
        stored = to_dict(msgspec.structs.replace(base, via=address))["via"]
        assert "sec" not in stored and stored.startswith(address.partition("://")[0] + "://me@host")
    assert [without_password(plain) for plain in ("shared", "amqp://host/", "amqp://me@host/")] == [
        "shared", "amqp://host/", "amqp://me@host/",
    ]  # fmt: skip


MOVING = ("hogwild", "locked", "parameter-server")  # schemes whose weights others change while one learns


def test_every_pair_is_taken_with_one_worker_but_ppo_where_weights_move_and_elite_where_workers_learn() -> None:
    for algo in ALGORITHMS:
        base = resolve({"env": "CartPole-v1", "algo": algo})
        for scheme in SCHEMES:
            for via in TRANSPORTS:
                config = msgspec.structs.replace(base, scheme=scheme, via=via, workers=1)
                if via in REMOTE and scheme != "actor-learner":
                    with pytest.raises(ConfigError, match="use --scheme actor-learner"):
                        check_pairs(config)
                elif algo == "ppo" and scheme in MOVING:
                    with pytest.raises(ConfigError, match="use --scheme all-reduce or actor-learner, or --algo a3c"):
                        check_pairs(config)
                elif algo == "elite" and SCHEMES[scheme]().shares_vector:
                    with pytest.raises(ConfigError, match="what everybody played: use --scheme actor-learner"):
                        check_pairs(config)
                else:
                    check_pairs(config)


@pytest.mark.parametrize("option", [{"sync_every": 2}, {"shards": 2}, {"max_lag": 5}, {"accumulate": 3}])
def test_an_option_of_another_scheme_is_refused_and_never_ignored(option: dict[str, int]) -> None:
    [(name, _)] = option.items()
    own = {"sync_every": {"hogwild", "locked"}, "max_lag": {"parameter-server", "actor-learner"}}
    schemes = own.get(name, {"parameter-server"})
    base = resolve({"env": "CartPole-v1", "algo": "a3c", "workers": 1, **option})
    for scheme in SCHEMES:
        config = msgspec.structs.replace(base, scheme=scheme)
        if scheme in schemes:
            check_pairs(config)
        else:
            with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} means nothing to scheme {scheme}"):
                check_pairs(config)


# Goals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("solved", Goal(475.0, None, None)),
        ("steps=1_000", Goal(None, 1000, None)),
        ("minutes=0.5", Goal(None, None, 30.0)),
        ("score=-3.5", Goal(-3.5, None, None)),
        ("solved, steps=10, minutes=2", Goal(475.0, 10, 120.0)),
        ("steps=1e6", Goal(None, 1_000_000, None)),
        ("consecutive=100", Goal(475.0, None, None, 100)),
        ("solved,consecutive=10,minutes=1", Goal(475.0, None, 60.0, 10)),
        ("consecutive=10,score=200", Goal(200.0, None, None, 10)),
    ],
)
def test_goals_are_read(text: str, goal: Goal) -> None:
    assert parse_goal(text, 475.0) == goal


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("solvd", "--until solvd: that is no goal; did you mean solved?"),
        ("", "that is no goal"),
        ("steps", "'' is not a number; write for example steps=10"),
        ("steps=many", "'many' is not a number"),
        ("steps=inf", "'inf' is not a number"),
        ("steps=nan", "'nan' is not a number"),
        ("minutes=inf", "'inf' is not a number"),
        ("score=nan", "'nan' is not a number"),
        ("steps=0", "the limit must be above 0"),
        ("steps=0.5", "the limit must be above 0"),
        ("minutes=-1", "the limit must be above 0"),
        ("consecutive=0.5", "the limit must be above 0"),
        ("consecutive", "'' is not a number; write for example consecutive=10"),
        ("solved,steps=", "'' is not a number"),
    ],
)
def test_goals_that_are_none_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=r"^--until") as caught:
        parse_goal(text, 475.0)
    assert sentence in str(caught.value)


def test_solved_needs_to_know_what_solved_is() -> None:
    with pytest.raises(ConfigError, match="names no score that counts as solved; give --solved-at S"):
        parse_goal("solved", None)
    with pytest.raises(ConfigError, match=r"--until consecutive=10: .*; give --solved-at S"):
        parse_goal("consecutive=10", None)
    assert parse_goal("score=3,consecutive=10", None) == Goal(3.0, None, None, 10)


def test_what_meets_a_goal() -> None:
    mean, row = Goal(10.0), Goal(10.0, consecutive=3)
    good, mixed = np.array([10.0, 12.0, 10.0]), np.array([30.0, 9.9, 30.0])
    assert mean.met(good, complete=True) and mean.met(mixed, complete=True)
    assert not mean.met(good, complete=False), "abandoned: it is not the mean of all"
    assert row.met(good, complete=True) and not row.met(mixed, complete=True)
    assert not row.met(good[:2], complete=False)
    assert not Goal(None, 5).met(good, complete=True)
    assert mean.merit(mixed, complete=True) == pytest.approx(23.3) and mean.merit(mixed, complete=False) == -np.inf
    assert row.merit(mixed, complete=False) == 1 and row.merit(good, complete=True) == 3


def test_limits_and_progress() -> None:
    goal = Goal(None, 1000, 60.0)
    assert not goal.spent(999, 59.9)
    assert goal.spent(1000, 0.0)
    assert goal.spent(0, 60.0)
    assert goal.progress(250, 6.0, horizon=9) == 0.25  # the limit that is nearer
    assert goal.progress(250, 30.0, horizon=9) == 0.5
    assert goal.progress(5000, 0.0, horizon=9) == 1.0
    scored = Goal(475.0, 1000, 60.0)
    assert scored.progress(250, 59.0, horizon=500) == 0.5  # with a score as the goal, schedules run over the horizon
    assert not Goal(475.0, None, None).spent(10**12, 1e12)
    assert Goal(475.0).progress(10**12, 0.0, horizon=500) == 1.0


def test_a_goal_in_words() -> None:
    assert str(Goal(475.0, 20_000, 300.0)) == "mean >= 475 or 20,000 steps or 5 minutes"
    assert str(Goal(None, 5, None)) == "5 steps"
    assert str(Goal(200.0, None, 60.0, 100)) == "100 episodes in a row >= 200 or 1 minutes"


@pytest.mark.parametrize("via", ["rabbitmq", "amqp://there"])
def test_where_others_shall_play_a_preset_for_one_process_gives_way(via: str) -> None:
    assert resolve({"env": "CartPole-v1"}).scheme == "local"
    assert resolve({"env": "CartPole-v1", "via": via}).scheme == "actor-learner"
    assert resolve({"env": "CartPole-v1", "via": via, "scheme": "local"}).scheme == "local"  # to be refused by name
