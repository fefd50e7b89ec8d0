from kvcache.errors import LACK_OF_MEMORY as LACK_OF_MEMORY

# Everything else in this module is C: see block_caching.pxd.
