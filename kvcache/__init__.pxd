# What compiled code cimports: `from kvcache cimport BlockPool, pool_get, ...`.
from kvcache._types cimport ANCHOR, NOT_LINKED, NULL_BLOCK, BlockMeta, Key, block_id_t
from kvcache.block_pool cimport BlockPool
from kvcache.hashing.chain cimport SHA256, SHA256_CBOR, CompiledHash
from kvcache.hashing.keyed_hash cimport Keyed, KeyedHash, keyed_chain
from kvcache.hashing.tokens cimport TokenSource
from kvcache.pool_state cimport (
    PoolState,
    pool_can_cache,
    pool_can_free,
    pool_free,
    pool_get,
    pool_touch,
    pool_unpin,
)
