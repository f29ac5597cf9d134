// Mean and sum of squared deviations of many elements, exact in any layout: corrected two-pass over pieces that stay in
// the first cache, merged (Chan) in double. Never E[x^2] - E[x]^2.
#pragma once

#include "rows.h"

namespace normkit::NORMKIT_ISA {

struct Moments {
  double count = 0, mean = 0, squares = 0;

  NORMKIT_INLINE void merge(double n, double m, double s) {
    if (n == 0) return;
    if (count == 0) {  // often all there is, and two divisions less
      count = n;
      mean = m;
      squares = s;
      return;
    }
    const double total = count + n, delta = m - mean;
    mean += delta * (n / total);
    squares += s + delta * delta * (count * n / total);
    count = total;
  }
};

// The statistic's mean in two parts and its reciprocal deviation, as the elementwise passes want them.
template <class A>
NORMKIT_INLINE Statistic<A> statistic_of(double mean, double variance, double eps) {
  const A high = A(mean);
  const A spread = A(variance) + A(eps);
  // Beyond A's exponents (values of 1e30 in float) the root is still inside them.
  const A rstd = out_of_range(spread) ? A(1 / __builtin_sqrt(variance + eps)) : A(1) / sqrt_of(spread);
  return {high, A(mean - high), rstd};
}

// Short segments are summed together: as many as stay in a near cache, and not so many that a lane's sum gets long: a
// segment shorter than a vector adds to the same few lanes each time.
constexpr int64_t kElementsTogether = 8192;
constexpr int64_t kSegmentsTogether = 128;
NORMKIT_INLINE int64_t segments_together(int64_t n) {
  return smaller(kElementsTogether / larger(1, n), kSegmentsTogether);
}

template <class X>
NORMKIT_INLINE double value_at(const X* x, int64_t j) {
  compute_t<X> lanes[Vec<compute_t<X>>::kLanes];
  store(lanes, load(x + j, Part{1}), Full{});
  return lanes[0];
}

// A mask of bytes as lanes of 0 and 1.
template <class A, class Tag>
NORMKIT_INLINE Vec<A> load_mask(const uint8_t* mask, Tag tag) {
  A lanes[Vec<A>::kLanes] = {};
  for (int k = 0; k < used_lanes<A>(tag); ++k) lanes[k] = mask[k] ? A(1) : A(0);
  return load(lanes, Full{});
}
template <class A>
NORMKIT_INLINE Vec<A> where_valid(const Vec<A>& valid, const Vec<A>& v) {
  return where_less(Vec<A>(), valid, v, Vec<A>());
}

template <class X>
__attribute__((noinline)) void wide_segment(const X* x, const uint8_t* mask, int64_t n, double count, double& mean,
                                            double& squares) {
  mean = squares = 0;
  for (int64_t j = 0; j < n; ++j)
    if (!mask || mask[j]) mean += value_at(x, j);
  mean /= count;
  for (int64_t j = 0; j < n; ++j) {
    const double c = value_at(x, j) - mean;
    if (!mask || mask[j]) squares += c * c;
  }
}

// Merge n contiguous elements into `into`; with a mask only those where it is not 0.
template <class X, bool Masked>
NORMKIT_INLINE void segment_moments(const X* x, const uint8_t* mask, int64_t n, Moments& into) {
  using A = compute_t<X>;
  for (int64_t start = 0; start < n; start += kChunk) {
    const int64_t m = smaller(kChunk, n - start);
    const X* p = x + start;
    const uint8_t* valid = Masked ? mask + start : nullptr;
    double count = double(m);
    if constexpr (Masked) {
      count = 0;
      for (int64_t j = 0; j < m; ++j) count += valid[j] != 0;
      if (count == 0) continue;
    }
    const A high = A(reduce(accumulate<A, Vec<A>>(m, [&](auto& acc, int64_t j, auto tag) NORMKIT_LAMBDA {
      Vec<A> v = load(p + j, tag);
      if constexpr (Masked) v = where_valid(load_mask<A>(valid + j, tag), v);
      acc += v;
    })) / count);
    Pair<A> both;
    if constexpr (Masked) {
      both = accumulate<A, Pair<A>>(m, [&](auto& acc, int64_t j, auto tag) NORMKIT_LAMBDA {
        const Vec<A> c = where_valid(load_mask<A>(valid + j, tag), keep(load(p + j, tag) - Vec<A>(high), tag));
        acc.first += c;
        acc.second += c * c;
      });
    } else {
      both = centred_pair(p, m, high);
    }
    const double sum = reduce(both.first);
    double mean = high + sum / count, squares = reduce(both.second) - sum * (sum / count);
    if (!is_finite(squares)) wide_segment(p, valid, m, count, mean, squares);
    into.merge(count, mean, squares < 0 ? 0 : squares);
  }
}

// ---- `segments` pieces of n contiguous elements, `stride` apart, that are summed together ----

template <class X>
struct Pieces {
  const X* x;
  int64_t segments, stride, n;
  NORMKIT_INLINE double count() const { return double(segments * n); }
};

template <class X>
NORMKIT_INLINE void add_piece(const X* x, int64_t n, Four<Vec<compute_t<X>>>& sums) {
  using A = compute_t<X>;
  accumulate_more<A>(sums, n, [&](Vec<A>& acc, int64_t j, auto tag) NORMKIT_LAMBDA { acc += load(x + j, tag); });
}

// The moments of the pieces, of which `high` is nearly the mean.
template <class X>
NORMKIT_INLINE void merge_pieces(const Pieces<X>& p, compute_t<X> high, Moments& into) {
  using A = compute_t<X>;
  Four<Pair<A>> pairs;
  for (int64_t i = 0; i < p.segments; ++i) {
    const X* x = p.x + i * p.stride;
    accumulate_more<A>(pairs, p.n, [&](Pair<A>& acc, int64_t j, auto tag) NORMKIT_LAMBDA {
      const Vec<A> c = keep(load(x + j, tag) - Vec<A>(high), tag);
      acc.first += c;
      acc.second += c * c;
    });
  }
  const Pair<A> both = pairs.total();
  const double sum = reduce(both.first), squares = reduce(both.second) - sum * (sum / p.count());
  if (is_finite(squares)) return into.merge(p.count(), high + sum / p.count(), squares < 0 ? 0 : squares);
  for (int64_t i = 0; i < p.segments; ++i) segment_moments<X, false>(p.x + i * p.stride, nullptr, p.n, into);
}

// ---- columns: the moments of each channel over rows of channels ----

constexpr int64_t kRowsPerPiece = 128;

struct ColumnMoments {
  double* mean;     // [channels]
  double* squares;  // [channels]
  double count = 0;
};

// Rows of channels are taken four at a time, then one by one: what is read beside them is read once for four.
template <int N>
struct Rows {
  static constexpr int kCount = N;
};
template <class F>
NORMKIT_INLINE void by_fours(int64_t n, const F& f) {
  int64_t r = 0;
  for (; r + 4 <= n; r += 4) f(r, Rows<4>{});
  for (; r < n; ++r) f(r, Rows<1>{});
}

// While four rows are worked on, the memory behind them is fetched in its own order: side by side, four rows look to the
// processor like no stream at all. `first` is where they begin.
template <class X>
NORMKIT_INLINE void fetch_ahead(Rows<4>, const X* first, int64_t channels, int64_t c) {
  const char* p = reinterpret_cast<const char*>(first + 4 * (channels + c));
  constexpr int lines = 4 * Vec<compute_t<X>>::kLanes * sizeof(X) / 64;
  NORMKIT_UNROLL for (int i = 0; i < lines; ++i) __builtin_prefetch(p + 64 * i);
}
template <class X>
NORMKIT_INLINE void fetch_ahead(Rows<1>, const X*, int64_t, int64_t) {}

// Column sums of at most kRowsPerPiece rows in the compute type: they stay in a near cache, and memory is read in its
// own order.
template <class A>
struct ColumnSums {
  explicit ColumnSums(int64_t channels) : channels(channels), rows(3 * channels) {}
  NORMKIT_INLINE void clear() { memset(high, 0, 3 * channels * sizeof(A)); }
  int64_t channels;
  ScratchRow<A> rows;
  A *high = rows.get(), *first = high + channels, *second = first + channels;
};

// The offsets of the next rows that count, at most kRowsPerPiece of them before row `end`; how many.
NORMKIT_INLINE int64_t next_rows(const uint8_t* mask, int64_t channels, int64_t end, int64_t& next, int64_t* rows) {
  int64_t n = 0;
  for (; next < end && n < kRowsPerPiece; ++next)
    if (!mask || mask[next]) rows[n++] = next * channels;
  return n;
}

// Merge one piece of n rows, at x + rows[r].
template <class X>
NORMKIT_INLINE void piece_moments(const X* x, const int64_t* rows, int64_t n, ColumnSums<compute_t<X>>& sums,
                                  const ColumnMoments& into) {
  using A = compute_t<X>;
  const int64_t channels = sums.channels;
  sums.clear();
  by_fours(n, [&](int64_t r, auto together) NORMKIT_LAMBDA {
    for_each<A>(channels, [&](int64_t c, auto tag) NORMKIT_LAMBDA {
      fetch_ahead(together, x + rows[r], channels, c);
      Vec<A> sum = load(sums.high + c, tag);
      NORMKIT_UNROLL for (int i = 0; i < together.kCount; ++i) sum += load(x + rows[r + i] + c, tag);
      store(sums.high + c, sum, tag);
    });
  });
  for_each<A>(channels, [&](int64_t c, auto tag) NORMKIT_LAMBDA {
    store(sums.high + c, load(sums.high + c, tag) * Vec<A>(A(1) / A(n)), tag);
  });
  by_fours(n, [&](int64_t r, auto together) NORMKIT_LAMBDA {
    for_each<A>(channels, [&](int64_t c, auto tag) NORMKIT_LAMBDA {
      const Vec<A> high = load(sums.high + c, tag);
      Vec<A> sum = load(sums.first + c, tag), squares = load(sums.second + c, tag);
      NORMKIT_UNROLL for (int i = 0; i < together.kCount; ++i) {
        const Vec<A> centred = load(x + rows[r + i] + c, tag) - high;
        sum += centred;
        squares += centred * centred;
      }
      store(sums.first + c, sum, tag);
      store(sums.second + c, squares, tag);
    });
  });
  const double total = into.count + n, share = n / total, weight = into.count * share, inverse = 1.0 / n;
  for (int64_t c = 0; c < channels; ++c) {
    const double low = sums.first[c] * inverse;
    double m = sums.high[c] + low, piece = sums.second[c] - sums.first[c] * low;
    if (!is_finite(piece)) [[unlikely]] {
      m = piece = 0;
      for (int64_t r = 0; r < n; ++r) m += value_at(x, rows[r] + c);
      m *= inverse;
      for (int64_t r = 0; r < n; ++r) {
        const double centred = value_at(x, rows[r] + c) - m;
        piece += centred * centred;
      }
    }
    const double delta = m - into.mean[c];
    into.mean[c] += delta * share;
    into.squares[c] += (piece < 0 ? 0 : piece) + delta * (delta * weight);  // the first piece: 0, whatever its mean
  }
}

// The moments of each of `channels` columns over rows [begin, end), rows `channels` apart; masked rows do not count.
template <class X>
void column_moments(const X* x, const uint8_t* mask, int64_t begin, int64_t end, int64_t channels, ColumnMoments& into) {
  memset(into.mean, 0, channels * sizeof(double));
  memset(into.squares, 0, channels * sizeof(double));
  into.count = 0;
  ColumnSums<compute_t<X>> sums(channels);
  int64_t rows[kRowsPerPiece];
  for (int64_t next = begin; next < end;) {
    const int64_t n = next_rows(mask, channels, end, next, rows);
    if (n == 0) break;
    piece_moments(x, rows, n, sums, into);
    into.count += n;
  }
}

}  // namespace normkit::NORMKIT_ISA
