"""Start the fork server before this process imports torch, so that the two import side by side."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from troupe.supervisor import Supervisor


def preloads(*, envpool: bool) -> list[str]:
    """What every worker needs, imported once for all of them."""
    return ["torch", "gymnasium", "troupe.parts", *(["envpool"] if envpool else [])]


@contextmanager
def warm_supervisor(env: str | None, options: Mapping[str, Any]) -> Iterator[Supervisor | None]:
    """A supervisor whose fork server is importing already; None for a run that will start no process.

    Which environment library the run needs is a guess here, from the words of the command alone; a wrong one costs
    a little memory, or an import in the worker, and nothing else.
    """
    if options.get("via") == "memory":
        yield None
        return
    may_have = options.get("backend") != "gymnasium" and ":" not in (env or "")
    supervisor = Supervisor(preload=preloads(envpool=may_have and importlib.util.find_spec("envpool") is not None))
    try:
        yield supervisor
    finally:
        supervisor.stop(0.0)
