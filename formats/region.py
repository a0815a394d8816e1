"""Write the region of an FTW folder: bytes by their offset, spread over shard files."""

import os
from collections.abc import Sequence
from pathlib import Path

from formats.errors import FormatError
from formats.ftw import Index
from formats.layout import Shard, extents


class ShardWriter:
    """Owns the shard file that is being written."""

    def __init__(self, root: Path, shards: Sequence[Shard]) -> None:
        self._root, self._shards = root, shards
        self._file, self._fd = "", -1

    def write(self, offset: int, data: memoryview) -> None:
        """Put bytes at an offset of the region."""
        for file, begin, nbytes in extents(self._shards, offset, len(data)):
            self._open(file)
            end = begin + nbytes
            while begin < end:
                n = os.pwrite(self._fd, data[: end - begin], begin)
                begin += n
                data = data[n:]

    def sync(self) -> None:
        """Return when everything written is on the drive."""
        if self._fd >= 0:
            os.fsync(self._fd)

    def close(self) -> None:
        """Give up the file; what was written is on the drive."""
        if self._fd >= 0:
            self.sync()
            # A conversion of terabytes shall not push everything else out of memory.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(self._fd)
            self._file, self._fd = "", -1

    def _open(self, file: str) -> None:
        if file != self._file:
            self.close()
            self._fd = os.open(self._root / file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._file = file
            sync(self._root)


def trim(index: Index, begin: int) -> None:
    """Cut off whatever lies beyond the finished entries.

    Args:
        index: planned index; its folder may hold some of the shards.
        begin: bytes of the region that are finished.

    Raises:
        FormatError: less is there than is finished.
    """
    for shard in index.shards:
        path = index.root / shard.file
        kept = min(max(begin - shard.offset, 0), shard.nbytes)
        length = path.stat().st_size if path.exists() else 0
        if length < kept:
            raise FormatError(f"{path} is {length} bytes long, want {kept} that the journal calls finished")
        if kept:
            os.truncate(path, kept)
        else:
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return when a file, or a folder's list of names, is on the drive."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
