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
from troupe.transports import TRANSPORTS


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
    values = {**preset(given["env"], given.get("algo")), **given}
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
    for what, name, known in (("scheme", config.scheme, SCHEMES), ("transport", config.via, TRANSPORTS)):
        if name not in known:
            raise ConfigError(f"there is no {what} {name!r}{nearest(name, known)} ('troupe list' names them all)")
    if config.envs % config.workers:
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


def flat(config: Config) -> dict[str, Any]:
    """The config as flat options, the way the user gives them."""
    values: dict[str, Any] = msgspec.to_builtins(config)
    return {**{key: value for key, value in values.items() if key != "hyper"}, **values["hyper"]}
