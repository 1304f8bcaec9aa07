"""What each `troupe` command does."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from troupe import api
from troupe.config import Config
from troupe.errors import ConfigError
from troupe.launch import Outcome
from troupe.region import available_bytes
from troupe.resolve import load_toml, resolve
from troupe.rundir import RunDir
from troupe.supervisor import Supervisor

SENSIBLE_WORKERS_PER_CORE: Final = 4
WORKER_BYTES: Final = 100 << 20  # of its own, beside what it shares with the others


def train(env: str | None, options: dict[str, Any], supervisor: Supervisor | None = None) -> int:
    """troupe train ENV [--options]."""
    fresh, quiet = bool(options.pop("fresh", False)), bool(options.pop("quiet", False))
    file = options.pop("config", None)
    values = {**(load_toml(Path(file)) if file else {}), **parsed(options)}
    if env is not None:
        values["env"] = env
    config = resolve(values, strict=False)
    warn(config)
    outcome = api.train_config(config, given=set(values), fresh=fresh, show=not quiet, supervisor=supervisor)
    return report(outcome)


def compare(env: str | None, options: dict[str, Any]) -> int:
    """troupe compare ENV --algo A,B --schemes S,T --workers N,M [--options]."""
    from troupe import compare as studies

    file = options.get("config")
    if file is not None:
        options = {**options, "config": os.path.abspath(str(file))}
    given = {**(load_toml(Path(options["config"])) if file else {}), **parsed(options)}
    plan = studies.plan(env, options, given)
    name, fresh, quiet = str(options.get("name", "")), bool(options.get("fresh")), bool(options.get("quiet"))
    return studies.compare(plan, name, fresh=fresh, show=not quiet)


def resume(name: str | None, options: dict[str, Any], supervisor: Supervisor | None = None) -> int:
    """troupe resume RUN [--options]."""
    if name is None:
        raise ConfigError("which run? troupe resume RUN, by its name or its path")
    quiet = bool(options.pop("quiet", False))
    if "fresh" in options:
        raise ConfigError("troupe resume goes on with a run; to start again: troupe train ENV --name RUN --fresh")
    stored = RunDir.open(name)
    before = resolve(api.flat_dict(stored))
    changed = api.changed(stored.name, before, parsed(options), strict=False)
    return report(api.resume(name, show=not quiet, supervisor=supervisor, **{k: api.flat(changed)[k] for k in options}))


def parsed(options: dict[str, Any]) -> dict[str, Any]:
    """Texts whose type is a table or a list, taken apart; all else is converted where it is checked."""
    values = dict(options)
    if "env_options" in values:
        pairs = [part.partition("=") for part in str(values["env_options"]).split(",") if part]
        values["env_options"] = {key: _scalar(text) for key, _, text in pairs}
    if "observation_scale" in values:
        values["observation_scale"] = [part for part in str(values["observation_scale"]).split(",") if part]
    return values


def _scalar(text: str) -> Any:
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, bool | int | float) else text


def warn(config: Config) -> None:
    """What is allowed, but hardly meant."""
    cores, free = os.cpu_count() or 1, available_bytes()
    needed = config.workers * WORKER_BYTES
    if needed > free:
        said = (
            f"{config.workers} workers take about {needed / 2**30:.1f} GiB, where {free / 2**30:.1f} GiB of memory are "
            f"free: --workers {max(1, free // WORKER_BYTES)} would fit"
        )
    elif config.workers > SENSIBLE_WORKERS_PER_CORE * cores and not config.env_delay_ms:
        said = (
            f"{config.workers} workers on {cores} cores will mostly wait for each other: --workers {cores} is likely "
            "faster"
        )
    else:
        return
    print(f"troupe: {said}", file=sys.stderr)


def report(outcome: Outcome) -> int:
    """The last lines of a run."""
    e = outcome.evaluation
    figure = (
        f"eval {e.mean:.1f} ± {e.sd:.1f} ({e.episodes} episodes, 95 % {e.low:.1f} to {e.high:.1f})"
        if e
        else "no evaluation"
    )
    words = {"solved": "solved", "limit": "goal reached" if outcome.met else "budget spent before the goal was met"}
    print(f"{words.get(outcome.reason, outcome.reason)}: {figure} · {outcome.seconds:.1f} s · {outcome.steps:,} steps")
    print(f"run {outcome.run} · play it: troupe play {outcome.run} · go on: troupe resume {outcome.run}")
    return outcome.exit_code


def evaluate(given: argparse.Namespace) -> int:
    """troupe eval RUN --episodes N."""
    agent = api.load(given.run, which=given.which)
    result = agent.evaluate(given.episodes, seed=given.seed, greedy=not given.sampled)
    low, high = result.mean - result.half_interval, result.mean + result.half_interval
    figures = {
        "env": agent.config.env, "mean": result.mean, "sd": result.sd, "low": low, "high": high,
        "episodes": len(result.returns), "min": float(result.returns.min()), "max": float(result.returns.max()),
        "mean_length": float(result.lengths.mean()), "greedy": not given.sampled, "steps": agent.checkpoint.steps,
        "version": agent.checkpoint.version, "which": given.which, "seconds": round(result.seconds, 2),
    }  # fmt: skip
    folder = RunDir.open(given.run).eval
    try:
        folder.mkdir(exist_ok=True)
        with (folder / "evaluations.jsonl").open("a") as file:
            file.write(json.dumps({**figures, "returns": result.returns.tolist()}) + "\n")
    except OSError as e:
        print(f"troupe: the figures could not be kept in {folder}: {e.strerror}", file=sys.stderr)
    if given.json:
        print(json.dumps(figures))
    else:
        how = "greedy" if not given.sampled else "sampled"
        print(
            f"{agent.config.env} reference, {how}, weights of step {agent.checkpoint.steps:,}: "
            f"{result.mean:.1f} ± {result.sd:.1f} over {len(result.returns)} episodes "
            f"(95 % {low:.1f} to {high:.1f}; worst {result.returns.min():.1f}, best {result.returns.max():.1f})"
        )
    return 0


def play(given: argparse.Namespace) -> int:
    """troupe play RUN: a window where there is a display, else a video file."""
    from troupe import video

    agent = api.load(given.run, which=given.which)
    display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    window = given.window == "yes" or (given.window == "auto" and display and given.out is None)
    if window and not display:
        raise ConfigError("--window yes: there is no display here; without it a video file is written")
    returns: list[float]
    if window:
        returns = video.show(agent, given.episodes, seed=given.seed, greedy=not given.sampled)
        where = "in the window"
    else:
        out = Path(given.out) if given.out else RunDir.open(given.run).video / f"step-{agent.checkpoint.steps}.mp4"
        returns = video.record(agent, given.episodes, out, seed=given.seed, greedy=not given.sampled)
        where = f"in {out}"
    print(f"{len(returns)} episode{'s'[: len(returns) != 1]} {where}: returns {', '.join(f'{r:.1f}' for r in returns)}")
    return 0


def join(given: argparse.Namespace) -> int:
    """troupe join ADDRESS [--workers N] [--run R] [--once]."""
    from troupe.addresses import find
    from troupe.join import Machine
    from troupe.join import join as play_for_others
    from troupe.transports.amqp import Address
    from troupe.transports.desk import RabbitDesk

    address = find(given.address)
    allowed = frozenset(part.strip() for part in given.allow.split(",") if part.strip())
    workers = given.workers or os.cpu_count() or 1
    desk = RabbitDesk(Address.parse(address))
    try:
        return play_for_others(Machine(address, workers, given.run, given.once, allowed), desk)
    finally:
        desk.close()


def broker(given: argparse.Namespace) -> int:
    """troupe broker: a private node, until Ctrl-C."""
    from troupe.addresses import announced, folder
    from troupe.broker import Tls, serve

    if bool(given.certificate) != bool(given.key):
        raise ConfigError("troupe broker: --certificate and --key go together")
    tls = Tls(Path(given.certificate), Path(given.key)) if given.certificate else None

    def tell(address: str) -> None:
        print(f"a broker runs at {address}\nother terminals here find it as --via rabbitmq; Ctrl-C ends it", flush=True)
        stack.enter_context(announced(address))

    with ExitStack() as stack:
        serve(Path(given.folder or folder()), host=given.host, port=given.port, tls=tls, tell=tell)
    return 0


def doctor(given: argparse.Namespace) -> int:
    """troupe doctor [ENV]."""
    from troupe import doctor as checks

    print(checks.report(given.env))
    return 0


def catalogue(given: argparse.Namespace) -> int:
    """troupe list."""
    from troupe import catalogue as known

    print(json.dumps(known.everything(), indent=1) if given.json else known.text())
    return 0
