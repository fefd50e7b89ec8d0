# The supported C surface: what compiled code cimports, without the GIL.
#
#     from kvcache cimport BlockPool, KVCacheManager, block_id_t, pool_get
#
# Names, signatures and meanings here are stable: they change with a major version only.
# Not stable are the fields of PoolState, ManagerState and HashIndex, functions that are
# not listed, and the layout of classes: compile against the version that will run
# (Cython checks sizes at import). `include/kvcache.h` is the same for C and C++.
#
# Errors are return codes; `except` is written where an exception may be set instead.
# Nothing is locked: one thread at a time on a pool, its manager and their Python
# objects, by the GIL or a lock of the caller's. Hooks and events hear of what a manager
# does, and not of the pool_* functions.

# -- words -----------------------------------------------------------------------------
from kvcache._types cimport (
    ANCHOR,                 # row of a free queue's anchor, -1
    MAX_BLOCKS,             # of a pool; also most tokens of a request
    MAX_DIGEST_BYTES,       # of a block hash
    NOT_LINKED,             # both links of a block in no free queue
    NULL_BLOCK,             # id 0: stands for blocks outside a window, never free
    BlockMeta,              # a block's row, 64 bytes: read ref_cnt, block_hash, ...
    Key,                    # a digest and its group id
    block_id_t,             # int32
)

# -- pools -----------------------------------------------------------------------------
from kvcache.block_pool cimport BlockPool       # &pool.state is its PoolState
from kvcache.pool_state cimport (
    POOL_NO_MEMORY,         # of pool_cache
    PoolState,              # num_blocks, rows (one BlockMeta a block), queue.num_free
    pool_cache,             # cache blocks under digests
    pool_can_cache,         # whether it would succeed
    pool_can_free,          # whether pool_free would
    pool_evict,             # take blocks' content out of the cache
    pool_free,              # one reference less each
    pool_get,               # n blocks from the front; evicts what they held
    pool_match,             # blocks of the leading digests that are cached
    pool_touch,             # one reference more each
    pool_unpin,             # as pool_free, but to the back whatever they hold
)

# -- managers --------------------------------------------------------------------------
from kvcache.manager.kv_cache_manager cimport KVCacheManager    # &manager.state
from kvcache.manager.manager_state cimport (
    ManagerState,           # pool, num_groups, max_requests, max_model_len
    Slots,                  # what a request asks for; zero it first
)
from kvcache.manager.calls cimport (
    BAD_ARGUMENT,           # a row, a count or a length that cannot be
    BAD_STATE,              # not while the request is as it is
    NO_MEMORY,
    RAISED,                 # an exception is set
    manager_add_request,    # the row of a new request, made with digests
    manager_allocate_slots,     # slots for its next tokens: a Served
    manager_allocate_step,      # the same for a step of running requests
    manager_append,         # it has generated tokens
    manager_block_ids,      # its table row
    manager_free,           # it is done
    manager_match,          # its longest cached prefix
    manager_preempt,        # it gives its blocks back and waits
    manager_slot_mapping,   # where its last tokens' KV values go
    manager_take_changed_rows,  # rows whose tables changed
)
from kvcache.manager.slots cimport (
    EXTENDED,               # served: may have taken blocks
    HAS_ROOM,               # served with the blocks it had
    NO_ROOM,                # not served
)
from kvcache.manager.step cimport step_ids      # that the last step's requests took

# -- hashing ---------------------------------------------------------------------------
from kvcache.hashing.chain cimport SHA256, SHA256_CBOR, CompiledHash
from kvcache.hashing.keyed_hash cimport (
    KEYED_BYTES,            # of a keyed digest
    Keyed,                  # &keyed.hasher is its KeyedHash
    KeyedHash,              # hasher.root is the parent of a first block
    keyed_chain,            # digests of consecutive blocks of int32 tokens
)
from kvcache.hashing.tokens cimport TokenSource
