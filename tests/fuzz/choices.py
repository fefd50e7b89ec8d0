"""Decisions drawn from bytes, so that whatever mutates the bytes changes decisions."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """What is drawn when the bytes have run out is 0, or the first of its kind."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def __bool__(self) -> bool:
        """Whether bytes are left."""
        return self.at < len(self.data)

    def take(self, n: int) -> bytes:
        """The next n bytes, or as many as are left."""
        taken = self.data[self.at : self.at + n]
        self.at += len(taken)
        return taken

    def below(self, n: int) -> int:
        """A number from 0 to n - 1, of as few bytes as n - 1 takes."""
        width = -(-(n - 1).bit_length() // 8)
        return int.from_bytes(self.take(width), "little") % n

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]
