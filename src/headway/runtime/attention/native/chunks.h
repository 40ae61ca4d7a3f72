// What a prefill call is asked, and how it is divided into jobs.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "flash.h"

namespace {

constexpr i64 kBlock = 16 * kWide * 8;     // rows in a job, at most
constexpr i64 kMostDim = 128;
constexpr i64 kSpan = 1024;                // keys in a job, at least
constexpr i64 kJobsPerThread = 4;

// One chunk, as the caller writes it. With `causal`, row i sees keys 0 .. keys - rows + i, and all keys otherwise.
struct Chunk { i64 row, rows, keys, causal, run, runs; };

struct Call {
    const bf16* q;
    i64 q_row, q_head;
    const bf16 *keys, *values;
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
inline Place place(const Call& call, i64 chunk, i64 head, i64 r) {
    return {call.chunks[chunk].row + r / call.group, head * call.group + r % call.group};
}

inline void put(const Call& call, Place at, i64 d, __m512 x) {
    const i64 to = at.token * call.out_row + at.head * call.out_head + d;
    if (call.wide) _mm512_storeu_ps((float*)call.out + to, x);
    else narrow((bf16*)call.out + to, x);
}
inline void put_lse(const Call& call, Place at, float x) {
    if (call.lse) call.lse[at.token * call.lse_row + at.head * call.lse_head] = x;
}

// All work of a call: jobs, the dearest first, and the blocks that are in pieces. Depends on shapes and threads only.
void divide(Call& call, i64 count, i64 kv_heads, i64 threads, std::vector<Job>& jobs, std::vector<Cut>& cuts) {
    std::vector<Job> whole;
    for (i64 i = 0; i < count; i++) {
        const Chunk& chunk = call.chunks[i];
        const i64 rows = chunk.rows * call.group, vectors = (rows + 15) / 16, blocks = (rows + kBlock - 1) / kBlock;
        for (i64 h = 0; h < kv_heads; h++)
            for (i64 b = 0; b < blocks; b++) {
                const i64 from = vectors * b / blocks * 16, to = std::min(rows, vectors * (b + 1) / blocks * 16);
                const i64 end = chunk.causal ? chunk.keys - chunk.rows + (to - 1) / call.group + 1 : chunk.keys;
                whole.push_back({i, h, from, to - from, 0, end, -1});
            }
    }
    const i64 wanted = threads == 1 ? 1 : (kJobsPerThread * threads + i64(whole.size()) - 1) / i64(whole.size());
    i64 parts = 0;
    for (Job job : whole) {
        const i64 blocks = (job.end + kKeys - 1) / kKeys, pieces = std::max<i64>(1, std::min(wanted, job.end / kSpan));
        const i64 end = job.end;
        if (pieces > 1) cuts.push_back({job.chunk, job.head, job.first, job.rows, parts, pieces});
        for (i64 s = 0; s < pieces; s++) {
            job.begin = blocks * s / pieces * kKeys, job.end = std::min(end, blocks * (s + 1) / pieces * kKeys);
            if (pieces > 1) job.part = parts, parts += job.rows;
            jobs.push_back(job);
        }
    }
    call.parts.reset(new float[parts * call.part_size()]);
    std::stable_sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) { return a.cost() > b.cost(); });
}

}  // namespace
