# The hit rate of a prefix cache.
cimport cython
from libc.math cimport rint


@cython.final
cdef class CacheMetricData:
    # Of the queries in completed blocks, and the share of them that were hits.
    cdef public long long num_completed_blocks
    cdef public double completed_block_cache_hit_rate
    # Of those since.
    cdef public long long num_incompleted_block_queries
    cdef public long long num_incompleted_block_hit
    cdef readonly long long block_size

    cdef inline void note(self, bint hit) noexcept:
        """Count one query."""
        self.num_incompleted_block_queries += 1
        self.num_incompleted_block_hit += hit
        if self.num_incompleted_block_queries >= self.block_size:
            self.complete()

    cdef inline void complete(self) noexcept:
        # The rate stands for a whole number of hits, so that rounding gives it back.
        cdef double before = <double> self.num_completed_blocks * self.block_size
        cdef double hits = rint(self.completed_block_cache_hit_rate * before)
        hits += self.num_incompleted_block_hit
        self.num_completed_blocks += 1
        self.completed_block_cache_hit_rate = hits / (
            before + self.num_incompleted_block_queries
        )
        self.num_incompleted_block_queries = self.num_incompleted_block_hit = 0

    cdef tuple fields(self)
