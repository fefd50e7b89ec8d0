# Everything in this module is C: see invariants.pxd.
