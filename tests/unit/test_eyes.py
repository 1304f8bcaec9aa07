"""What a user looks at: the video of `troupe play`, the report of `troupe doctor`, event files, the example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import troupe
from troupe.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a few steps, with event files."""
    monkeypatch.setenv("TROUPE_RUNS", str(tmp_path / "runs"))
    troupe.train("CartPole-v1", name="seen", via="memory", until="steps=4096", eval_episodes=2, tensorboard=True)
    return tmp_path / "runs" / "seen"


def test_play_writes_a_video_that_has_every_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import imageio_ffmpeg

    assert main(["play", "seen", "--episodes", "2", "--seed", "5"]) == 0
    told = capsys.readouterr().out
    returns = [float(number) for number in told.rpartition("returns ")[2].split(",")]
    (video,) = (run / "video").glob("*.mp4")
    frames, _ = imageio_ffmpeg.count_frames_and_secs(str(video))
    assert frames == sum(returns) + len(returns), "CartPole pays 1 a step, and the first picture comes before any"


def test_play_again_with_the_same_seed_is_the_same_episode(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for out in ("a.mp4", "b.mp4"):
        main(["play", "seen", "--seed", "5", "--out", str(run / out)])
        told.append(capsys.readouterr().out.rpartition("returns ")[2])
    assert told[0] == told[1]


def test_a_window_without_a_display_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert main(["play", "seen", "--window", "yes"]) == 2
    assert "no display" in capsys.readouterr().err


def test_event_files_hold_what_the_journal_says(run: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    from troupe.journal import Journal

    (file,) = (run / "tensorboard").iterdir()
    points = {
        (value.tag, event.step): value.tensor.float_val[0]
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    evaluations = [line for line in Journal.read(run / "metrics.jsonl") if line["kind"] == "eval"]
    assert evaluations
    for line in evaluations:
        assert points["eval/mean", line["steps"]] == pytest.approx(line["mean"], rel=1e-6)
    assert any(tag == "progress/value_loss" for tag, _ in points), "the losses are in it as well"


def test_doctor_measures_what_is_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_RUNS", str(tmp_path))
    assert main(["doctor", "CartPole-v1"]) == 0
    told = capsys.readouterr().out
    assert f"{os.cpu_count()} cores" in told
    for what, least in (("environment steps/s", 10_000), ("calls/s", 1_000)):
        found = re.search(rf"([\d,]+) {what}", told)
        assert found and int(found[1].replace(",", "")) > least
    advice = told.partition("troupe train ")[2].splitlines()[0].split()
    short = ["--until", "steps=1024", "--via", "memory", "--scheme", "actor-learner", "--eval-episodes", "2", "--quiet"]
    assert main(["train", *advice, *short]) == 0, "what is advised can be typed"


def test_the_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "train_and_act.py"],
        env=os.environ | {"TROUPE_RUNS": str(tmp_path)}, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    first, last = done.stdout.splitlines()
    assert first.startswith("solved in")
    assert float(last.removeprefix("an episode of ")) > 200
