# Everything in this module is C: see slots.pxd.
