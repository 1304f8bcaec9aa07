"""The mean of the weights of late: what it is over, and that it is what a run evaluates and keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import troupe
from troupe.average import Average
from troupe.parameters import Parameters
from troupe.rundir import RunDir


@pytest.fixture
def parameters() -> Parameters:
    return Parameters(torch.nn.Linear(3, 2))


def at(parameters: Parameters, value: float) -> None:
    parameters.load_weights(np.full(len(parameters.vector), value, np.float32), parameters.version + 1)


def test_it_is_over_the_last_share_of_the_steps(parameters: Parameters) -> None:
    average = Average(parameters, 0.1)
    at(parameters, 1.0)
    for steps in range(1, 901):
        average.follow(steps)
    assert average.weights()[0] == pytest.approx(1.0)
    at(parameters, 2.0)
    for steps in range(901, 991):  # about a tenth of all there are: most of the older weights' share is gone
        average.follow(steps)
    assert average.weights()[0] == pytest.approx(2 - (900 / 990) ** 10, abs=0.01)


def test_a_share_of_none_is_the_newest_weights(parameters: Parameters) -> None:
    average = Average(parameters, 0.0)
    average.follow(5)
    at(parameters, 3.0)
    assert (average.weights() == 3.0).all()
    assert average.version == parameters.version


def test_the_first_steps_leave_nothing_of_the_weights_before_them(parameters: Parameters) -> None:
    average = Average(parameters, 0.05)
    at(parameters, 4.0)
    average.follow(64)
    assert np.allclose(average.weights(), 4.0)


def test_a_resumed_run_does_not_forget_how_many_steps_there_were(parameters: Parameters) -> None:
    at(parameters, 1.0)
    average = Average(parameters, 0.1, steps=1000)
    at(parameters, 2.0)
    average.follow(1010)
    assert average.weights()[0] == pytest.approx(1 + 10 / 101)


def test_what_it_gives_is_a_copy(parameters: Parameters) -> None:
    average = Average(parameters, 0.5)
    average.weights()[:] = 9.0
    assert not (average.weights() == 9.0).any()


@pytest.mark.parametrize("scheme", ["local", "actor-learner"])
def test_a_run_evaluates_and_keeps_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setenv("TROUPE_RUNS", str(tmp_path))
    for share in (0.0, 1.0):
        outcome = troupe.train(
            "CartPole-v1", scheme=scheme, average=share, until="steps=20000", name=f"run-{share:g}",
            eval_every_s=1000.0, eval_from=1e6,
        )  # fmt: skip
        run = RunDir(Path(outcome.run))
        best, latest = run.load_best(), run.load_latest({})
        assert best is not None and latest is not None
        assert np.array_equal(best.weights, latest.weights) == (share == 0.0)
