"""Tokens kept beside cached blocks: a match by content, where no collision may count.

Stores: of each row the tokens of its block and two serials: 80 bytes at 16 tokens.
Invariant: rows have the same serial if and only if they hold the same tokens behind the
same prefix under the same key. A match follows serials from the root on, so every block
that it finds is, by induction, the prompt's, whatever the digests say.
Costs: O(blocks matched); nothing is hashed along the hints. A look-up in the table also
passes the older copies of a key that are none of the prompt: normally there are none.
Threads: as the index: the caller's lock or the GIL guards it.
"""
# In 100,000 blocks, half of them cached, 63 / 2,000 matched: 11 / 8 ns a block for one
# prompt again and again, against 17 / 14 by hashes; 29 / 24 for all prompts in turns in
# random places, against 28 / 23: three cache misses a block take the place of one and
# the hashing. To cache a block: 65 ns, against 50.
from libc.stdint cimport int32_t, uint8_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from kvcache._memory cimport allocate, deallocate, kvc_prefetch, zeroed
from kvcache._types cimport NULL_BLOCK, make_key, row_has_digest
from kvcache.hash_index cimport MATCH_CHUNK, entry_next, index_find, index_match
from kvcache.hashing.keyed_hash cimport KEYED_BYTES, keyed_chain

cdef enum:
    LINE = 64               # bytes of a cache line
    USUAL_BLOCK_SIZE = 16   # a constant, so that its tokens are compared in one go


cdef int kept_init(
    KeptTokens* kept, block_id_t num_rows, Py_ssize_t block_size
) except -1:
    """Memory for the records of so many rows, in place of what was there.

    Raises:
        MemoryError: There is not that much. Nothing changed.
    """
    cdef size_t count = <size_t> num_rows * <size_t> block_size
    cdef void* memory = allocate(
        count + LINE // sizeof(int32_t), sizeof(int32_t), "kept tokens"
    )
    cdef void* prefixes = zeroed(num_rows, sizeof(KeptPrefix))
    if prefixes == NULL:
        deallocate(memory)
        raise MemoryError(f"cannot allocate serials for {num_rows} blocks")
    kept_free(kept)
    kept.memory = memory
    kept.prefixes = <KeptPrefix*> prefixes
    kept.tokens = <int32_t*> (
        (<uintptr_t> memory + LINE - 1) & ~<uintptr_t> (LINE - 1)
    )
    kept.num_rows = num_rows
    kept.block_size = block_size
    return 0


cdef void kept_free(KeptTokens* kept) noexcept:
    deallocate(kept.memory)
    deallocate(kept.prefixes)
    memset(kept, 0, sizeof(KeptTokens))


cdef size_t kept_bytes(const KeptTokens* kept) noexcept nogil:
    cdef size_t a_row = kept.block_size * sizeof(int32_t) + sizeof(KeptPrefix)
    return kept.num_rows * a_row + LINE if kept.memory != NULL else 0


cdef uint64_t kept_store(
    KeptTokens* kept,
    BlockMeta* rows,
    block_id_t block,
    uint64_t parent,
    const int32_t* tokens,
    block_id_t copy,
) noexcept nogil:
    cdef KeptPrefix* prefix = &kept.prefixes[block]
    memcpy(
        kept.tokens + block * kept.block_size, tokens,
        kept.block_size * sizeof(int32_t),
    )
    prefix.parent = parent
    if copy != NULL_BLOCK:
        prefix.serial = kept.prefixes[copy].serial
    else:
        kept.last_serial += 1
        prefix.serial = kept.last_serial
    rows[block].flags |= FLAG_TOKENS_KEPT
    return prefix.serial


cdef void kept_move(
    KeptTokens* kept, BlockMeta* rows, block_id_t source, block_id_t target
) noexcept nogil:
    kept.prefixes[target] = kept.prefixes[source]
    memcpy(
        kept.tokens + target * kept.block_size,
        kept.tokens + source * kept.block_size,
        kept.block_size * sizeof(int32_t),
    )
    rows[target].flags |= FLAG_TOKENS_KEPT


cdef block_id_t kept_find(
    const KeptTokens* kept,
    const HashIndex* index,
    const Key* key,
    uint64_t parent,
    const int32_t* tokens,
) noexcept nogil:
    cdef int32_t entry = index_find(index, key)
    while entry:
        # A side entry is a further key, under which no tokens were recorded.
        if entry > 0 and kept_is(
            kept, &index.rows[entry - 1], entry - 1, parent, tokens, kept.block_size
        ):
            return entry - 1
        entry = entry_next(<HashIndex*> index, entry)[0]
    return NULL_BLOCK


cdef inline Py_ssize_t follow_hints(
    const KeptTokens* kept,
    const HashIndex* index,
    block_id_t before,
    const int32_t* tokens,
    Py_ssize_t block_size,
    Py_ssize_t count,
    block_id_t* blocks,
) noexcept nogil:
    """Follow the hints behind a block that matched; how many of `count` are right.

    Only a key's single copy is believed: of several, the oldest is to answer.
    """
    cdef block_id_t block = before
    cdef uint64_t serial = kept.prefixes[before].serial
    cdef const BlockMeta* row
    cdef Py_ssize_t i
    for i in range(count):
        block = index.successor[block]
        blocks[i] = block
        if block == NULL_BLOCK:
            count = i
            break
        kvc_prefetch(&index.rows[block])
        kvc_prefetch(&kept.prefixes[block])
        kvc_prefetch(kept.tokens + block * block_size)
    for i in range(count):
        block = blocks[i]
        row = &index.rows[block]
        if row.prev_copy != block + 1 or not kept_is(
            kept, row, block, serial, tokens + i * block_size, block_size
        ):
            return i
        serial = kept.prefixes[block].serial
    return count


cdef inline Py_ssize_t look_up(
    const KeptTokens* kept,
    const HashIndex* index,
    const KeyedHash* hasher,
    block_id_t before,
    const int32_t* tokens,
    Py_ssize_t count,
    uint64_t suffix,
    block_id_t* blocks,
) noexcept nogil:
    """Hash blocks behind one that matched, or 0, and ask the table; how many match."""
    cdef uint8_t[MATCH_CHUNK * 16] digests
    cdef const uint8_t* places[MATCH_CHUNK]
    cdef const uint8_t* parent = &hasher.root[0]
    cdef uint64_t serial = 0
    cdef Py_ssize_t size = kept.block_size, hits, i
    cdef Key key
    if before != NULL_BLOCK:
        parent = &index.rows[before].block_hash[0]
        serial = kept.prefixes[before].serial
    keyed_chain(hasher, parent, tokens, size, count, digests)
    for i in range(count):
        places[i] = digests + i * KEYED_BYTES
    hits = index_match(index, before, places, KEYED_BYTES, suffix, count, blocks)
    for i in range(hits):
        kvc_prefetch(&kept.prefixes[blocks[i]])
        kvc_prefetch(kept.tokens + blocks[i] * size)
    for i in range(count):
        if i >= hits or not (
            # It may have been found by a further key.
            row_has_digest(&index.rows[blocks[i]], places[i], KEYED_BYTES, suffix)
            and kept_is(
                kept, &index.rows[blocks[i]], blocks[i], serial, tokens + i * size, size
            )
        ):
            make_key(&key, places[i], KEYED_BYTES, suffix)
            blocks[i] = kept_find(kept, index, &key, serial, tokens + i * size)
            if blocks[i] == NULL_BLOCK:
                return i
        serial = kept.prefixes[blocks[i]].serial
    return count


cdef Py_ssize_t kept_match(
    const KeptTokens* kept,
    const HashIndex* index,
    const KeyedHash* hasher,
    const int32_t* tokens,
    Py_ssize_t count,
    uint64_t suffix,
    block_id_t* blocks,
) noexcept nogil:
    cdef Py_ssize_t size = kept.block_size, done = 0, ahead = 1, wanted, hits
    cdef block_id_t before = NULL_BLOCK
    while done < count:
        if before != NULL_BLOCK and index.successor != NULL:
            wanted = min(count - done, <Py_ssize_t> MATCH_CHUNK)
            if size == USUAL_BLOCK_SIZE:
                hits = follow_hints(
                    kept, index, before, tokens + done * size, USUAL_BLOCK_SIZE,
                    wanted, blocks + done,
                )
            else:
                hits = follow_hints(
                    kept, index, before, tokens + done * size, size, wanted,
                    blocks + done,
                )
            if hits:
                done += hits
                before = blocks[done - 1]
                ahead = 1  # a hint that fails among good ones is likely alone
            if hits == wanted:
                continue
        wanted = min(count - done, ahead)
        ahead = min(2 * ahead, <Py_ssize_t> MATCH_CHUNK)
        hits = look_up(
            kept, index, hasher, before, tokens + done * size, wanted, suffix,
            blocks + done,
        )
        done += hits
        if hits < wanted:
            break
        before = blocks[done - 1]
    return done
