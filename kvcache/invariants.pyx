"""check(): proves every invariant of a pool in O(n) and names the first that fails.

The states themselves are predicates (`is_free`, `is_linked`, `has_hash` in _types.pxd).
Each function below is one invariant; the order is from the queue up to the index, so
that the first failure is the cause and not a consequence.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t

from kvcache._types cimport (
    ANCHOR,
    FLAG_INDEXED,
    FLAG_NULL,
    FLAG_TOKENS_KEPT,
    FOREIGN,
    GROUP_ID_BYTES,
    NULL_BLOCK,
    BlockMeta,
    Key,
    block_id_t,
    has_hash,
    is_free,
    is_linked,
)
from kvcache.free_queue cimport FreeQueue
from kvcache.hash_index cimport (
    SIDE_VACANT,
    HashIndex,
    entry_key,
    entry_next,
    entry_prev,
    index_slot,
    index_tag,
)

from kvcache.hashing.keyed_hash cimport KEYED_BYTES
from kvcache.kept_tokens cimport KeptPrefix, KeptTokens


cdef int fail(str what) except -1:
    raise AssertionError(what)


cdef int check_queue(PoolState* pool) except -1:
    """Walking from the anchor meets num_free rows, each free, each linked both ways."""
    cdef FreeQueue* queue = pool.queue
    cdef block_id_t at = ANCHOR, behind
    cdef Py_ssize_t count = 0
    while True:
        behind = pool.rows[at].next_free_block
        if behind != ANCHOR and not 0 <= behind < pool.num_blocks:
            fail(f"block {at} is linked to {behind}, which is no block")
        if pool.rows[behind].prev_free_block != at:
            fail(f"block {behind} follows {at} but does not link back to it")
        if behind == ANCHOR:
            break
        if not is_free(&pool.rows[behind]):
            fail(f"block {behind} is in the free queue and not free")
        count += 1
        at = behind  # each links back, so it ends at the anchor
    if count != queue.num_free:
        fail(f"the free queue holds {count} blocks and counts {queue.num_free}")
    return 0


cdef int check_rows(PoolState* pool) except -1:
    """A block is linked if and only if it is free; only block 0 is null."""
    cdef block_id_t block
    cdef BlockMeta* row
    for block in range(pool.num_blocks):
        row = &pool.rows[block]
        if bool(row.flags & FLAG_NULL) != (block == NULL_BLOCK):
            fail(f"block {block} is {'' if row.flags & FLAG_NULL else 'not '}null")
        if row.flags & ~(FLAG_NULL | FLAG_INDEXED | FLAG_TOKENS_KEPT):
            fail(f"block {block} has the flags {row.flags}")
        if row.ref_cnt < 0:
            fail(f"block {block} has the reference count {row.ref_cnt}")
        if is_linked(row) != is_free(row):
            fail(
                f"block {block} with {row.ref_cnt} references is"
                f" {'' if is_linked(row) else 'not '}in the free queue"
            )
        if row.flags & FLAG_INDEXED and not has_hash(row):
            fail(f"block {block} is in the index and has no hash")
        if row.flags & FLAG_TOKENS_KEPT and not row.flags & FLAG_INDEXED:
            fail(f"block {block} has its tokens kept and is not in the index")
        if row.flags & FLAG_TOKENS_KEPT and pool.kept == NULL:
            fail(f"block {block} has its tokens kept in a pool that keeps none")
    return 0


cdef int check_entry(HashIndex* index, int32_t entry) except -1:
    """An entry is a row that knows of it, or a side entry in use."""
    if entry > 0:
        if entry > index.num_rows:
            fail(f"the index names block {entry - 1}")
        if not index.rows[entry - 1].flags & FLAG_INDEXED:
            fail(f"the index names block {entry - 1}, which does not know of it")
    elif -entry > index.side_capacity or index.side[-entry - 1].kind == SIDE_VACANT:
        fail(f"the index names the vacant side entry {-entry}")
    return 0


cdef int check_copies(HashIndex* index, int32_t head, uint32_t tag) except -1:
    """The copies of one key hang together, oldest first; how many there are."""
    cdef Key key, own
    cdef int32_t entry = head, before, behind
    cdef int count = 0
    check_entry(index, head)
    before = entry_prev(index, head)[0]
    entry_key(index, head, &key)
    if index_tag(index, &key) != tag:
        fail(f"the slot of entry {head} has a tag that is not its key's")
    while entry:
        check_entry(index, entry)
        entry_key(index, entry, &own)
        if index_tag(index, &own) != tag:
            fail(f"entry {entry} hangs on another key's slot")
        behind = entry_next(index, entry)[0]
        if entry != head and entry_prev(index, entry)[0] != before:
            fail(f"entry {entry} does not link back to the copy before it")
        count += 1
        if count > index.num_rows + index.num_side:
            fail(f"the copies of entry {head} run in a circle")
        before, entry = entry, behind
    if entry_prev(index, head)[0] != before:
        fail(f"entry {head} does not know its youngest copy")
    return count


cdef int check_index(PoolState* pool) except -1:
    """Every slot is reached by its key; every entry hangs on exactly one slot."""
    cdef HashIndex* index = pool.index
    cdef uint32_t i, num_keys = 0
    cdef int64_t entries = 0, expected = 0
    cdef block_id_t block
    cdef int32_t k
    cdef Key key
    for i in range(index.num_slots):
        if not index.slots[i].head:
            continue
        num_keys += 1
        entries += check_copies(index, index.slots[i].head, index.slots[i].tag)
        entry_key(index, index.slots[i].head, &key)
        if index_slot(index, &key) != i:
            fail(f"the key of entry {index.slots[i].head} is not found in its slot")
    if num_keys != index.num_keys:
        fail(f"the index holds {num_keys} keys and counts {index.num_keys}")
    for block in range(pool.num_blocks):
        expected += (pool.rows[block].flags & FLAG_INDEXED) != 0
    if entries != expected + index.num_side:
        fail(f"the index holds {entries} entries, {expected + index.num_side} are made")
    expected = 0
    if index.first_side != NULL:
        for block in range(pool.num_blocks):
            k = index.first_side[block]
            while k:
                if (
                    not 0 < k <= index.side_capacity
                    or index.side[k - 1].block != block
                ):
                    fail(f"block {block} lists a side entry that is not its own")
                expected += 1
                if expected > index.num_side:
                    fail(f"the side entries of block {block} run in a circle")
                k = index.side[k - 1].next_of_block
    for k in range(index.side_capacity):
        if index.side[k].kind != SIDE_VACANT and index.side[k].block == FOREIGN:
            expected += 1
    if expected != index.num_side:
        fail(f"{expected} side entries are listed and {index.num_side} counted")
    return 0


cdef int check_kept_tokens(PoolState* pool) except -1:
    """Rows have one serial if and only if they have one key, parent and tokens.

    A parent's serial is older than its children's: no prefix is its own.
    """
    cdef KeptTokens* kept = pool.kept
    cdef block_id_t block
    cdef BlockMeta* row
    cdef KeptPrefix* prefix
    cdef Py_ssize_t size = kept.block_size * sizeof(int32_t)
    contents, serials = {}, {}
    for block in range(pool.num_blocks):
        row = &pool.rows[block]
        if not row.flags & FLAG_TOKENS_KEPT:
            continue
        prefix = &kept.prefixes[block]
        if row.block_hash_len != KEYED_BYTES + GROUP_ID_BYTES:
            fail(f"block {block} has its tokens kept and another hash than keyed's")
        if not prefix.parent < prefix.serial <= kept.last_serial:
            fail(
                f"block {block} has the serial {prefix.serial} behind {prefix.parent},"
                f" {kept.last_serial} are given out"
            )
        content = (
            (<char*> row.block_hash)[: row.block_hash_len],
            prefix.parent,
            (<char*> (kept.tokens + block * kept.block_size))[:size],
        )
        if contents.setdefault(prefix.serial, content) != content:
            fail(f"block {block} has the serial {prefix.serial} of another content")
        if serials.setdefault(content, prefix.serial) != prefix.serial:
            fail(f"block {block} has another serial than its copy")
    return 0


cdef int check_pool(PoolState* pool, BlockHashToBlockMap map) except -1:
    check_queue(pool)
    check_rows(pool)
    check_index(pool)
    if pool.kept != NULL:
        check_kept_tokens(pool)
    if len(map.entries) > pool.index.num_side:
        fail("the map holds more hand-made blocks than side entries")
    return 0
