// RMSNorm and LayerNorm over rows, with residual sum and gate.
#pragma once

#include "rows.h"

namespace normkit::NORMKIT_ISA {

// ---- what is normalized ----

template <class X>
struct PlainSource {
  using A = compute_t<X>;
  static constexpr bool kDirect = sizeof(X) == sizeof(A);
  static constexpr bool kCanCentre = true;
  const X* x;
  template <class Tag>
  NORMKIT_INLINE Vec<A> operator()(int64_t j, Tag tag) const {
    return load(x + j, tag);
  }
  NORMKIT_INLINE const A* row() const { return reinterpret_cast<const A*>(x); }
};

// x + residual, rounded to the residual's dtype, which is also what the statistic sees.
template <class X, class R>
struct ResidualSource {
  using A = compute_t<X>;
  static constexpr bool kDirect = sizeof(R) == sizeof(A);
  static constexpr bool kCanCentre = true;
  const X* x;
  const R* residual;
  R* sum;
  template <class Tag>
  NORMKIT_INLINE Vec<A> operator()(int64_t j, Tag tag) const {
    const Vec<A> v = round_to(load(x + j, tag) + load(residual + j, tag), R{});
    store(sum + j, v, tag);
    return v;
  }
  NORMKIT_INLINE const A* row() const { return reinterpret_cast<const A*>(sum); }
};

template <class X>
struct GatedSource {
  using A = compute_t<X>;
  static constexpr bool kDirect = false;
  static constexpr bool kCanCentre = false;
  const X* x;
  const X* gate;
  const A* sigmoids;  // of the gate
  bool silu;
  template <class Tag>
  NORMKIT_INLINE Vec<A> operator()(int64_t j, Tag tag) const {
    return load(x + j, tag) * activate(load(gate + j, tag), load(sigmoids + j, tag), silu);
  }
  NORMKIT_INLINE const A* row() const { return nullptr; }
};

// ---- from the statistic to the output ----

template <class A>
struct FinishRow {
  const A* row;
  Statistic<A> stat;
  const A* gain;
  const A* bias;
  const void* gate;
  const A* sigmoids;  // of the gate
  void* y;
  const char *ahead, *ahead_beside;  // rows of x and of the residual that are read after these, or about there
};

template <class A>
struct Finish {
  FinishRow<A> rows[kRowsTogether];
  int64_t n, x_bytes, residual_bytes;
  bool silu, round_product, stream;
};

// Mid is the type that the normalized value is rounded to before the gain multiplies it (A: not rounded).
template <class A, class Y, class Mid, bool Centered, bool Bias, bool Gated>
void finish_rows(const Finish<A>& f, int64_t count) {
  const int64_t n = f.n;
  const bool silu = f.silu, round_product = f.round_product;
  for (int64_t r = 0; r < count; ++r) {
    // Locals, since a store to y could change what f holds for all that the compiler knows.
    const FinishRow<A> it = f.rows[r];
    const A *row = it.row, *gain = it.gain, *bias = it.bias;
    const Y* gate = static_cast<const Y*>(it.gate);
    const A* sigmoids = it.sigmoids;
    const A high = it.stat.high, low = it.stat.low, rstd = it.stat.rstd;
    Y* y = static_cast<Y*>(it.y);
    const auto at = [&](int64_t j, auto tag) NORMKIT_LAMBDA {
      Vec<A> v = load(row + j, tag);
      if constexpr (Centered) v = centre(v, high, low);
      v = round_to(v * Vec<A>(rstd), Mid{}) * load(gain + j, tag);
      if constexpr (Bias) v = v + load(bias + j, tag);
      if constexpr (Gated) {
        if (round_product) v = round_to(v, Mid{});
        v = v * activate(load(gate + j, tag), load(sigmoids + j, tag), silu);
      }
      return v;
    };
    constexpr int L = Vec<A>::kLanes;
    if (f.stream && !Gated && n % L == 0 && reinterpret_cast<uintptr_t>(y) % 64 == 0)
      for (int64_t j = 0; j < n; j += L) {  // memory would rest while a row that is near is worked on
        __builtin_prefetch(it.ahead + j * f.x_bytes, 0, 2);
        if (it.ahead_beside) __builtin_prefetch(it.ahead_beside + j * f.residual_bytes, 0, 2);
        stream(y + j, at(j, Full{}));
      }
    else
      for_each<A>(n, [&](int64_t j, auto tag) NORMKIT_LAMBDA { store(y + j, at(j, tag), tag); });
  }
}

template <class A>
using FinishRows = void (*)(const Finish<A>&, int64_t count);

// A gate on the output comes without mean and bias (the op layer sees to it): that is all that models use.
template <class A, class Y, class Mid>
FinishRows<A> select_finish(bool centered, bool bias, bool gated) {
  if (gated) return finish_rows<A, Y, Mid, false, false, true>;
  if (centered) return bias ? finish_rows<A, Y, Mid, true, true, false> : finish_rows<A, Y, Mid, true, false, false>;
  return bias ? finish_rows<A, Y, Mid, false, true, false> : finish_rows<A, Y, Mid, false, false, false>;
}

NORMKIT_INLINE bool is_half(DType t) { return t == DType::bfloat16 || t == DType::float16; }

NORMKIT_INLINE FinishRows<float> select_finish_float(const RowsForward& a) {
  const DType stream_dtype = a.residual.data ? a.residual.dtype : a.x.dtype;
  const DType mid = !a.round_before_gain     ? DType::float32
                    : is_half(stream_dtype) ? stream_dtype
                                            : a.y.dtype;
  const bool bias = a.bias != nullptr, gated = a.gate.data && !a.gate_before;
  switch (a.y.dtype) {
    case DType::bfloat16:
      return mid == DType::bfloat16 ? select_finish<float, bfloat16, bfloat16>(a.centered, bias, gated)
                                    : select_finish<float, bfloat16, float>(a.centered, bias, gated);
    case DType::float16:
      return mid == DType::float16 ? select_finish<float, float16, float16>(a.centered, bias, gated)
                                   : select_finish<float, float16, float>(a.centered, bias, gated);
    default:
      return mid == DType::bfloat16  ? select_finish<float, float, bfloat16>(a.centered, bias, gated)
             : mid == DType::float16 ? select_finish<float, float, float16>(a.centered, bias, gated)
                                     : select_finish<float, float, float>(a.centered, bias, gated);
  }
}
template <class X>
NORMKIT_INLINE FinishRows<compute_t<X>> select_finish_for(const RowsForward& a) {
  if constexpr (sizeof(X) == 8)
    return select_finish<double, double, double>(a.centered, a.bias != nullptr, a.gate.data && !a.gate_before);
  else
    return select_finish_float(a);
}

NORMKIT_INLINE int64_t size_of(DType t) { return t == DType::float64 ? 8 : t == DType::float32 ? 4 : 2; }

// ---- the loop over rows ----

// Make is called with the addresses of one row and returns its Source.
template <class X, class R, class Make>
void run_rows(const RowsForward& a, int64_t begin, int64_t end, FinishRows<compute_t<X>> finish, const Make& make) {
  using A = compute_t<X>;
  const int64_t n = a.features;
  const int64_t together = rows_together<A>(n), pitch = padded<A>(n);
  ScratchRow<A> scratch(together * pitch), sigmoids(a.gate.data ? together * pitch : 0);
  RowView y_bytes = a.y;  // the type of y is known to `finish` alone
  for (int64_t& s : y_bytes.stride) s *= size_of(a.y.dtype);
  RowCursor<X> x(a.x, begin);
  RowCursor<X> gate(a.gate, begin);
  RowCursor<R> residual(a.residual, begin), sum(a.sum, begin);
  RowCursor<char> y(y_bytes, begin);
  int64_t phase = begin % a.period;
  using Source = decltype(make(x.get(), residual.get(), sum.get(), gate.get(), sigmoids.get()));
  const bool centered = Source::kCanCentre && a.centered;
  Finish<A> f;
  f.n = n;
  f.silu = a.silu;
  f.round_product = a.round_product;
  f.stream = a.stream;
  f.x_bytes = sizeof(X);
  f.residual_bytes = sizeof(R);
  for (int64_t first = begin; first < end; first += together) {
    const int64_t count = smaller(together, end - first);
    double totals[kRowsTogether];
    for (int64_t r = 0; r < count; ++r) {
      A* own_sigmoids = sigmoids.get() + r * pitch;
      if (a.gate.data) sigmoid_row(gate.get(), own_sigmoids, n);
      const Source source = make(x.get(), residual.get(), sum.get(), gate.get(), own_sigmoids);
      A* own = scratch.get() + r * pitch;
      totals[r] = centered ? row_total<A, false>(source, own, n) : row_total<A, true>(source, own, n);
      FinishRow<A>& it = f.rows[r];
      it.row = Source::kDirect ? source.row() : own;
      it.gain = static_cast<const A*>(a.gain) + phase * n;
      it.bias = a.bias ? static_cast<const A*>(a.bias) + phase * n : nullptr;
      it.gate = gate.get();
      it.sigmoids = own_sigmoids;
      it.y = y.get();
      it.ahead = reinterpret_cast<const char*>(x.get() + together * a.x.stride[2]);
      it.ahead_beside =
          residual.get() ? reinterpret_cast<const char*>(residual.get() + together * a.residual.stride[2]) : nullptr;
      x.next();
      gate.next();
      residual.next();
      sum.next();
      y.next();
      if (++phase == a.period) phase = 0;
    }
    if (centered) {
      RowSums sums[kRowsTogether];
      for (int64_t r = 0; r < count; ++r) {
        const A high = A(totals[r] / n);
        f.rows[r].stat.high = high;
        sums[r] = centred_sums(f.rows[r].row, n, high);
      }
      for (int64_t r = 0; r < count; ++r)
        f.rows[r].stat = layer_statistic(f.rows[r].stat.high, sums[r], f.rows[r].row, n, a.eps);
    } else {
      for (int64_t r = 0; r < count; ++r) f.rows[r].stat = rms_statistic(totals[r], f.rows[r].row, n, a.eps);
    }
    finish(f, count);
    for (int64_t r = 0; r < count; ++r) {
      const Statistic<A>& stat = f.rows[r].stat;
      if (a.mean) a.mean[first + r] = double(stat.high) + double(stat.low);
      if (a.rstd) static_cast<A*>(a.rstd)[first + r] = stat.rstd;
    }
  }
  if (a.stream) stream_fence();
}

template <class X, class R>
void run_residual(const RowsForward& a, int64_t begin, int64_t end, FinishRows<compute_t<X>> finish) {
  run_rows<X, R>(a, begin, end, finish, [](const X* x, const R* residual, R* sum, const X*, const auto*) {
    return ResidualSource<X, R>{x, residual, sum};
  });
}

template <class X>
void rows_forward_from(const RowsForward& a, int64_t begin, int64_t end, FinishRows<compute_t<X>> finish) {
  if (a.residual.data) {
    if constexpr (sizeof(X) == 2) {
      if (a.residual.dtype == DType::float32) return run_residual<X, float>(a, begin, end, finish);
    }
    return run_residual<X, X>(a, begin, end, finish);
  }
  if (a.gate.data && a.gate_before) {
    const bool silu = a.silu;
    return run_rows<X, X>(a, begin, end, finish, [silu](const X* x, const X*, X*, const X* gate, const auto* sigmoids) {
      return GatedSource<X>{x, gate, sigmoids, silu};
    });
  }
  run_rows<X, X>(a, begin, end, finish, [](const X* x, const X*, X*, const X*, const auto*) {
    return PlainSource<X>{x};
  });
}

// Rows [begin, end).
inline void rows_forward(const RowsForward& a, int64_t begin, int64_t end) {
  NORMKIT_BY_DTYPE(a.x.dtype, rows_forward_from<X>(a, begin, end, select_finish_for<X>(a)))
}

}  // namespace normkit::NORMKIT_ISA
