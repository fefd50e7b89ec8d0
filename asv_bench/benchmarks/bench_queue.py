"""The free queue made by hand, as vLLM's own tests and tools use it.

A pool's queue is timed in bench_pool: there it threads the pool's rows.
"""

from collections import OrderedDict

from kvcache import FreeKVCacheBlockQueue, KVCacheBlock

from .common import REQUEST, WHO


class PlainQueue(OrderedDict):
    """The baseline: an OrderedDict of block ids."""

    def popleft_n(self, n):
        return [self.popitem(last=False)[0] for _ in range(n)]

    def append_n(self, blocks):
        for block in blocks:
            self[block] = None

    def remove(self, block):
        del self[block]

    def append(self, block):
        self[block] = None


class HandMadeQueue:
    # In L2 (1,000 blocks and their objects take about 200 KB) and beyond it.
    params = (WHO, [1_000, 100_000])
    param_names = ("who", "blocks")

    def setup(self, who, num_blocks):
        if who == "kvcache":
            blocks = [KVCacheBlock(i) for i in range(num_blocks)]
            self.queue = FreeKVCacheBlockQueue(blocks)
        else:
            blocks = list(range(num_blocks))
            self.queue = PlainQueue.fromkeys(blocks)
        self.middle = blocks[num_blocks // 2]

    def time_popleft_and_append_100(self, who, num_blocks):
        self.queue.append_n(self.queue.popleft_n(REQUEST))

    def time_remove_and_append(self, who, num_blocks):
        self.queue.remove(self.middle)
        self.queue.append(self.middle)
