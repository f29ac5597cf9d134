// What the forward and backward row kernels share: walking strided rows, scratch rows, the statistic of one row.
#pragma once

#include <cstdlib>

#include "activation.h"
#include "args.h"

namespace normkit::NORMKIT_ISA {

// A call for the storage type X that `dtype` names, in a function that returns what it does.
#define NORMKIT_OF_TYPE(type, call)            \
  {                                            \
    using X = type;                            \
    if constexpr (kCompiled<X>) return call;   \
    break;                                     \
  }
#define NORMKIT_BY_DTYPE(dtype, call)              \
  switch (dtype) {                                 \
    case DType::float32:                           \
      NORMKIT_OF_TYPE(float, call)                 \
    case DType::bfloat16:                          \
      NORMKIT_OF_TYPE(bfloat16, call)              \
    case DType::float16:                           \
      NORMKIT_OF_TYPE(float16, call)               \
    case DType::float64:                           \
      NORMKIT_OF_TYPE(double, call)                \
  }                                                \
  abort(); /* `kernels` gives tables that have the type */

inline bool has(DType dtype) {
  const bool compiled[] = {kCompiled<float>, kCompiled<bfloat16>, kCompiled<float16>, kCompiled<double>};
  return compiled[int(dtype)];
}

// The address of a row, moved on from row to row without a division.
template <class T>
class RowCursor {
 public:
  NORMKIT_INLINE RowCursor(const RowView& view, int64_t row) : view_(view) {
    const int64_t last = view.size[2], middle = view.size[1];
    i2_ = row % last;
    i1_ = row / last % middle;
    const int64_t i0 = row / last / middle;
    p_ = static_cast<T*>(view.data);
    if (p_) p_ += i0 * view.stride[0] + i1_ * view.stride[1] + i2_ * view.stride[2];
  }
  NORMKIT_INLINE T* get() const { return p_; }
  NORMKIT_INLINE void next() {
    if (!p_) return;
    p_ += view_.stride[2];
    if (++i2_ < view_.size[2]) return;
    i2_ = 0;
    p_ += view_.stride[1] - view_.size[2] * view_.stride[2];
    if (++i1_ < view_.size[1]) return;
    i1_ = 0;
    p_ += view_.stride[0] - view_.size[1] * view_.stride[1];
  }

 private:
  const RowView& view_;
  T* p_;
  int64_t i1_, i2_;
};

// Rows that are worked on together: as many as stay in half of a first cache of 32 KB, up to eight.
constexpr int64_t kRowsTogether = 8;
template <class A>
NORMKIT_INLINE int64_t padded(int64_t n) {
  return (n + Vec<A>::kLanes - 1) / Vec<A>::kLanes * Vec<A>::kLanes;
}
template <class A>
NORMKIT_INLINE int64_t rows_together(int64_t n) {
  const int64_t fit = int64_t(16384 / sizeof(A)) / padded<A>(n > 0 ? n : 1);
  return fit < 1 ? 1 : fit > kRowsTogether ? kRowsTogether : fit;
}

// Rows in the compute type that stay in the first cache between passes.
template <class A>
class ScratchRow {
 public:
  NORMKIT_INLINE explicit ScratchRow(int64_t n) {
    constexpr int64_t small = sizeof small_ / sizeof(A);
    data_ = n <= small ? small_ : static_cast<A*>(aligned_alloc(64, (n * sizeof(A) + 63) / 64 * 64));
    if (!data_) abort();  // as the allocator of any C++ program would end up doing
  }
  ScratchRow(const ScratchRow&) = delete;
  ScratchRow& operator=(const ScratchRow&) = delete;
  NORMKIT_INLINE ~ScratchRow() {
    if (data_ != small_) free(data_);
  }
  NORMKIT_INLINE A* get() const { return data_; }

 private:
  alignas(64) A small_[16384 / sizeof(A)];
  A* data_;
};

// Sums longer than this are cut, and the pieces added in double: lane sums of float stay short and accurate.
constexpr int64_t kChunk = 4096;

NORMKIT_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
NORMKIT_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The mean is kept in two parts: x - high is exact where x is near the mean, and low is what high missed. Sixteen
// values 1e4 + i * 1e-3 lose all but one digit when the mean is rounded to one float.
template <class A>
struct Statistic {
  A high, low, rstd;
};

template <class A>
NORMKIT_INLINE Vec<A> centre(const Vec<A>& x, A high, A low) {
  return (x - Vec<A>(high)) - Vec<A>(low);
}

template <class A>
struct WiderOf {
  using type = double;
};
template <>
struct WiderOf<double> {
  using type = long double;
};

// Rows whose squares overflow or underflow in A (values of 1e30 or 1e-30), or that hold a NaN or infinity: rare, so
// plain loops in a type with a wider exponent.
template <class A>
__attribute__((noinline)) Statistic<A> wide_statistic(const A* row, int64_t n, double eps, bool centered) {
  using W = typename WiderOf<A>::type;
  W mean = 0, squares = 0;
  if (centered) {
    for (int64_t j = 0; j < n; ++j) mean += row[j];
    mean /= n;
  }
  for (int64_t j = 0; j < n; ++j) squares += (row[j] - mean) * (row[j] - mean);
  const W spread = squares / n + W(eps);
  const A high = A(mean);
  const W root = sizeof(W) == 8 ? W(__builtin_sqrt(double(spread))) : W(__builtin_sqrtl(spread));
  return {high, A(mean - high), A(1 / root)};
}

template <class A>
NORMKIT_INLINE bool out_of_range(A spread) {
  constexpr A tiny = sizeof(A) == 4 ? A(1e-34) : A(1e-290);
  return !(spread >= tiny) || !is_finite(spread);
}

// A Source yields the values of a row at j in the compute type, whatever they are made from. Direct sources read them
// from memory in that type already; the others leave a copy in `row` for the passes that follow.

// A statistic comes in steps, each taken for several rows before the next one begins: a row waits for its sums to be
// reduced, divided and rooted, and other rows fill that time.

struct RowSums {
  double first = 0, second = 0;
};

// The sum of the values (centered), or of their squares.
template <class A, bool Squares, class Source>
NORMKIT_INLINE double row_total(const Source& source, A* row, int64_t n) {
  double total = 0;
  for (int64_t start = 0; start < n; start += kChunk) {
    total += reduce(accumulate<A, Vec<A>>(smaller(kChunk, n - start), [&](auto& acc, int64_t j, auto tag) NORMKIT_LAMBDA {
      const Vec<A> v = source(start + j, tag);
      if constexpr (!Source::kDirect) store(row + start + j, v, tag);
      if constexpr (Squares)
        acc += v * v;
      else
        acc += v;
    }));
  }
  return total;
}

// Sums of (value - high) and of its squares, in the order of `accumulate`. Where a Vec is several registers, one
// register's share of the lanes is summed over the row before the next: eight accumulators then, and not more than the
// processor has.
template <class X, class A = compute_t<X>>
NORMKIT_INLINE Pair<A> centred_pair(const X* values, int64_t n, A high) {
  constexpr int L = Vec<A>::kLanes, P = Vec<A>::kPartLanes;
  using Native = typename Vec<A>::Native;
  const int64_t quadruples = n / (4 * L) * (4 * L), whole = n / L * L;
  const Native shift = high - Native{};
  const Part rest{int(n - whole)};
  Vec<A> last;  // past the end: zeros, which change no sum
  if (whole < n) last = keep(load(values + whole, rest) - Vec<A>(high), rest);
  Pair<A> total;
  NORMKIT_UNROLL for (int i = 0; i < Vec<A>::kParts; ++i) {
    Native s0{}, s1{}, s2{}, s3{}, q0{}, q1{}, q2{}, q3{};
    const auto add = [&](Native& s, Native& q, const X* p) NORMKIT_LAMBDA {
      const Native c = load_register(p) - shift;
      s += c;
      q += c * c;
    };
    const X* p = values + i * P;
    int64_t j = 0;
    for (; j < quadruples; j += 4 * L) {
      add(s0, q0, p + j);
      add(s1, q1, p + j + L);
      add(s2, q2, p + j + 2 * L);
      add(s3, q3, p + j + 3 * L);
    }
    for (; j < whole; j += L) add(s0, q0, p + j);
    s1 += last.part[i];
    q1 += last.part[i] * last.part[i];
    total.first.part[i] = (s0 + s1) + (s2 + s3);
    total.second.part[i] = (q0 + q1) + (q2 + q3);
  }
  return total;
}

template <class A>
NORMKIT_INLINE RowSums centred_sums(const A* values, int64_t n, A high) {
  RowSums sums;
  for (int64_t start = 0; start < n; start += kChunk) {
    const Pair<A> both = centred_pair(values + start, smaller(kChunk, n - start), high);
    sums.first += reduce(both.first);
    sums.second += reduce(both.second);
  }
  return sums;
}

template <class A>
NORMKIT_INLINE Statistic<A> rms_statistic(double squares, const A* values, int64_t n, double eps) {
  const A spread = A(squares / n) + A(eps);
  if (out_of_range(spread)) return wide_statistic(values, n, eps, false);
  return {A(0), A(0), A(1) / sqrt_of(spread)};
}

template <class A>
NORMKIT_INLINE Statistic<A> layer_statistic(A high, const RowSums& sums, const A* values, int64_t n, double eps) {
  const double low = sums.first / n;
  const double variance = (sums.second - sums.first * low) / n;
  const A spread = A(variance < 0 ? 0 : variance) + A(eps);
  if (out_of_range(spread)) return wide_statistic(values, n, eps, true);
  return {high, A(low), A(1) / sqrt_of(spread)};
}

}  // namespace normkit::NORMKIT_ISA
