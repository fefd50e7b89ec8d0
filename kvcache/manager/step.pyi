# Everything in this module is C: see step.pxd.
