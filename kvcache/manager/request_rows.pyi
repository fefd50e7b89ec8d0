# Everything in this module is C: see request_rows.pxd.
