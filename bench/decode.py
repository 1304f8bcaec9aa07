"""How fast experience is read: Troupe's frames beside JSON lists of lists, as the original Executor and Worker sent.

    python bench/decode.py --out bench/results/decode.json

The same LunarLander experience, observation and action of many steps, goes both ways. Read means: from the bytes of a
message to arrays that are checked against what was agreed and are ready for a network. JSON is parsed once here, though
the original did it twice, with Python's own module and with msgspec, the fastest there is. GB/s are of the arrays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from troupe.roles.cargo import RolloutShape, pack_rollout
from troupe.transports.codec import decode, encode
from troupe.types import Rollout

STEPS, LANES = 256, 64  # of one message
ROUNDS = 15


def experience() -> Rollout:
    """A message's worth; the numbers mean nothing, but are as long in text as real ones."""
    rng, grid = np.random.default_rng(1), (STEPS, LANES)
    flags = {name: np.zeros(grid, bool) for name in ("terminated", "truncated")}
    return Rollout(
        observations=rng.standard_normal((STEPS + 1, LANES, 8)).astype(np.float32), actions=rng.integers(4, size=grid),
        log_probs=rng.standard_normal(grid).astype(np.float32), rewards=rng.standard_normal(grid).astype(np.float32),
        **flags, valid=np.ones(grid, bool), final_index=np.zeros((0, 2), np.int64),
        final_observations=np.zeros((0, 8), np.float32), version=1,
    )  # fmt: skip


def median_s(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes."""
    taken = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def main() -> None:
    """Measure both in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    rollout = experience()
    shape = RolloutShape(STEPS, LANES, (8,), "float32", ())
    frame = b"".join(encode(pack_rollout(rollout, run="r", sender="a", incarnation=0, sequence=1, meta={})))
    seen, taken = rollout.observations[:-1].reshape(-1, 8), rollout.actions.flat
    pairs = [[observation.tolist(), int(action)] for observation, action in zip(seen, taken, strict=True)]
    text = json.dumps(pairs).encode()

    def arrays(rows: list[Any]) -> tuple[Any, Any]:
        return np.array([row[0] for row in rows], np.float32), np.array([row[1] for row in rows])

    ours = median_s(lambda: shape.unpack(decode(bytearray(frame))))
    theirs = median_s(lambda: arrays(json.loads(text)))
    quickest = median_s(lambda: arrays(msgspec.json.decode(text)))
    both = rollout.observations[:-1].nbytes + rollout.actions.nbytes  # what either hands to the learner
    result = {
        "steps": STEPS * LANES, "frame_bytes": len(frame), "json_bytes": len(text),
        "troupe_us": round(1e6 * ours, 1), "json_us": round(1e6 * theirs, 1),
        "msgspec_json_us": round(1e6 * quickest, 1),
        "troupe_gb_per_s": round(len(frame) / ours / 1e9, 2), "json_gb_per_s": round(both / theirs / 1e9, 4),
        "times_json": round(theirs / ours, 1), "times_msgspec_json": round(quickest / ours, 1),
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
