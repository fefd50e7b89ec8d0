# Everything in this module is C: see pool_state.pxd.
