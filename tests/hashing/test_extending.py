"""Compiled code of others hashes without the GIL, and adds hash functions."""

import importlib.util
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache.hashing import (
    BlockHasher,
    get_request_block_hasher,
    hash_block_tokens,
    hash_blocks,
)

pytest.importorskip("Cython")

SOURCE = '''
# cython: language_level=3
from libc.stdint cimport int32_t, uint8_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from kvcache.hashing.chain cimport SHA256, CompiledHash, hash_chain_t, scratch_bytes_t
from kvcache.hashing.tokens cimport TokenSource


def sha256_without_the_gil(const int32_t[::1] tokens, int block_size, bytes parent):
    cdef hash_chain_t hash_chain = SHA256.hash_chain
    cdef scratch_bytes_t scratch_bytes = SHA256.scratch_bytes
    cdef const uint8_t* start = parent
    cdef size_t length = len(parent), count = tokens.shape[0] // block_size
    cdef TokenSource source
    cdef uint8_t* digests = <uint8_t*> malloc(32 * count)
    cdef uint8_t* scratch
    with nogil:
        source.count = tokens.shape[0]
        source.width = sizeof(int32_t)
        source.data = <const char*> &tokens[0]
        scratch = <uint8_t*> malloc(scratch_bytes(32, block_size))
        hash_chain(
            NULL, start, length, &source, 0, block_size, count, scratch, digests
        )
        free(scratch)
    try:
        return [digests[32 * i : 32 * i + 32] for i in range(count)]
    finally:
        free(digests)


cdef void sums(
    const void* state, const uint8_t* parent, size_t parent_length,
    const TokenSource* source, Py_ssize_t first, size_t block_size,
    size_t num_blocks, uint8_t* scratch, uint8_t* digests,
) noexcept nogil:
    cdef size_t i, j
    cdef uint8_t total
    for i in range(num_blocks):
        total = parent[0]
        for j in range(block_size):
            if source.width == 4:
                total += (<const int32_t*> source.data)[first + j]
            else:
                total += (<const long long*> source.data)[first + j]
        memset(digests, total, 16)
        parent = digests
        digests += 16
        first += block_size


cdef size_t no_scratch(size_t parent_length, size_t block_size) noexcept nogil:
    return 0


cdef class Sum(CompiledHash):
    """Adds tokens up: a hash function as simple as can be."""

    def __cinit__(self):
        self.hash_chain = sums
        self.scratch_bytes = no_scratch
        self.digest_length = self.parent_length = 16
        self.root = bytes(16)

    def __call__(self, value):
        parent, tokens, extra_keys = value
        return bytes([(parent[0] + sum(tokens) + len(extra_keys)) % 256]) * 16
'''


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("extension")
    (folder / "extension.pyx").write_text(SOURCE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["-c", "from Cython.Build.Cythonize import main; main()", "-i"]
    subprocess.run(
        [sys.executable, *command, "extension.pyx"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )
    (library,) = [path for path in folder.iterdir() if path.suffix in (".so", ".pyd")]
    spec = importlib.util.spec_from_file_location("extension", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("parent", [b"p" * 32, b"q"])
def test_a_chain_is_hashed_without_the_gil(extension: Any, parent: bytes) -> None:
    tokens = np.arange(100, dtype=np.int32)
    found = extension.sha256_without_the_gil(tokens, 16, parent)
    assert found == hash_blocks(tokens.tolist(), 16, parent)


def test_every_face_takes_a_compiled_hash_function(extension: Any) -> None:
    add = extension.Sum()
    expected = [b"\x0a" * 16, b"\x24" * 16]
    tokens = list(range(1, 10))
    assert hash_blocks(tokens, 4, hash_fn=add) == expected
    assert hash_blocks(np.array(tokens, np.int32), 4, hash_fn=add).tolist() == [
        list(digest) for digest in expected
    ]
    assert hash_block_tokens(add, None, tokens[:4]) == expected[0]
    assert BlockHasher(4, add).append(tokens) == expected

    request = SimpleNamespace(
        block_hashes=[],
        num_tokens=9,
        all_token_ids=tokens,
        lora_request=None,
        mm_features=None,
        cache_salt=None,
        prompt_embeds=None,
    )
    assert get_request_block_hasher(4, add)(request) == expected


def test_a_compiled_hash_function_is_called_where_there_are_extra_keys(
    extension: Any,
) -> None:
    keys = [None, ("a", "b"), None]
    found = hash_blocks([1] * 12, 4, hash_fn=extension.Sum(), extra_keys=keys)
    assert [digest[0] for digest in found] == [4, 10, 14]


def test_a_compiled_hash_function_may_ask_for_parents_of_one_length(
    extension: Any,
) -> None:
    with pytest.raises(ValueError, match="16 bytes, got 32"):
        hash_blocks([1] * 4, 4, bytes(32), hash_fn=extension.Sum())
