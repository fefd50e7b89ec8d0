"""From the tokens of a request to the blocks of its prefix: found, or cached.

Stores: nothing; reads and fills a hash index and the digests in its rows.
Invariant: a block counts only if its row holds the digest of all tokens up to its end,
computed here; the hints only say which digest to try as the parent of the next.
Costs: O(blocks matched); hashing stops at the first miss, or up to as many blocks
behind it as matched before it, never over 31.
Threads: as the index: the caller's lock or the GIL guards it.
"""
# A chain of digests must be computed one after the other, 15 ns a block. But a cached
# block's row already holds its digest, so where the hints name a run of rows, each can
# be checked with the digest in the row before it as parent, all at once, 8.5 ns a
# block. By induction the run is right up to the first row that differs, and the digest
# computed for that place is right too. In 100,000 blocks, half of them cached, 63 /
# 2,000 matched: 16 / 14 ns a block, against 28 / 21 for hashing and then matching.
#
# A pool that keeps tokens compares those instead (kept_tokens.pyx), at 11 / 8 ns a
# block and 80 bytes more for each: for those who must rule out a collision.
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy

from kvcache._memory cimport kvc_prefetch
from kvcache._types cimport (
    FLAG_INDEXED,
    FLAG_TOKENS_KEPT,
    GROUP_ID_BYTES,
    NULL_BLOCK,
    BlockMeta,
    Key,
    block_id_t,
    group_suffix,
    load_word,
    make_key,
    row_has_digest,
)
from kvcache.hash_index cimport (
    MATCH_CHUNK,
    index_add_row,
    index_chain,
    index_drop_side,
    index_match,
)
from kvcache.hashing.keyed_hash cimport (
    KEYED_BYTES,
    as_tokens,
    keyed_chain,
    keyed_chain_wide,
    keyed_each,
)
from kvcache.kept_tokens cimport kept_find, kept_store, same_tokens
from kvcache.pool_state cimport is_block, prefetch_digests

cnp.import_array()


cdef inline Py_ssize_t match_guessed(
    const HashIndex* index,
    const KeyedHash* hasher,
    block_id_t before,
    const uint8_t* parent,
    const int32_t* tokens,
    Py_ssize_t block_size,
    Py_ssize_t count,
    uint64_t suffix,
    block_id_t* blocks,
    uint8_t* digests,
) noexcept nogil:
    """Follow the hints behind a block with a digest; how many of `count` are right.

    If not all, the digest in that place is the right one of the block that follows.
    """
    cdef const uint8_t* parents[MATCH_CHUNK]
    cdef const BlockMeta* row
    cdef Py_ssize_t i
    parents[0] = parent
    for i in range(count):
        before = index.successor[before]
        blocks[i] = before
        if before == NULL_BLOCK:
            count = i + 1
            break
        kvc_prefetch(&index.rows[before])
        if i + 1 < count:
            parents[i + 1] = index.rows[before].block_hash
    keyed_each(hasher, parents, tokens, block_size, count, digests)
    for i in range(count):
        row = &index.rows[blocks[i]]
        # Another copy may be older, and then answers for the key.
        if not (
            row.flags & FLAG_INDEXED
            and row.prev_copy == blocks[i] + 1
            and row_has_digest(row, digests + i * KEYED_BYTES, KEYED_BYTES, suffix)
        ):
            return i
    return count


cdef Py_ssize_t match_tokens(
    const HashIndex* index,
    const KeyedHash* hasher,
    const int32_t* tokens,
    Py_ssize_t block_size,
    Py_ssize_t count,
    uint64_t suffix,
    block_id_t* blocks,
) noexcept nogil:
    cdef uint8_t[MATCH_CHUNK * 16] digests
    cdef const uint8_t* places[MATCH_CHUNK]
    cdef uint8_t[16] parent
    cdef Py_ssize_t done = 0, ahead = 1, wanted, hits, i
    cdef bint guessing = False
    for i in range(MATCH_CHUNK):
        places[i] = digests + i * KEYED_BYTES
    for i in range(KEYED_BYTES):
        parent[i] = hasher.root[i]
    while done < count:
        if guessing:
            wanted = min(count - done, <Py_ssize_t> MATCH_CHUNK)
            hits = match_guessed(
                index, hasher, blocks[done - 1], parent, tokens + done * block_size,
                block_size, wanted, suffix, blocks + done, digests,
            )
            if hits < wanted:
                # A block without a good hint: the table knows. After two in a row, a
                # run of blocks is looked up there before hints are tried again.
                guessing = hits > 0
                wanted = hits + 1
                hits += index_match(
                    index, NULL_BLOCK, places + hits, KEYED_BYTES, suffix, 1,
                    blocks + done + hits,
                )
        else:
            wanted = min(count - done, ahead)
            ahead = min(2 * ahead, <Py_ssize_t> MATCH_CHUNK)
            keyed_chain(
                hasher, parent, tokens + done * block_size, block_size, wanted, digests
            )
            hits = index_match(
                index, blocks[done - 1] if done else NULL_BLOCK, places, KEYED_BYTES,
                suffix, wanted, blocks + done,
            )
            guessing = index.successor != NULL
        if hits < wanted:
            return done + hits
        done += hits
        for i in range(KEYED_BYTES):
            parent[i] = places[wanted - 1][i]
    return done


cdef cnp.ndarray tokens_behind(object tokens, Py_ssize_t skip):
    if skip and (
        type(tokens) is list
        or type(tokens) is tuple
        or (cnp.PyArray_CheckExact(tokens) and cnp.PyArray_NDIM(tokens) == 1)
    ):
        # A long request that grows is not read anew.
        return as_tokens(tokens[skip:])
    return as_tokens(tokens)[skip:]


cdef int read_parent(
    const PoolState* pool,
    block_id_t block,
    unsigned int group_id,
    const int32_t* tokens,
    Py_ssize_t block_size,
    TokenParent* parent,
) except -1:
    cdef const BlockMeta* row
    if block == NULL_BLOCK:
        raise ValueError("the null block cannot be the parent of blocks to cache")
    if not is_block(pool, block):
        raise ValueError(
            f"block id {block} is not one of the pool's {pool.num_blocks}"
        )
    row = &pool.rows[block]
    if (
        row.block_hash_len != KEYED_BYTES + GROUP_ID_BYTES
        or load_word(row.block_hash + KEYED_BYTES) != group_suffix(group_id)
    ):
        raise ValueError(
            f"block {block}, the parent, carries no hash of {KEYED_BYTES} bytes in"
            f" group {group_id}"
        )
    parent.block = block
    memcpy(parent.digest, row.block_hash, KEYED_BYTES)
    if pool.kept != NULL:
        if not row.flags & FLAG_TOKENS_KEPT:
            raise ValueError(f"of block {block}, the parent, no tokens are kept")
        if not same_tokens(
            pool.kept.tokens + block * block_size, tokens, block_size
        ):
            raise ValueError(
                f"block {block}, the parent, holds other tokens than those given"
            )
        parent.serial = pool.kept.prefixes[block].serial
    return 0


cdef bytes hash_behind(
    const KeyedHash* hasher,
    const TokenParent* parent,
    cnp.ndarray tokens,
    Py_ssize_t skip,
    Py_ssize_t block_size,
    Py_ssize_t count,
):
    cdef bytes digests = PyBytes_FromStringAndSize(NULL, count * KEYED_BYTES)
    cdef uint8_t* data = <uint8_t*> PyBytes_AS_STRING(digests)
    if cnp.PyArray_TYPE(tokens) == cnp.NPY_INT32:
        keyed_chain(
            hasher, &parent.digest[0], <const int32_t*> cnp.PyArray_DATA(tokens) + skip,
            block_size, count, data,
        )
    else:
        keyed_chain_wide(
            hasher, &parent.digest[0], <const int64_t*> cnp.PyArray_DATA(tokens) + skip,
            block_size, count, data,
        )
    return digests


cdef void cache_tokens(
    PoolState* pool,
    const TokenParent* parent,
    const block_id_t* ids,
    const uint8_t* digests,
    const int32_t* tokens,
    Py_ssize_t block_size,
    Py_ssize_t count,
    uint64_t suffix,
    int32_t num_tokens,
) noexcept nogil:
    cdef block_id_t before = parent.block, copy = NULL_BLOCK
    cdef uint64_t serial = parent.serial
    cdef Py_ssize_t i
    cdef Key key
    for i in range(count):
        if i % MATCH_CHUNK == 0:
            prefetch_digests(
                pool, digests + i * KEYED_BYTES, KEYED_BYTES, suffix, count - i
            )
        make_key(&key, digests + i * KEYED_BYTES, KEYED_BYTES, suffix)
        # One made by the caller, through the map: the row's own takes its place.
        index_drop_side(pool.index, &key, ids[i])
        if pool.kept != NULL:
            copy = kept_find(
                pool.kept, pool.index, &key, serial, tokens + i * block_size
            )
        num_tokens += <int32_t> block_size
        index_add_row(pool.index, ids[i], &key, num_tokens)
        index_chain(pool.index, before, ids[i])
        before = ids[i]
        if pool.kept != NULL:
            serial = kept_store(
                pool.kept, pool.rows, ids[i], serial, tokens + i * block_size, copy
            )
