# Everything in this module is C: see plan.pxd.
