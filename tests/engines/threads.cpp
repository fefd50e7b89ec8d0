// Threads of an engine, without the GIL: each works on a manager and its pool, under
// the mutex of that manager. Several may share one; a Keyed is shared by all, unlocked.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "kvcache.h"

namespace {

const kvc_api *kvc = nullptr;
constexpr int BLOCK_SIZE = 16, DIGEST = 16, PROMPT_BLOCKS = 40, PROMPTS = 6;
constexpr int MOST_HELD = 36, MOST_RUNNING = 8, MOST_TOKENS = 400, MOST_ROWS = 256;

struct Shared {
    kvc_manager *manager;
    kvc_pool *pool;
    std::mutex mutex;
};

struct Request {
    int32_t row;
    int64_t num_tokens;
    std::vector<uint8_t> digests;
};

struct Worker {
    Shared &shared;
    const kvc_keyed *keyed;
    bool careless;  // reads what the mutex guards without it
    std::mt19937 random;
    std::vector<uint8_t> digests = std::vector<uint8_t>(PROMPT_BLOCKS * DIGEST);
    std::vector<int32_t> held = {};
    std::vector<Request> running = {};
    long long served = 0, refused = 0;

    int draw(size_t below) { return int(random() % below); }
    bool count(bool good) { return (good ? served : refused)++, good; }

    void hash_a_prompt() {
        std::vector<int32_t> tokens(PROMPT_BLOCKS * BLOCK_SIZE, draw(PROMPTS));
        kvc->keyed_chain(keyed, kvc->keyed_root(keyed), tokens.data(), BLOCK_SIZE,
                         PROMPT_BLOCKS, digests.data());
    }

    void use_the_pool() {
        int32_t ids[PROMPT_BLOCKS];
        const auto few = Py_ssize_t(held.size() < MOST_HELD ? draw(5) : 0);
        const auto n = Py_ssize_t(draw(std::min(held.size(), size_t(MOST_HELD)) + 1));
        const int32_t *last = held.data() + held.size() - n;
        switch (draw(6)) {
            case 0:
                if (count(kvc->pool_get(shared.pool, ids, few) >= 0))
                    held.insert(held.end(), ids, ids + few);
                break;
            case 1:
                std::copy_n(last, n, ids);
                if (few && count(kvc->pool_touch(shared.pool, ids, n) < 0))
                    held.insert(held.end(), ids, ids + n);
                break;
            case 2:
                count(kvc->pool_free(shared.pool, last, n) < 0);
                held.resize(held.size() - size_t(n));
                break;
            case 3:
                count(kvc->pool_cache(shared.pool, last, digests.data(), DIGEST, n, 0) <
                      0);
                break;
            case 4:
                count(kvc->pool_match(shared.pool, digests.data(), DIGEST,
                                      PROMPT_BLOCKS, 0, ids) > 0);
                break;
            case 5:
                count(kvc->pool_evict(shared.pool, last, n) < 0);
        }
    }

    bool admit(const Request &request) {
        kvc_slots slots = {};
        slots.full_sequence_must_fit = 1;
        slots.num_new_tokens =
            request.num_tokens - kvc->manager_match(shared.manager, request.row, -1);
        return kvc->manager_allocate_slots(shared.manager, request.row, &slots) >
               KVC_NO_ROOM;
    }

    // Requests from `first` on leave: each has its turn again, or is done.
    void preempt(Py_ssize_t first, bool again) {
        std::vector<Request> leaving(running.begin() + first, running.end());
        running.resize(size_t(first));
        for (const Request &each : leaving) {
            kvc->manager_preempt(shared.manager, each.row);
            if (count(again && admit(each)))
                running.push_back(each);
            else
                kvc->manager_free(shared.manager, each.row);
        }
    }

    void add_a_request() {
        Request request = {-1, 1 + draw(MOST_TOKENS), digests};
        request.row = kvc->manager_add_request(shared.manager, request.num_tokens,
                                               request.digests.data(),
                                               request.num_tokens / BLOCK_SIZE, DIGEST);
        if (!count(request.row >= 0)) return;
        if (count(admit(request)))
            running.push_back(request);
        else
            kvc->manager_free(shared.manager, request.row);
    }

    void decode() {
        std::vector<int32_t> rows, ones(running.size(), 1), ids(running.size());
        std::vector<int32_t> starts(running.size() + 1);
        std::vector<int64_t> slots(running.size());
        for (Request &each : running) {
            rows.push_back(each.row);
            const int64_t blocks = ++each.num_tokens / BLOCK_SIZE;
            kvc->manager_append(shared.manager, each.row, 1,
                                each.digests.data() + (blocks - 1) * DIGEST,
                                each.num_tokens % BLOCK_SIZE == 0);
        }
        const Py_ssize_t done = kvc->manager_allocate_step(
            shared.manager, rows.data(), ones.data(), Py_ssize_t(rows.size()), 0,
            starts.data());
        kvc->manager_step_ids(shared.manager, rows.data(), ids.data());
        kvc->manager_slot_mapping(shared.manager, rows.data(), ones.data(), done, 0,
                                  slots.data());
        preempt(done, false);
    }

    void use_the_manager() {
        int32_t n, changed[MOST_ROWS];
        const bool room = !running.empty() &&
                          std::all_of(running.begin(), running.end(), [](auto &each) {
                              return each.num_tokens < PROMPT_BLOCKS * BLOCK_SIZE;
                          });
        switch (draw(5)) {
            case 0:
                if (running.size() < MOST_RUNNING) add_a_request();
                break;
            case 1:
                if (room) decode();
                break;
            case 2:
                preempt(draw(running.size() + 1), draw(2));
                break;
            case 3:
                for (const Request &each : running)
                    count(kvc->manager_block_ids(shared.manager, each.row, 0, &n));
                break;
            case 4:
                count(kvc->manager_take_changed_rows(shared.manager, changed) > 0);
        }
    }

    void run(long long turns) {
        for (long long i = 0; i < turns; i++) {
            hash_a_prompt();
            if (careless) count(kvc->pool_num_free(shared.pool) > 0);
            const std::lock_guard<std::mutex> lock(shared.mutex);
            draw(2) ? use_the_pool() : use_the_manager();
        }
        const std::lock_guard<std::mutex> lock(shared.mutex);
        kvc->pool_free(shared.pool, held.data(), Py_ssize_t(held.size()));
        preempt(0, false);
    }
};

// (a manager for each thread, keyed, turns of each, careless) -> (served, refused)
PyObject *run(PyObject *, PyObject *args) {
    PyObject *managers, *keyed_object;
    long long turns, served = 0, refused = 0;
    int careless;
    if (!PyArg_ParseTuple(args, "O!OLp", &PyList_Type, &managers, &keyed_object, &turns,
                          &careless))
        return nullptr;
    const kvc_keyed *keyed = kvc->keyed_of(keyed_object);
    if (!keyed) return nullptr;
    std::map<kvc_manager *, Shared> shared;
    std::vector<Worker> workers;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(managers); i++) {
        kvc_manager *manager = kvc->manager_of(PyList_GET_ITEM(managers, i));
        if (!manager) return nullptr;
        Shared &one = shared[manager];
        one.manager = manager;
        one.pool = kvc->manager_pool(manager);
        workers.push_back({one, keyed, careless != 0, std::mt19937(unsigned(i))});
    }
    PyThreadState *state = PyEval_SaveThread();
    std::vector<std::thread> threads;
    for (Worker &worker : workers) threads.emplace_back(&Worker::run, &worker, turns);
    for (std::thread &thread : threads) thread.join();
    PyEval_RestoreThread(state);
    for (const Worker &worker : workers) {
        served += worker.served;
        refused += worker.refused;
    }
    return Py_BuildValue("LL", served, refused);
}

PyMethodDef methods[] = {{"run", run, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "threads", nullptr, -1, methods,
                      nullptr,               nullptr,   nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_threads() {
    kvc = kvc_import();
    return kvc ? PyModule_Create(&module) : nullptr;
}
