# Everything in this module is C: see _args.pxd.
