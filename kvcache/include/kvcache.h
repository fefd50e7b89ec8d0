/* kvcache for C and C++: a table of functions that a capsule brings, nothing to link.
 *
 *     const kvc_api *kvc = kvc_import();            // with the GIL; NULL: ImportError
 *     kvc_pool *pool = kvc->pool_of(block_pool);    // a kvcache.BlockPool; NULL: TypeError
 *     kvc->pool_get(pool, ids, 8);                  // from here on without the GIL
 *
 * A handle points into the Python object, which must outlive it. One thread at a time
 * on one pool, its manager and its Python objects: a lock of the caller's sees to it.
 * What is here stays as it is within a major version; a minor one adds at the end.
 * Every call checks its arguments before its first write. Events and metrics hooks hear
 * of what a manager does, but not of the calls on a pool.
 */
#ifndef KVCACHE_H
#define KVCACHE_H

#include <Python.h>
#include <stdint.h>

#define KVC_API_MAJOR 1
#define KVC_API_MINOR 0
#define KVC_MODULE "kvcache.capi"
#define KVC_CAPSULE KVC_MODULE ".API"

#ifdef __cplusplus
extern "C" {
#endif

/* What calls on a manager return, with nothing changed. */
enum {
    KVC_BAD_ARGUMENT = -1,      /* a row, a count or a length that cannot be */
    KVC_BAD_STATE = -2,         /* not while the request is as it is */
    KVC_NO_MEMORY = -3,
    KVC_RAISED = -4             /* a Python exception is set; some may have changed */
};

/* What manager_allocate_slots returns. */
enum {
    KVC_NO_ROOM = 0,            /* all as it was, but for blocks outside the window */
    KVC_HAS_ROOM = 1,           /* in the blocks that the request had */
    KVC_EXTENDED = 2            /* it may have taken blocks */
};

typedef struct kvc_pool kvc_pool;           /* a kvcache.BlockPool's */
typedef struct kvc_manager kvc_manager;     /* a kvcache.manager.KVCacheManager's */
typedef struct kvc_keyed kvc_keyed;         /* a kvcache.hashing.Keyed's */

/* One block, to be read only: kvcache/_types.pxd says when a field is valid. */
typedef struct kvc_block {
    int32_t prev_free_block;
    int32_t next_free_block;
    int32_t ref_cnt;
    int32_t block_hash_num_tokens;
    int32_t prev_copy;
    int32_t next_copy;
    uint8_t block_hash[36];
    uint8_t block_hash_len;
    uint8_t flags;
    uint8_t reserved[2];
} kvc_block;

/* What a request asks for: KVCacheManager.allocate_slots says what each means. */
typedef struct kvc_slots {
    int64_t num_new_tokens;
    int64_t num_lookahead_tokens;
    int64_t num_external_computed_tokens;
    int64_t num_encoder_tokens;
    int32_t reserved_blocks;
    int delay_cache_blocks;
    int full_sequence_must_fit;
    int has_scheduled_requests;
} kvc_slots;

typedef struct kvc_api {
    uint32_t major, minor;

    /* With the GIL. NULL and a TypeError for any other object. */
    kvc_pool *(*pool_of)(PyObject *block_pool);
    kvc_manager *(*manager_of)(PyObject *kv_cache_manager);
    const kvc_keyed *(*keyed_of)(PyObject *keyed);

    /* Pools. Ids in, ids out; of those that take ids, -1 is success and any other value
     * the place in `ids` of the first that is no block or not in the state required. */
    const kvc_block *(*pool_blocks)(const kvc_pool *);
    int32_t (*pool_num_blocks)(const kvc_pool *);   /* the null block, 0, included */
    int32_t (*pool_num_free)(const kvc_pool *);
    /* n blocks into `ids`, the first ones in eviction order: how many were evicted, or
     * -1 if fewer than n are free. */
    Py_ssize_t (*pool_get)(kvc_pool *, int32_t *ids, Py_ssize_t n);
    /* One reference less each; blocks without users go back to the queue. */
    Py_ssize_t (*pool_free)(kvc_pool *, const int32_t *ids, Py_ssize_t n);
    /* One reference more each. */
    Py_ssize_t (*pool_touch)(kvc_pool *, const int32_t *ids, Py_ssize_t n);
    /* Blocks of the leading digests that are cached, into `ids`: how many, or -1 for a
     * digest_length that is not from 1 to 32. */
    Py_ssize_t (*pool_match)(const kvc_pool *, const uint8_t *digests,
                             Py_ssize_t digest_length, Py_ssize_t n,
                             uint32_t group_id, int32_t *ids);
    /* Cache blocks that have no content, each under the digest in its place. Other
     * results: -2 is lack of memory, n a bad digest_length. */
    Py_ssize_t (*pool_cache)(kvc_pool *, const int32_t *ids, const uint8_t *digests,
                             Py_ssize_t digest_length, Py_ssize_t n,
                             uint32_t group_id);
    /* Take blocks' content out of the cache. */
    Py_ssize_t (*pool_evict)(kvc_pool *, const int32_t *ids, Py_ssize_t n);

    /* Managers: a request is the row that manager_add_request returns. */
    kvc_pool *(*manager_pool)(const kvc_manager *);
    /* num_hashes digests of full blocks, copied. KVC_BAD_STATE: no row is left, or the
     * manager records events or metrics. */
    int32_t (*manager_add_request)(kvc_manager *, int64_t num_tokens,
                                   const uint8_t *digests, Py_ssize_t num_hashes,
                                   Py_ssize_t digest_length);
    /* It has so many tokens more, which fill num_hashes blocks; 0. */
    int (*manager_append)(kvc_manager *, int32_t row, int64_t num_tokens,
                          const uint8_t *digests, Py_ssize_t num_hashes);
    /* Tokens at its start that are cached; all but the last if max_length < 0. */
    int64_t (*manager_match)(kvc_manager *, int32_t row, int64_t max_length);
    /* KVC_BAD_STATE: what was matched is not cached now, match again. */
    int (*manager_allocate_slots)(kvc_manager *, int32_t row, const kvc_slots *);
    /* Slots for a step of running requests: how many leading ones were served. `starts`
     * has room for n * groups + 1: where each request's ids begin, group by group, in
     * what manager_step_ids then writes; the entry behind the last one's is their
     * number. */
    Py_ssize_t (*manager_allocate_step)(kvc_manager *, const int32_t *rows,
                                        const int32_t *num_new_tokens, Py_ssize_t n,
                                        int64_t num_lookahead_tokens,
                                        int32_t *starts);
    void (*manager_step_ids)(const kvc_manager *, const int32_t *rows, int32_t *ids);
    int (*manager_preempt)(kvc_manager *, int32_t row);
    int (*manager_free)(kvc_manager *, int32_t row);
    /* Valid until the request is next served or freed; NULL: no such row or group. */
    const int32_t *(*manager_block_ids)(const kvc_manager *, int32_t row,
                                        int32_t group, int32_t *num_blocks);
    /* block id * block size + offset of each request's last tokens; how many. */
    Py_ssize_t (*manager_slot_mapping)(const kvc_manager *, const int32_t *rows,
                                       const int32_t *num_new_tokens, Py_ssize_t n,
                                       int32_t group, int64_t *slots);
    /* Rows whose tables changed since the last call: room for all requests. */
    int32_t (*manager_take_changed_rows)(kvc_manager *, int32_t *rows);

    /* Hashing with kvcache.hashing.Keyed: 16 bytes a digest. */
    const uint8_t *(*keyed_root)(const kvc_keyed *);    /* parent of a first block */
    void (*keyed_chain)(const kvc_keyed *, const uint8_t *parent, const int32_t *tokens,
                        Py_ssize_t block_size, Py_ssize_t num_blocks,
                        uint8_t *digests);
} kvc_api;

/* The table, once kvcache is importable; NULL and an ImportError else, also if the one
 * installed has another major version than this header, or an older minor one. */
static inline const kvc_api *kvc_import(void) {
    const kvc_api *api;
    PyObject *module = PyImport_ImportModule(KVC_MODULE);
    if (module == NULL) {
        return NULL;
    }
    Py_DECREF(module);
    api = (const kvc_api *)PyCapsule_Import(KVC_CAPSULE, 0);
    if (api == NULL) {
        return NULL;
    }
    if (api->major != KVC_API_MAJOR || (int)api->minor < KVC_API_MINOR) {
        PyErr_Format(PyExc_ImportError,
                     "compiled for version %d.%d of kvcache's C API, installed is %u.%u",
                     KVC_API_MAJOR, KVC_API_MINOR, api->major, api->minor);
        return NULL;
    }
    return api;
}

#ifdef __cplusplus
}
#endif
#endif
