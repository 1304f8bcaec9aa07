"""TensorBoard event files beside the journal, for those who have the viewer."""

from __future__ import annotations

from pathlib import Path

from troupe.errors import MissingExtra
from troupe.journal import Journal
from troupe.types import Json

_SCALARS = {
    "progress": ("return_mean", "steps_per_s", "lag_median", "lag_p95"),
    "eval": ("mean", "sd"),
}


class EventFiles:
    """A journal whose figures also go into `folder`."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise MissingExtra("TensorBoard", "tensorboard") from e
        self._journal = journal
        self._writer = SummaryWriter(str(folder))

    def write(self, kind: str, **fields: Json) -> None:
        """One line in the journal, and a point of every curve it has a figure for."""
        self._journal.write(kind, **fields)
        numbers = {name: fields.get(name) for name in _SCALARS.get(kind, ())} | dict(fields.get("metrics") or {})
        for name, value in numbers.items():
            if value is not None:
                self._writer.add_scalar(f"{kind}/{name}", value, fields["steps"])

    def flush(self) -> None:
        """Both to the disk."""
        self._journal.flush()
        self._writer.flush()

    def close(self) -> None:
        """Both to the disk, and no more."""
        self._writer.close()
        self._journal.close()
