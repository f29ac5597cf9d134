// What the forward and backward row kernels share: walking strided rows, scratch rows, the statistic of one row.
#pragma once

#include <cstdlib>

#include "activation.h"
#include "args.h"

namespace normkit::NORMKIT_ISA {

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

// A row in the compute type that stays in the first cache between passes.
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

template <class A, class Source>
NORMKIT_INLINE Statistic<A> rms_statistic(const Source& source, A* row, int64_t n, double eps) {
  double total = 0;
  for (int64_t start = 0; start < n; start += kChunk) {
    total += reduce(accumulate<A, Vec<A>>(smaller(kChunk, n - start), [&](auto& acc, int64_t j, auto tag) NORMKIT_LAMBDA {
      const Vec<A> v = source(start + j, tag);
      if constexpr (!Source::kDirect) store(row + start + j, v, tag);
      acc += v * v;
    }));
  }
  const A spread = A(total / n) + A(eps);
  if (out_of_range(spread)) return wide_statistic(Source::kDirect ? source.row() : row, n, eps, false);
  return {A(0), A(0), A(1) / sqrt_of(spread)};
}

template <class A, class Source>
NORMKIT_INLINE Statistic<A> layer_statistic(const Source& source, A* row, int64_t n, double eps) {
  double total = 0;
  for (int64_t start = 0; start < n; start += kChunk) {
    total += reduce(accumulate<A, Vec<A>>(smaller(kChunk, n - start), [&](auto& acc, int64_t j, auto tag) NORMKIT_LAMBDA {
      const Vec<A> v = source(start + j, tag);
      if constexpr (!Source::kDirect) store(row + start + j, v, tag);
      acc += v;
    }));
  }
  const A* values = Source::kDirect ? source.row() : row;
  const A high = A(total / n);
  double sum = 0, squares = 0;
  for (int64_t start = 0; start < n; start += kChunk) {
    const auto both =
        accumulate<A, Pair<A>>(smaller(kChunk, n - start), [&](auto& acc, int64_t j, auto tag) NORMKIT_LAMBDA {
          const Vec<A> c = keep(load(values + start + j, tag) - Vec<A>(high), tag);
          acc.first += c;
          acc.second += c * c;
        });
    sum += reduce(both.first);
    squares += reduce(both.second);
  }
  const double low = sum / n;
  const double variance = (squares - sum * low) / n;
  const A spread = A(variance < 0 ? 0 : variance) + A(eps);
  if (out_of_range(spread)) return wide_statistic(values, n, eps, true);
  return {high, A(low), A(1) / sqrt_of(spread)};
}

}  // namespace normkit::NORMKIT_ISA
