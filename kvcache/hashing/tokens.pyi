# Everything in this module is C: see tokens.pxd.
