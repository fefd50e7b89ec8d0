"""The hit rate of a prefix cache, since it was made or reset.

Stores: the rate over all completed blocks of 1,000 queries, and the counts since.
Invariant: rate * blocks * 1,000 is within rounding of a whole number of hits, so no
error adds up: the rate is right to its last digits for the first 10**15 queries.
Costs: two additions a query, one division a block of them; 56 bytes.
Threads: each call is atomic.
"""
cimport cython

from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._args cimport as_int


cdef long long count(object value, str name, Py_ssize_t low) except -1:
    return as_int(value, name, low, 2**62)


@cython.final
cdef class CacheMetricData:
    """Counts hits among queries; fields and results are vLLM 0.8.5's.

    Args:
        num_completed_blocks: Blocks of queries that are complete.
        completed_block_cache_hit_rate: Share of their queries that were hits, 0 to 1.
        num_incompleted_block_queries: Queries since, fewer than `block_size`.
        num_incompleted_block_hit: Hits among these.
        block_size: Queries in a block, at least 1.

    Raises:
        TypeError, ValueError: One is of the wrong type or out of range.
    """

    __hash__ = None

    @cython.critical_section
    def __init__(
        self,
        num_completed_blocks=0,
        completed_block_cache_hit_rate=0.0,
        num_incompleted_block_queries=0,
        num_incompleted_block_hit=0,
        block_size=1000,
    ):
        cdef long long size = count(block_size, "block_size", 1)
        cdef long long blocks = count(num_completed_blocks, "num_completed_blocks", 0)
        cdef double rate = completed_block_cache_hit_rate
        cdef long long queries = count(
            num_incompleted_block_queries, "num_incompleted_block_queries", 0
        )
        cdef long long hits = count(
            num_incompleted_block_hit, "num_incompleted_block_hit", 0
        )
        if not 0 <= rate <= 1:
            raise ValueError(
                f"completed_block_cache_hit_rate must be from 0 to 1, got {rate}"
            )
        if not hits <= queries < size:
            raise ValueError(
                f"{hits} hits in {queries} queries of a block of {size} are impossible"
            )
        self.num_completed_blocks = blocks
        self.completed_block_cache_hit_rate = rate
        self.num_incompleted_block_queries = queries
        self.num_incompleted_block_hit = hits
        self.block_size = size

    @cython.critical_section
    def query(self, bint hit):
        """Count one query."""
        self.note(hit)

    @cython.critical_section
    def get_hit_rate(self):
        """Hits / queries, from 0 to 1; 0 before the first query."""
        cdef double before = <double> self.num_completed_blocks * self.block_size
        cdef double queries = before + self.num_incompleted_block_queries
        if self.num_incompleted_block_queries == 0:
            return self.completed_block_cache_hit_rate if before else 0.0
        return (
            self.completed_block_cache_hit_rate * before
            + self.num_incompleted_block_hit
        ) / queries

    cdef tuple fields(self):
        return (
            self.num_completed_blocks,
            self.completed_block_cache_hit_rate,
            self.num_incompleted_block_queries,
            self.num_incompleted_block_hit,
            self.block_size,
        )

    @cython.critical_section
    def __eq__(self, other):
        if type(other) is not CacheMetricData:
            return NotImplemented
        return self.fields() == (<CacheMetricData> other).fields()

    @cython.critical_section
    def __repr__(self):
        return (
            f"CacheMetricData(num_completed_blocks={self.num_completed_blocks}, "
            "completed_block_cache_hit_rate="
            f"{self.completed_block_cache_hit_rate}, "
            f"num_incompleted_block_queries={self.num_incompleted_block_queries}, "
            f"num_incompleted_block_hit={self.num_incompleted_block_hit}, "
            f"block_size={self.block_size})"
        )

    @cython.critical_section
    def __reduce__(self):
        return CacheMetricData, self.fields()
