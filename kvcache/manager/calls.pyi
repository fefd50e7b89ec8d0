# Everything in this module is C: see calls.pxd.
