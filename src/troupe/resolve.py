"""From what the user gave to a whole, checked config: presets, the algorithm's own options, and what goes with what."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from troupe.algos import ALGORITHMS, algorithm_class
from troupe.config import Config, convert, nearest
from troupe.errors import ConfigError
from troupe.schemes import SCHEMES
from troupe.transports import REMOTE, TRANSPORTS, transport


def hyper_class(algo: str) -> type[Any]:
    """The class of the algorithm's own options."""
    if algo not in ALGORITHMS:
        raise ConfigError(f"there is no algorithm {algo!r}{nearest(algo, ALGORITHMS)} ('troupe list' names them all)")
    cls: type[Any] = algorithm_class(algo).Config
    return cls


def presets() -> dict[str, dict[str, Any]]:
    """Every preset, by environment."""
    found = {}
    for file in sorted(resources.files("troupe.presets").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml") and file.name != "default.toml":
            found[file.name.removesuffix(".toml")] = tomllib.loads(file.read_text())
    return found


def preset(env: str, algo: str | None) -> dict[str, Any]:
    """The tuned values for `env`, its general ones overlaid with those of the algorithm."""
    table = presets().get(env)
    if table is None:
        table = tomllib.loads(resources.files("troupe.presets").joinpath("default.toml").read_text())
    general = {key: value for key, value in table.items() if not isinstance(value, dict)}
    algo = algo or general.get("algo", "ppo")
    return {**general, **table.get(algo, {}), "algo": algo, "env": env}


def resolve(given: Mapping[str, Any], *, strict: bool = True) -> Config:
    """The whole config from what the user gave, over the preset, over the defaults."""
    if "env" not in given:
        raise ConfigError("no environment was named: troupe train ENV, for example  troupe train CartPole-v1")
    for key in ("env", "algo"):
        if not isinstance(given.get(key, ""), str):
            raise ConfigError(f"{key} {given[key]!r} is wrong: give a name")
    tuned = preset(given["env"], given.get("algo"))
    if transport(str(given.get("via", ""))) in REMOTE and SCHEMES[tuned["scheme"]].plays_here:
        tuned["scheme"] = "actor-learner"  # a preset for one process; here others shall play
    values = {**tuned, **given}
    own = hyper_class(values["algo"])
    return split(values, own, strict=strict)


def split(values: Mapping[str, Any], own: type[Any], *, strict: bool) -> Config:
    """Sort flat options into the general ones and the algorithm's, check both, and write every default out."""
    general = {field.name for field in msgspec.structs.fields(Config)} - {"hyper"}
    mine = {field.name for field in msgspec.structs.fields(own)}
    for key in values:
        if key not in general | mine | {"hyper"}:
            raise ConfigError(
                f"{key!r} is not an option of troupe train with {values['algo']}{nearest(key, general | mine)} "
                "('troupe train --help' lists them)"
            )
    nested = values.get("hyper", {})
    if not isinstance(nested, Mapping):
        raise ConfigError(f"hyper {nested!r} is wrong: give each option of {values['algo']} by its own name")
    hyper = {**nested, **{key: value for key, value in values.items() if key in mine}}
    checked = convert(own, hyper, f"the options of {values['algo']}", strict=strict)
    rest = {key: value for key, value in values.items() if key in general}
    config: Config = convert(Config, {**rest, "hyper": msgspec.to_builtins(checked)}, "troupe train", strict=strict)
    return config


def load_toml(path: Path) -> dict[str, Any]:
    """A config file as flat options."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as e:
        raise ConfigError(f"cannot read the config file {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not a TOML file: {e}") from e
    own = values.pop("hyper", {})
    if not isinstance(own, dict):
        raise ConfigError(f"{path}: hyper is a table of the algorithm's options, not {own!r}")
    return {**values, **own}


def check_pairs(config: Config) -> None:
    """ConfigError where the combination makes no sense, saying why and what to use instead."""
    via = transport(config.via).partition("://")[0]  # of an address no more: it may hold a password
    for what, name, known in (("scheme", config.scheme, SCHEMES), ("transport", via, TRANSPORTS)):
        if name not in known:
            raise ConfigError(f"there is no {what} {name!r}{nearest(name, known)} ('troupe list' names them all)")
    _check_reach(config, via)
    if config.workers and config.envs % config.workers:
        even = max(config.envs // config.workers, 1) * config.workers
        raise ConfigError(
            f"--envs {config.envs} cannot be spread evenly over --workers {config.workers}: take --envs {even}"
        )
    if config.env_delay_ms >= config.step_timeout_s * 1000:
        raise ConfigError(
            f"--env-delay-ms {config.env_delay_ms:g} is not below --step-timeout-s {config.step_timeout_s:g}, so every "
            "step would count as a hang: allow more with --step-timeout-s"
        )
    refusal = SCHEMES[config.scheme]().refuses(config, algorithm_class(config.algo))
    if refusal:
        raise ConfigError(refusal)


def _check_reach(config: Config, via: str) -> None:
    """Who may be on another machine, and who may not."""
    scheme = SCHEMES[config.scheme]
    if via not in REMOTE:
        if not config.workers:
            raise ConfigError(
                "--workers 0: nobody would play; give 1 or more, or let other machines join over a broker "
                "(--via amqp://...)"
            )
        for name, default in (("delivery", "lossless"), ("queue", 32), ("share", "")):
            if getattr(config, name) != default:
                raise ConfigError(f"--{name} means nothing to --via {via}: leave it out, or use --via amqp://...")
    elif scheme.plays_here:
        raise ConfigError(
            f"scheme {config.scheme} is one process, so there is nothing for {via} to carry: use --scheme actor-learner"
        )
    elif scheme.shares_vector:
        raise ConfigError(
            f"scheme {config.scheme} needs memory that all its workers share, which {via} cannot carry to another "
            "machine: use --scheme actor-learner, or --via shared on one machine"
        )


def flat(config: Config) -> dict[str, Any]:
    """The config as flat options, the way the user gives them."""
    values: dict[str, Any] = msgspec.to_builtins(config)
    return {**{key: value for key, value in values.items() if key != "hyper"}, **values["hyper"]}
