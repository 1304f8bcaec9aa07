"""Helpers for tests over a real broker: waiting without a guess, foreign clients, certificates, names."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pika

from troupe.types import Message

_runs = itertools.count(1)


def new_run() -> str:
    """A run that no other test has."""
    return f"test-{os.getpid()}-{next(_runs)}"


def wait_for(done: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Until `done`; a failure after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"it did not happen within {timeout_s} s"
        time.sleep(0.005)


def rollout(run: str, sequence: int, sender: str = "worker-0", incarnation: int = 0, size: int = 64) -> Message:
    """A message whose bytes tell its number."""
    data = np.full(size, sequence % 251, np.uint8)
    return Message("rollout", run, sender, incarnation, sequence, version=3, arrays={"data": data})


@contextmanager
def stranger(address: str) -> Iterator[Any]:
    """A channel of a client that is not ours, with confirms."""
    connection = pika.BlockingConnection(pika.URLParameters(address))
    try:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel
    finally:
        if connection.is_open:
            connection.close()


@dataclass(frozen=True)
class Certificates:
    """An authority, and a certificate that it signed."""

    authority: Path
    certificate: Path
    key: Path


def certificates(folder: Path, host: str = "127.0.0.1") -> Certificates:
    """For the address `host`; made by openssl; valid for a day."""
    folder.mkdir()

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-days", "1", "-subj", "/CN=Test CA")
    openssl("req", *curve, "-keyout", "node.key", "-out", "node.csr", "-subj", f"/CN={host}")
    (folder / "san").write_text(f"subjectAltName=IP:{host}\n")
    openssl(
        "x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1",
        "-extfile", "san", "-out", "node.pem",
    )  # fmt: skip
    return Certificates(folder / "ca.pem", folder / "node.pem", folder / "node.key")
