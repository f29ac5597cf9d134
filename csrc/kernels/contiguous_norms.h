// Group, instance and batch normalization over contiguous memory x[n][c][s]: every channel of every sample is a segment of
// contiguous elements.
#pragma once

#include "coefficients.h"

namespace normkit::NORMKIT_ISA {

// out[j] = f(j, tag) over a segment, the end of which need not fill a vector.
template <class X, class F>
NORMKIT_INLINE void fill_segment(X* out, int64_t n, const F& f) {
  using A = compute_t<X>;
  constexpr int64_t L = Vec<A>::kLanes, bytes = L * sizeof(X);
  if constexpr (kNativeBytes == 64) {  // masks are cheap, but a long segment's stores should not straddle cache lines
    int64_t head = 0;
    if (n >= 8 * L) head = (bytes - int64_t(uintptr_t(out) % bytes)) % bytes / int64_t(sizeof(X));
    if (head > 0) store(out, f(int64_t(0), Part{int(head)}), Part{int(head)});
    for_each<A>(n - head, [&](int64_t j, auto tag) NORMKIT_LAMBDA { store(out + head + j, f(head + j, tag), tag); });
  } else if (n < L || n % L == 0) {
    for_each<A>(n, [&](int64_t j, auto tag) NORMKIT_LAMBDA { store(out + j, f(j, tag), tag); });
  } else {  // the last L elements, some of them for a second time: computed first, since out may be what f reads
    const Vec<A> last = f(n - L, Full{});
    for (int64_t j = 0; j + L <= n; j += L) store(out + j, f(j, Full{}), Full{});
    store(out + n - L, last, Full{});
  }
}

template <class X, bool Masked>
__attribute__((noinline)) void normalize_in_steps(const X* x, X* y, const uint8_t* mask, int64_t n,
                                                  const Scaled<compute_t<X>>& k) {
  using A = compute_t<X>;
  fill_segment(y, n, [&](int64_t j, auto tag) NORMKIT_LAMBDA {
    const Vec<A> hat = centre(load(x + j, tag), k.stat.high, k.stat.low) * Vec<A>(k.stat.rstd);
    Vec<A> v = hat * Vec<A>(k.gain) + Vec<A>(k.bias);
    if constexpr (Masked) v = where_valid(load_mask<A>(mask + j, tag), v);
    return v;
  });
}

template <class X, bool Masked>
NORMKIT_INLINE void normalize_segment(const X* x, X* y, const uint8_t* mask, int64_t n,
                                      const Scaled<compute_t<X>>& k) {
  using A = compute_t<X>;
  if (!k.safe) [[unlikely]] return normalize_in_steps<X, Masked>(x, y, mask, n, k);
  const Vec<A> high(k.stat.high), scale(k.scale), shift(k.shift);
  fill_segment(y, n, [&](int64_t j, auto tag) NORMKIT_LAMBDA {
    Vec<A> v = (load(x + j, tag) - high) * scale + shift;
    if constexpr (Masked) v = where_valid(load_mask<A>(mask + j, tag), v);
    return v;
  });
}

template <class X>
void group_norm_from(const ChannelsForward& a, int64_t begin, int64_t end) {
  using A = compute_t<X>;
  const int64_t space = a.shape.space, per_group = a.shape.channels / a.groups, n = per_group * space;
  const A* gain = static_cast<const A*>(a.gain);
  const A* bias = static_cast<const A*>(a.bias);
  for (int64_t unit = begin; unit < end; ++unit) {
    const X* x = static_cast<const X*>(a.x) + unit * n;
    X* y = static_cast<X*>(a.y) + unit * n;
    Moments m;
    segment_moments<X, false>(x, nullptr, n, m);
    const double variance = m.squares / n;
    if (a.mean) {
      a.mean[unit] = m.mean;
      a.variance[unit] = variance;
    }
    const Statistic<A> stat = statistic_of<A>(m.mean, variance, a.eps);
    const int64_t first = unit % a.groups * per_group;
    for (int64_t c = 0; c < per_group; ++c)
      normalize_segment<X, false>(x + c * space, y + c * space, nullptr, space,
                                  scaled(stat, gain[first + c], bias[first + c]));
  }
}

// Short channels are worked on several at once: the steps of a statistic (sum, centred sums, root) wait for one another,
// which other channels fill, and the segments of one sample are neighbours in memory, which is then read in longer runs.
// How many: the forward, which reads x three times, wants them in the first cache; the backward, which streams three
// tensors, wants runs. Segments of several pages are runs by themselves.
constexpr int64_t kChannelsAtOnce = 8;
constexpr int64_t kElementsAtOnceForward = kElementsTogether, kElementsAtOnceBackward = 65536;
constexpr int64_t kLongSegment = 1024;
NORMKIT_INLINE int64_t channels_at_once(const Volume& v, int64_t elements) {
  const int64_t fit = elements / larger(1, v.samples * v.space);
  return v.space >= kLongSegment || fit < 1 ? 1 : smaller(fit, kChannelsAtOnce);
}

template <class X, bool Masked>
NORMKIT_INLINE void moments_of_channels(const ChannelsForward& a, int64_t first, int64_t count, Moments* m) {
  using A = compute_t<X>;
  const int64_t space = a.shape.space, stride = a.shape.channels * space;
  const X* x = static_cast<const X*>(a.x) + first * space;
  const int64_t together = segments_together(space);
  if (Masked || together < 2) {
    for (int64_t s = 0; s < a.shape.samples; ++s)
      for (int64_t k = 0; k < count; ++k)
        segment_moments<X, Masked>(x + s * stride + k * space, Masked ? a.mask + s * space : nullptr, space, m[k]);
    return;
  }
  for (int64_t from = 0; from < a.shape.samples; from += together) {
    const int64_t to = smaller(from + together, a.shape.samples);
    Four<Vec<A>> sums[kChannelsAtOnce];
    for (int64_t s = from; s < to; ++s)
      for (int64_t k = 0; k < count; ++k) add_piece(x + s * stride + k * space, space, sums[k]);
    for (int64_t k = 0; k < count; ++k) {
      const Pieces<X> pieces{x + from * stride + k * space, to - from, stride, space};
      merge_pieces(pieces, A(reduce(sums[k].total()) / pieces.count()), m[k]);
    }
  }
}

// Units are channels: the statistics of some channels, then (while they are in a near cache) their output.
template <class X, bool Masked>
void batch_norm_from(const ChannelsForward& a, int64_t begin, int64_t end) {
  using A = compute_t<X>;
  const int64_t space = a.shape.space, stride = a.shape.channels * space;
  const int64_t at_once = channels_at_once(a.shape, kElementsAtOnceForward);
  for (int64_t first = begin; first < end; first += at_once) {
    const int64_t count = smaller(at_once, end - first);
    Moments m[kChannelsAtOnce];
    Scaled<A> k[kChannelsAtOnce];
    moments_of_channels<X, Masked>(a, first, count, m);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t c = first + i;
      const double variance = m[i].count > 0 ? m[i].squares / m[i].count : 0;
      a.mean[c] = m[i].mean;
      a.variance[c] = variance;
      k[i] = scaled(statistic_of<A>(m[i].mean, variance, a.eps), static_cast<const A*>(a.gain)[c],
                    static_cast<const A*>(a.bias)[c]);
    }
    if (a.count) *a.count = m[0].count;  // every channel has the same
    for (int64_t s = 0; s < a.shape.samples; ++s)
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = s * stride + (first + i) * space;
        normalize_segment<X, Masked>(static_cast<const X*>(a.x) + at, static_cast<X*>(a.y) + at,
                                     Masked ? a.mask + s * space : nullptr, space, k[i]);
      }
  }
}

// Units are channels of samples, with given statistics of each channel.
template <class X, bool Masked>
void normalize_from(const ChannelsForward& a, int64_t begin, int64_t end) {
  using A = compute_t<X>;
  const int64_t space = a.shape.space, channels = a.shape.channels;
  // A root and a division for each channel, not for each unit: channel by channel of the samples in range.
  const int64_t first = begin / channels, last = (end + channels - 1) / channels;
  ScratchRow<A> roots(channels);
  for (int64_t c = 0; c < smaller(channels, end - begin); ++c) {
    const int64_t at = (begin + c) % channels;
    roots.get()[at] = statistic_of<A>(a.mean[at], a.variance[at], a.eps).rstd;
  }
  for (int64_t i = first; i < last; ++i)
    for (int64_t c = larger(0, begin - i * channels); c < smaller(channels, end - i * channels); ++c) {
      const int64_t unit = i * channels + c;
      const A high = A(a.mean[c]);
      const Statistic<A> stat{high, A(a.mean[c] - high), roots.get()[c]};
      normalize_segment<X, Masked>(static_cast<const X*>(a.x) + unit * space, static_cast<X*>(a.y) + unit * space,
                                   Masked ? a.mask + i * space : nullptr, space,
                                   scaled(stat, static_cast<const A*>(a.gain)[c], static_cast<const A*>(a.bias)[c]));
    }
}

// ---- backward: dx = rstd * (gain * grad - s1 - x̂ * s2), where s1 and s2 are the means of gain * grad and of
// gain * grad * x̂ over the elements that share the statistic (zero where the statistics were given) ----

template <class A>
struct GradSums {
  double grad = 0, grad_hat = 0;  // of grad, and of grad * x̂
};

template <class X, bool Masked>
NORMKIT_INLINE GradSums<compute_t<X>> segment_grad_sums(const X* g, const X* x, const uint8_t* mask, int64_t n,
                                                        const Statistic<compute_t<X>>& stat) {
  using A = compute_t<X>;
  GradSums<A> total;
  for (int64_t start = 0; start < n; start += kChunk) {
    const auto both =
        accumulate<A, Pair<A>>(smaller(kChunk, n - start), [&](auto& acc, int64_t k, auto tag) NORMKIT_LAMBDA {
          const int64_t j = start + k;
          Vec<A> grad = load(g + j, tag);
          Vec<A> hat = keep(centre(load(x + j, tag), stat.high, stat.low) * Vec<A>(stat.rstd), tag);
          if constexpr (Masked) {
            const Vec<A> valid = load_mask<A>(mask + j, tag);
            grad = where_valid(valid, grad);
            hat = where_valid(valid, hat);
          }
          acc.first += grad;
          acc.second += grad * hat;
        });
    total.grad += reduce(both.first);
    total.grad_hat += reduce(both.second);
  }
  return total;
}

template <class X>
NORMKIT_INLINE void add_grad_piece(const X* g, const X* x, int64_t n, const Statistic<compute_t<X>>& stat,
                                   Four<Pair<compute_t<X>>>& sums) {
  using A = compute_t<X>;
  accumulate_more<A>(sums, n, [&](Pair<A>& acc, int64_t j, auto tag) NORMKIT_LAMBDA {
    const Vec<A> grad = load(g + j, tag);
    acc.first += grad;
    acc.second += grad * keep(centre(load(x + j, tag), stat.high, stat.low), tag);
  });
}

template <class X, bool Masked>
__attribute__((noinline)) void dx_in_steps(const X* g, const X* x, X* dx, const uint8_t* mask, int64_t n,
                                           const ScaledGrad<compute_t<X>>& k) {
  using A = compute_t<X>;
  const Vec<A> rstd(k.stat.rstd);
  fill_segment(dx, n, [&](int64_t j, auto tag) NORMKIT_LAMBDA {
    const Vec<A> hat = centre(load(x + j, tag), k.stat.high, k.stat.low) * rstd;
    Vec<A> d = (load(g + j, tag) * Vec<A>(k.gain) - Vec<A>(k.s1) - hat * Vec<A>(k.s2)) * rstd;
    if constexpr (Masked) d = where_valid(load_mask<A>(mask + j, tag), d);
    return d;
  });
}

template <class X, bool Masked>
NORMKIT_INLINE void segment_dx(const X* g, const X* x, X* dx, const uint8_t* mask, int64_t n,
                               const ScaledGrad<compute_t<X>>& k) {
  using A = compute_t<X>;
  if (!k.safe) [[unlikely]] return dx_in_steps<X, Masked>(g, x, dx, mask, n, k);
  const Vec<A> high(k.stat.high), scale(k.scale), slope(k.slope), shift(k.shift);
  fill_segment(dx, n, [&](int64_t j, auto tag) NORMKIT_LAMBDA {
    Vec<A> d = (load(g + j, tag) * scale - (load(x + j, tag) - high) * slope) - shift;
    if constexpr (Masked) d = where_valid(load_mask<A>(mask + j, tag), d);
    return d;
  });
}

template <class X>
void group_norm_backward_from(const ChannelsBackward& a, int64_t begin, int64_t end) {
  using A = compute_t<X>;
  const int64_t space = a.shape.space, per_group = a.shape.channels / a.groups, n = per_group * space;
  const A* gain = static_cast<const A*>(a.gain);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t sample = unit / a.groups, first = unit % a.groups * per_group;
    const X* g = static_cast<const X*>(a.grad) + unit * n;
    const X* x = static_cast<const X*>(a.x) + unit * n;
    X* dx = static_cast<X*>(a.dx) + unit * n;
    double* sums = a.sums + sample * 2 * a.shape.channels;
    const Statistic<A> stat = statistic_of<A>(a.mean[unit], a.variance[unit], a.eps);
    double s1 = 0, s2 = 0;
    for (int64_t c = 0; c < per_group; ++c) {
      const auto s = segment_grad_sums<X, false>(g + c * space, x + c * space, nullptr, space, stat);
      sums[first + c] = s.grad;
      sums[a.shape.channels + first + c] = s.grad_hat;
      s1 += gain[first + c] * s.grad;
      s2 += gain[first + c] * s.grad_hat;
    }
    for (int64_t c = 0; c < per_group; ++c)
      segment_dx<X, false>(g + c * space, x + c * space, dx + c * space, nullptr, space,
                           scaled_grad(stat, gain[first + c], s1 / n, s2 / n));
  }
}

// With given statistics dx needs no sum: one pass over memory does everything.
template <class X, bool Masked>
NORMKIT_INLINE void frozen_segment(const X* g, const X* x, X* dx, const uint8_t* mask, int64_t n,
                                   const Statistic<compute_t<X>>& stat, compute_t<X> gain,
                                   GradSums<compute_t<X>>& total) {
  using A = compute_t<X>;
  const Vec<A> w(gain), rstd(stat.rstd);
  for (int64_t start = 0; start < n; start += kChunk) {
    const auto both =
        accumulate<A, Pair<A>>(smaller(kChunk, n - start), [&](auto& acc, int64_t k, auto tag) NORMKIT_LAMBDA {
          const int64_t j = start + k;
          Vec<A> grad = load(g + j, tag);
          Vec<A> centred = keep(centre(load(x + j, tag), stat.high, stat.low), tag), d = grad * w * rstd;
          if constexpr (Masked) {
            const Vec<A> valid = load_mask<A>(mask + j, tag);
            grad = where_valid(valid, grad);
            centred = where_valid(valid, centred);
            d = where_valid(valid, d);
          }
          acc.first += grad;
          acc.second += grad * centred;
          store(dx + j, d, tag);
        });
    total.grad += reduce(both.first);
    total.grad_hat += reduce(both.second) * double(stat.rstd);
  }
}

// The sums of some channels, sample by sample; short segments share their accumulators.
template <class X, bool Masked>
NORMKIT_INLINE void grad_sums_of_channels(const ChannelsBackward& a, int64_t first, int64_t count,
                                          const Statistic<compute_t<X>>* stat, GradSums<compute_t<X>>* total) {
  using A = compute_t<X>;
  const int64_t space = a.shape.space, stride = a.shape.channels * space;
  const X* g = static_cast<const X*>(a.grad) + first * space;
  const X* x = static_cast<const X*>(a.x) + first * space;
  const int64_t together = segments_together(space);
  if (Masked || together < 2) {
    for (int64_t s = 0; s < a.shape.samples; ++s)
      for (int64_t k = 0; k < count; ++k) {
        const int64_t at = s * stride + k * space;
        const uint8_t* mask = Masked ? a.mask + s * space : nullptr;
        const auto alone = segment_grad_sums<X, Masked>(g + at, x + at, mask, space, stat[k]);
        total[k].grad += alone.grad;
        total[k].grad_hat += alone.grad_hat;
      }
    return;
  }
  for (int64_t from = 0; from < a.shape.samples; from += together) {
    const int64_t to = smaller(from + together, a.shape.samples);
    Four<Pair<A>> sums[kChannelsAtOnce];
    for (int64_t s = from; s < to; ++s)
      for (int64_t k = 0; k < count; ++k)
        add_grad_piece(g + s * stride + k * space, x + s * stride + k * space, space, stat[k], sums[k]);
    for (int64_t k = 0; k < count; ++k) {
      const Pair<A> both = sums[k].total();
      total[k].grad += reduce(both.first);
      total[k].grad_hat += reduce(both.second) * double(stat[k].rstd);
    }
  }
}

// Units are channels.
template <class X, bool Masked>
void batch_norm_backward_from(const ChannelsBackward& a, int64_t begin, int64_t end) {
  using A = compute_t<X>;
  const int64_t space = a.shape.space, stride = a.shape.channels * space;
  const int64_t at_once = channels_at_once(a.shape, kElementsAtOnceBackward);
  const X* g = static_cast<const X*>(a.grad);
  const X* x = static_cast<const X*>(a.x);
  X* dx = static_cast<X*>(a.dx);
  const A* gain = static_cast<const A*>(a.gain);
  for (int64_t first = begin; first < end; first += at_once) {
    const int64_t count = smaller(at_once, end - first);
    Statistic<A> stat[kChannelsAtOnce];
    GradSums<A> sums[kChannelsAtOnce];
    for (int64_t k = 0; k < count; ++k) stat[k] = statistic_of<A>(a.mean[first + k], a.variance[first + k], a.eps);
    ScaledGrad<A> scaled[kChannelsAtOnce];
    if (!a.frozen) {
      grad_sums_of_channels<X, Masked>(a, first, count, stat, sums);
      for (int64_t k = 0; k < count; ++k) {
        const double scale = a.count == 0 ? 0 : gain[first + k] / a.count;
        scaled[k] = scaled_grad(stat[k], gain[first + k], sums[k].grad * scale, sums[k].grad_hat * scale);
      }
    }
    for (int64_t s = 0; s < a.shape.samples; ++s)
      for (int64_t k = 0; k < count; ++k) {
        const int64_t at = s * stride + (first + k) * space;
        const uint8_t* mask = Masked ? a.mask + s * space : nullptr;
        if (a.frozen)
          frozen_segment<X, Masked>(g + at, x + at, dx + at, mask, space, stat[k], gain[first + k], sums[k]);
        else
          segment_dx<X, Masked>(g + at, x + at, dx + at, mask, space, scaled[k]);
      }
    for (int64_t k = 0; k < count; ++k) {
      a.sums[first + k] = sums[k].grad;
      a.sums[a.shape.channels + first + k] = sums[k].grad_hat;
    }
  }
}

inline void group_norm(const ChannelsForward& a, int64_t begin, int64_t end) {
  NORMKIT_BY_DTYPE(a.shape.dtype, group_norm_from<X>(a, begin, end))
}
inline void group_norm_backward(const ChannelsBackward& a, int64_t begin, int64_t end) {
  NORMKIT_BY_DTYPE(a.shape.dtype, group_norm_backward_from<X>(a, begin, end))
}
inline void batch_norm(const ChannelsForward& a, int64_t begin, int64_t end) {
  NORMKIT_BY_DTYPE(a.shape.dtype,
                   (a.mask ? batch_norm_from<X, true>(a, begin, end) : batch_norm_from<X, false>(a, begin, end)))
}
inline void batch_norm_normalize(const ChannelsForward& a, int64_t begin, int64_t end) {
  NORMKIT_BY_DTYPE(a.shape.dtype,
                   (a.mask ? normalize_from<X, true>(a, begin, end) : normalize_from<X, false>(a, begin, end)))
}
inline void batch_norm_backward(const ChannelsBackward& a, int64_t begin, int64_t end) {
  NORMKIT_BY_DTYPE(a.shape.dtype, (a.mask ? batch_norm_backward_from<X, true>(a, begin, end)
                                          : batch_norm_backward_from<X, false>(a, begin, end)))
}

}  // namespace normkit::NORMKIT_ISA
