# Key (block hash + group id) -> the blocks that hold that content.
#
# An open-addressing table of 8-byte slots points at the oldest entry of each key; the
# other copies hang on it in a doubly linked list. A block's own hash needs no entry of
# its own: its row is the entry. Whatever else names a block is a side entry.
# Entry codes: id + 1 is the row of block id, -(k + 1) is side entry k, 0 is none.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvcache._types cimport (
    BlockMeta,
    Key,
    block_id_t,
    key_of_row,
    row_has_key,
    same_key,
)
from kvcache.block_store cimport BlockStore, KVCacheBlock

cdef enum:
    MATCH_CHUNK = 32        # digests whose slots are asked for before the first is read
    NEAR_SLOTS = 32768      # 256 KiB of them stay in a near cache

cdef enum SideKind:
    SIDE_VACANT = 0
    SIDE_ALIAS = 1          # made by a pool: the block answers to a second key
    SIDE_INSERTED = 2       # made by the caller, through the map's `insert`

cdef struct Slot:
    uint32_t tag            # of the key; also places the slot
    int32_t head            # entry code of the oldest copy, 0 = empty slot

cdef struct SideEntry:
    Key key
    block_id_t block        # row it names, or FOREIGN: the map holds the object
    int32_t prev_copy       # entry codes, as in BlockMeta
    int32_t next_copy
    int32_t next_of_block   # next side entry of the same row, or next vacant; k + 1
    int32_t kind            # SideKind

cdef struct HashIndex:
    BlockMeta* rows
    block_id_t num_rows
    Slot* slots             # num_slots of them
    uint32_t num_slots
    uint32_t num_keys       # slots in use
    uint32_t max_keys       # at most this many before the table grows
    SideEntry* side         # side_capacity of them, num_side in use
    int32_t side_capacity
    int32_t num_side
    int32_t vacant          # first vacant side entry, k + 1
    int32_t* first_side     # per row, k + 1; NULL until the first side entry
    block_id_t* successor   # per row, a hint: the block cached behind it; or NULL
    uint64_t seed[5]

# Copies of one key, oldest first: the oldest's prev_copy is the youngest,
# the youngest's next_copy is 0.


cdef inline void entry_key(
    const HashIndex* index, int32_t entry, Key* key
) noexcept nogil:
    if entry > 0:
        key_of_row(key, &index.rows[entry - 1])
    else:
        key[0] = index.side[-entry - 1].key


cdef inline bint entry_has_key(
    const HashIndex* index, int32_t entry, const Key* key
) noexcept nogil:
    if entry > 0:
        return row_has_key(&index.rows[entry - 1], key)
    return same_key(&index.side[-entry - 1].key, key)


cdef inline block_id_t entry_block(
    const HashIndex* index, int32_t entry
) noexcept nogil:
    """The row an entry names, or FOREIGN."""
    return entry - 1 if entry > 0 else index.side[-entry - 1].block


cdef inline int32_t* entry_next(HashIndex* index, int32_t entry) noexcept nogil:
    if entry > 0:
        return &index.rows[entry - 1].next_copy
    return &index.side[-entry - 1].next_copy


cdef inline int32_t* entry_prev(HashIndex* index, int32_t entry) noexcept nogil:
    if entry > 0:
        return &index.rows[entry - 1].prev_copy
    return &index.side[-entry - 1].prev_copy


cdef inline bint index_is_far(const HashIndex* index) noexcept nogil:
    """Whether it pays to ask for slots ahead of adding keys.

    With 1,000,000 keys 74 ns a block, not 166; with 100,000 57, not 60 to 80.
    """
    return index.num_slots > NEAR_SLOTS


cdef int index_init(
    HashIndex* index, BlockMeta* rows, block_id_t num_rows, Py_ssize_t num_keys
) noexcept nogil
cdef void index_free(HashIndex* index) noexcept nogil
cdef void index_clear(HashIndex* index) noexcept nogil
cdef size_t index_bytes(const HashIndex* index) noexcept nogil
cdef int index_reserve(
    HashIndex* index, Py_ssize_t num_keys, Py_ssize_t num_side
) noexcept nogil
cdef uint32_t index_tag(const HashIndex* index, const Key* key) noexcept nogil
cdef void index_prefetch(const HashIndex* index, const BlockMeta* row) noexcept nogil
cdef void index_prefetch_key(const HashIndex* index, const Key* key) noexcept nogil
cdef int64_t index_slot(const HashIndex* index, const Key* key) noexcept nogil
cdef int32_t index_find(const HashIndex* index, const Key* key) noexcept nogil
# Blocks of the leading digests that are present, at most MATCH_CHUNK at once so that
# their cache misses overlap; how many. `before` is the block that matched just before
# them, or 0. A key whose oldest copy is a hand-made block counts as a miss: it has no
# row. All digests have the same length.
cdef Py_ssize_t index_match(
    const HashIndex* index,
    block_id_t before,
    const uint8_t** digests,
    Py_ssize_t length,
    uint64_t suffix,
    Py_ssize_t count,
    block_id_t* blocks,
) noexcept nogil
cdef bint index_has_side(
    const HashIndex* index, const Key* key, block_id_t block
) noexcept nogil
cdef void index_add_row(
    HashIndex* index, block_id_t block, const Key* key, int32_t num_tokens
) noexcept nogil
cdef void index_chain(
    HashIndex* index, block_id_t before, block_id_t block
) noexcept nogil
cdef int32_t index_add_side(
    HashIndex* index, const Key* key, block_id_t block, int32_t kind
) noexcept nogil
cdef void index_remove(HashIndex* index, int32_t entry) noexcept nogil
cdef int index_drop_block(HashIndex* index, block_id_t block) noexcept nogil
cdef void index_drop_side(
    HashIndex* index, const Key* key, block_id_t block
) noexcept nogil
cdef bytes key_bytes(const Key* key)


cdef class HandMade:
    cdef KVCacheBlock block
    cdef tuple name         # its key and block id
    cdef int32_t side       # its side entry, k + 1


cdef HandMade hand_made_of(const Key* key, KVCacheBlock block)


cdef class BlockHashToBlockMap:
    cdef HashIndex index
    cdef BlockStore store   # the pool's rows; None in a map made by hand
    cdef list held          # per side entry: the HandMade that it names, or None
    cdef dict entries       # name -> HandMade

    @staticmethod
    cdef BlockHashToBlockMap for_pool(BlockStore store, bint enable_caching)
    cdef object block_of(self, int32_t entry)
    cdef bint owns(self, KVCacheBlock block) noexcept
    cdef bint is_of(self, int32_t entry, KVCacheBlock block) noexcept
    cdef tuple name_of(self, const Key* key, Py_ssize_t block_id)
    cdef int32_t find_named(
        self, const Key* key, Py_ssize_t block_id, tuple name
    ) except? -1
    cdef int reserve(self, Py_ssize_t num_keys, Py_ssize_t num_side) except -1
    cdef int name_all(self, list made) except -1
    cdef void unname(self, list made) noexcept
    cdef void hold(self, HandMade made, const Key* key, int32_t kind) noexcept
    cdef void forget(self, int32_t entry) noexcept
    cdef void forget_all(self) noexcept
    cdef KVCacheBlock accepted(self, object block)
    cdef int add(
        self, const Key* key, KVCacheBlock block, list made, int32_t kind
    ) except -1
    cdef int replace(
        self, int32_t old, const Key* key, KVCacheBlock block, list made
    ) except -1
    cdef int append_keys(self, block_id_t block, list keys, bint own) except -1
    cdef int append_object_keys(self, KVCacheBlock block, list keys) except -1
    cdef int drop_object(self, KVCacheBlock block) noexcept
