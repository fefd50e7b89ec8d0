"""The C surface as a capsule: for C and C++ that link nothing (include/kvcache.h).

Stores: one table of functions, `API`, the same that `__init__.pxd` gives to Cython.
Invariant: entries are only ever added, at the end; `kvc_import` compares versions.
Costs: an indirect call. Threads: the table is read only; see the functions.
"""
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, uint8_t, uint32_t

from kvcache._types cimport BlockMeta
from kvcache.block_pool cimport BlockPool
from kvcache.hashing.keyed_hash cimport Keyed, KeyedHash, keyed_chain
from kvcache.manager.calls cimport (
    manager_add_request,
    manager_allocate_slots,
    manager_allocate_step,
    manager_append,
    manager_block_ids,
    manager_free,
    manager_match,
    manager_preempt,
    manager_slot_mapping,
    manager_take_changed_rows,
)
from kvcache.manager.kv_cache_manager cimport KVCacheManager
from kvcache.manager.manager_state cimport ManagerState
from kvcache.manager.step cimport step_ids
from kvcache.pool_state cimport (
    PoolState,
    pool_cache,
    pool_evict,
    pool_free,
    pool_get,
    pool_match,
    pool_touch,
)

cdef extern from "include/kvcache.h":
    const char* KVC_CAPSULE
    enum:
        KVC_API_MAJOR
        KVC_API_MINOR

    # Handles and structs differ in name only, so entries are set as void pointers; the
    # engines of the tests call each of them.
    struct kvc_api:
        uint32_t major
        uint32_t minor
        void* pool_of
        void* manager_of
        void* keyed_of
        void* pool_blocks
        void* pool_num_blocks
        void* pool_num_free
        void* pool_get
        void* pool_free
        void* pool_touch
        void* pool_match
        void* pool_cache
        void* pool_evict
        void* manager_pool
        void* manager_add_request
        void* manager_append
        void* manager_match
        void* manager_allocate_slots
        void* manager_allocate_step
        void* manager_step_ids
        void* manager_preempt
        void* manager_free
        void* manager_block_ids
        void* manager_slot_mapping
        void* manager_take_changed_rows
        void* keyed_root
        void* keyed_chain


cdef PoolState* pool_of(PyObject* thing) except NULL with gil:
    if not isinstance(<object> thing, BlockPool):
        raise TypeError(f"expected a BlockPool, got {<object> thing!r}")
    return &(<BlockPool> thing).state


cdef ManagerState* manager_of(PyObject* thing) except NULL with gil:
    if not isinstance(<object> thing, KVCacheManager):
        raise TypeError(f"expected a KVCacheManager, got {<object> thing!r}")
    return &(<KVCacheManager> thing).state


cdef const KeyedHash* keyed_of(PyObject* thing) except NULL with gil:
    if not isinstance(<object> thing, Keyed):
        raise TypeError(f"expected a Keyed, got {<object> thing!r}")
    return &(<Keyed> thing).hasher


cdef const BlockMeta* pool_blocks(const PoolState* pool) noexcept nogil:
    return pool.rows


cdef int32_t pool_num_blocks(const PoolState* pool) noexcept nogil:
    return pool.num_blocks


cdef int32_t pool_num_free(const PoolState* pool) noexcept nogil:
    return pool.queue.num_free


cdef PoolState* manager_pool(const ManagerState* m) noexcept nogil:
    return m.pool


cdef const uint8_t* keyed_root(const KeyedHash* keyed) noexcept nogil:
    return keyed.root


cdef kvc_api api

api.major, api.minor = KVC_API_MAJOR, KVC_API_MINOR
api.pool_of = <void*> pool_of
api.manager_of = <void*> manager_of
api.keyed_of = <void*> keyed_of
api.pool_blocks = <void*> pool_blocks
api.pool_num_blocks = <void*> pool_num_blocks
api.pool_num_free = <void*> pool_num_free
api.pool_get = <void*> pool_get
api.pool_free = <void*> pool_free
api.pool_touch = <void*> pool_touch
api.pool_match = <void*> pool_match
api.pool_cache = <void*> pool_cache
api.pool_evict = <void*> pool_evict
api.manager_pool = <void*> manager_pool
api.manager_add_request = <void*> manager_add_request
api.manager_append = <void*> manager_append
api.manager_match = <void*> manager_match
api.manager_allocate_slots = <void*> manager_allocate_slots
api.manager_allocate_step = <void*> manager_allocate_step
api.manager_step_ids = <void*> step_ids
api.manager_preempt = <void*> manager_preempt
api.manager_free = <void*> manager_free
api.manager_block_ids = <void*> manager_block_ids
api.manager_slot_mapping = <void*> manager_slot_mapping
api.manager_take_changed_rows = <void*> manager_take_changed_rows
api.keyed_root = <void*> keyed_root
api.keyed_chain = <void*> keyed_chain

API = PyCapsule_New(&api, KVC_CAPSULE, NULL)
