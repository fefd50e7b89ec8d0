# What a manager keeps in C: a row a request, and a block table a group.
from cpython.object cimport PyObject
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvcache._types cimport block_id_t
from kvcache.pool_state cimport PoolState

cdef enum GroupKind:
    FULL_ATTENTION
    SLIDING_WINDOW
    CHUNKED_LOCAL
    MAMBA
    CROSS_ATTENTION

cdef enum RequestStatus:
    UNUSED = 0
    WAITING = 1             # holds nothing, or hits that `match` found
    RUNNING = 2
    PREEMPTED = 3           # as WAITING, after it ran

cdef enum:
    NOT_TRACKED = -1
    MAX_SPECS = 64          # groups
    MAX_REQUESTS = 1048576

# One request's blocks in one group. The ids stand at the start of its table row.
cdef struct GroupRow:
    int32_t num_blocks      # held; null blocks stand for those outside the window
    int32_t num_cached      # at the start, cached or skipped; NOT_TRACKED until known
    int32_t num_hits        # found by `match`; not held, in the row while it is empty
    int32_t num_nulls       # at the start, whether or not there are more behind
    int32_t first_new       # where those begin that were taken last

cdef struct Group:
    GroupKind kind
    int32_t block_size
    int32_t hash_scale      # block hashes a block
    int64_t window          # of SLIDING_WINDOW; chunk of CHUNKED_LOCAL
    int64_t extra_retained  # tokens kept before the window
    int32_t spec_blocks     # of MAMBA
    int32_t max_admission   # blocks a request is admitted with at most
    bint eagle              # drops the last block of a hit
    uint64_t suffix         # of its keys
    int32_t spec            # place in the manager's specs: groups looked up together
    int32_t width           # of a table row
    int32_t* table          # max_requests rows
    GroupRow* rows          # max_requests of them

# All that a step reads of a request that needs nothing: four to a cache line.
cdef struct Progress:
    int32_t num_computed    # KV values exist, or will when the steps under way are done
    int32_t idle_until      # up to so many slots in all nothing is to be done
    uint32_t step           # the last one that it was listed in
    int16_t status          # RequestStatus
    int16_t changed         # listed in `changed`

# What else is read to cache a block that is full: four to a line again.
cdef struct Content:
    uint8_t* digests        # num_hashes of them, one behind the other
    int32_t num_hashes
    int32_t num_tokens      # known

cdef struct Request:
    int32_t num_prompt      # of the tokens in the prompt
    int32_t num_in_flight   # of the computed ones in steps under way
    int32_t hit_length      # tokens that `match` found
    int32_t hash_capacity   # digests that there is room for
    int32_t num_preemptions
    bint matched            # hits stand in the table rows; else hit_length is 0
    bint skip_lookup        # its prompt must be computed whatever is cached
    bint has_object         # Python knows its content: KVCacheManager.contents

# Cache blocks so that events tell of it; called with the GIL.
ctypedef int (*cache_full_t)(
    PyObject* owner, int32_t row, int32_t group, int32_t start, int32_t stop
) except -1
ctypedef int (*cache_partial_t)(
    PyObject* owner, int32_t row, int32_t group, int32_t i, int64_t num_tokens
) except -1

cdef struct ManagerState:
    PoolState* pool
    PyObject* loud          # the BlockPool, if events or metrics are wanted, else NULL
    PyObject* owner         # the manager, for the same; both borrowed
    cache_full_t cache_full
    cache_partial_t cache_partial
    Group* groups
    int32_t num_groups
    int32_t num_specs
    Progress* progress      # max_requests of them, and one that is nobody's
    Content* content        # max_requests of them
    Request* requests       # likewise
    int32_t max_requests
    int32_t* vacant         # rows of no request, num_vacant of them, the next one last
    int32_t num_vacant
    int64_t max_model_len
    int32_t hash_block_size
    int32_t digest_length
    int32_t alignment       # tokens: hits end at a multiple (of all block sizes)
    int32_t watermark_blocks
    bint enable_caching
    bint use_eagle
    bint drops_blocks       # a group gives blocks back that the next token skips
    uint32_t step           # steps so far
    int32_t* scratch        # room for the widest table row
    int32_t* busy           # places in the last step of those that needed something
    int32_t num_busy
    int32_t* took           # and of those that took blocks
    int32_t num_took
    bint serving            # blocks are being taken, and hooks may run
    bint starved            # there was no memory to cache a block that is full
    int32_t* taken          # loud: ids taken for a request, from next_taken on still
    int32_t* next_taken     # to be put in its rows; room for taken_capacity of them
    int32_t taken_capacity
    int32_t* changed        # rows whose tables changed; num_changed of them
    int32_t num_changed

# What a request asks for; see KVCacheManager.allocate_slots.
cdef struct Slots:
    int64_t num_new
    int64_t num_lookahead
    int64_t num_external
    int64_t num_encoder
    int32_t reserved_blocks
    bint delay_cache
    bint must_fit
    bint has_scheduled


cdef inline int64_t cdiv(int64_t a, int64_t b) noexcept nogil:
    return (a + b - 1) // b


cdef inline int32_t* table_row(const Group* group, int32_t row) noexcept nogil:
    return group.table + <Py_ssize_t> row * group.width


cdef inline int64_t num_skipped(const Group* group, int64_t computed) noexcept nogil:
    """Tokens at the start that the next one does not attend to."""
    if group.kind == SLIDING_WINDOW:
        computed -= group.window - 1 + group.extra_retained
    elif group.kind == CHUNKED_LOCAL:
        computed -= computed % group.window
    elif group.kind == MAMBA:
        computed -= 1
    else:
        return 0
    return computed if computed > 0 else 0


cdef inline const uint8_t* digest_of(
    const ManagerState* m, const Group* group, int32_t row, int64_t i
) noexcept nogil:
    """The hash of the prefix that ends with a group's block i."""
    return m.content[row].digests + (
        (i + 1) * group.hash_scale - 1
    ) * m.digest_length


cdef inline int64_t fills_at(
    const ManagerState* m, const Group* group, int32_t row
) noexcept nogil:
    """Tokens with which the next block is full and can be cached; many if it cannot."""
    cdef int64_t at = (
        <int64_t> max(group.rows[row].num_cached, 0) + 1
    ) * group.block_size
    if at <= <int64_t> m.content[row].num_hashes * m.hash_block_size:
        return at
    return <int64_t> 1 << 62


cdef inline void note_change(ManagerState* m, int32_t row) noexcept nogil:
    if not m.progress[row].changed:
        m.progress[row].changed = True
        m.changed[m.num_changed] = row
        m.num_changed += 1
