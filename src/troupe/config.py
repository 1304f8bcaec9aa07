"""One frozen, typed config: it is the command line, the TOML file and the record in the run directory."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated as Option  # Option[type, Meta(...)]: the type checks, the description is the help text
from typing import Any, Literal

import msgspec
from msgspec import Meta, Struct

from troupe.errors import ConfigError
from troupe.types import Scalar


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a run is made from."""

    env: Option[str, Meta(description="a Gymnasium id, or your own environment as module:Class")]
    env_options: Option[dict[str, Scalar], Meta(description="keyword arguments of the environment, key=value,...")] = {}
    backend: Option[Literal["auto", "envpool", "gymnasium"], Meta(description="what simulates it while training")] = (
        "auto"
    )
    algo: Option[str, Meta(description="the algorithm")] = "ppo"
    scheme: Option[str, Meta(description="where the pipeline is cut")] = "actor-learner"
    via: Option[str, Meta(description="the transport: what carries messages over the cut")] = "shared"
    delivery: Option[
        Literal["lossless", "fresh"],
        Meta(description="rabbitmq: a full queue holds the workers back, or drops its oldest message and counts it"),
    ] = "lossless"
    queue: Option[int, Meta(ge=1, description="rabbitmq: messages of experience that may wait for the learner")] = 32
    share: Option[str, Meta(description="rabbitmq: learn from the queue of this run too, beside its learner")] = ""
    workers: Option[int, Meta(ge=0, description="processes that play; 0: only those that join from elsewhere")] = 1
    envs: Option[int, Meta(ge=1, description="environments in all, spread over the workers")] = 64
    env_threads: Option[int, Meta(ge=0, description="threads EnvPool steps with, per worker; 0: cores / workers")] = 0
    env_delay_ms: Option[
        float, Meta(ge=0, description="each step of a worker's environments waits so long: stands in for a slow one")
    ] = 0.0
    overlap: Option[bool, Meta(description="play the next rollout while the last one is learned from")] = True
    sync_every: Option[
        int, Meta(ge=0, description="hogwild, locked: batches between two copies of the shared weights; 0: workers / 2")
    ] = 0
    shards: Option[int, Meta(ge=1, description="parameter-server: servers, each owning a slice of the vector")] = 1
    accumulate: Option[int, Meta(ge=1, description="parameter-server: gradients that make one step")] = 1
    max_lag: Option[
        int,
        Meta(ge=0, description="versions a gradient (parameter-server) or rollout (actor-learner) may be old; 0: any"),
    ] = 0
    seed: Option[int, Meta(ge=0, description="the root of every random stream")] = 1
    name: Option[str, Meta(description="the run's name; the same name resumes")] = ""
    until: Option[
        str, Meta(description="goals and limits: solved, score=S, consecutive=N, steps=N, minutes=M, joined by commas")
    ] = "solved,minutes=30"
    solved_at: Option[float | None, Meta(description="the evaluation mean that counts as solved")] = None
    horizon: Option[int, Meta(ge=1, description="steps over which schedules run while the goal is a score")] = 1_000_000
    net: Option[str, Meta(description="hidden layers as 64x64, or your own torch module as module:Class")] = "64x64"
    activation: Option[Literal["tanh", "relu", "elu"], Meta(description="between the hidden layers")] = "tanh"
    dropout: Option[float, Meta(ge=0, lt=1, description="after each hidden layer")] = 0.0
    observation_scale: Option[
        tuple[float, ...], Meta(description="factor per observation entry, or one for all; fixed for the run")
    ] = ()
    optimiser: Option[Literal["adam", "rmsprop"], Meta(description="torch's fused optimiser")] = "adam"
    average: Option[
        float,
        Meta(ge=0, le=1, description="evaluate and keep the mean of the weights over this last share; 0: the newest"),
    ] = 0.0
    eval_episodes: Option[int, Meta(ge=2, description="reference episodes of one evaluation")] = 100
    eval_every_s: Option[float, Meta(gt=0, description="at the latest so long after the last evaluation")] = 20.0
    eval_from: Option[
        float | None, Meta(description="evaluate again and again once the training mean is here; by default the goal")
    ] = None
    eval_greedy: Option[bool, Meta(description="evaluate the most likely action; otherwise sampled ones")] = True
    checkpoint_every_s: Option[float, Meta(gt=0, description="the most that a crash can cost")] = 30.0
    step_timeout_s: Option[float, Meta(gt=0, description="a worker that gives no sign for so long is replaced")] = 60.0
    tensorboard: Option[bool, Meta(description="write event files as well")] = False
    hyper: dict[str, Scalar] = {}  # the algorithm's own options

    @property
    def lanes(self) -> int:
        """Environments of one worker, here or elsewhere."""
        return self.envs // max(1, self.workers)


HELD_FIXED = ("env", "env_options", "algo", "net", "activation", "dropout", "observation_scale", "optimiser")
"""What a checkpoint's weights depend on: a run that is resumed cannot change it."""


def nearest(name: str, among: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing."""
    near = difflib.get_close_matches(name, list(among), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def convert(kind: type[Any], values: Mapping[str, Any], where: str, *, strict: bool = True) -> Any:
    """`values` as a `kind`, or one sentence that says which of them is wrong and what is allowed."""
    names = {field.name for field in msgspec.structs.fields(kind)}
    for key in values:
        if key not in names:
            raise ConfigError(f"{key!r} is not an option of {where}{nearest(key, names)}")
    try:
        return msgspec.convert(dict(values), kind, strict=strict)
    except msgspec.ValidationError as e:
        text, _, path = str(e).partition(" - at `$.")
        key = path.rstrip("`").split("[")[0]
        given = f" {values[key]!r}" if key in values else ""
        raise ConfigError(f"{where}: {key or 'config'}{given} is wrong: {text[0].lower()}{text[1:]}") from e


def to_dict(config: Config) -> dict[str, Any]:
    """Plain values, as the TOML file has them; no password is among them."""
    values: dict[str, Any] = msgspec.to_builtins(config)
    values["via"] = without_password(config.via)
    return {key: value for key, value in values.items() if value is not None}


def without_password(address: str) -> str:
    """amqp://user:password@host/vhost as amqp://user@host/vhost; anything else as it is."""
    scheme, found, rest = address.partition("://")
    user, at, host = rest.rpartition("@")
    return f"{scheme}{found}{user.partition(':')[0]}{at}{host}"
