"""What tests of several folders share: one private broker for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rabbit import certificates
from troupe import broker


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
