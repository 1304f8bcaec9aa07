"""The `troupe` command. Its options are the fields of the config; torch is imported only by what needs it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from troupe import __version__
from troupe.config import Config
from troupe.errors import ConfigError, TroupeError
from troupe.warmup import warm_supervisor

EPILOG = """\
two commands to start with:
  troupe train CartPole-v1          solved in seconds, with a live panel
  troupe train LunarLander-v3       the same for something harder

exit codes: 0 the goal was met, 2 something was wrong with what was asked, 3 the budget ran out first,
130 and 143 stopped by Ctrl-C or SIGTERM with a checkpoint saved.
"""


EXTRA_OPTIONS = {
    "--fresh": "start the run of this name again",
    "--quiet": "no panel",
    "--config FILE": "options from a TOML file, such as a run's config.toml",
}


COMPARE_HELP = """\
usage: troupe compare ENV [--algo A,B] [--schemes S,T] [--workers 1,2,4] [--seeds N] [--options of troupe train]

Train every combination, one run after another, and write tables and charts of what came of it below the runs folder.
The same command goes on after an interruption; a run that has ended is not run again.

  --algo A,B,...                algorithms (default: the preset's)
  --schemes S,T,...             coordination schemes (default: all); local is one process, and the reference
  --workers N,M,...             numbers of workers (default: powers of two up to the number of cores)
  --seeds N                     seeds 1 to N of each (default 3)
  --envs-per-worker N           as many environments as N times the workers, instead of a fixed number
  --name STUDY                  the study's folder (default: compare-ENV-1 and so on)
  --fresh                       forget what the study has, and start it again
  --quiet                       print nothing
Every other option is held fixed and means what 'troupe train --help' says. Give a limit: --until solved,minutes=5

exit codes: 0 every run ended, 1 some failed, 2 something was wrong with what was asked, 130 and 143 interrupted.
"""


_VALUED = {"config", "schemes", "seeds", "envs_per_worker"}  # options that no config has


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.path.insert(0, os.getcwd())  # the user's own module:Class lies where they are
    try:
        return _run(given)
    except TroupeError as e:
        print(f"troupe: {e}", file=sys.stderr)
        return e.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as e:  # a full disk, no descriptors left, a port in use: the system's own words, without a traceback
        where = f" ({e.filename})" if e.filename else ""
        print(f"troupe: {e.strerror or e}{where}; free what is short and try again", file=sys.stderr)
        return 2


def _run(given: list[str]) -> int:
    parser = _commands()
    if not given or given == ["train"]:
        parser.print_help()
        return 0 if not given else 2
    if given[0] in ("train", "resume"):
        return _train_or_resume(parser, given)
    if given[0] == "compare":
        return _compare(given[1:])
    known = parser.parse_args(given)
    from troupe import commands

    run = {
        "eval": commands.evaluate, "play": commands.play, "doctor": commands.doctor, "list": commands.catalogue,
        "join": commands.join, "broker": commands.broker,
    }  # fmt: skip
    return run[known.command](known)


def _commands() -> _Parser:
    parser = _Parser(
        prog="troupe", description="Train one deep-RL agent with every core and machine you have.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"troupe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    commands.add_parser("train", help="train an agent: troupe train ENV [--options]", add_help=False)
    commands.add_parser("resume", help="go on with a run: troupe resume RUN [--options]", add_help=False)
    commands.add_parser("compare", help="schemes by workers, each over seeds: tables and charts", add_help=False)
    _add_remote(commands)
    evaluate = commands.add_parser("eval", help="play whole reference episodes, report mean, spread and interval")
    evaluate.add_argument("run", help="a run's name or path")
    evaluate.add_argument("--episodes", type=_count, default=100, help="how many (default 100)")
    evaluate.add_argument("--seed", type=int, default=None, help="root of the episodes' seeds (default: the run's)")
    evaluate.add_argument("--sampled", action="store_true", help="sample actions instead of taking the most likely")
    evaluate.add_argument("--which", choices=("best", "latest"), default="best", help="which weights (default best)")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    play = commands.add_parser("play", help="write a video of the agent (a window where there is a display)")
    play.add_argument("run", help="a run's name or path")
    play.add_argument("--episodes", type=_count, default=1, help="how many (default 1)")
    play.add_argument("--seed", type=int, default=None, help="root of the episodes' seeds")
    play.add_argument("--sampled", action="store_true", help="sample actions instead of taking the most likely")
    play.add_argument("--which", choices=("best", "latest"), default="best", help="which weights (default best)")
    play.add_argument("--out", default=None, help="the video file (default: video/ in the run)")
    play.add_argument("--window", choices=("auto", "yes", "no"), default="auto", help="a window instead of a file")
    doctor = commands.add_parser("doctor", help="versions, cores, optional parts, measured speeds, what to set")
    doctor.add_argument("env", nargs="?", default="LunarLander-v3", help="what to measure (default LunarLander-v3)")
    listing = commands.add_parser("list", help="algorithms, schemes, transports, presets; what goes with what")
    listing.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_remote(commands: Any) -> None:
    """What a second machine needs."""
    join = commands.add_parser("join", help="play for whoever leads a run on a broker: troupe join amqp://...")
    join.add_argument("address", nargs="?", default="rabbitmq", help="the broker's (default: $TROUPE_BROKER)")
    join.add_argument("--workers", type=_count, default=None, help="processes that play (default: one a core)")
    join.add_argument("--run", default="", help="play in this run only (default: in any that asks)")
    join.add_argument("--once", action="store_true", help="end with the run, instead of waiting for the next one")
    join.add_argument("--allow", default="", help="packages whose environments and networks may be run, a,b,...")
    broker = commands.add_parser("broker", help="start a private RabbitMQ node and print its address")
    broker.add_argument("--host", default="127.0.0.1", help="where it listens (default 127.0.0.1)")
    broker.add_argument("--port", type=_count, default=0, help="its port (default: a free one)")
    broker.add_argument("--certificate", default=None, help="PEM file, for other machines: amqps:// at --host")
    broker.add_argument("--key", default=None, help="PEM file of the certificate's key")
    broker.add_argument("--folder", default=None, help="what it keeps (default: .broker below the runs)")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a count: give 1 or more")
    return int(text)


# train and resume: their options are the config's fields, and the algorithm's ----------------------------------------


def _train_or_resume(parser: _Parser, given: list[str]) -> int:
    command, rest = given[0], given[1:]
    if "-h" in rest or "--help" in rest:
        print(_train_help(command, rest))
        return 0
    subject, options = parse_options(command, rest)
    with warm_supervisor(subject, options) as supervisor:
        from troupe import commands

        start = commands.train if command == "train" else commands.resume
        return start(subject, options, supervisor)


def _compare(given: list[str]) -> int:
    if not given or "-h" in given or "--help" in given:
        print(COMPARE_HELP)
        return 0 if given else 2
    subject, options = parse_options("compare", given)
    from troupe import commands

    return commands.compare(subject, options)


def parse_options(command: str, given: list[str]) -> tuple[str | None, dict[str, str | bool]]:
    """`ENV --workers 2 --no-overlap --net=64x64` -> ENV and {option: text}; what they mean is checked elsewhere."""
    subject: str | None = None
    options: dict[str, str | bool] = {}
    words = deque(given)
    while words:
        word = words.popleft()
        if not word.startswith("--"):
            if subject is not None:
                raise ConfigError(f"troupe {command}: {word!r} is one word too many after {subject!r}")
            subject = word
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if key in ("fresh", "quiet"):
            options[key] = True
        elif equals:
            options[key] = value
        elif not _is_flag(key) and words and not words[0].startswith("--"):
            options[key] = words.popleft()
        elif _is_flag(key) or key not in _VALUED | set(_fields()):  # an algorithm's own: a flag, if anything
            options[key.removeprefix("no_")] = "false" if key.startswith("no_") else "true"
        else:
            raise ConfigError(f"troupe {command}: --{name} needs a value")
    return subject, options


def _fields() -> dict[str, Any]:
    return {field.name: field for field in msgspec.structs.fields(Config)}


def _is_flag(key: str) -> bool:
    field = _fields().get(key.removeprefix("no_"))
    return field is not None and _kind(field.type) == "flag"


def _kind(annotated: Any) -> str:
    """What a value of this type looks like, in a word."""
    described = msgspec.inspect.type_info(annotated)
    while isinstance(described, msgspec.inspect.Metadata):
        described = described.type
    if isinstance(described, msgspec.inspect.UnionType):
        described = next(t for t in described.types if not isinstance(t, msgspec.inspect.NoneType))
    if isinstance(described, msgspec.inspect.LiteralType):
        return "|".join(str(v) for v in described.values)
    names = {
        "BoolType": "flag",
        "IntType": "N",
        "FloatType": "X",
        "StrType": "TEXT",
        "DictType": "K=V,...",
        "VarTupleType": "X,X,...",
    }
    return names.get(type(described).__name__, "VALUE")


def _description(annotated: Any) -> str:
    described = msgspec.inspect.type_info(annotated)
    while isinstance(described, msgspec.inspect.Metadata):
        text = (described.extra_json_schema or {}).get("description")
        if text:
            return str(text)
        described = described.type
    return ""


def _train_help(command: str, rest: list[str]) -> str:
    from troupe.resolve import hyper_class, resolve

    subject, options = parse_options(command, [word for word in rest if word not in ("-h", "--help")])
    if command == "resume":
        head = "usage: troupe resume RUN [--options]\n\nGo on where the newest valid checkpoint stands.\n"
        values: dict[str, Any] = {"env": "CartPole-v1", **{k: v for k, v in options.items() if k == "algo"}}
    else:
        head = (
            "usage: troupe train ENV [--options]\n\nTrain an agent. The same --name resumes, --fresh starts it again.\n"
        )
        values = {"env": subject or "any", **{k: v for k, v in options.items() if k == "algo"}}
    config = resolve(values)
    lines = [head, f"options (defaults for {subject or 'an environment without a preset'}):"]
    lines += [f"  {option:<29} {about}" for option, about in EXTRA_OPTIONS.items()]
    for field in msgspec.structs.fields(Config):
        if field.name not in ("env", "hyper"):
            lines.append(_help_line(field, getattr(config, field.name)))
    lines.append(f"\noptions of {config.algo}:")
    for field in msgspec.structs.fields(hyper_class(config.algo)):
        lines.append(_help_line(field, config.hyper[field.name]))
    return "\n".join(lines)


def _help_line(field: Any, default: Any) -> str:
    kind, name = _kind(field.type), field.name.replace("_", "-")
    option = f"--[no-]{name}" if kind == "flag" else f"--{name} {kind}"
    shown = "" if default in ("", (), {}, None) else f" (default {json.dumps(default)})"
    return (
        f"  {option:<29} {_description(field.type)}{shown}"
        if len(option) < 29
        else f"  {option}\n{'':32}{_description(field.type)}{shown}"
    )
