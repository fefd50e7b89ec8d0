"""Which ids an allocator's blocks have, and the row of each.

Stores: nothing but the first id where they are contiguous; else the ids and a dict.
Invariant: rows ascend with ids, so a block's row is its zero-offset physical id.
Costs: both ways O(1); 8 bytes an id and a dict entry where they are not contiguous.
Threads: never changes once made.
"""
cimport cython
from libc.stdint cimport INT64_MAX

from kvcache._args cimport as_int
from kvcache._memory cimport allocate, deallocate
from kvcache._types cimport MAX_BLOCKS


@cython.final
cdef class BlockIds:
    """Distinct ids, ints from 0 to 2**63 - 1 in any order, with or without gaps.

    Args:
        block_ids: The ids, in an iterable.
        num_blocks: How many they must be, or None if a repeated id counts once.

    Raises:
        TypeError: An id is not an int.
        ValueError: One is out of range, or they are not `num_blocks` distinct ones.
    """

    def __cinit__(self, block_ids, num_blocks=None):
        cdef Py_ssize_t i
        if type(block_ids) is range and block_ids.step == 1:
            count = max(0, block_ids.stop - block_ids.start)
            if count:
                self.first = as_int(block_ids.start, "a block id", 0, INT64_MAX)
                as_int(block_ids.stop - 1, "a block id", 0, INT64_MAX)
        else:
            listed = [
                as_int(block_id, "a block id", 0, INT64_MAX) for block_id in block_ids
            ]
            distinct = sorted(set(listed))
            count = len(distinct)
            if num_blocks is not None and count != len(listed):
                seen = set()
                twice = next(one for one in listed if one in seen or seen.add(one))
                raise ValueError(f"block id {twice} is listed more than once")
            if count:
                self.first = distinct[0]
            if count and distinct[count - 1] - distinct[0] != count - 1:
                self.ids = <int64_t*> allocate(count, sizeof(int64_t), "block ids")
                for i in range(count):
                    self.ids[i] = distinct[i]
                self.rows = {one: i for i, one in enumerate(distinct)}
            if count == len(listed) and listed != distinct:
                row_of = {one: i for i, one in enumerate(distinct)}
                self.order = [row_of[one] for one in listed]
        if count > MAX_BLOCKS:
            raise ValueError(f"{count} blocks are too many, the limit is {MAX_BLOCKS}")
        if num_blocks is not None and count != num_blocks:
            raise ValueError(f"{count} block ids for {num_blocks} blocks")
        self.count = <block_id_t> count

    def __dealloc__(self):
        deallocate(self.ids)

    cdef Py_ssize_t nbytes(self) noexcept:
        return 0 if self.ids == NULL else self.count * sizeof(int64_t)

    cdef block_id_t find(self, object block_id) except? -1:
        """The row of an id, or -1; TypeError or ValueError if it can be none."""
        cdef int64_t wanted = as_int(block_id, "a block id", 0, INT64_MAX)
        if self.ids == NULL:
            if 0 <= wanted - self.first < self.count:
                return <block_id_t> (wanted - self.first)
            return -1
        return self.rows.get(wanted, -1)

    cdef block_id_t row_of(self, object block_id) except -1:
        """The row of an id.

        Raises:
            ValueError: There is no such block here.
        """
        cdef block_id_t row = self.find(block_id)
        if row < 0:
            raise ValueError(f"block {block_id} is none of the {self.count} here")
        return row

    cdef frozenset as_frozenset(self):
        cdef block_id_t row
        if self.all_ids is None:
            self.all_ids = frozenset([self.id_of(row) for row in range(self.count)])
        return self.all_ids
