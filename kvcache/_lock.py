"""What the Python faces lock where there is no GIL; see _lock.pxd."""

LOCK = object()
