// The scheduler of scheduler.pyx in C++, over the capsule: nothing of kvcache is linked.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvcache.h"

namespace {

const kvc_api *kvc = nullptr;

struct Job {
    int32_t row;
    int64_t num_tokens, goal;
    const uint8_t *digests;
};

struct Engine {
    kvc_manager *manager;
    int64_t block_size;
    std::vector<Job> jobs;
    std::vector<int32_t> waiting, running;  // the next one last
    std::vector<int32_t> log;
    int64_t preemptions = 0;

    void admit(size_t most_running) {
        kvc_slots slots = {};
        slots.full_sequence_must_fit = 1;
        while (!waiting.empty() && running.size() < most_running) {
            Job &job = jobs[waiting.back()];
            if (job.row < 0) {
                job.row = kvc->manager_add_request(manager, job.num_tokens, job.digests,
                                                   job.num_tokens / block_size, 16);
                if (job.row < 0) throw std::runtime_error("no row");
            }
            slots.num_new_tokens =
                job.num_tokens - kvc->manager_match(manager, job.row, -1);
            if (kvc->manager_allocate_slots(manager, job.row, &slots) <= KVC_NO_ROOM)
                return;
            int32_t n = 0;
            const int32_t *ids = kvc->manager_block_ids(manager, job.row, 0, &n);
            log.insert(log.end(), ids, ids + n);
            running.push_back(waiting.back());
            waiting.pop_back();
        }
    }

    void take_tokens() {
        std::vector<int32_t> kept;
        for (int32_t at : running) {
            Job &job = jobs[at];
            if (job.num_tokens == job.goal) {
                if (kvc->manager_free(manager, job.row))
                    throw std::runtime_error("not freed");
                continue;
            }
            job.num_tokens++;
            const int64_t blocks = job.num_tokens / block_size;
            if (kvc->manager_append(manager, job.row, 1,
                                    job.digests + (blocks - 1) * 16,
                                    job.num_tokens % block_size == 0))
                throw std::runtime_error("no token more");
            kept.push_back(at);
        }
        running = kept;
    }

    void decode() {
        std::vector<int32_t> rows, ones(running.size(), 1), starts(running.size() + 1);
        for (int32_t at : running) rows.push_back(jobs[at].row);
        for (size_t done = 0; done < running.size();) {
            const Py_ssize_t served = kvc->manager_allocate_step(
                manager, rows.data() + done, ones.data(), running.size() - done, 0,
                starts.data());
            if (served < 0) throw std::runtime_error("a step that cannot be");
            const size_t before = log.size();
            log.resize(before + starts[served]);
            kvc->manager_step_ids(manager, rows.data() + done, log.data() + before);
            done += served;
            if (done < running.size()) {
                waiting.push_back(running.back());
                running.pop_back();
                preemptions++;
                if (kvc->manager_preempt(manager, rows[running.size()]))
                    throw std::runtime_error("not preempted");
            }
        }
    }
};

template <class T> const T *data(const Py_buffer &view) { return (const T *)view.buf; }

// (manager, block_size, prompts, goals, digests, starts, most_running) -> (log, count)
PyObject *run(PyObject *, PyObject *args) {
    PyObject *object;
    long long block_size, most_running;
    Py_buffer prompts, goals, digests, starts;
    if (!PyArg_ParseTuple(args, "OLy*y*y*y*L", &object, &block_size, &prompts, &goals,
                          &digests, &starts, &most_running))
        return nullptr;
    Engine engine;
    engine.manager = kvc->manager_of(object);
    engine.block_size = block_size;
    std::string failed;
    if (engine.manager) {
        const auto n = int32_t(prompts.len / sizeof(int64_t));
        for (int32_t i = 0; i < n; i++) {
            engine.jobs.push_back({-1, data<int64_t>(prompts)[i], data<int64_t>(goals)[i],
                                   data<uint8_t>(digests) +
                                       16 * data<int64_t>(starts)[i]});
            engine.waiting.insert(engine.waiting.begin(), i);
        }
        PyThreadState *state = PyEval_SaveThread();
        try {
            while (!engine.waiting.empty() || !engine.running.empty()) {
                engine.admit(size_t(most_running));
                engine.take_tokens();
                engine.decode();
            }
        } catch (const std::exception &error) {
            failed = error.what();
        }
        PyEval_RestoreThread(state);
    }
    for (Py_buffer *view : {&prompts, &goals, &digests, &starts}) PyBuffer_Release(view);
    if (!engine.manager) return nullptr;
    if (!failed.empty()) return PyErr_Format(PyExc_ValueError, "%s", failed.c_str());
    return Py_BuildValue("y#L", (const char *)engine.log.data(),
                         Py_ssize_t(engine.log.size() * sizeof(int32_t)),
                         (long long)engine.preemptions);
}

// (pool, keyed, tokens int32, block_size) -> list of what each call on the pool gave
PyObject *drive_pool(PyObject *, PyObject *args) {
    PyObject *pool_object, *keyed_object;
    Py_buffer tokens;
    long long size;
    if (!PyArg_ParseTuple(args, "OOy*L", &pool_object, &keyed_object, &tokens, &size))
        return nullptr;
    kvc_pool *pool = kvc->pool_of(pool_object);
    const kvc_keyed *keyed = pool ? kvc->keyed_of(keyed_object) : nullptr;
    if (!keyed) {
        PyBuffer_Release(&tokens);
        return nullptr;
    }
    const auto n = Py_ssize_t(tokens.len / sizeof(int32_t) / size);
    std::vector<uint8_t> digests(size_t(n) * 16);
    std::vector<int32_t> ids(n), found(n);
    std::vector<long long> said;
    const int32_t foreign = 1 << 30;
    PyThreadState *state = PyEval_SaveThread();
    kvc->keyed_chain(keyed, kvc->keyed_root(keyed), data<int32_t>(tokens), size, n,
                     digests.data());
    said.push_back(kvc->pool_get(pool, ids.data(), n));
    said.push_back(kvc->pool_cache(pool, ids.data(), digests.data(), 16, n, 3));
    said.push_back(kvc->pool_cache(pool, ids.data(), digests.data(), 16, n, 3));
    said.push_back(kvc->pool_match(pool, digests.data(), 16, n, 3, found.data()));
    said.push_back(found == ids);
    said.push_back(kvc->pool_match(pool, digests.data(), 16, n, 4, found.data()));
    said.push_back(kvc->pool_match(pool, digests.data(), 33, n, 3, found.data()));
    said.push_back(kvc->pool_touch(pool, ids.data(), n));
    said.push_back(kvc->pool_blocks(pool)[ids[0]].ref_cnt);
    said.push_back(kvc->pool_free(pool, ids.data(), n));
    said.push_back(kvc->pool_free(pool, ids.data(), n));
    said.push_back(kvc->pool_free(pool, ids.data(), n));
    said.push_back(kvc->pool_touch(pool, &foreign, 1));
    said.push_back(kvc->pool_evict(pool, ids.data(), 1));
    said.push_back(kvc->pool_match(pool, digests.data(), 16, n, 3, found.data()));
    said.push_back(kvc->pool_get(pool, ids.data(), kvc->pool_num_blocks(pool)));
    said.push_back(kvc->pool_num_free(pool));
    PyEval_RestoreThread(state);
    PyBuffer_Release(&tokens);
    PyObject *list = PyList_New(0);
    for (long long each : said) {
        PyObject *number = PyLong_FromLongLong(each);
        PyList_Append(list, number);
        Py_DECREF(number);
    }
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)digests.data(), n * 16);
    return Py_BuildValue("NN", list, bytes);
}

// (manager, rows int32, num_new int32, group) -> (free blocks, slots, changed rows)
PyObject *read_manager(PyObject *, PyObject *args) {
    PyObject *object;
    Py_buffer rows, news;
    int group;
    if (!PyArg_ParseTuple(args, "Oy*y*i", &object, &rows, &news, &group)) return nullptr;
    kvc_manager *manager = kvc->manager_of(object);
    std::vector<int64_t> slots(10'000);
    std::vector<int32_t> changed(10'000);
    Py_ssize_t mapped = 0, num_changed = 0, num_free = 0;
    if (manager) {
        mapped = kvc->manager_slot_mapping(manager, data<int32_t>(rows),
                                           data<int32_t>(news), rows.len / 4, group,
                                           slots.data());
        num_changed = kvc->manager_take_changed_rows(manager, changed.data());
        num_free = kvc->pool_num_free(kvc->manager_pool(manager));
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&news);
    if (!manager) return nullptr;
    return Py_BuildValue("niy#y#", num_free, int(mapped), (const char *)slots.data(),
                         mapped < 0 ? 0 : mapped * Py_ssize_t(sizeof(int64_t)),
                         (const char *)changed.data(),
                         num_changed * Py_ssize_t(sizeof(int32_t)));
}

// The layout of a block: (size, offset of each field).
PyObject *block_layout(PyObject *, PyObject *) {
    return Py_BuildValue(
        "n{snsnsnsnsnsnsnsnsn}", sizeof(kvc_block), "prev_free_block",
        offsetof(kvc_block, prev_free_block), "next_free_block",
        offsetof(kvc_block, next_free_block), "ref_cnt", offsetof(kvc_block, ref_cnt),
        "block_hash_num_tokens", offsetof(kvc_block, block_hash_num_tokens), "prev_copy",
        offsetof(kvc_block, prev_copy), "next_copy", offsetof(kvc_block, next_copy),
        "block_hash", offsetof(kvc_block, block_hash), "block_hash_len",
        offsetof(kvc_block, block_hash_len), "flags", offsetof(kvc_block, flags));
}

PyMethodDef methods[] = {{"run", run, METH_VARARGS, nullptr},
                         {"drive_pool", drive_pool, METH_VARARGS, nullptr},
                         {"read_manager", read_manager, METH_VARARGS, nullptr},
                         {"block_layout", block_layout, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "engine", nullptr, -1, methods,
                      nullptr,               nullptr,  nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_engine() {
    kvc = kvc_import();
    return kvc ? PyModule_Create(&module) : nullptr;
}
