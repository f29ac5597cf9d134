// Gradients of RMSNorm and LayerNorm over rows.
//
// With h = grad * gain and x̂ the normalized row:
//     dx    = rstd * (h - mean(h) - x̂ * mean(h * x̂))        (no mean(h) where not centered)
//     dgain = sum over rows of grad * x̂,    dbias = sum over rows of grad
// in one pass over memory. Column sums are kept per block of rows; the partition depends on the shape alone, so the
// same bits come out for any number of threads.
#pragma once

#include "rows.h"

namespace normkit::NORMKIT_ISA {

constexpr int64_t kRowsPerSum = 512;  // float sums of more rows would lose digits

template <class A>
__attribute__((noinline)) void move_sums(A* from, A* to, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    to[j] += from[j];
    from[j] = 0;
  }
}

enum class Columns { none, gain, both };
enum class GateAt { nowhere, before, after };

template <class X, class G, bool Centered, Columns columns, GateAt gate_at>
void backward_block(const RowsBackward& a, int64_t block) {
  using A = compute_t<X>;
  const int64_t n = a.features;
  const int64_t begin = a.rows * block / a.blocks, end = a.rows * (block + 1) / a.blocks;
  const int64_t width = a.period * n;
  A* dgain = columns != Columns::none ? static_cast<A*>(a.dgain) + block * width : nullptr;
  A* dbias = columns == Columns::both ? static_cast<A*>(a.dbias) + block * width : nullptr;
  if (dgain) memset(dgain, 0, width * sizeof(A));
  if (dbias) memset(dbias, 0, width * sizeof(A));
  // Sums of many rows of few features are made of shorter ones.
  A *const all_dgain = dgain, *const all_dbias = dbias;
  const bool cut = dgain && end - begin > kRowsPerSum;
  ScratchRow<A> pieces(cut ? 2 * width : 0);
  if (cut) {
    dgain = pieces.get();
    if (dbias) dbias = dgain + width;
    memset(pieces.get(), 0, 2 * width * sizeof(A));
  }

  // The gradient is read again in the second pass, unless it had to be converted or multiplied by a gate.
  constexpr bool kGradDirect = sizeof(G) == sizeof(A) && gate_at != GateAt::after;
  ScratchRow<A> normalized(n), weighted(kGradDirect ? 0 : n), sigmoids(gate_at == GateAt::nowhere ? 0 : n);
  RowCursor<X> x(a.x, begin), gate(a.gate, begin), grad_sum(a.grad_sum, begin), dx(a.dx, begin), dgate(a.dgate, begin);
  RowCursor<G> grad(a.grad, begin);
  int64_t phase = begin % a.period;
  const bool silu = a.silu;

  for (int64_t i = begin; i < end; ++i) {
    const A* gain = static_cast<const A*>(a.gain) + phase * n;
    const A rstd = static_cast<const A*>(a.rstd)[i];
    const A high = Centered ? A(a.mean[i]) : A(0), low = Centered ? A(a.mean[i] - double(high)) : A(0);
    const X *xp = x.get(), *zp = gate.get(), *sp = grad_sum.get();
    const G* gp = grad.get();
    X *dxp = dx.get(), *dzp = dgate.get();
    A *hat = normalized.get(), *kept = weighted.get(), *sigma = sigmoids.get();
    if constexpr (gate_at != GateAt::nowhere) sigmoid_row(zp, sigma, n);

    double total_h = 0, total_hx = 0;
    for (int64_t start = 0; start < n; start += kChunk) {
      const auto both =
          accumulate<A, Pair<A>>(smaller(kChunk, n - start), [&](auto& acc, int64_t k, auto tag) NORMKIT_LAMBDA {
            const int64_t j = start + k;
            Vec<A> v = load(xp + j, tag);
            if constexpr (gate_at == GateAt::before) v = v * activate(load(zp + j, tag), load(sigma + j, tag), silu);
            if constexpr (Centered) v = centre(v, high, low);
            v = v * Vec<A>(rstd);
            store(hat + j, v, tag);
            Vec<A> g = load(gp + j, tag);
            const Vec<A> w = load(gain + j, tag);
            if constexpr (gate_at == GateAt::after) {
              const Vec<A> z = load(zp + j, tag), s = load(sigma + j, tag);
              store(dzp + j, g * (v * w) * activation_slope(z, s, silu), tag);
              g = g * activate(z, s, silu);
            }
            if constexpr (!kGradDirect) store(kept + j, g, tag);
            const Vec<A> h = g * w;
            acc.first += h;
            acc.second += keep(h * v, tag);
          });
      total_h += reduce(both.first);
      total_hx += reduce(both.second);
    }

    const Vec<A> mean_h(Centered ? A(total_h / n) : A(0)), mean_hx(A(total_hx / n)), scale(rstd);
    const auto at = [&](int64_t j, auto tag) NORMKIT_LAMBDA {
      const Vec<A> v = load(hat + j, tag);
      Vec<A> g;
      if constexpr (kGradDirect)
        g = load(gp + j, tag);
      else
        g = load(kept + j, tag);
      if constexpr (columns != Columns::none)
        store(dgain + phase * n + j, load(dgain + phase * n + j, tag) + g * v, tag);
      if constexpr (columns == Columns::both) store(dbias + phase * n + j, load(dbias + phase * n + j, tag) + g, tag);
      Vec<A> d = g * load(gain + j, tag);
      if constexpr (Centered) d = d - mean_h;
      d = (d - v * mean_hx) * scale;
      if constexpr (gate_at == GateAt::before) {
        const Vec<A> z = load(zp + j, tag), s = load(sigma + j, tag), input = load(xp + j, tag);
        store(dzp + j, d * input * activation_slope(z, s, silu), tag);
        d = d * activate(z, s, silu);
      }
      if (sp) d = d + load(sp + j, tag);
      return d;
    };
    constexpr int L = Vec<A>::kLanes;
    if (a.stream && gate_at == GateAt::nowhere && n % L == 0 && reinterpret_cast<uintptr_t>(dxp) % 64 == 0)
      for (int64_t j = 0; j < n; j += L) {  // the next row from memory, which would rest here
        __builtin_prefetch(xp + a.x.stride[2] + j, 0, 2);
        __builtin_prefetch(gp + a.grad.stride[2] + j, 0, 2);
        stream(dxp + j, at(j, Full{}));
      }
    else
      for_each<A>(n, [&](int64_t j, auto tag) NORMKIT_LAMBDA { store(dxp + j, at(j, tag), tag); });

    x.next();
    gate.next();
    grad_sum.next();
    dx.next();
    dgate.next();
    grad.next();
    if (++phase == a.period) phase = 0;
    if (cut && ((i + 1 - begin) % kRowsPerSum == 0 || i + 1 == end)) {
      move_sums(dgain, all_dgain, width);
      if (dbias) move_sums(dbias, all_dbias, width);
    }
  }
  if (a.stream) stream_fence();
}

template <class X, class G, bool Centered>
void backward_centered(const RowsBackward& a, int64_t block) {
  if constexpr (sizeof(X) == sizeof(G) && !Centered) {  // gated: never centered, always with the gain's gradient
    if (a.gate.data)
      return a.gate_before ? backward_block<X, G, Centered, Columns::gain, GateAt::before>(a, block)
                           : backward_block<X, G, Centered, Columns::gain, GateAt::after>(a, block);
  }
  if (!a.dgain) return backward_block<X, G, Centered, Columns::none, GateAt::nowhere>(a, block);
  if (!a.dbias) return backward_block<X, G, Centered, Columns::gain, GateAt::nowhere>(a, block);
  return backward_block<X, G, Centered, Columns::both, GateAt::nowhere>(a, block);
}

template <class X, class G>
void backward_pair(const RowsBackward& a, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block)
    a.centered ? backward_centered<X, G, true>(a, block) : backward_centered<X, G, false>(a, block);
}

template <class X>
void rows_backward_from(const RowsBackward& a, int64_t begin, int64_t end) {
  if constexpr (sizeof(X) == 2) {
    if (a.grad.dtype == DType::float32) return backward_pair<X, float>(a, begin, end);
  }
  backward_pair<X, X>(a, begin, end);
}

// Blocks [begin, end) of a.blocks.
inline void rows_backward(const RowsBackward& a, int64_t begin, int64_t end) {
  NORMKIT_BY_DTYPE(a.x.dtype, rows_backward_from<X>(a, begin, end))
}

}  // namespace normkit::NORMKIT_ISA
