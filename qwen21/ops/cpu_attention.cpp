// Softmax attention in fp32 on a CPU: no mask, keys in blocks, a running maximum (Dao et al., arXiv:2205.14135).
//
// A panel is so many queries that their columns fill a few vectors. Queries and what they attend to are held
// transposed, a row for each of `dim` numbers; so keys and values are read where they lie, number by number, and
// softmax needs no sum across a vector. The tile of sums, `ROWS` times `VECTORS`, stays in registers beside what it
// multiplies. A query's result does not depend on the others, on their number or on the number of threads. A weight is
// never quite nothing, but 2^-126 of the largest.
//
// For GCC and Clang. Written without PyTorch's headers, which would take most of the time to compile.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int WIDTH = 16, ROWS = 4, VECTORS = 4;
// Held in a register, where the compiler would read it from memory for every row: that takes as long as multiplying.
#define IN_REGISTER(x) asm("" : "+v"(x))
#else
constexpr int WIDTH = 8, ROWS = 4, VECTORS = 3;
#define IN_REGISTER(x)
#endif

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(WIDTH * sizeof(float))));

constexpr int64_t QUERIES = WIDTH * VECTORS;  // of a panel
constexpr int64_t PANELS = 8;                 // at most, that a thread takes at once: they read a block of keys once
constexpr int64_t KEYS = 128;                 // of a block: at dim 128 with values 128 KiB, to stay in a core's cache
constexpr float LOWEST = std::numeric_limits<float>::lowest();

#define UNROLLED _Pragma("GCC unroll 8")
#define FOR_VECTORS UNROLLED for (int j = 0; j < VECTORS; ++j)

// b where either is NaN.
static inline Vector larger(Vector a, Vector b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);  // GCC makes a comparison and a choice of what is below
#else
  return a > b ? a : b;
#endif
}

// 2 to the power of x <= 0: of the whole part by the exponent's bits, of the rest by a polynomial fitted over
// [-1/2, 1/2], within 1e-7. What is below -126 counts as that; NaN stays NaN.
static inline Vector power_of_two(Vector x) {
  x = larger(Vector{} - 126.f, x);
  constexpr float BIASED = 12582912.f + 127.f;  // 1.5 * 2^23: the sum's last bits are x rounded, plus the bias
  const Vector sum = x + BIASED;
  const Vector rest = x - (sum - BIASED);
  Vector power = rest * 0.000154614449f + 0.0013400428f;
  power = power * rest + 0.00961805694f;
  power = power * rest + 0.0555032715f;
  power = power * rest + 0.240226507f;
  power = power * rest + 0.693147182f;
  power = power * rest + 1.f;
  return power * (Vector)((Integers)sum << 23);
}

// sums[r][j] = the sum over i < n of a[r * row + i * step] * b[i * VECTORS + j].
template <int rows>
static inline __attribute__((always_inline)) void multiply(
    const float* a, int64_t row, int64_t step, const Vector* b, int64_t n, Vector (&sums)[rows][VECTORS]) {
  UNROLLED for (int r = 0; r < rows; ++r) FOR_VECTORS sums[r][j] = Vector{};
  _Pragma("GCC unroll 2") for (int64_t i = 0; i < n; ++i, a += step, b += VECTORS) {
    Vector x[VECTORS];
    FOR_VECTORS {
      x[j] = b[j];
      IN_REGISTER(x[j]);
    }
    UNROLLED for (int r = 0; r < rows; ++r) {
      const float y = a[r * row];
      FOR_VECTORS sums[r][j] += y * x[j];
    }
  }
}

// Scaled products of `rows` keys, `row` floats apart, with a panel's queries; `top` is raised to the largest.
// Like `gather` a function of its own, for the compiler to give all registers to.
template <int rows>
static __attribute__((noinline)) void score(
    const float* keys, int64_t row, const Vector* queries, int64_t dim, float scale, Vector* scores,
    Vector (&top)[VECTORS]) {
  Vector sums[rows][VECTORS];
  multiply<rows>(keys, row, 1, queries, dim, sums);
  UNROLLED for (int r = 0; r < rows; ++r) FOR_VECTORS {
    const Vector scaled = sums[r][j] * scale;
    scores[r * VECTORS + j] = scaled;
    top[j] = larger(top[j], scaled);
  }
}

// ROWS numbers of what a panel attended to: shrunk, and the weighted values of one block added.
static __attribute__((noinline)) void gather(
    const float* values, int64_t row, const Vector* weights, int64_t n, const Vector (&shrink)[VECTORS], Vector* out) {
  Vector sums[ROWS][VECTORS];
  multiply<ROWS>(values, 1, row, weights, n, sums);
  UNROLLED for (int r = 0; r < ROWS; ++r) FOR_VECTORS {
    Vector& number = out[r * VECTORS + j];
    number = number * shrink[j] + sums[r][j];
  }
}

struct Panel {
  Vector *queries, *out;                // [dim][VECTORS] each
  Vector top[VECTORS], total[VECTORS];  // of scores the largest, of weights the sum

  void start(const float* q, int64_t row, int64_t count, int64_t dim) {
    for (int64_t i = 0; i < QUERIES; ++i)
      for (int64_t d = 0; d < dim; ++d)
        reinterpret_cast<float*>(queries)[d * QUERIES + i] = i < count ? q[i * row + d] : 0.f;
    std::fill(out, out + dim * VECTORS, Vector{});
    FOR_VECTORS {
      top[j] = Vector{} + LOWEST;
      total[j] = Vector{};
    }
  }

  void attend(
      const float* k, int64_t k_row, const float* v, int64_t v_row, int64_t n, int64_t dim, float scale,
      Vector* scores) {
    Vector highest[VECTORS], shrink[VECTORS], sum[VECTORS];
    FOR_VECTORS highest[j] = top[j];
    const auto row = [&](int64_t i) { return k + i * k_row; };
    int64_t i = 0;
    for (; i + ROWS <= n; i += ROWS) score<ROWS>(row(i), k_row, queries, dim, scale, scores + i * VECTORS, highest);
    for (; i < n; ++i) score<1>(row(i), k_row, queries, dim, scale, scores + i * VECTORS, highest);
    FOR_VECTORS {
      shrink[j] = power_of_two(top[j] - highest[j]);
      top[j] = highest[j];
      sum[j] = Vector{};
    }
    for (i = 0; i < n; ++i)
      FOR_VECTORS sum[j] += scores[i * VECTORS + j] = power_of_two(scores[i * VECTORS + j] - highest[j]);
    FOR_VECTORS total[j] = total[j] * shrink[j] + sum[j];
    for (int64_t d = 0; d < dim; d += ROWS) gather(v + d, v_row, scores, n, shrink, out + d * VECTORS);
  }

  void finish(float* o, int64_t row, int64_t count, int64_t dim) {
    for (int64_t d = 0; d < dim; ++d) FOR_VECTORS out[d * VECTORS + j] /= total[j];
    for (int64_t i = 0; i < count; ++i)
      for (int64_t d = 0; d < dim; ++d) o[i * row + d] = reinterpret_cast<float*>(out)[d * QUERIES + i];
  }
};

// A tensor [batch, heads, length, dim], strides in floats; dim lies together.
struct Strided {
  float* data;
  int64_t batch, head, row;
};

// Every query over all keys. `dim` must be a multiple of four, `scale` is log2(e) / sqrt(dim), for powers of two.
extern "C" void attend(
    const Strided* q, const Strided* k, const Strided* v, const Strided* o,
    int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t dim, float scale,
    int threads) {
  const int64_t all = batch * heads * ((queries + QUERIES - 1) / QUERIES), size = dim * VECTORS;
  const int64_t most = std::clamp<int64_t>(all / (2 * threads), 1, PANELS);  // fewer, before threads run out of work
  const int64_t at_once = QUERIES * most, tasks = (queries + at_once - 1) / at_once;
#pragma omp parallel num_threads(threads)
  {
    const std::unique_ptr<Vector[]> memory(new Vector[2 * PANELS * size + KEYS * VECTORS]);
    Vector* scores = memory.get() + 2 * PANELS * size;
    Panel panels[PANELS];
    for (int64_t p = 0; p < PANELS; ++p) {
      panels[p].queries = memory.get() + 2 * p * size;
      panels[p].out = panels[p].queries + size;
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < batch * heads * tasks; ++task) {
      const int64_t b = task / tasks / heads, h = task / tasks % heads, start = task % tasks * at_once;
      const int64_t stop = std::min(queries, start + at_once), used = (stop - start + QUERIES - 1) / QUERIES;
      const auto at = [b, h](const Strided* x, int64_t i) { return x->data + b * x->batch + h * x->head + i * x->row; };
      const auto first = [start](int64_t p) { return start + p * QUERIES; };
      const auto count = [&](int64_t p) { return std::min(QUERIES, stop - first(p)); };
      for (int64_t p = 0; p < used; ++p) panels[p].start(at(q, first(p)), q->row, count(p), dim);
      for (int64_t i = 0; i < keys; i += KEYS)
        for (int64_t p = 0; p < used; ++p)
          panels[p].attend(at(k, i), k->row, at(v, i), v->row, std::min(KEYS, keys - i), dim, scale, scores);
      for (int64_t p = 0; p < used; ++p) panels[p].finish(at(o, first(p)), o->row, count(p), dim);
    }
  }
}
