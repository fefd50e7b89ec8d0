# Everything in this module is C: see eviction_heap.pxd.
