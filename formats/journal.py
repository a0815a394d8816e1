"""What an unfinished conversion has put on the drive.

``rowstream_journal.jsonl``: the first line is the identity of source and options, then one line per finished entry, in
order, with its digests. A line is written after its bytes are on the drive, so lines may be trusted; whatever follows
the last whole line is a write that was cut off.
"""

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

from formats.digests import DIGEST_BYTES
from formats.errors import FormatError

JOURNAL_NAME = "rowstream_journal.jsonl"


class Journal:
    """Owns the open, locked journal file of one conversion.

    Attributes:
        done: digests of each finished entry.
    """

    def __init__(self, root: Path, identity: str, rows: list[int]) -> None:
        """Open or create the journal.

        Args:
            root: output folder.
            identity: of source and options.
            rows: digests that each entry has.

        Raises:
            FormatError: the journal is of another conversion, or another process is writing.
        """
        self._path = root / JOURNAL_NAME
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self.done = self._recover(identity, rows)
        except BaseException:
            os.close(self._fd)
            raise

    def _recover(self, identity: str, rows: list[int]) -> list[list[bytes]]:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FormatError(f"{self._path} is locked: another conversion is writing to this folder") from None
        lines = self._path.read_bytes().splitlines(keepends=True)
        if not lines or not lines[0].endswith(b"\n"):
            os.ftruncate(self._fd, 0)
            self._append({"rowstream_journal": 1, "identity": identity})
            return []
        if _parse(lines[0]).get("identity") != identity:
            raise FormatError(
                f"{self._path} belongs to another source, other options or another version; want the same"
            )
        done = []
        for number, (line, count) in enumerate(zip(lines[1:], rows, strict=False)):
            record = _parse(line)
            text = str(record.get("digests"))
            if record.get("entry") != number or not re.fullmatch(rf"[0-9a-f]{{{2 * DIGEST_BYTES * count}}}", text):
                break
            digests = bytes.fromhex(text)
            done.append([digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)])
        os.ftruncate(self._fd, sum(map(len, lines[: 1 + len(done)])))
        return done

    def add(self, digests: list[bytes]) -> None:
        """Note that the next entry is on the drive."""
        self._append({"entry": len(self.done), "digests": b"".join(digests).hex()})
        self.done.append(digests)

    def _append(self, record: dict[str, object]) -> None:
        data = json.dumps(record).encode() + b"\n"
        os.lseek(self._fd, 0, os.SEEK_END)
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._fd)

    def remove(self) -> None:
        """The conversion is complete."""
        self._path.unlink()


def _parse(line: bytes) -> dict[str, Any]:
    """A whole line's object; empty for a line that was cut off."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else {}
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
