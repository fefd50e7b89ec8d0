"""Reads a trace file: rows of prompt lengths and block ids, as a stream.

Holds one row at a time, and at most `HEAD_ROWS` rows while the block size is
unknown. Invariant: a row that leaves `Trace` fits the block size, so it has an
id for each full block of its prompt. Costs: one JSON parse a line.
Thread-safety: none; a trace is read once, by one thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

from kvcache.replay.row import (
    MAX_BLOCK_SIZE,
    block_size_limits,
    parse_arrival,
    parse_row,
)

if TYPE_CHECKING:
    from types import TracebackType

    from kvcache.replay.batches import Arrival, Row

HEAD_ROWS = 1000


class TraceError(ValueError):
    """A trace that cannot be replayed; the message names file and line."""


class Trace:
    """A trace file, iterated once as `(input_length, hash_ids)` rows.

    The suffix chooses the decompressor (`.gz`, `.xz`, `.bz2`). The block size
    is the given one; else the one that one of the first rows names in a field
    `block_size`; else the only integer for which all of the first rows have
    `ceil(input_length / block_size)` ids; else the only such power of two.

    Attributes:
        path: The file, as given.
        name: Its last part.
        block_size: Tokens a block.
        total: Bytes of the file, 0 if it is no regular file.
    """

    unit = "B"

    def __init__(
        self, path: str | os.PathLike[str], block_size: int | None = None
    ) -> None:
        """Open a trace and find its block size.

        Args:
            path: The file, one JSON object a line.
            block_size: Tokens a block, or None to find it from the first rows.

        Raises:
            OSError: The file cannot be opened.
            TraceError: One of the first rows is malformed, or they do not tell
                the block size.
            ValueError: `block_size` is out of range.
        """
        if block_size is not None and not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ValueError(
                f"block_size must be from 1 to {MAX_BLOCK_SIZE}, not {block_size}"
            )
        self.path = os.fspath(path)
        self.name = os.path.basename(self.path)
        self._line = 0
        # Line, input_length, hash_ids and the whole row of each.
        self._head: list[tuple[int, int, list[int], dict[str, Any]]] = []
        # A trace of known block size may leave out the id of a partly filled
        # last block; a size found by counting ids is right only if none does.
        self._counted = False
        self._file = open(self.path, "rb")  # noqa: SIM115 (`close` closes it)
        try:
            status = os.fstat(self._file.fileno())
            self.total = status.st_size if stat.S_ISREG(status.st_mode) else 0
            self._stream, self._stream_errors = _decompress(self._file, self.path)
            self._parsed = self._parse()
            self.block_size = block_size or self._find_block_size()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Trace:
        """Return the open trace."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file; no row can be read after that."""
        self._file.close()

    @property
    def done(self) -> int:
        """Bytes of the file read so far, before decompression."""
        return self._file.tell() if self.total else 0

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in file order.

        Raises:
            TraceError: A row is malformed, contradicts the block size, or
                cannot be read from the file.
        """
        for _, length, ids, _ in self._rows():
            yield length, ids

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the rows in file order, with `timestamp` and `output_length`.

        A row without them has None and 1.

        Raises:
            TraceError: As in iteration, or one of them is no number in its range.
        """
        for line, length, ids, row in self._rows():
            try:
                timestamp, output_length = parse_arrival(row)
            except ValueError as error:
                raise self._error(str(error), line) from None
            yield length, ids, timestamp, output_length

    def _rows(self) -> Iterator[tuple[int, int, list[int], dict[str, Any]]]:
        yield from self._head
        self._head.clear()
        for length, ids, named_size, row in self._parsed:
            self._check(length, len(ids), named_size)
            yield self._line, length, ids, row

    def _parse(self) -> Iterator[tuple[int, list[int], int | None, dict[str, Any]]]:
        for line in self._lines():
            if line.isspace():
                continue
            try:
                row = parse_row(line)
            except ValueError as error:
                raise self._error(str(error)) from None
            yield row

    def _lines(self) -> Iterator[bytes]:
        try:
            for line in self._stream:
                self._line += 1
                yield line
        except self._stream_errors as error:
            self._line += 1
            raise self._error(f"cannot be read: {error}") from None

    def _check(self, length: int, ids: int, named_size: int | None) -> None:
        size = self.block_size
        if named_size is not None and named_size != size:
            raise self._error(f"block_size {named_size} contradicts {size}")
        most = -(-length // size)
        least = most if self._counted else length // size
        if not least <= ids <= most:
            raise self._error(
                f"too {'few' if ids < least else 'many'} hash_ids: {ids}, where "
                f"input_length {length} makes {most} blocks of {size} tokens"
            )

    def _find_block_size(self) -> int:
        low, high = 1, MAX_BLOCK_SIZE
        for length, ids, named_size, row in islice(self._parsed, HEAD_ROWS):
            if named_size is None:
                row_low, row_high = block_size_limits(length, len(ids))
                fault = f"{len(ids)} hash_ids for input_length {length}"
            else:
                row_low = row_high = named_size
                fault = f"block_size {named_size}"
            row_low, row_high = max(low, row_low), min(high, row_high)
            if row_low > row_high:
                raise self._error(
                    f"{fault}: none of the block sizes that the rows before allow, "
                    f"{low} to {high}, fits; if one is known, give --block-size"
                )
            low, high = row_low, row_high
            self._head.append((self._line, length, ids, row))
            if named_size is not None:
                self.block_size = named_size
                self._check(length, len(ids), named_size)
                return named_size
            if low == high:
                break
        powers = [1 << i for i in range(31) if low <= 1 << i <= high]
        sizes = [low] if low == high else powers
        if len(sizes) != 1:
            raise TraceError(
                f"{self.path}: the first {len(self._head)} rows allow block sizes "
                f"from {low} to {high}; give the right one with --block-size"
            )
        self._counted = True
        return sizes[0]

    def _error(self, message: str, line: int | None = None) -> TraceError:
        return TraceError(f"{self.path}:{line or self._line}: {message}")


def _decompress(
    file: IO[bytes], path: str
) -> tuple[Iterable[bytes], tuple[type[Exception], ...]]:
    """Return a file's lines, and what reading them raises if it is corrupt."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".gz":
        import gzip
        import zlib

        return gzip.GzipFile(fileobj=file), (OSError, EOFError, zlib.error)
    if suffix == ".xz":
        import lzma

        return lzma.LZMAFile(file), (OSError, EOFError, lzma.LZMAError)
    if suffix == ".bz2":
        import bz2

        return bz2.BZ2File(file), (OSError, EOFError)
    return file, (OSError,)
