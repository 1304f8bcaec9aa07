"""What tests of several folders share: one private broker for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rabbit import certificates
from troupe import broker

if TYPE_CHECKING:
    from command import Command, Run


@pytest.fixture(scope="session")
def session_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[broker.Node]:
    """A RabbitMQ node of this session's own; run names keep the tests apart."""
    folder = tmp_path_factory.mktemp("broker")
    tls = certificates(folder / "tls")
    with broker.start(folder / "node", tls=broker.Tls(tls.certificate, tls.key)) as running:
        yield running


@pytest.fixture
def node(session_node: broker.Node) -> broker.Node:
    """The session's node, running, whatever the test before did to it."""
    if not session_node.running():
        session_node.restart()
    return session_node


@pytest.fixture
def command(tmp_path: Path, node: broker.Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Start `troupe ...` beside the session's broker; whatever is left at the end of the test is a failure of it."""
    from command import Run  # of the tests that use this

    monkeypatch.setenv("TROUPE_BROKER", node.address)
    begun: list[Run] = []

    def start(*words: str, run: str = "run", home: str = "here", **options: object) -> Run:
        texts = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        (tmp_path / home).mkdir(exist_ok=True)
        begun.append(Run(tmp_path / home, [*words, *texts], name=run))
        return begun[-1]

    yield start
    for run in begun:
        run.end()
    for run in begun:
        run.assert_nothing_is_left()
