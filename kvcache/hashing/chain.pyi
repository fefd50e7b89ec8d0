from typing_extensions import disjoint_base

# A hash function that has a C form; the rest of it is in chain.pxd.
@disjoint_base
class CompiledHash: ...
