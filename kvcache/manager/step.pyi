from kvcache.errors import LACK_OF_MEMORY as LACK_OF_MEMORY

# Everything else in this module is C: see step.pxd.
