"""What the tests of whole runs over a broker share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Command, Run

from troupe import broker


@pytest.fixture
def command(tmp_path: Path, node: broker.Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Start `troupe ...` beside the session's broker; whatever is left at the end of the test is a failure of it."""
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
