from collections.abc import Sequence
from typing import Any, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from kvcache.hashing.chain import CompiledHash

PATHS: tuple[str, ...]

@final
class Keyed(CompiledHash):
    def __new__(cls, key: bytes | None = None, *, path: str | None = None) -> Keyed: ...
    def __call__(self, value: object, /) -> bytes: ...
    def __reduce__(self) -> NoReturn: ...
    @property
    def root(self) -> bytes: ...
    @property
    def path(self) -> str: ...
    def hash_blocks(
        self,
        tokens: Sequence[int] | NDArray[np.integer[Any]],
        block_size: int,
        parent: bytes | None = None,
    ) -> NDArray[np.uint8]: ...
    def hash_block(
        self,
        tokens: Sequence[int] | NDArray[np.integer[Any]],
        parent: bytes | None = None,
        extra: bytes = b"",
    ) -> bytes: ...
