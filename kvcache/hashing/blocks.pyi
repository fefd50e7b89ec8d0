from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

# Token ids from 0 to 2**63 - 1: ints, or a one-dimensional array of integers.
_Tokens = Sequence[int] | NDArray[np.integer[Any]] | Buffer

_HashFunction = Callable[[Any], bytes]

def hash_block_tokens(
    hash_function: _HashFunction,
    parent_block_hash: bytes | None,
    curr_block_token_ids: _Tokens,
    extra_keys: Any = None,
) -> bytes: ...
@overload
def hash_blocks(
    tokens: list[int] | tuple[int, ...],
    block_size: int,
    parent: bytes | None = None,
    *,
    hash_fn: _HashFunction = ...,
    extra_keys: Iterable[Any] | None = None,
    num_lookahead_tokens: int = 0,
) -> list[bytes]: ...
@overload
def hash_blocks(
    tokens: NDArray[np.integer[Any]] | Buffer,
    block_size: int,
    parent: bytes | None = None,
    *,
    hash_fn: _HashFunction = ...,
    extra_keys: Iterable[Any] | None = None,
    num_lookahead_tokens: int = 0,
) -> NDArray[np.uint8]: ...
@overload
def hash_blocks(
    tokens: Sequence[int],
    block_size: int,
    parent: bytes | None = None,
    *,
    hash_fn: _HashFunction = ...,
    extra_keys: Iterable[Any] | None = None,
    num_lookahead_tokens: int = 0,
) -> list[bytes]: ...
