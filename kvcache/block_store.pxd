# One BlockMeta per block, and KVCacheBlock, the Python view of a row.
from cpython.object cimport PyObject

from kvcache._types cimport BlockMeta, block_id_t


cdef class BlockStore:
    cdef BlockMeta* rows            # num_blocks rows after the anchor, row -1
    cdef void* memory               # what `rows` was cut from, for free()
    cdef readonly block_id_t num_blocks
    cdef PyObject** views           # pool: strong references, NULL until asked for
    cdef block_id_t num_views       # how many of them are made, block 0 aside
    cdef list adopted               # hand-made queue: the block in each row, or None
    cdef block_id_t* vacant         # hand-made queue: rows that hold no block
    cdef block_id_t num_vacant      # how many; the next one to be used is the last
    cdef PyObject* owner            # the pool, borrowed; it clears this when it goes
    cdef PyObject* map              # the pool's map, borrowed likewise
    cdef PyObject* head             # the queue's fake ends, borrowed likewise
    cdef PyObject* tail
    cdef bint tail_unlinked         # fake tail's prev_free_block was set to None
    cdef object __weakref__

    cdef void tear_down(self) noexcept
    cdef KVCacheBlock view(self, block_id_t index)
    cdef int reserve(self, Py_ssize_t extra) except -1
    cdef int grow(self, block_id_t new, list spare) except -1
    cdef void adopt(self, KVCacheBlock block) noexcept
    cdef void release(self, KVCacheBlock block) noexcept
    cdef void abandon(self, KVCacheBlock block) noexcept


cdef class Loose:
    cdef BlockMeta row              # the row of a hand-made block that is in no queue
    cdef object prev_free_block     # links set by hand
    cdef object next_free_block
    cdef object pool
    cdef bint orphan                # it was a pool's block, and the pool is gone


cdef class KVCacheBlock:
    cdef BlockMeta* row             # in the store, in `loose`, or a shared blank
    cdef PyObject* store            # BlockStore, borrowed; NULL if in none
    cdef Loose loose                # None on a pool's block
    cdef block_id_t index           # row in the store
    cdef block_id_t id              # what block_id shows

    cdef object neighbour(self, bint forward)
    cdef int set_neighbour(self, bint forward, object block) except -1
    cdef int require_loose(self, str what) except -1
    cdef bint is_end(self) noexcept


cdef object borrowed(PyObject* thing)
cdef KVCacheBlock new_block(block_id_t block_id)
