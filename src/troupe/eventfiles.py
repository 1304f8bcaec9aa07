"""TensorBoard event files beside the journal, for those who have the viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from troupe.errors import MissingExtra
from troupe.journal import Journal

_SCALARS = {
    "progress": ("return_mean", "steps_per_s", "lag_median", "lag_p95"),
    "eval": ("mean", "sd"),
}


def with_event_files(journal: Journal, folder: Path, wanted: bool) -> Journal:
    """`journal`, which also writes event files to `folder`/tensorboard where they are wanted."""
    if not wanted:
        return journal
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise MissingExtra("TensorBoard", "tensorboard") from e
    writer = SummaryWriter(str(folder / "tensorboard"))  # type: ignore[no-untyped-call]
    write, close = journal.write, journal.close

    def write_both(kind: str, **fields: Any) -> None:
        write(kind, **fields)
        numbers = {name: fields.get(name) for name in _SCALARS.get(kind, ())} | dict(fields.get("metrics") or {})
        for name, value in numbers.items():
            if value is not None:
                writer.add_scalar(f"{kind}/{name}", value, fields["steps"])  # type: ignore[no-untyped-call]

    def close_both() -> None:
        writer.close()  # type: ignore[no-untyped-call]
        close()

    journal.write, journal.close = write_both, close_both  # type: ignore[method-assign]
    return journal
