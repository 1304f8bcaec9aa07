"""What there is: algorithms, schemes, transports and presets, and which pairs are refused and why."""

from __future__ import annotations

import inspect
import math
from typing import Any

import msgspec

from troupe.algos import ALGORITHMS, algorithm_class
from troupe.config import Config
from troupe.errors import ConfigError
from troupe.resolve import check_pairs, presets, resolve
from troupe.schemes import SCHEMES
from troupe.transports import TRANSPORTS


def everything() -> dict[str, Any]:
    """All of it as plain values."""
    return {
        "algorithms": {name: _about(inspect.getmodule(algorithm_class(name))) for name in ALGORITHMS},
        "schemes": {name: _about(scheme) for name, scheme in SCHEMES.items()},
        "transports": dict(TRANSPORTS),
        "presets": presets(),
        "refused": _refused(),
    }


def text() -> str:
    """The same for a person."""
    known = everything()
    lines: list[str] = []
    for what in ("algorithms", "schemes", "transports"):
        lines += [f"{what}:", *(f"  {name:<17} {about}" for name, about in known[what].items()), ""]
    lines.append("presets (each value can be overridden on the command line):")
    for env, table in known["presets"].items():
        general = {key: value for key, value in table.items() if not isinstance(value, dict)}
        lines.append(f"  {env:<15} {_values(general)}")
        lines += [f"    {algo:<13} {_values(own)}" for algo, own in table.items() if isinstance(own, dict)]
    lines += ["  any other       safe values: --scheme actor-learner, one worker, 32 environments", ""]
    lines.append("refused, and why:")
    for why in dict.fromkeys(known["refused"].values()):
        pairs = [pair for pair, its in known["refused"].items() if its == why]
        lines += [f"  {why}", *(f"      {row}" for row in together(pairs))]
    return "\n".join(lines)


def together(pairs: list[str]) -> list[str]:
    """`ppo · local` and `a3c · local` as `ppo, a3c · local`; one by one where they are not every combination."""
    columns = [list(dict.fromkeys(column)) for column in zip(*(pair.split(" · ") for pair in pairs), strict=True)]
    if math.prod(map(len, columns)) != len(pairs):
        return pairs
    return [" · ".join(", ".join(column) for column in columns)]


def _about(thing: object) -> str:
    text = (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")
    return text.partition(": ")[2] or text


def _values(table: dict[str, Any]) -> str:
    return " ".join(f"{key.replace('_', '-')}={value}" for key, value in table.items())


def _refused() -> dict[str, str]:
    """Every combination is tried, so that this list cannot differ from what `train` says."""
    refused = {}
    for algo in ALGORITHMS:
        base = resolve({"env": "CartPole-v1", "algo": algo})
        for scheme in SCHEMES:
            for via in TRANSPORTS:
                for workers in (1, 2):
                    config = msgspec.structs.replace(base, scheme=scheme, via=via, workers=workers, envs=64)
                    why = _why_not(config)
                    if why:
                        refused[f"{algo} · {scheme} · {via} · {workers} worker{'s'[: workers > 1]}"] = why
    return refused


def _why_not(config: Config) -> str | None:
    try:
        check_pairs(config)
    except ConfigError as e:
        return str(e)
    return None
