from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

# Rows of requests, shape (n,); int32 arrays are used without a copy.
_Rows = NDArray[np.integer[Any]] | Iterable[int]
_Tokens = NDArray[np.integer[Any]] | Sequence[int]

@disjoint_base
class Requests:
    def add_request(
        self,
        tokens: _Tokens | None = None,
        *,
        hashes: Iterable[bytes] = (),
        num_tokens: int | None = None,
        skip_reading_prefix_cache: bool = False,
        **content: Any,
    ) -> int: ...
    def append(
        self,
        row: int,
        tokens: int | _Tokens | None = None,
        *,
        num_tokens: int | None = None,
        hashes: Iterable[bytes] = (),
    ) -> None: ...
    def append_step(self, rows: _Rows, tokens: _Tokens) -> None: ...
    def num_tokens(self, row: int) -> int: ...
    @property
    def num_requests(self) -> int: ...
