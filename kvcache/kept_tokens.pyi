# Everything in this module is C: see kept_tokens.pxd.
