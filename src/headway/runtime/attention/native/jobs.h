// What an attention call over chunks is asked, and how it is divided into jobs: the same for every element type.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

using i64 = int64_t;

namespace {

constexpr i64 kSpan = 1024;                // keys in a job, at least
constexpr i64 kJobsPerThread = 4;

// One chunk, as the caller writes it. With `causal`, row i sees keys 0 .. keys - rows + i, and all keys otherwise.
struct Chunk { i64 row, rows, keys, causal, run, runs; };

template <class T>
struct CallOf {
    const T* q;
    i64 q_row, q_head;
    const T *keys, *values;
    i64 kv_row, kv_head;
    void* out;
    i64 out_row, out_head;
    int wide;
    float* lse;
    i64 lse_row, lse_head;
    const Chunk* chunks;
    const i64* runs;
    i64 group, dim;
    float scale;
    std::unique_ptr<float[]> parts;        // of cut spans: each row's answer (dim), then its log-sum-exp and padding
    i64 part_size() const { return dim + 16; }
};

// Rows first .. first + rows of a KV head of a chunk, over keys begin..end; part: its first row in parts, or -1.
struct Job {
    i64 chunk, head, first, rows, begin, end, part;
    i64 cost() const { return rows * (end - begin); }
};

// A block of rows whose span was cut into `pieces`; piece i has its rows at part + i * rows.
struct Cut { i64 chunk, head, first, rows, part, pieces; };

struct Place { i64 token, head; };
template <class T>
Place place(const CallOf<T>& call, i64 chunk, i64 head, i64 r) {
    return {call.chunks[chunk].row + r / call.group, head * call.group + r % call.group};
}

template <class T>
void put_lse(const CallOf<T>& call, Place at, float x) {
    if (call.lse) call.lse[at.token * call.lse_row + at.head * call.lse_head] = x;
}

// A chunk's slots, token by token, in order.
struct Slots {
    const i64* run;
    i64 before = 0;
    // The slot of token t, which is not before that of the last call, and how many follow it side by side, itself included.
    i64 find(i64 t, i64& side) {
        for (; t >= before + run[1]; run += 2) before += run[1];
        side = before + run[1] - t;
        return run[0] + t - before;
    }
};

// How a kernel works: rows in a vector, rows in a job at most, keys in a block.
struct Grain { i64 lanes, rows, keys; };

// All work of a call: jobs, the dearest first, and the blocks that are in pieces. Depends on shapes and threads only, and is
// the same for one and two, so that an answer's bits do not change when a busy machine's second thread is left out.
template <class T>
void divide(CallOf<T>& call, Grain grain, i64 count, i64 kv_heads, i64 threads, std::vector<Job>& jobs,
            std::vector<Cut>& cuts) {
    std::vector<Job> whole;
    for (i64 i = 0; i < count; i++) {
        const Chunk& chunk = call.chunks[i];
        const i64 rows = chunk.rows * call.group, lanes = grain.lanes, vectors = (rows + lanes - 1) / lanes;
        const i64 blocks = (rows + grain.rows - 1) / grain.rows;
        for (i64 h = 0; h < kv_heads; h++)
            for (i64 b = 0; b < blocks; b++) {
                const i64 from = vectors * b / blocks * lanes, to = std::min(rows, vectors * (b + 1) / blocks * lanes);
                const i64 end = chunk.causal ? chunk.keys - chunk.rows + (to - 1) / call.group + 1 : chunk.keys;
                whole.push_back({i, h, from, to - from, 0, end, -1});
            }
    }
    const i64 least = kJobsPerThread * std::max<i64>(2, threads);
    const i64 wanted = (least + i64(whole.size()) - 1) / i64(whole.size());
    i64 parts = 0;
    for (Job job : whole) {
        const i64 blocks = (job.end + grain.keys - 1) / grain.keys;
        const i64 pieces = std::max<i64>(1, std::min(wanted, job.end / kSpan)), end = job.end;
        if (pieces > 1) cuts.push_back({job.chunk, job.head, job.first, job.rows, parts, pieces});
        for (i64 s = 0; s < pieces; s++) {
            job.begin = blocks * s / pieces * grain.keys, job.end = std::min(end, blocks * (s + 1) / pieces * grain.keys);
            if (pieces > 1) job.part = parts, parts += job.rows;
            jobs.push_back(job);
        }
    }
    call.parts.reset(new float[parts * call.part_size()]);
    std::stable_sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) { return a.cost() > b.cost(); });
}

}  // namespace
