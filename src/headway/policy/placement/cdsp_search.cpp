// Tetris Algorithms 1-3 on an absolute time line; cdsp.py says why this gives the same plans, and _Search is the same
// in Python. Instances come node by node; `free_s` are seconds until each is free.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace {

constexpr int kNodes = 128, kChunks = 12, kSizes = 12;
constexpr double kNever = std::numeric_limits<double>::infinity();

struct Size { int32_t sp; double a, b, c, d; };
struct Group { int16_t count[kNodes]; };
struct Step { int64_t tokens; Group group; };

struct Search {
    int nodes, sizes; bool prune, single; double keep;
    const int32_t* start; const Size* size; const double* free_s;  // free_s sorted within each node
    double best_s; int best_n, depth; Step best[kChunks], path[kChunks];

    double at(int node, int k) const { return free_s[start[node] + k]; }
    double seconds(int k, double past, double n) const {
        const Size& s = size[k];
        return s.a + n * (s.b + s.c * past + s.d * n);
    }

    void spread(const Group& pool, Group& g, int need, double now) const {
        bool open[kNodes]; int whole = 0;
        for (int n = 0; n < nodes; ++n) {
            open[n] = !g.count[n] && pool.count[n];
            if (open[n]) whole = std::max<int>(whole, pool.count[n]);
        }
        auto pick = [&](int least, bool exact, int k) {
            int found = -1; double when = kNever;
            for (int n = 0; n < nodes; ++n) {
                if (!open[n] || (exact ? pool.count[n] != least : pool.count[n] < least)) continue;
                double t = std::max(at(n, k), now);
                if (found < 0 || t < when) { when = t; found = n; }
            }
            return found;
        };
        while (need > whole) {
            int n = pick(whole, true, whole - 1);
            if (n < 0) break;
            open[n] = false; g.count[n] = int16_t(whole); need -= whole;
        }
        int n = pick(need, false, need - 1);
        if (n >= 0) { g.count[n] = int16_t(need); return; }
        while (need--) {
            int found = -1; double when = kNever;
            for (int m = 0; m < nodes; ++m)
                if (open[m] && g.count[m] < pool.count[m]) {
                    double t = std::max(at(m, g.count[m]), now);
                    if (found < 0 || t < when) { when = t; found = m; }
                }
            ++g.count[found];
        }
    }

    double group(const Group& pool, const Group& initial, int target, double now, Group& g) const {
        std::copy(initial.count, initial.count + nodes, g.count);
        int need = target;
        for (int n = 0; n < nodes; ++n) need -= initial.count[n];
        while (need > 0) {
            int found = -1; double when = kNever;
            for (int n = 0; n < nodes; ++n)
                if (initial.count[n] && g.count[n] < pool.count[n]) {
                    double t = std::max(at(n, g.count[n]), now);
                    if (found < 0 || t < when) { when = t; found = n; }
                }
            if (found < 0) break;
            ++g.count[found]; --need;
        }
        if (need > 0) spread(pool, g, need, now);
        double last = -kNever;
        for (int n = 0; n < nodes; ++n) if (g.count[n]) last = std::max(last, at(n, g.count[n] - 1));
        return last;
    }

    void take(double end, int64_t tokens, const Group& g) {
        best_s = end; best_n = depth + 1;
        std::copy(path, path + depth, best);
        best[depth].tokens = tokens; best[depth].group = g;
    }

    void schedule(int64_t left, int64_t past, double now, const Group& initial, int first, int last, const Group& pool) {
        double limit = kNever; Group chosen = initial, g; int most = first;
        for (int k = first; k <= last; ++k) {
            double f = group(pool, initial, size[k].sp, now, g);
            double ttft = (f > now ? f - now : 0.0) + seconds(k, double(past), double(left));
            if (ttft < limit * keep) { limit = ttft; chosen = g; most = k; }
        }
        if (now + limit < best_s) take(now + limit, left, chosen);
        if (single || depth + 2 > kChunks) return;
        Group mine, next;
        for (int i = first; i < most; ++i) {
            double begin = std::max(group(chosen, initial, size[i].sp, now, mine), now);
            const Size& s = size[i];
            for (int j = i + 1; j <= most; ++j) {
                double rest = group(chosen, mine, size[j].sp, now, next) - begin - s.a;
                if (rest <= 0.0) continue;
                double linear = s.b + s.c * double(past);
                double root = linear + std::sqrt(linear * linear + 4.0 * s.d * rest);
                int64_t n = root > 0 ? std::min<int64_t>(left, int64_t(std::min(2.0 * rest / root, 1e15))) : left;
                if (n <= 0) continue;
                double took = seconds(i, double(past), double(n));
                if (i > 0 && took >= seconds(i - 1, double(past), double(n))) continue;
                double end = begin + took;
                if (n == left) { if (end < best_s) take(end, n, mine); continue; }
                if (prune) {
                    double least = kNever;
                    for (int k = j; k <= most; ++k) least = std::min(least, seconds(k, double(past + n), double(left - n)));
                    if (end + least >= best_s) continue;
                }
                path[depth].tokens = n; path[depth].group = mine;
                ++depth;
                schedule(left - n, past + n, end, mine, j, most, chosen);
                --depth;
            }
        }
    }
};

}  // namespace

extern "C" {

// sizes: n_sizes rows of (sp, a, b, c, d) as doubles. ids: instances, node by node. out_tokens[i], out_group[i]: chunks
// and how many instances each has; out_ids: their ids, one chunk after another, ascending. Returns the chunks.
int headway_cdsp_plan(int n_nodes, const int32_t* start, const int32_t* ids, int n_sizes, const double* sizes, int prune,
                      const double* queue_s, int64_t tokens, int64_t cached, double rate, int single, double* out_ttft,
                      int64_t* out_tokens, int32_t* out_group, int32_t* out_ids) {
    static thread_local double sorted[8192];
    static thread_local int32_t order[8192];
    Size table[kSizes];
    for (int k = 0; k < n_sizes; ++k) {
        const double* row = sizes + 5 * k;
        table[k] = Size{int32_t(row[0]), row[1], row[2], row[3], row[4]};
    }
    Search search;
    Group pool, none;
    for (int n = 0; n < n_nodes; ++n) {
        int from = start[n], to = start[n + 1];
        for (int i = from; i < to; ++i) {  // insertion sort: nodes are small, ties keep ids in order
            double t = queue_s[ids[i]];
            int j = i;
            for (; j > from && sorted[j - 1] > t; --j) { sorted[j] = sorted[j - 1]; order[j] = order[j - 1]; }
            sorted[j] = t; order[j] = ids[i];
        }
        pool.count[n] = int16_t(to - from);
        none.count[n] = 0;
    }
    search.nodes = n_nodes; search.sizes = n_sizes; search.prune = prune != 0; search.single = single != 0; search.keep = 1.0 - rate;
    search.start = start; search.size = table; search.free_s = sorted;
    search.best_s = kNever; search.best_n = 0; search.depth = 0;
    search.schedule(tokens, cached, 0.0, none, 0, n_sizes - 1, pool);
    *out_ttft = search.best_s;
    for (int i = 0, at = 0; i < search.best_n; ++i) {
        const Step& step = search.best[i];
        int from = at;
        for (int n = 0; n < n_nodes; ++n)
            for (int k = 0; k < step.group.count[n]; ++k) out_ids[at++] = order[start[n] + k];
        std::sort(out_ids + from, out_ids + at);
        out_tokens[i] = step.tokens;
        out_group[i] = at - from;
    }
    return search.best_n;
}

}  // extern "C"
