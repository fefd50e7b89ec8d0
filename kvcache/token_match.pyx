"""From the tokens of a request to the blocks that hold its prefix, in one pass.

Stores: nothing; reads a hash index and the digests in its rows.
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
# Keeping each block's tokens, to compare them along the hints instead of hashing, took
# 6.4 / 9.1 ns a block without the check of the parent's digest that it also needs, and
# at least 80 bytes a block: no faster than these 8.5 ns, so it would only be for those
# who must rule out a collision.
from libc.stdint cimport int32_t, uint8_t, uint64_t

from kvcache._memory cimport kvc_prefetch
from kvcache._types cimport (
    FLAG_INDEXED,
    GROUP_ID_BYTES,
    NULL_BLOCK,
    BlockMeta,
    block_id_t,
    load_word,
)
from kvcache.hash_index cimport MATCH_CHUNK, index_match
from kvcache.hashing.keyed_hash cimport KEYED_BYTES, keyed_chain, keyed_each


cdef inline bint row_has_digest(
    const BlockMeta* row, const uint8_t* digest, uint64_t suffix
) noexcept nogil:
    """Whether a row's key is the digest in the group; it is zero beyond its end."""
    return (
        (load_word(row.block_hash) ^ load_word(digest))
        | (load_word(row.block_hash + 8) ^ load_word(digest + 8))
        | (load_word(row.block_hash + 16) ^ suffix)
        | (row.block_hash_len ^ <uint64_t> (KEYED_BYTES + GROUP_ID_BYTES))
    ) == 0


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
            and row_has_digest(row, digests + i * KEYED_BYTES, suffix)
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
