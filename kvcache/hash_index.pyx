"""Block hash + group id -> the blocks that hold that content, several if need be.

Stores: a table of 8-byte slots (linear probing, backward-shift deletion, so no
tombstones); a block's own hash lives in its row, everything else in side entries.
Invariant: every entry is reachable from the slot its key's tag points at, and the
copies of one key stand oldest first.
Costs: find, add and remove are O(1) however many copies a key has; a pool's table takes
11.2 bytes a block and never grows for the blocks' own hashes; chain hints, in pools of
up to 262,144 blocks, take 4 more.
Threads: none of this is locked; the GIL or the caller's lock guards it.
"""
cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy, memset

from kvcache._args cimport as_int, no_copy, read_key
from kvcache._lock cimport kvc_lend
from kvcache._memory cimport allocate, copy_bytes, deallocate, kvc_prefetch, zeroed
from kvcache._types cimport (
    FLAG_INDEXED,
    FLAG_TOKENS_KEPT,
    FOREIGN,
    MAX_BLOCKS,
    MAX_KEY_BYTES,
    has_hash,
    key_of_row,
    make_key,
    row_has_digest,
    row_has_key,
)
from kvcache.block_store cimport KVCacheBlock

cdef extern from *:
    """
    #if defined(_MSC_VER)
    #include <intrin.h>
    static inline uint64_t kvc_fold(uint64_t a, uint64_t b) {
        uint64_t high, low = _umul128(a, b, &high);
        return low ^ high;
    }
    #else
    static inline uint64_t kvc_fold(uint64_t a, uint64_t b) {
        __extension__ typedef unsigned __int128 wide;
        wide product = (wide)a * b;
        return (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    #endif
    """
    uint64_t kvc_fold(uint64_t a, uint64_t b) nogil

cdef enum:
    CHAIN_CHUNK = 16  # hints followed before what they name is looked at
    # Following hints waits for one cache miss after the other, table look-ups overlap
    # theirs. In caches: 3.7 against 6.2 ns a block. In 1,000,000 blocks strewn about:
    # 204 against 132 ns. So larger pools go without.
    MAX_CHAINED_BLOCKS = 262144

# Keys may be chosen by whoever sends prompts, so places in the table must not be
# guessable. Python's own hash secret is used: PYTHONHASHSEED=0 repeats a run exactly.
cdef uint64_t[5] process_seed
for _i in range(5):
    process_seed[_i] = <uint64_t> <Py_ssize_t> hash(f"kvcache.hash_index {_i}")


cdef int index_init(
    HashIndex* index, BlockMeta* rows, block_id_t num_rows, Py_ssize_t num_keys
) noexcept nogil:
    """An empty index with room for num_keys keys; -1 if there is no memory."""
    memset(index, 0, sizeof(HashIndex))
    memcpy(index.seed, process_seed, sizeof(process_seed))
    index.rows = rows
    index.num_rows = num_rows
    return index_reserve(index, num_keys, 0)


cdef void index_free(HashIndex* index) noexcept nogil:
    deallocate(index.slots)
    deallocate(index.side)
    deallocate(index.first_side)
    deallocate(index.successor)
    memset(index, 0, sizeof(HashIndex))


cdef size_t index_bytes(const HashIndex* index) noexcept nogil:
    cdef size_t size = <size_t> index.num_slots * sizeof(Slot)
    size += <size_t> index.side_capacity * sizeof(SideEntry)
    if index.first_side != NULL:
        size += <size_t> index.num_rows * sizeof(int32_t)
    if index.successor != NULL:
        size += <size_t> index.num_rows * sizeof(block_id_t)
    return size


cdef void index_clear(HashIndex* index) noexcept nogil:
    """Forget every entry. The rows' own fields are the caller's to clear."""
    if index.slots != NULL:
        memset(index.slots, 0, index.num_slots * sizeof(Slot))
    index.num_keys = 0
    if index.side != NULL:
        memset(index.side, 0, index.side_capacity * sizeof(SideEntry))
        index.num_side = index.vacant = 0
        link_vacant(index, 0)
    if index.first_side != NULL:
        memset(index.first_side, 0, index.num_rows * sizeof(int32_t))


cdef void link_vacant(HashIndex* index, int32_t start) noexcept nogil:
    """Put side entries from `start` on in the list of vacant ones, lowest first."""
    cdef int32_t k
    for k in range(index.side_capacity - 1, start - 1, -1):
        index.side[k].next_of_block = index.vacant
        index.vacant = k + 1


cdef int index_reserve(
    HashIndex* index, Py_ssize_t num_keys, Py_ssize_t num_side
) noexcept nogil:
    """Make room for so many more keys and side entries; -1 if there is no memory.

    After it, that many `index_add_*` cannot fail.
    """
    cdef size_t keys = <size_t> num_keys + index.num_keys
    cdef size_t capacity
    cdef SideEntry* side
    cdef int32_t start = index.side_capacity
    if keys > index.max_keys or index.slots == NULL:
        # Full to 5/7 at most: what is spare keeps a miss within a cache line or two.
        capacity = keys + keys * 2 // 5 + 16
        if index.slots != NULL:
            capacity *= 2
        if capacity > 0xFFFFFFFFU or table_resize(index, capacity) < 0:
            return -1
    if num_side == 0:
        return 0
    if index.first_side == NULL:
        index.first_side = <int32_t*> zeroed(index.num_rows, sizeof(int32_t))
        if index.first_side == NULL:
            return -1
    if index.num_side + num_side > index.side_capacity:
        capacity = 2 * <size_t> (index.num_side + num_side) + 16
        if capacity > MAX_BLOCKS:
            return -1
        side = <SideEntry*> zeroed(capacity, sizeof(SideEntry))
        if side == NULL:
            return -1
        copy_bytes(side, index.side, start * sizeof(SideEntry))
        deallocate(index.side)
        index.side = side
        index.side_capacity = <int32_t> capacity
        link_vacant(index, start)
    return 0


cdef int table_resize(HashIndex* index, size_t capacity) noexcept nogil:
    """Move all slots to a table of another size; their tags say where they go."""
    cdef Slot* old = index.slots
    cdef uint32_t old_size = index.num_slots
    cdef uint32_t i, at
    cdef Slot* slots = <Slot*> zeroed(capacity, sizeof(Slot))
    if slots == NULL:
        return -1
    index.slots = slots
    index.num_slots = <uint32_t> capacity
    index.max_keys = <uint32_t> (capacity * 5 // 7)
    for i in range(old_size):
        if old[i].head:
            at = home_of(index, old[i].tag)
            while slots[at].head:
                at = after(index, at)
            slots[at] = old[i]
    deallocate(old)
    return 0


cdef inline uint32_t home_of(const HashIndex* index, uint32_t tag) noexcept nogil:
    """Where a tag's slot is looked for first: the tag, scaled to the table."""
    return <uint32_t> ((<uint64_t> tag * index.num_slots) >> 32)


cdef inline uint32_t after(const HashIndex* index, uint32_t at) noexcept nogil:
    at += 1
    return 0 if at == index.num_slots else at


cdef inline uint32_t tag_of(const HashIndex* index, const Key* key) noexcept nogil:
    # Digests are random already; the secret keeps their places from being guessed.
    cdef uint64_t mixed = (
        kvc_fold(key.words[0] ^ index.seed[0], key.words[1] ^ index.seed[1])
        ^ kvc_fold(key.words[2] ^ index.seed[2], key.words[3] ^ index.seed[3])
        ^ (key.words[4] ^ index.seed[4]) * 0x9E3779B97F4A7C15U
    )
    return <uint32_t> (mixed ^ (mixed >> 32))


cdef uint32_t index_tag(const HashIndex* index, const Key* key) noexcept nogil:
    return tag_of(index, key)


cdef void index_prefetch_key(const HashIndex* index, const Key* key) noexcept nogil:
    """Have the slot of a key brought to the cache."""
    kvc_prefetch(&index.slots[home_of(index, tag_of(index, key))])


cdef void index_prefetch(const HashIndex* index, const BlockMeta* row) noexcept nogil:
    """The same for the key of a row."""
    cdef Key key
    key_of_row(&key, row)
    index_prefetch_key(index, &key)


cdef inline int64_t slot_of(
    const HashIndex* index, const Key* key, uint32_t tag
) noexcept nogil:
    """The slot of a key, or -1 - (the empty slot where it belongs)."""
    cdef uint32_t at = home_of(index, tag)
    while index.slots[at].head:
        if index.slots[at].tag == tag:
            if entry_has_key(index, index.slots[at].head, key):
                return at
        at = after(index, at)
    return -1 - <int64_t> at


cdef int64_t index_slot(const HashIndex* index, const Key* key) noexcept nogil:
    return slot_of(index, key, tag_of(index, key))


cdef int32_t index_find(const HashIndex* index, const Key* key) noexcept nogil:
    """The oldest entry of a key, or 0."""
    cdef int64_t at = slot_of(index, key, tag_of(index, key))
    return index.slots[at].head if at >= 0 else 0


cdef inline Py_ssize_t match_chained(
    const HashIndex* index,
    block_id_t before,
    const uint8_t** digests,
    Py_ssize_t length,
    uint64_t suffix,
    Py_ssize_t count,
    block_id_t* blocks,
) noexcept nogil:
    """Follow the hints from a block on: no hash to compute, no slot to load.

    A guess counts only if the row holds the key and is its only copy, so a stale hint
    costs a comparison and nothing else.
    """
    cdef Py_ssize_t done = 0, ahead, i
    cdef const BlockMeta* row
    while done < count:
        ahead = min(count - done, <Py_ssize_t> CHAIN_CHUNK)
        for i in range(done, done + ahead):
            before = index.successor[before]
            blocks[i] = before
            kvc_prefetch(&index.rows[before])
        for i in range(done, done + ahead):
            row = &index.rows[blocks[i]]
            if not (
                row.flags & FLAG_INDEXED
                and row.prev_copy == blocks[i] + 1
                and row_has_digest(row, digests[i], length, suffix)
            ):
                return i
        done += ahead
    return done


cdef inline Py_ssize_t match_hashed(
    const HashIndex* shared,
    const uint8_t** digests,
    Py_ssize_t length,
    uint64_t suffix,
    Py_ssize_t count,
    block_id_t* blocks,
) noexcept nogil:
    """Look the digests up in the table."""
    cdef HashIndex index = shared[0]  # a copy that no store below can alias
    cdef uint32_t[MATCH_CHUNK] tags
    cdef uint32_t[MATCH_CHUNK] homes
    cdef Py_ssize_t i
    cdef int64_t at
    cdef int32_t head
    cdef Key key
    for i in range(count):
        make_key(&key, digests[i], length, suffix)
        tags[i] = tag_of(&index, &key)
        homes[i] = home_of(&index, tags[i])
        kvc_prefetch(&index.slots[homes[i]])
    for i in range(count):
        head = index.slots[homes[i]].head
        if head > 0:
            kvc_prefetch(&index.rows[head - 1])
    for i in range(count):
        head = index.slots[homes[i]].head
        # Nearly always the first slot is the right one.
        if not (
            index.slots[homes[i]].tag == tags[i]
            and head > 0
            and row_has_digest(&index.rows[head - 1], digests[i], length, suffix)
        ):
            make_key(&key, digests[i], length, suffix)
            at = slot_of(&index, &key, tags[i])
            if at < 0:
                return i
            head = index.slots[at].head
            if entry_block(&index, head) == FOREIGN:
                return i
            head = entry_block(&index, head) + 1
        blocks[i] = head - 1
    return count


cdef inline Py_ssize_t match_run(
    const HashIndex* index,
    block_id_t before,
    const uint8_t** digests,
    Py_ssize_t length,
    uint64_t suffix,
    Py_ssize_t count,
    block_id_t* blocks,
) noexcept nogil:
    """`index_match`, compiled once for each length that is a constant."""
    cdef Py_ssize_t done = 0
    if index.successor == NULL:
        return match_hashed(index, digests, length, suffix, count, blocks)
    if before == 0 and count:
        done = match_hashed(index, digests, length, suffix, 1, blocks)
        if done == 0:
            return 0
        before = blocks[0]
    done += match_chained(
        index, before, digests + done, length, suffix, count - done, blocks + done
    )
    if done == count:
        return done
    return done + match_hashed(
        index, digests + done, length, suffix, count - done, blocks + done
    )


cdef Py_ssize_t index_match(
    const HashIndex* index,
    block_id_t before,
    const uint8_t** digests,
    Py_ssize_t length,
    uint64_t suffix,
    Py_ssize_t count,
    block_id_t* blocks,
) noexcept nogil:
    if length == 32:
        return match_run(index, before, digests, 32, suffix, count, blocks)
    if length == 16:
        return match_run(index, before, digests, 16, suffix, count, blocks)
    return match_run(index, before, digests, length, suffix, count, blocks)


cdef void index_chain(
    HashIndex* index, block_id_t before, block_id_t block
) noexcept nogil:
    """Note that a block was cached right behind another, for the next match."""
    if index.successor != NULL and before > 0 and block > 0:
        index.successor[before] = block


cdef bint index_has_side(
    const HashIndex* index, const Key* key, block_id_t block
) noexcept nogil:
    """Whether a key has a side entry that names this row."""
    cdef int32_t k
    if index.first_side != NULL:
        k = index.first_side[block]
        while k:
            if same_key(&index.side[k - 1].key, key):
                return True
            k = index.side[k - 1].next_of_block
    return False


cdef void link_entry(HashIndex* index, int32_t entry, const Key* key) noexcept nogil:
    """Make an entry the youngest copy of its key. There is room."""
    cdef uint32_t tag = tag_of(index, key)
    cdef int64_t at = slot_of(index, key, tag)
    cdef int32_t head
    cdef int32_t youngest
    entry_next(index, entry)[0] = 0
    if at < 0:
        index.slots[-1 - at].tag = tag
        index.slots[-1 - at].head = entry
        index.num_keys += 1
        entry_prev(index, entry)[0] = entry
        return
    head = index.slots[at].head
    youngest = entry_prev(index, head)[0]
    entry_next(index, youngest)[0] = entry
    entry_prev(index, entry)[0] = youngest
    entry_prev(index, head)[0] = entry


cdef void empty_slot(HashIndex* index, uint32_t hole) noexcept nogil:
    """Empty a slot and close the gap: every probe still ends where it should."""
    cdef uint32_t at = hole
    cdef uint32_t home
    index.num_keys -= 1
    while True:
        at = after(index, at)
        if not index.slots[at].head:
            break
        home = home_of(index, index.slots[at].tag)
        # Leave a slot whose home lies cyclically in (hole, at].
        if (hole < home and home <= at) or (at < hole and (hole < home or home <= at)):
            continue
        index.slots[hole] = index.slots[at]
        hole = at
    index.slots[hole].head = 0


cdef void index_remove(HashIndex* index, int32_t entry) noexcept nogil:
    """Take an entry out. The rows' hash fields are not touched, the flags are."""
    cdef Key key
    cdef int64_t at
    cdef int32_t head
    cdef int32_t before = entry_prev(index, entry)[0]
    cdef int32_t behind = entry_next(index, entry)[0]
    cdef SideEntry* side
    cdef int32_t* link
    entry_key(index, entry, &key)
    at = slot_of(index, &key, tag_of(index, &key))
    head = index.slots[at].head
    if entry == head:
        if behind == 0:
            empty_slot(index, <uint32_t> at)
        else:
            index.slots[at].head = behind
            entry_prev(index, behind)[0] = before
    else:
        entry_next(index, before)[0] = behind
        entry_prev(index, head if behind == 0 else behind)[0] = before
    if entry > 0:
        index.rows[entry - 1].flags &= ~<uint8_t> (FLAG_INDEXED | FLAG_TOKENS_KEPT)
        return
    side = &index.side[-entry - 1]
    if side.block != FOREIGN:
        link = &index.first_side[side.block]
        while link[0] != -entry:
            link = &index.side[link[0] - 1].next_of_block
        link[0] = side.next_of_block
    memset(side, 0, sizeof(SideEntry))
    side.next_of_block = index.vacant
    index.vacant = -entry
    index.num_side -= 1


cdef void index_add_row(
    HashIndex* index, block_id_t block, const Key* key, int32_t num_tokens
) noexcept nogil:
    """Give a row its primary hash, and an entry for it. There is room."""
    cdef BlockMeta* row = &index.rows[block]
    memcpy(row.block_hash, key.words, MAX_KEY_BYTES)
    row.block_hash_len = <uint8_t> key.length
    row.block_hash_num_tokens = num_tokens
    row.flags |= FLAG_INDEXED
    link_entry(index, block + 1, key)


cdef int32_t index_add_side(
    HashIndex* index, const Key* key, block_id_t block, int32_t kind
) noexcept nogil:
    """A further entry for a row, or one for a hand-made block. There is room."""
    cdef int32_t k = index.vacant
    cdef SideEntry* side = &index.side[k - 1]
    index.vacant = side.next_of_block
    index.num_side += 1
    side.key = key[0]
    side.block = block
    side.kind = kind
    side.next_of_block = 0
    if block != FOREIGN:
        side.next_of_block = index.first_side[block]
        index.first_side[block] = k
    link_entry(index, -k, key)
    return -k


cdef int index_drop_block(HashIndex* index, block_id_t block) noexcept nogil:
    """Remove every entry that names a row, and clear its hash; how many there were."""
    cdef BlockMeta* row = &index.rows[block]
    cdef int count = 0
    if row.flags & FLAG_INDEXED:
        index_remove(index, block + 1)
        count = 1
    if index.first_side != NULL:
        while index.first_side[block]:
            index_remove(index, -index.first_side[block])
            count += 1
    if row.block_hash_len:
        memset(row.block_hash, 0, MAX_KEY_BYTES)
        row.block_hash_len = 0
    row.block_hash_num_tokens = -1
    return count


cdef void index_drop_side(
    HashIndex* index, const Key* key, block_id_t block
) noexcept nogil:
    """Remove the side entry of a key that names a row, if there is one."""
    cdef int32_t k = 0 if index.first_side == NULL else index.first_side[block]
    while k:
        if same_key(&index.side[k - 1].key, key):
            index_remove(index, -k)
            return
        k = index.side[k - 1].next_of_block


cdef bytes key_bytes(const Key* key):
    return PyBytes_FromStringAndSize(<char*> key.words, key.length)


@cython.final
cdef class HandMade:
    """A hand-made block that a map holds under a key."""


cdef HandMade hand_made_of(const Key* key, KVCacheBlock block):
    """What a map is to hold; making it may run foreign code."""
    cdef HandMade made = HandMade.__new__(HandMade)
    made.name, made.block = (key_bytes(key), block.id), block
    return made


@cython.final
@cython.no_gc_clear
cdef class BlockHashToBlockMap:
    """The prefix-cache map, as vLLM's: a key's blocks, oldest first.

    A pool's map names rows; one made by hand holds the blocks it is given. Keys are
    bytes, 1 to 36 of them (digest + 4-byte big-endian group id).
    """

    def __cinit__(self):
        self.held, self.entries = [], {}
        if index_init(&self.index, NULL, 0, 0) < 0:
            raise MemoryError("cannot allocate an empty map")

    def __dealloc__(self):
        if self.store is not None:
            with cython.critical_section(self):
                self.store.map = NULL
        index_free(&self.index)

    def __reduce__(self):
        raise no_copy(self)

    @staticmethod
    cdef BlockHashToBlockMap for_pool(BlockStore store, bint enable_caching):
        cdef BlockHashToBlockMap made = BlockHashToBlockMap.__new__(BlockHashToBlockMap)
        cdef Py_ssize_t num_keys = store.num_blocks if enable_caching else 0
        index_free(&made.index)
        if index_init(&made.index, store.rows, store.num_blocks, num_keys) < 0:
            raise MemoryError(f"cannot allocate a table of {num_keys} keys")
        if enable_caching and num_keys <= MAX_CHAINED_BLOCKS:
            made.index.successor = <block_id_t*> allocate(
                num_keys, sizeof(block_id_t), "chain hints"
            )
        made.store = store
        store.map = <PyObject*> made
        kvc_lend(store.map)
        return made

    @property
    @cython.critical_section
    def nbytes(self):
        """Bytes held in C."""
        return index_bytes(&self.index)

    cdef object block_of(self, int32_t entry):
        cdef block_id_t block = entry_block(&self.index, entry)
        if block == FOREIGN:
            return (<HandMade> self.held[-entry - 1]).block
        return self.store.view(block)

    cdef bint owns(self, KVCacheBlock block) noexcept:
        """Whether a block is one of the pool's rows."""
        return self.store is not None and block.store == <PyObject*> self.store

    cdef bint is_of(self, int32_t entry, KVCacheBlock block) noexcept:
        """Whether an entry names a block."""
        cdef block_id_t row = entry_block(&self.index, entry)
        if row == FOREIGN:
            return (<HandMade> self.held[-entry - 1]).block is block
        return self.owns(block) and block.index == row

    cdef tuple name_of(self, const Key* key, Py_ssize_t block_id):
        """For `find_named`; making it may run foreign code."""
        return (key_bytes(key), block_id) if self.entries else None

    cdef int32_t find_named(
        self, const Key* key, Py_ssize_t block_id, tuple name
    ) except? -1:
        """The entry of a key that names the block id, or 0; `name` is of both."""
        cdef HandMade made
        cdef int32_t k
        if 0 <= block_id < self.index.num_rows:
            if self.index.rows[block_id].flags & FLAG_INDEXED:
                if row_has_key(&self.index.rows[block_id], key):
                    return <int32_t> block_id + 1
            k = 0 if self.index.first_side == NULL else self.index.first_side[block_id]
            while k:
                if same_key(&self.index.side[k - 1].key, key):
                    return -k
                k = self.index.side[k - 1].next_of_block
        if name is None:
            return 0
        made = self.entries.get(name)
        return 0 if made is None else -made.side

    cdef int reserve(self, Py_ssize_t num_keys, Py_ssize_t num_side) except -1:
        """As `index_reserve`, or MemoryError; runs no foreign code."""
        if index_reserve(&self.index, num_keys, num_side) < 0:
            raise MemoryError(f"cannot cache {num_keys} more blocks")
        return 0

    cdef int name_all(self, list made) except -1:
        """Note hand-made blocks, so that `hold` cannot fail, or none and an error.

        `reserve` has made room. Runs no foreign code.
        """
        cdef HandMade one
        try:
            while len(self.held) < self.index.side_capacity:
                self.held.append(None)
            for one in made:
                self.entries.setdefault(one.name, one)
        except MemoryError:
            self.unname(made)
            raise
        return 0

    cdef void unname(self, list made) noexcept:
        """Take back what `name_all` noted and `hold` has not held."""
        cdef HandMade one
        for one in made:
            if one.side == 0 and self.entries.get(one.name) is one:
                del self.entries[one.name]

    cdef void hold(self, HandMade made, const Key* key, int32_t kind) noexcept:
        """An entry for a hand-made block that `name_all` has noted.

        If the key and the id had one already, that stays.
        """
        if self.entries.setdefault(made.name, made) is made:
            made.side = -index_add_side(&self.index, key, FOREIGN, kind)
            self.held[made.side - 1] = made

    cdef void forget(self, int32_t entry) noexcept:
        """Remove an entry, and let go of the block if it names a hand-made one."""
        cdef HandMade made
        index_remove(&self.index, entry)
        if entry < 0 and -entry <= len(self.held):
            made = self.held[-entry - 1]
            if made is not None:
                self.held[-entry - 1] = None
                del self.entries[made.name]

    cdef void forget_all(self) noexcept:
        """Let go of the hand-made blocks, when the index was cleared."""
        self.entries.clear()
        self.held.clear()  # last, since that may run foreign code

    cdef KVCacheBlock accepted(self, object block):
        """The block, which is this pool's or one made by hand."""
        if type(block) is not KVCacheBlock:
            raise TypeError(f"expected a KVCacheBlock, got {block!r}")
        cdef KVCacheBlock ours = block
        if ours.is_end():
            raise ValueError("the fake end of a queue holds no content")
        if self.store is not None and ours.store != <PyObject*> self.store:
            if ours.loose is None or ours.loose.orphan:
                raise ValueError(f"block {ours.id} belongs to another pool")
        return ours

    cdef int add(
        self, const Key* key, KVCacheBlock block, list made, int32_t kind
    ) except -1:
        """An entry for any block; a row whose hash this is needs none of its own.

        A hand-made block comes with its `HandMade` in a list. Runs no foreign code.
        """
        cdef BlockMeta* row
        self.reserve(1, 1)
        if made is not None:
            self.name_all(made)
            self.hold(<HandMade> made[0], key, kind)
            return 0
        row = &self.index.rows[block.index]
        if has_hash(row) and not row.flags & FLAG_INDEXED and row_has_key(row, key):
            index_add_row(&self.index, block.index, key, row.block_hash_num_tokens)
        else:
            index_add_side(&self.index, key, block.index, kind)
        return 0

    cdef int replace(
        self, int32_t old, const Key* key, KVCacheBlock block, list made
    ) except -1:
        """Put another block in the place of an entry, among the copies of its key."""
        cdef HashIndex* index = &self.index
        cdef int32_t new, before, behind, head, youngest
        cdef int64_t at
        if made is not None and entry_block(index, old) == FOREIGN:
            # Both go by one name.
            index.side[-old - 1].kind = SIDE_INSERTED
            _held = (<HandMade> self.held[-old - 1]).block
            (<HandMade> self.held[-old - 1]).block = block
            return 0
        self.add(key, block, made, SIDE_INSERTED)
        head = index_find(index, key)
        new = entry_prev(index, head)[0]
        # `new` came last; unlink it there and link it before `old`, which then goes.
        youngest = entry_prev(index, new)[0]
        entry_next(index, youngest)[0] = 0
        entry_prev(index, head)[0] = youngest
        before, behind = entry_prev(index, old)[0], old
        entry_next(index, new)[0] = behind
        if old == head:
            at = index_slot(index, key)
            index.slots[at].head = new
            entry_prev(index, new)[0] = entry_prev(index, old)[0]
        else:
            entry_next(index, before)[0] = new
            entry_prev(index, new)[0] = before
        entry_prev(index, old)[0] = new
        self.forget(old)
        return 0

    cdef int append_keys(self, block_id_t block, list keys, bint own) except -1:
        """Append a row's keys: its own if it has an entry and is wanted, then aliases.

        Makes nothing that the collector tracks, so no foreign code runs.
        """
        cdef BlockMeta* row = &self.index.rows[block]
        cdef SideEntry* side
        cdef int32_t k
        cdef Key key
        if own and self.index.rows[block].flags & FLAG_INDEXED:
            key_of_row(&key, &self.index.rows[block])
            keys.append(key_bytes(&key))
        if self.index.first_side != NULL:
            k = self.index.first_side[block]
            while k:
                side = &self.index.side[k - 1]
                # One inserted by hand counts if it is the row's own hash, set later.
                if side.kind == SIDE_ALIAS or (own and row_has_key(row, &side.key)):
                    keys.append(key_bytes(&side.key))
                k = side.next_of_block
        return 0

    cdef int append_object_keys(self, KVCacheBlock block, list keys) except -1:
        """Append the keys of the entries that name a hand-made block."""
        cdef HandMade made
        for made in self.held:
            if made is not None and made.block is block:
                keys.append(made.name[0])
        return 0

    cdef int drop_object(self, KVCacheBlock block) noexcept:
        """Remove these entries; how many there were."""
        cdef HandMade made
        cdef int count = 0
        for made in self.held:
            if made is not None and made.block is block:
                self.forget(-made.side)
                count += 1
        return count

    @cython.critical_section
    def _drop_block(self, block_id):
        """Remove every entry that names a pool's block, and clear its hash."""
        index_drop_block(
            &self.index,
            <block_id_t> as_int(block_id, "block_id", 0, self.index.num_rows - 1),
        )

    @cython.critical_section
    def _aliases_of(self, block_id):
        """Further keys of a pool's block, as a set."""
        cdef list keys = []
        self.append_keys(
            <block_id_t> as_int(block_id, "block_id", 0, self.index.num_rows - 1),
            keys,
            False,
        )
        return set(keys)

    @cython.critical_section
    def _aliased_blocks(self):
        """Ids of the pool's blocks that have further keys."""
        cdef int32_t k
        return {
            self.index.side[k].block
            for k in range(self.index.side_capacity)
            if self.index.side[k].kind == SIDE_ALIAS
            and self.index.side[k].block != FOREIGN
        }

    @cython.critical_section
    def get_one_block(self, key):
        """The block that was cached first under a key, or None."""
        cdef Key wanted
        read_key(key, &wanted)
        cdef int32_t entry = index_find(&self.index, &wanted)
        return self.block_of(entry) if entry else None

    @cython.critical_section
    def contain(self, key, block_id):
        """Whether a key names the block id."""
        cdef Key wanted
        read_key(key, &wanted)
        cdef Py_ssize_t block = as_int(block_id, "block_id", -2**31, 2**31)
        cdef tuple name = self.name_of(&wanted, block)
        return self.find_named(&wanted, block, name) != 0

    @cython.critical_section
    def insert(self, key, block):
        """Add a block under a key; the block's own hash field stays as it is.

        Raises:
            TypeError: The block is not a KVCacheBlock.
            ValueError: The map is a pool's and the block is another pool's.
        """
        cdef Key wanted
        cdef KVCacheBlock ours = self.accepted(block)
        cdef list made = None
        cdef int32_t entry
        cdef tuple name
        read_key(key, &wanted)
        name = self.name_of(&wanted, ours.id)
        if not self.owns(ours):
            made = [hand_made_of(&wanted, ours)]
            name = (<HandMade> made[0]).name
        # From here on nothing runs that could change the map.
        entry = self.find_named(&wanted, ours.id, name)
        if entry == 0:
            self.add(&wanted, ours, made, SIDE_INSERTED)
        elif not self.is_of(entry, ours):
            # As in a dict, the new block takes the place of the one with its id.
            self.replace(entry, &wanted, ours, made)

    @cython.critical_section
    def pop(self, key, block_id):
        """Remove the entry of a key that names the block id; that block, or None."""
        cdef Key wanted
        read_key(key, &wanted)
        cdef Py_ssize_t block = as_int(block_id, "block_id", -2**31, 2**31)
        cdef tuple name = self.name_of(&wanted, block)
        cdef int32_t entry = self.find_named(&wanted, block, name)
        while entry:
            held = self.block_of(entry)
            # Making a view may run foreign code.
            if entry == self.find_named(&wanted, block, name):
                if held is self.block_of(entry):
                    self.forget(entry)
                    return held
            entry = self.find_named(&wanted, block, name)
        return None

    @cython.critical_section
    def __len__(self):
        return self.index.num_keys
