"""Where the broker is: the address that was given, the one in the environment, or that of the `troupe broker` here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from troupe.config import without_password
from troupe.errors import ConfigError
from troupe.rundir import runs_root

VARIABLE: Final = "TROUPE_BROKER"  # keeps a password off the command line, which every user of a machine can read


def folder() -> Path:
    """What the node of `troupe broker` keeps; its name is none that a run can have."""
    return runs_root() / ".broker"


def find(via: str) -> str:
    """The whole address, password and all; of `rabbitmq` alone, the broker that is known here."""
    known = [address for address in (os.environ.get(VARIABLE, ""), _private()) if address]
    if via == "rabbitmq":
        if not known:
            raise ConfigError(
                f"no broker is known here: give its address as --via amqp://user:password@host/vhost or in {VARIABLE}, "
                "or start one with  troupe broker"
            )
        return known[0]
    if via != without_password(via) or "@" not in via:
        return via
    for address in known:
        if without_password(address) == via:
            return address
    raise ConfigError(f"{via} names a user but no password, and none is kept in a run: give the address in {VARIABLE}")


@contextmanager
def announced(address: str) -> Iterator[None]:
    """While the node of `troupe broker` runs, its user's other commands find it; nobody else may read the file."""
    path = folder() / "address"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(address)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _private() -> str:
    try:
        return (folder() / "address").read_text().strip()
    except OSError:
        return ""
