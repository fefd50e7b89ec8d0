# Everything in this module is C: see prefix_match.pxd.
