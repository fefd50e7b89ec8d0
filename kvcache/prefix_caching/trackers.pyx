"""What a block manager remembers of each sequence: block hashes, time of last use.

Stores: by sequence id, the hashes of its full blocks and how many tokens were found
cached; in the other tracker, one time.
Invariant: the hashes are those that the allocator gives to the same tokens; each block
is hashed once.
Costs: a lookup and what is new; 16-byte hashes as ints, 44 bytes a block.
Threads: each call is atomic, but for what a sequence's own methods do.
"""
cimport cython
from kvcache._args cimport as_int, no_copy
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._types cimport MAX_BLOCKS

from kvcache.errors import BlockStateError
from kvcache.prefix_caching import prefix_hash


cdef class ComputedBlocksTracker:
    """Tells how many of a sequence's first tokens are cached and computed.

    Args:
        allocator: What finds cached prefixes: `find_cached_blocks_prefix(hashes)`.
        block_size: Tokens a block, at least 1.
        enable_caching: If false, no sequence has cached tokens.

    A sequence has `seq_id`, `get_token_ids()`, `extra_hash()` and `is_prefill()`.
    """

    cdef readonly object _allocator
    cdef readonly Py_ssize_t _block_size
    cdef readonly bint _enable_caching
    cdef readonly dict _seq_id_to_blocks_hashes
    cdef readonly dict _seq_id_to_num_tokens_computed

    _none_hash = prefix_hash.NONE_HASH

    @cython.critical_section
    def __init__(self, allocator, block_size, enable_caching):
        self._block_size = as_int(block_size, "block_size", 1, MAX_BLOCKS)
        self._enable_caching = enable_caching
        self._allocator = allocator
        self._seq_id_to_blocks_hashes = {}
        self._seq_id_to_num_tokens_computed = {}

    def __reduce__(self):
        raise no_copy(self)

    @cython.critical_section
    def get_num_cached_tokens(self, seq):
        """Number of the sequence's first tokens that need not be computed.

        A multiple of the block size. While the sequence is in prefill it stays what the
        first call found: blocks count as computed when their batch is scheduled, so
        that a prompt computed in chunks would find its own chunks.

        Raises:
            BlockStateError: The sequence has fewer tokens than full blocks are known
                of it; one that starts anew is to be removed first.
        """
        if not self._enable_caching:
            return 0
        seq_id = seq.seq_id
        token_ids = seq.get_token_ids()
        cdef list hashes = self._seq_id_to_blocks_hashes.get(seq_id)
        cdef Py_ssize_t num_known = 0 if hashes is None else len(hashes)
        cdef Py_ssize_t num_hashed = num_known * self._block_size
        if len(token_ids) < num_hashed:
            raise BlockStateError(
                f"sequence {seq_id!r} has {len(token_ids)} tokens, but {num_known} full"
                f" blocks of {self._block_size} are known of it; remove it first"
            )
        if hashes is None:
            hashes = []
        if len(token_ids) - num_hashed >= self._block_size:
            hashes += prefix_hash.hash_token_blocks(
                hashes[num_known - 1] if num_known else None,
                token_ids[num_hashed:],
                self._block_size,
                seq.extra_hash(),
            )
        self._seq_id_to_blocks_hashes[seq_id] = hashes

        num_cached = self._seq_id_to_num_tokens_computed.get(seq_id)
        if num_cached is None or not seq.is_prefill():
            found = self._allocator.find_cached_blocks_prefix(hashes)
            num_cached = len(found) * self._block_size
            self._seq_id_to_num_tokens_computed[seq_id] = num_cached
        return num_cached

    @cython.critical_section
    def remove_seq(self, seq_id):
        """Forget a sequence.

        Raises:
            BlockStateError: Nothing is known of it.
        """
        if not self._enable_caching:
            return
        if seq_id not in self._seq_id_to_blocks_hashes:
            raise BlockStateError(f"nothing is known of sequence {seq_id!r}")
        del self._seq_id_to_blocks_hashes[seq_id]
        self._seq_id_to_num_tokens_computed.pop(seq_id, None)


cdef class LastAccessBlocksTracker:
    """Keeps when each sequence was last used, for the allocator to be told at its end.

    Args:
        allocator: What is told: `mark_blocks_as_accessed(block_ids, now)`.
    """

    cdef readonly object _allocator
    cdef readonly dict _seq_last_access

    @cython.critical_section
    def __init__(self, allocator):
        self._allocator = allocator
        self._seq_last_access = {}

    def __reduce__(self):
        raise no_copy(self)

    cdef int check_known(self, object seq_id) except -1:
        if seq_id not in self._seq_last_access:
            raise BlockStateError(f"sequence {seq_id!r} is not tracked")
        return 0

    @cython.critical_section
    def add_seq(self, seq_id):
        """Track a sequence, not used so far.

        Raises:
            BlockStateError: It is tracked already.
        """
        if seq_id in self._seq_last_access:
            raise BlockStateError(f"sequence {seq_id!r} is tracked already")
        self._seq_last_access[seq_id] = None

    @cython.critical_section
    def remove_seq(self, seq_id):
        """Stop tracking a sequence.

        Raises:
            BlockStateError: It is not tracked.
        """
        self.check_known(seq_id)
        del self._seq_last_access[seq_id]

    @cython.critical_section
    def update_last_access(self, seq_id, time):
        """Note that a sequence was used, by the caller's clock.

        Raises:
            BlockStateError: It is not tracked.
        """
        self.check_known(seq_id)
        self._seq_last_access[seq_id] = time

    @cython.critical_section
    def update_seq_blocks_last_access(self, seq_id, block_ids):
        """Tell the allocator when these blocks of a sequence were used, if they were.

        Raises:
            BlockStateError: The sequence is not tracked.
        """
        self.check_known(seq_id)
        time = self._seq_last_access[seq_id]
        if time is not None:
            self._allocator.mark_blocks_as_accessed(block_ids, time)
