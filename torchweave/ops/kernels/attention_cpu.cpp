// Causal attention over a paged KV cache on a CPU, float32. HEAD_DIM, VALUE_DIM and GROUP (query heads that share a key head)
// are defined in front of this text; Inductor's C++ code cache builds it. Shapes and meaning are those of AttentionStep.forward.
//
// Every token is a row of its own, whether it generates or belongs to a prompt: what it computes depends on its own sequence
// only, never on the batch or on how a prompt was cut. Threads share the (token, key head) pairs once all keys are stored.

#include <torch/csrc/inductor/cpp_prefix.h>
#include <omp.h>
#include <limits>
#include <vector>

using Vec = at::vec::Vectorized<float>;
constexpr int64_t WIDTH = Vec::size();
constexpr int64_t padded(int64_t size) { return (size + WIDTH - 1) / WIDTH * WIDTH; }

// Vector i of an array of SIZE floats; lanes behind its end are zero.
template <int64_t SIZE>
inline Vec load(const float* array, int64_t i) {
    return (i + 1) * WIDTH <= SIZE ? Vec::loadu(array + i * WIDTH) : Vec::loadu(array + i * WIDTH, SIZE - i * WIDTH);
}

inline float total(const Vec& x) {
    return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

// Where the keys of a sequence lie: the first element of the token at `position` in a cache of `stride` floats a token.
struct Pages {
    const int32_t* blocks;
    int64_t block_size;
    inline int64_t token(int64_t position) const {
        return blocks[position / block_size] * block_size + position % block_size;
    }
};

// scores[0..count) = scale * dot(query, key of first + i), capped. `scores` has room for padded(count).
static void score(const float* query, const float* keys, int64_t stride, const Pages& pages, int64_t first, int64_t count,
                  float scale, float softcap, float* scores) {
    constexpr int64_t PARTS = padded(HEAD_DIM) / WIDTH;
    Vec parts[PARTS];
    for (int64_t i = 0; i < PARTS; ++i) parts[i] = load<HEAD_DIM>(query, i) * Vec(scale);
    for (int64_t done = 0; done < count;) {
        const int64_t position = first + done;
        const int64_t run = std::min(count - done, pages.block_size - position % pages.block_size);
        const float* key = keys + pages.token(position) * stride;
        for (int64_t j = 0; j < run; ++j, key += stride) {
            Vec sum = parts[0] * load<HEAD_DIM>(key, 0);
            for (int64_t i = 1; i < PARTS; ++i) sum = at::vec::fmadd(parts[i], load<HEAD_DIM>(key, i), sum);
            scores[done + j] = total(sum);
        }
        done += run;
    }
    for (int64_t i = count; i < padded(count); ++i) scores[i] = -std::numeric_limits<float>::infinity();
    if (softcap > 0)
        for (int64_t i = 0; i < count; ++i) scores[i] = softcap * std::tanh(scores[i] / softcap);
}

// scores = exp(scores - largest); returns the denominator. `sink` joins it, -inf for none.
static float weigh(float* scores, int64_t count, float sink) {
    Vec most(sink), sum(0);
    for (int64_t i = 0; i < padded(count); i += WIDTH) most = at::vec::maximum(most, Vec::loadu(scores + i));
    const float largest = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, most);
    for (int64_t i = 0; i < padded(count); i += WIDTH) {
        const Vec weights = (Vec::loadu(scores + i) - Vec(largest)).exp();
        weights.store(scores + i);
        sum = sum + weights;
    }
    return total(sum) + std::exp(sink - largest);
}

// out = sum of weights[i] * value of first + i, divided by `denominator`.
static void mix(const float* weights, const float* values, int64_t stride, const Pages& pages, int64_t first, int64_t count,
                float denominator, float* out) {
    constexpr int64_t PARTS = padded(VALUE_DIM) / WIDTH;
    Vec parts[PARTS];
    for (int64_t i = 0; i < PARTS; ++i) parts[i] = Vec(0);
    for (int64_t done = 0; done < count;) {
        const int64_t position = first + done;
        const int64_t run = std::min(count - done, pages.block_size - position % pages.block_size);
        const float* value = values + pages.token(position) * stride;
        for (int64_t j = 0; j < run; ++j, value += stride)
            for (int64_t i = 0; i < PARTS; ++i)
                parts[i] = at::vec::fmadd(Vec(weights[done + j]), load<VALUE_DIM>(value, i), parts[i]);
        done += run;
    }
    for (int64_t i = 0; i < PARTS; ++i)
        (parts[i] / Vec(denominator)).store(out + i * WIDTH, std::min(WIDTH, VALUE_DIM - i * WIDTH));
}

// slots[T]: row of the block table; lengths[T]: keys that the token sees, itself included, or 0: only store its key and value;
// mapping[T]: its place in the cache, or -1 for padding. Strides are in elements; the last dimension is contiguous, the cache and out are contiguous.
extern "C" void kernel(const float* q, const float* k, const float* v, float* out, float* k_cache, float* v_cache,
                       const float* sinks, const int32_t* slots, const int32_t* lengths, const int64_t* mapping,
                       const int32_t* block_table, int64_t tokens, int64_t kv_heads, int64_t q_token, int64_t q_head,
                       int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head, int64_t max_blocks,
                       int64_t block_size, int64_t window, int64_t chunk, int64_t has_sinks, int64_t threads, float scale,
                       float softcap) {
    const int64_t key_stride = kv_heads * HEAD_DIM, value_stride = kv_heads * VALUE_DIM;
    const int64_t pairs = tokens * kv_heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            if (mapping[t] < 0) continue;
            for (int64_t h = 0; h < kv_heads; ++h) {
                std::copy_n(k + t * k_token + h * k_head, HEAD_DIM, k_cache + mapping[t] * key_stride + h * HEAD_DIM);
                std::copy_n(v + t * v_token + h * v_head, VALUE_DIM, v_cache + mapping[t] * value_stride + h * VALUE_DIM);
            }
        }
        std::vector<float> scores;
#pragma omp for schedule(dynamic, 8)
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const int64_t t = pair / kv_heads, h = pair % kv_heads, last = lengths[t] - 1;
            float* result = out + pair * GROUP * VALUE_DIM;
            if (mapping[t] < 0) {
                std::fill_n(result, GROUP * VALUE_DIM, 0.0f);
                continue;
            }
            if (lengths[t] == 0) continue;
            int64_t first = window ? std::max<int64_t>(last - window + 1, 0) : 0;
            if (chunk) first = std::max(first, last / chunk * chunk);
            const int64_t count = last - first + 1;
            const Pages pages{block_table + slots[t] * max_blocks, block_size};
            if (static_cast<int64_t>(scores.size()) < padded(count)) scores.resize(padded(count) + 256);
            for (int64_t g = 0; g < GROUP; ++g) {
                const int64_t head = h * GROUP + g;
                score(q + t * q_token + head * q_head, k_cache + h * HEAD_DIM, key_stride, pages, first, count, scale, softcap,
                      scores.data());
                const float sink = has_sinks ? sinks[head] : -std::numeric_limits<float>::infinity();
                const float denominator = weigh(scores.data(), count, sink);
                mix(scores.data(), v_cache + h * VALUE_DIM, value_stride, pages, first, count, denominator,
                    result + g * VALUE_DIM);
            }
        }
    }
}
