"""A node keeps what its clients remember of its last few trainings, each in a folder, and removes older ones."""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
from pathlib import Path

from fedtail.rows import RowsError
from fedtail.rows.writer_lock import WriterLock

log = logging.getLogger("fedtail.node")
REMOVING = ".removing-"      # the name of a folder begins so when it counts no more: a crash leaves it, the next call removes it


def remove_old_trainings(folder: Path, most: int, used: Path) -> None:
    """Delete the subfolders of old trainings in `folder`: `used` stays, and so do the `most` - 1 others that were written last.

    A training whose folder another process is writing stays as well. A folder is renamed before it is deleted, so that a crash
    leaves no training half deleted; what a crash left of earlier deletions is deleted too. Other folders are not touched.
    """
    trainings = [place for place in folder.iterdir() if place.is_dir() and _is_training_name(place.name) and place != used]
    for place in sorted(trainings, key=_last_change_time, reverse=True)[most - 1:]:
        lock = WriterLock(place)
        with suppress(RowsError):
            lock.acquire(patience=0.0)
            place.rename(folder / f"{REMOVING}{place.name}")
            log.info("what clients remember of training %s is removed: the node keeps its last %d trainings", place.name, most)
        lock.release()
    for place in folder.glob(f"{REMOVING}*"):
        shutil.rmtree(place, ignore_errors=True)


def _is_training_name(name: str) -> bool:
    """Whether `name` has the form of a training's folder: pairs of hexadecimal digits in lower case."""
    with suppress(ValueError):
        return bytes.fromhex(name).hex() == name
    return False


def _last_change_time(place: Path) -> float:
    """When the folder `place` or a file in it was last changed, in seconds since 1970; 0.0 where it does not exist."""
    with suppress(FileNotFoundError):
        return max(path.stat().st_mtime for path in (place, *place.iterdir()))
    return 0.0
