# One lock for all Python faces, where there is no GIL. A module with methods under
# `@cython.critical_section`, as all have that read or write shared state, cimports it.
# A pool, its map, queue, views and manager share rows, and blocks of other pools may be
# passed: the object of a call does not say what it will touch. So all lock the same
# one, at some 15 ns a call; who waits for anything lets go of it, as with the GIL.
# With the GIL this compiles to nothing. The C surface locks nothing.
from cpython.object cimport PyObject

cdef extern from *:
    """
    #ifdef Py_GIL_DISABLED
    static inline PyObject *kvc_lock_of(PyObject *op) {
        static PyObject *shared = NULL;  /* two threads would find the same one */
        if (PyDict_Check(op) || PyList_Check(op) || PyAnySet_Check(op))
            return op;  /* Cython's own sections */
        if (shared == NULL) {
            PyObject *module = PyImport_ImportModule("kvcache._lock");
            if (module != NULL) shared = PyObject_GetAttrString(module, "LOCK");
            Py_XDECREF(module);
        }
        if (shared != NULL) return shared;
        if (!Py_IsFinalizing()) Py_FatalError("kvcache._lock is not there");
        PyErr_Clear();  /* nothing is imported any more, and no other thread runs */
        return op;
    }
    #define PyCriticalSection_Begin(c, op) (PyCriticalSection_Begin)(c, kvc_lock_of(op))
    #endif
    """
    int KVC_LOCKED "0"

# A reference to what a borrowed pointer names, unless it is going already: what goes
# clears the pointer under the lock, but first waits for it. Lend it when it is made.
cdef extern from *:
    """
    #ifndef Py_GIL_DISABLED
    #define kvc_lend(op) ((void)(op))
    static inline int kvc_try_incref(PyObject *op) {
        return Py_REFCNT(op) == 0 ? 0 : (Py_INCREF(op), 1);
    }
    #define KVC_NO_GIL 0
    #else
    #define KVC_NO_GIL 1
    #if PY_VERSION_HEX >= 0x030E0000
    #define kvc_lend(op) PyUnstable_EnableTryIncRef(op)
    #define kvc_try_incref(op) PyUnstable_TryIncRef(op)
    #else
    /* What 3.14 does; 3.13 has it for itself only. */
    static inline void kvc_lend(PyObject *op) {
        Py_ssize_t shared = _Py_atomic_load_ssize_relaxed(&op->ob_ref_shared);
        while ((shared & _Py_REF_SHARED_FLAG_MASK) == 0 &&
               !_Py_atomic_compare_exchange_ssize(
                   &op->ob_ref_shared, &shared, shared | _Py_REF_MAYBE_WEAKREF)) {}
    }
    static inline int kvc_try_incref(PyObject *op) {
        uint32_t local = _Py_atomic_load_uint32_relaxed(&op->ob_ref_local) + 1;
        Py_ssize_t shared;
        if (local == 0) return 1;
        if (_Py_IsOwnedByCurrentThread(op)) {
            _Py_atomic_store_uint32_relaxed(&op->ob_ref_local, local);
            return 1;
        }
        shared = _Py_atomic_load_ssize_relaxed(&op->ob_ref_shared);
        do {
            if (shared == 0 || shared == _Py_REF_MERGED) return 0;
        } while (!_Py_atomic_compare_exchange_ssize(
            &op->ob_ref_shared, &shared, shared + (1 << _Py_REF_SHARED_SHIFT)));
        return 1;
    }
    #endif
    #endif
    """
    const bint KVC_NO_GIL       # a constant
    void kvc_lend(PyObject* op)
    bint kvc_try_incref(PyObject* op)

cdef inline object unshared(object items):
    """A list or tuple whose items may be read as borrowed: a copy without the GIL."""
    if KVC_NO_GIL and type(items) is list:
        return list(items)
    return items
