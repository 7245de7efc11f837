"""A run's folder in host memory: what slots put there outlives the process that wrote it, as pinned memory of a node's
agent would. It goes with the run; what a killed driver left is removed when another run first needs the place, unless
slots that live on still need it: whoever does holds a shared lock on it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

from nereus.errors import TransferFailed
from nereus.runtime.journal import lock
from nereus.transitions.change import Mode

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # its files have names of their own
PLACES = (SHARED_MEMORY, Path(tempfile.gettempdir()))
"""Where the folder may be: memory, or without room there a disk."""
PREFIX, OWNER = "nereus-", "owner"


class HostMemory:
    """Folders for snapshots of a change, in memory or on `disk`, and for what waits between its phases.

    The folder in memory is made when it is first asked for, or taken over from a driver that is gone.
    """

    def __init__(self, disk: Path | None) -> None:
        self._disk = disk
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """This run's folder on the driver's host; slots of other hosts make one of the same name.

        TransferFailed where no place takes it.
        """
        return self._taken(*made()) if self._folder is None else self._folder

    def adopt(self, folder: Path) -> bool:
        """Takes over the folder of a driver that is gone, before this one makes its own; False where it is gone too."""
        owner = kept(folder)
        if owner is not None:
            self._taken(folder, owner)
        return owner is not None

    def _taken(self, folder: Path, owner: IO[bytes]) -> Path:
        self._folder, self._owner = folder, owner
        self._end = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def snapshots(self, mode: Mode) -> Path:
        """Where slots copy old bytes to: host memory, or for mode checkpoint the disk of the run's folder."""
        return self._disk if mode == "checkpoint" and self._disk is not None else self.folder / "snapshots"

    @property
    def offloaded(self) -> Path:
        """Where stages wait between their phases."""
        return self.folder / "offloaded"

    @property
    def progress(self) -> Path:
        """Where slots tell how far requests have come."""
        return self.folder / "progress"

    def drop_progress(self) -> None:
        """Removes what this host's slots have told."""
        shutil.rmtree(self.progress, ignore_errors=True)

    def drop_snapshots(self) -> None:
        """Removes this host's snapshots; what is offloaded stays."""
        if self._folder is not None:
            shutil.rmtree(self._folder / "snapshots", ignore_errors=True)
        if self._disk is not None:
            shutil.rmtree(self._disk, ignore_errors=True)

    def close(self) -> None:
        """Removes everything; a second call does nothing."""
        self.drop_snapshots()
        if self._folder is not None:
            self._end()
            self._owner.close()
            self._folder = None


def kept(folder: Path) -> IO[bytes] | None:
    """While what this gives is open `folder` stays, whatever becomes of its driver; None where it has none here."""
    owner: IO[bytes] | None = None
    try:
        owner = (folder / OWNER).open("rb")
        _share(owner)
        if os.fstat(owner.fileno()).st_nlink:  # else it was removed just now
            return owner
    except OSError:
        pass
    if owner is not None:
        owner.close()
    return None


def _share(owner: IO[bytes]) -> None:
    fcntl.flock(owner.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)


def left(keeping: IO[bytes] | None) -> None:
    """A slot that ends without a driver needs the folder no more; the last one takes it away."""
    if keeping is not None:
        keeping.close()
    for place in PLACES:
        remove_orphans(place)


def made() -> tuple[Path, IO[bytes]]:
    """A new folder in the first place that takes one, and the file in it by whose lock it is owned."""
    problems: list[str] = []
    for place in PLACES:
        try:
            remove_orphans(place)
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            fresh = folder / f".{OWNER}"
            owner = fresh.open("wb")
            _share(owner)
            fresh.rename(folder / OWNER)  # under that name it is locked from the first
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
            continue
        return folder, owner
    raise TransferFailed(f"no folder can be made in host memory ({', '.join(problems)}): free some room")


def remove_orphans(place: Path) -> None:
    """Removes folders of runs in `place` that nobody needs: drivers and slots are gone, and with them their locks."""
    for owner in place.glob(f"{PREFIX}*/{OWNER}"):
        try:
            with owner.open("rb") as file:
                gone = lock(file.fileno())
        except OSError:  # another user's, or gone just now
            continue
        if gone:
            shutil.rmtree(owner.parent, ignore_errors=True)
