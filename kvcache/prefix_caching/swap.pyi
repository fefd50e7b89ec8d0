# Everything in this module is C: see swap.pxd.
