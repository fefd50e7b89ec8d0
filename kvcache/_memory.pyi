tracemalloc_domain: int
