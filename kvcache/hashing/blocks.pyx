"""Tokens in, chained block hashes out.

Stores nothing.
Invariant: a hash is hash_fn((parent, tuple of the block's tokens, extra keys)). In C if
hash_fn has a C form and there are no extra keys and no lookahead; otherwise by the
serialiser itself, given the very objects, because pickle tells equal ones apart.
Costs: in C one pass over the tokens, and on the list face an object a hash.
Threads: reentrant; a long chain is hashed without the GIL.
"""
cimport numpy as cnp
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_Check,
    PyBytes_CheckExact,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.list cimport PyList_CheckExact, PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_CheckExact
from libc.stdint cimport uint8_t

import numpy as np

from kvcache._args cimport as_int
from kvcache.hashing.chain cimport SHA256, SHA256_CBOR, fill_chain
from kvcache.hashing.encoding cimport encode_source, encoded_bound
from kvcache.hashing.tokens cimport as_tokens, is_buffer, token_tuple

from kvcache.hashing import functions
from kvcache.hashing.functions import sha256

cnp.import_array()

cdef object _sha256 = functions.sha256
cdef object _sha256_cbor = functions.sha256_cbor
cdef object _xxhash = functions.xxhash
cdef object _xxhash_cbor = functions.xxhash_cbor


# -- what all faces share ---------------------------------------------------------


cdef CompiledHash compiled_form(object hash_fn):
    """The C form of a hash function, or None."""
    if hash_fn is _sha256:
        return SHA256
    if hash_fn is _sha256_cbor:
        return SHA256_CBOR
    if isinstance(hash_fn, CompiledHash):
        if (<CompiledHash> hash_fn).hash_chain != NULL:
            return hash_fn
    if not callable(hash_fn):
        raise TypeError(f"hash_fn must be a hash function, got {hash_fn!r}")
    return None


cdef object checked_parent(object parent, object hash_fn, CompiledHash compiled):
    """The parent itself, the root for None or no bytes at all."""
    if parent is not None and not PyBytes_Check(parent):
        raise TypeError(f"a parent must be bytes or None, got {parent!r}")
    if not parent:
        if compiled is not None and compiled.root is not None:
            return compiled.root
        parent = functions.root_hash(hash_fn)
    if compiled is not None and compiled.parent_length:
        if len(parent) != compiled.parent_length:
            raise ValueError(
                f"a parent must have {compiled.parent_length} bytes,"
                f" got {len(parent)}: {parent!r}"
            )
    return parent


cdef bytes checked_digest(object digest, object hash_fn):
    if not PyBytes_CheckExact(digest):
        raise TypeError(f"{hash_fn!r} must return bytes, got {digest!r}")
    return digest


cdef bytes encoded(
    bint cbor, bytes parent, const TokenSource* source, Py_ssize_t first,
    Py_ssize_t count,
):
    """The block's encoding, as an object."""
    cdef size_t length = PyBytes_GET_SIZE(parent)
    cdef bytes memory = PyBytes_FromStringAndSize(NULL, encoded_bound(length, count))
    cdef uint8_t* out = <uint8_t*> PyBytes_AS_STRING(memory)
    length = encode_source(
        cbor, <const uint8_t*> PyBytes_AS_STRING(parent), length, source, first, count,
        out,
    )
    return out[:length]


cdef bytes hash_one(
    object hash_fn,
    object parent,
    const TokenSource* source,
    Py_ssize_t first,
    Py_ssize_t count,
    object extra_keys,
):
    """The hash of a block, not in C."""
    cdef bint cbor = hash_fn is _xxhash_cbor
    if extra_keys is None and PyBytes_CheckExact(parent) and (
        cbor or hash_fn is _xxhash
    ):
        return functions.xxhash_digest(encoded(cbor, parent, source, first, count))
    tokens = token_tuple(source, first, count)
    return checked_digest(hash_fn((parent, tokens, extra_keys)), hash_fn)


cdef list hash_range(
    object hash_fn,
    CompiledHash compiled,
    object parent,
    const TokenSource* source,
    Py_ssize_t first,
    Py_ssize_t block_size,
    Py_ssize_t num_blocks,
    Py_ssize_t num_lookahead,
    list extra_keys,
    bint keep_gil,
):
    """Hashes of the blocks that begin at token `first`; extra_keys has one a block."""
    cdef list hashes = []
    cdef Py_ssize_t done = 0, run, ahead
    cdef bint plain = compiled is not None and not num_lookahead
    cdef object keys = None
    while done < num_blocks:
        run = 0
        if plain and PyBytes_CheckExact(parent):
            run = num_blocks - done
            if extra_keys is not None:
                run = 0
                while done + run < num_blocks and extra_keys[done + run] is None:
                    run += 1
        if run:
            hashes += chain_list(
                compiled, parent, source, first, block_size, run, keep_gil
            )
        else:
            if extra_keys is not None:
                keys = extra_keys[done]
            if num_lookahead:
                ahead = first + block_size
                keys = (keys, *token_tuple(source, ahead, num_lookahead))
            hashes.append(hash_one(hash_fn, parent, source, first, block_size, keys))
            keys = None
            run = 1
        parent = hashes[len(hashes) - 1]
        done += run
        first += run * block_size
    return hashes


cdef list chain_list(
    CompiledHash compiled,
    bytes parent,
    const TokenSource* source,
    Py_ssize_t first,
    Py_ssize_t block_size,
    Py_ssize_t num_blocks,
    bint keep_gil,
):
    """A chain in C, its digests as objects."""
    cdef Py_ssize_t length = compiled.digest_length
    cdef bytes memory = PyBytes_FromStringAndSize(NULL, num_blocks * length)
    cdef char* digests = PyBytes_AS_STRING(memory)
    cdef list hashes = PyList_New(num_blocks)
    cdef object digest
    cdef Py_ssize_t i
    fill_chain(
        compiled,
        <const uint8_t*> PyBytes_AS_STRING(parent),
        PyBytes_GET_SIZE(parent),
        source,
        first,
        block_size,
        num_blocks,
        <uint8_t*> digests,
        keep_gil,
    )
    for i in range(num_blocks):
        digest = PyBytes_FromStringAndSize(digests + i * length, length)
        Py_INCREF(digest)
        PyList_SET_ITEM(hashes, i, digest)
    return hashes


# -- one block, one prompt --------------------------------------------------------


def hash_block_tokens(
    hash_function, parent_block_hash, curr_block_token_ids, extra_keys=None
):
    """The hash of one block.

    Args:
        hash_function: Any function of an object to bytes.
        parent_block_hash: Hash of the block before it, of any length; None for a
            first block.
        curr_block_token_ids: The block's token ids, a sequence of ints or an integer
            array.
        extra_keys: What else the hash covers; None for nothing.

    Raises:
        TypeError: parent_block_hash is not bytes, or a token not an int.
        ValueError: A token is negative or over 2**63 - 1.
    """
    cdef TokenSource source
    cdef object parent = parent_block_hash, tokens = curr_block_token_ids
    cdef CompiledHash compiled = compiled_form(hash_function)
    cdef object _alive = as_tokens(tokens, &source)
    cdef bytes digest
    parent = checked_parent(parent, hash_function, compiled)
    if extra_keys is not None:
        # A list's or tuple's own ints, and a tuple itself: keys may hold it too.
        if PyList_CheckExact(tokens) or PyTuple_CheckExact(tokens):
            graph = (parent, tuple(tokens), extra_keys)
        else:
            graph = (parent, token_tuple(&source, 0, source.count), extra_keys)
        return checked_digest(hash_function(graph), hash_function)
    if compiled is None or not PyBytes_CheckExact(parent):
        return hash_one(hash_function, parent, &source, 0, source.count, None)
    digest = PyBytes_FromStringAndSize(NULL, compiled.digest_length)
    fill_chain(
        compiled,
        <const uint8_t*> PyBytes_AS_STRING(parent),
        PyBytes_GET_SIZE(parent),
        &source,
        0,
        source.count,
        1,
        <uint8_t*> PyBytes_AS_STRING(digest),
        True,
    )
    return digest


def hash_blocks(
    tokens,
    block_size,
    parent=None,
    *,
    hash_fn=sha256,
    extra_keys=None,
    num_lookahead_tokens=0,
):
    """The chained hashes of all full blocks of a prompt.

    Args:
        tokens: Token ids: a list, a tuple or another sequence of ints; or an array, a
            one-dimensional NumPy array or another buffer of integers.
        block_size: Tokens a block.
        parent: Hash of the block before the first; None if that begins the prompt. With
            an array of tokens it has 16 or 32 bytes.
        hash_fn: Any function of an object to bytes.
        extra_keys: One entry a block, None where it has none.
        num_lookahead_tokens: Tokens behind each block that its hash covers too; a block
            whose lookahead tokens are missing is not full.

    Returns:
        A list of bytes; for an array of tokens an array, shape (n, L), uint8, L being
        the bytes of a digest.

    Raises:
        TypeError: parent is not bytes, or a token not an int.
        ValueError: A token is negative or over 2**63 - 1, block_size is 0, or
            extra_keys does not have an entry for each block.
    """
    cdef TokenSource source
    cdef Py_ssize_t size = as_int(block_size, "block_size", 1, MAX_BLOCK_SIZE)
    cdef Py_ssize_t ahead = as_int(
        num_lookahead_tokens, "num_lookahead_tokens", 0, MAX_BLOCK_SIZE
    )
    cdef CompiledHash compiled = compiled_form(hash_fn)
    cdef bint arrays = is_buffer(tokens)
    cdef object _alive = as_tokens(tokens, &source)
    cdef Py_ssize_t num_blocks = max(source.count - ahead, 0) // size
    cdef list keys = None if extra_keys is None else list(extra_keys)
    cdef list hashes
    if keys is not None and len(keys) != num_blocks:
        raise ValueError(
            f"{num_blocks} blocks need as many extra_keys, got {len(keys)}"
        )
    if arrays and PyBytes_Check(parent) and len(parent) not in (16, 32):
        raise ValueError(
            f"a parent must have 16 or 32 bytes, got {len(parent)}: {parent!r}"
        )
    parent = checked_parent(parent, hash_fn, compiled)
    if (
        arrays and compiled is not None and keys is None and not ahead
        and PyBytes_CheckExact(parent)
    ):
        return chain_array(compiled, parent, &source, size, num_blocks)
    hashes = hash_range(
        hash_fn, compiled, parent, &source, 0, size, num_blocks, ahead, keys, False
    )
    return rows(hashes, hash_fn, compiled) if arrays else hashes


cdef cnp.ndarray chain_array(
    CompiledHash compiled,
    bytes parent,
    const TokenSource* source,
    Py_ssize_t block_size,
    Py_ssize_t num_blocks,
):
    """A chain in C, its digests as rows."""
    cdef cnp.npy_intp[2] shape
    shape[0] = num_blocks
    shape[1] = compiled.digest_length
    cdef cnp.ndarray digests = cnp.PyArray_SimpleNew(2, shape, cnp.NPY_UINT8)
    fill_chain(
        compiled,
        <const uint8_t*> PyBytes_AS_STRING(parent),
        PyBytes_GET_SIZE(parent),
        source,
        0,
        block_size,
        num_blocks,
        <uint8_t*> cnp.PyArray_DATA(digests),
        False,
    )
    return digests


cdef object rows(list hashes, object hash_fn, CompiledHash compiled):
    """Digests as an array, shape (n, L), uint8."""
    # Without a digest to measure, the root of this function tells the length.
    if compiled is not None:
        length = compiled.digest_length
    else:
        length = len(hashes[0] if hashes else hash_fn(""))
    if any([len(digest) != length for digest in hashes]):
        raise ValueError(f"{hash_fn!r} gave digests of different lengths")
    flat = np.frombuffer(b"".join(hashes), np.uint8)
    return flat.reshape(len(hashes), length).copy()
