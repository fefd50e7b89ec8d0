# The blocks of a sequence: tokens, and the physical block that holds them.
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t

from kvcache._types cimport block_id_t
from kvcache.block_store cimport BlockStore
from kvcache.prefix_caching.block_ids cimport BlockIds
from kvcache.prefix_caching.prefix_hash cimport DIGEST_BYTES

cdef enum:
    NO_ROW = -1
    NO_BLOCK_ID = -1


# What a block asks of the kvcache allocator that it belongs to.
cdef class BlockOwner:
    cdef BlockIds ids
    cdef BlockStore store           # one row a physical block
    cdef readonly Py_ssize_t block_size

    # Row of the physical block that a block of this allocator holds.
    cdef block_id_t held_row(self, object block) except -1
    # Prove that so many blocks can be made writable, of which some are shared.
    cdef int require_copies(self, Py_ssize_t n) except -1
    # Have it hold a physical block that nobody else uses; `require_copies` allows it.
    cdef void make_writable(self, TokenBlock block) noexcept
    # It is full: share its content.
    cdef void promote(self, TokenBlock block) noexcept
    # Blocks behind each other, one for each list of tokens, that hold no physical one
    # yet. None if another class makes the allocator's blocks.
    cdef list make_chain(self, object prev, object pieces, object extra_hash)
    # Prove that each of them can be placed, in turn. `seen`, empty, is for blocks of
    # which some may have the same content; None if all differ.
    cdef int require_places(self, list blocks, set seen) except -1
    # Have each hold a physical block; fresh ones are computed if they are hits.
    cdef void place_all(self, list blocks, bint fresh) noexcept
    # The physical blocks that `place_all` may choose, some twice; at most 3 a block.
    cdef Py_ssize_t choices(self, list blocks, block_id_t* rows) except -1
    # Take the reference of each of these blocks, which hold a physical one.
    cdef void release_all(self, list blocks) noexcept


cdef class TokenBlock:
    cdef object allocator
    cdef PyObject* owner            # the allocator if it is kvcache's, else NULL
    cdef PyObject* prev             # the block before, owned; NULL if it is the first
    cdef bytes room                 # for block_size tokens; blocks may share it to read
    cdef int64_t* tokens            # where they lie in it; NULL until the first
    cdef Py_ssize_t num_tokens
    cdef Py_ssize_t size            # block_size
    cdef int64_t total              # tokens up to the end of this block
    cdef int64_t id                 # of the physical block, or NO_BLOCK_ID
    cdef block_id_t row             # its row with `owner`, or NO_ROW
    cdef bint has_digest
    cdef bint is_computed
    cdef uint8_t[DIGEST_BYTES] digest
    cdef double accessed            # last_accessed
    cdef object extra               # extra_hash
    cdef bytes extra_bytes
    cdef object cow_target          # None for the block itself

    cdef void belong_to(self, object allocator) noexcept
    cdef int set_prev(self, object prev) except -1
    cdef int make_room(self, Py_ssize_t n) except -1
    # Whether another one uses its physical block too; BlockStateError if it has none.
    cdef bint is_shared(self) except -1
    # Prove that a block of a kvcache allocator can take these tokens; whether it must
    # be copied for that. After that and `require_copies` to append them cannot fail.
    cdef bint prepare(self, object tokens) except -1
    cdef void append(self, object tokens) noexcept
    cdef void write(self, object tokens) noexcept
    cdef int fill(self, object token_ids) except -1
    cdef void share_content(self, TokenBlock source) noexcept
    cdef inline void hold(self, BlockOwner owner, block_id_t row) noexcept:
        self.row = row
        self.id = owner.ids.id_of(row)

    cdef inline void let_go(self) noexcept:
        self.row = NO_ROW
        self.id = NO_BLOCK_ID


cdef class NaiveBlock(TokenBlock):
    pass


cdef class PrefixCachingBlock(TokenBlock):
    cdef object foreign_parent(self, Py_ssize_t n)
    cdef int write_hashed(
        self, object tokens, int64_t before, object foreign_parent
    ) except -1
    cdef bint has_foreign_parent(self) noexcept
    cdef int find_digest(self, object foreign_parent) except -1


# The last num_blocks blocks up to this one, all if None; each of the type given.
cdef list chain_of(object last_block, type kind, object num_blocks)
