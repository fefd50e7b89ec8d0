# Everything in this module is C: see block_caching.pxd.
