// Group, instance and batch normalization over channels-last memory x[n][s][c]: rows of channels. Three steps, each
// threaded by the caller: column moments of blocks of rows, their merge into statistics, and one elementwise pass.
// A batch norm is one sample of all rows with as many groups as channels.
#pragma once

#include "contiguous_norms.h"

namespace normkit::NORMKIT_ISA {

// Unit (sample, block): the moments of its rows into a.partial.
template <class X>
void last_moments_from(const ChannelsForward& a, int64_t begin, int64_t end) {
  const int64_t channels = a.shape.channels, space = a.shape.space;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t sample = unit / a.blocks, block = unit % a.blocks;
    double* partial = a.partial + unit * (2 * channels + 1);
    ColumnMoments into{partial, partial + channels};
    column_moments(static_cast<const X*>(a.x) + sample * space * channels,
                   a.mask ? a.mask + sample * space : nullptr, space * block / a.blocks,
                   space * (block + 1) / a.blocks, channels, into);
    partial[2 * channels] = into.count;
  }
}

// Unit: one sample. Blocks in order (into the first), then the channels of each group.
inline void last_merge(const ChannelsForward& a, int64_t begin, int64_t end) {
  const int64_t channels = a.shape.channels, per_group = channels / a.groups, width = 2 * channels + 1;
  for (int64_t sample = begin; sample < end; ++sample) {
    double* mean = a.partial + sample * a.blocks * width;
    double* squares = mean + channels;
    double count = mean[2 * channels];
    for (int64_t b = 1; b < a.blocks; ++b) {
      const double* block = mean + b * width;
      const double n = block[2 * channels], total = count + n;
      if (n == 0) continue;
      const double share = n / total, weight = count * share;
      for (int64_t c = 0; c < channels; ++c) {
        const double delta = block[c] - mean[c];
        mean[c] += delta * share;
        squares[c] += block[channels + c] + delta * (delta * weight);
      }
      count = total;
    }
    const double all = count * double(per_group), inverse = all > 0 ? 1 / all : 0;
    for (int64_t group = 0; group < a.groups; ++group) {
      const double *m = mean + group * per_group, *s = squares + group * per_group;
      double centre = m[0], spread = s[0];
      if (per_group > 1) {
        double sum = 0;
        for (int64_t c = 0; c < per_group; ++c) sum += m[c];
        centre = sum / double(per_group);
        spread = 0;
        for (int64_t c = 0; c < per_group; ++c) spread += s[c] + count * (m[c] - centre) * (m[c] - centre);
      }
      a.mean[sample * a.groups + group] = centre;
      a.variance[sample * a.groups + group] = spread * inverse;
    }
    if (a.count) *a.count = count;
  }
}

// Per-channel coefficients of one sample, as rows that the elementwise pass reads beside x.
template <class A>
struct ChannelCoefficients {
  explicit ChannelCoefficients(int64_t channels) : channels(channels), rows(3 * channels) {}
  void fill(const double* mean, const double* variance, int64_t groups, double eps) {
    const int64_t per_group = channels / groups;
    for (int64_t g = 0; g < groups; ++g) {
      const Statistic<A> stat = statistic_of<A>(mean[g], variance[g], eps);
      for (int64_t c = g * per_group; c < (g + 1) * per_group; ++c) {
        high[c] = stat.high;
        low[c] = stat.low;
        rstd[c] = stat.rstd;
      }
    }
  }
  Statistic<A> of(int64_t c) const { return {high[c], low[c], rstd[c]}; }
  int64_t channels;
  ScratchRow<A> rows;
  A *high = rows.get(), *low = high + channels, *rstd = low + channels;
};

// f(sample, from, to) for the rows of each sample in [begin, end).
template <class F>
NORMKIT_INLINE void for_each_sample(const Volume& v, int64_t begin, int64_t end, const F& f) {
  for (int64_t sample = begin / v.space, from = begin; from < end; ++sample) {
    const int64_t to = smaller(end, (sample + 1) * v.space);
    f(sample, from, to);
    from = to;
  }
}

// f(row, Rows<4>{} or Rows<1>{}) for the rows in [from, to); a masked row gives zeros in `out`.
template <class Args, class X, class F>
NORMKIT_INLINE void each_row_of_channels(const Args& a, int64_t from, int64_t to, X* out, const F& f) {
  if (!a.mask) return by_fours(to - from, [&](int64_t r, auto together) NORMKIT_LAMBDA { f(from + r, together); });
  const int64_t channels = a.shape.channels;
  for (int64_t row = from; row < to; ++row) {
    if (a.mask[row])
      f(row, Rows<1>{});
    else
      memset(static_cast<void*>(out + row * channels), 0, channels * sizeof(X));
  }
}

// A row in which some channel's products cannot be formed beforehand; the others keep their bits.
template <class X>
__attribute__((noinline)) void row_in_steps(const X* x, X* y, const ChannelCoefficients<compute_t<X>>& k,
                                            const compute_t<X>* gain, const compute_t<X>* bias,
                                            const compute_t<X>* scale, const compute_t<X>* shift,
                                            const compute_t<X>* safe, bool masked) {
  using A = compute_t<X>;
  if (masked) return void(memset(static_cast<void*>(y), 0, k.channels * sizeof(X)));
  for_each<A>(k.channels, [&](int64_t c, auto tag) NORMKIT_LAMBDA {
    const Vec<A> centred = load(x + c, tag) - load(k.high + c, tag);
    const Vec<A> usual = centred * load(scale + c, tag) + load(shift + c, tag);
    const Vec<A> hat = (centred - load(k.low + c, tag)) * load(k.rstd + c, tag);
    const Vec<A> steps = hat * load(gain + c, tag) + load(bias + c, tag);
    store(y + c, where_less(Vec<A>(), load(safe + c, tag), usual, steps), tag);
  });
}

// Unit: one row of channels. What a row of channels reads beside x is most of the work.
template <class X>
void last_normalize_from(const ChannelsForward& a, int64_t begin, int64_t end) {
  using A = compute_t<X>;
  const int64_t channels = a.shape.channels;
  const A* gain = static_cast<const A*>(a.gain);
  const A* bias = static_cast<const A*>(a.bias);
  ChannelCoefficients<A> k(channels);
  ScratchRow<A> products(3 * channels);
  A *scale = products.get(), *shift = scale + channels, *safe = shift + channels;  // safe: 1 or 0
  for_each_sample(a.shape, begin, end, [&](int64_t sample, int64_t from, int64_t to) {
    k.fill(a.mean + sample * a.groups, a.variance + sample * a.groups, a.groups, a.eps);
    bool all_safe = true;
    for (int64_t c = 0; c < channels; ++c) {
      const Scaled<A> s = scaled(k.of(c), gain[c], bias[c]);
      scale[c] = s.scale;
      shift[c] = s.shift;
      safe[c] = s.safe;
      all_safe &= s.safe;
    }
    if (!all_safe) [[unlikely]] {
      for (int64_t row = from; row < to; ++row) {
        const int64_t at = row * channels;
        row_in_steps(static_cast<const X*>(a.x) + at, static_cast<X*>(a.y) + at, k, gain, bias, scale, shift, safe,
                     a.mask && !a.mask[row]);
      }
      return;
    }
    each_row_of_channels(a, from, to, static_cast<X*>(a.y), [&](int64_t row, auto together) NORMKIT_LAMBDA {
      const X* x = static_cast<const X*>(a.x) + row * channels;
      X* y = static_cast<X*>(a.y) + row * channels;
      for_each<A>(channels, [&](int64_t c, auto tag) NORMKIT_LAMBDA {
        fetch_ahead(together, x, channels, c);
        const Vec<A> high = load(k.high + c, tag), by = load(scale + c, tag), add = load(shift + c, tag);
        NORMKIT_UNROLL for (int i = 0; i < together.kCount; ++i)
          store(y + i * channels + c, (load(x + i * channels + c, tag) - high) * by + add, tag);
      });
    });
  });
}

// ---- backward ----

// Add the sums of one piece of rows. With given statistics (dx not null) dx needs no sum and is written on the way.
template <class X>
NORMKIT_INLINE void piece_grad_sums(const X* g, const X* x, X* dx, const compute_t<X>* scale, const int64_t* rows,
                                    int64_t n, const ChannelCoefficients<compute_t<X>>& k,
                                    ColumnSums<compute_t<X>>& piece, double* sums) {
  using A = compute_t<X>;
  piece.clear();
  by_fours(n, [&](int64_t r, auto together) NORMKIT_LAMBDA {
    for_each<A>(k.channels, [&](int64_t c, auto tag) NORMKIT_LAMBDA {
      fetch_ahead(together, g + rows[r], k.channels, c);
      fetch_ahead(together, x + rows[r], k.channels, c);
      if (dx) fetch_ahead(together, dx + rows[r], k.channels, c);
      const Vec<A> high = load(k.high + c, tag), low = load(k.low + c, tag);
      Vec<A> sum = load(piece.first + c, tag), centred = load(piece.second + c, tag);
      NORMKIT_UNROLL for (int i = 0; i < together.kCount; ++i) {
        const int64_t at = rows[r + i] + c;
        const Vec<A> grad = load(g + at, tag);
        sum += grad;
        centred += grad * ((load(x + at, tag) - high) - low);
        if (dx) store(dx + at, grad * load(scale + c, tag), tag);
      }
      store(piece.first + c, sum, tag);
      store(piece.second + c, centred, tag);
    });
  });
  for (int64_t c = 0; c < k.channels; ++c) {
    sums[c] += piece.first[c];
    sums[k.channels + c] += piece.second[c] * double(k.rstd[c]);
  }
}

// A row of dx in which some channel's products cannot be formed beforehand; the others keep their bits. `products`: rows of
// scale, slope, shift and safe. Without x, by given statistics.
template <class X>
__attribute__((noinline)) void row_dx_in_steps(const X* g, const X* x, X* dx,
                                               const ChannelCoefficients<compute_t<X>>& k, const compute_t<X>* gain,
                                               const compute_t<X>* products, const compute_t<X>* s1,
                                               const compute_t<X>* s2, bool masked) {
  using A = compute_t<X>;
  const int64_t channels = k.channels;
  if (masked) return void(memset(static_cast<void*>(dx), 0, channels * sizeof(X)));
  for_each<A>(channels, [&](int64_t c, auto tag) NORMKIT_LAMBDA {
    const Vec<A> grad = load(g + c, tag), rstd = load(k.rstd + c, tag);
    Vec<A> usual = grad * load(products + c, tag), steps = grad * load(gain + c, tag);
    if (x) {
      const Vec<A> centred = load(x + c, tag) - load(k.high + c, tag);
      usual = (usual - centred * load(products + channels + c, tag)) - load(products + 2 * channels + c, tag);
      steps = steps - load(s1 + c, tag) - (centred - load(k.low + c, tag)) * rstd * load(s2 + c, tag);
    }
    store(dx + c, where_less(Vec<A>(), load(products + 3 * channels + c, tag), usual, steps * rstd), tag);
  });
}

// Unit (sample, block): sums of grad and grad * x̂ per channel, in short float sums added up in double.
template <class X>
void last_grad_sums_from(const ChannelsBackward& a, int64_t begin, int64_t end) {
  using A = compute_t<X>;
  const int64_t channels = a.shape.channels, space = a.shape.space;
  const A* gain = static_cast<const A*>(a.gain);
  ChannelCoefficients<A> k(channels);
  ColumnSums<A> piece(channels);
  ScratchRow<A> products(4 * channels);
  A *scale = products.get(), *safe = scale + 3 * channels;
  int64_t rows[kRowsPerPiece];
  int64_t filled = -1;
  bool in_steps = false;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t sample = unit / a.blocks, block = unit % a.blocks;
    if (sample != filled) {
      k.fill(a.mean + sample * a.groups, a.variance + sample * a.groups, a.groups, a.eps);
      in_steps = false;
      for (int64_t c = 0; c < channels; ++c) {
        scale[c] = k.rstd[c] * gain[c];
        safe[c] = is_safe(scale[c], gain[c]);
        in_steps |= safe[c] == 0;
      }
    }
    filled = sample;
    double* sums = a.partial + unit * 2 * channels;
    memset(sums, 0, 2 * channels * sizeof(double));
    const X* g = static_cast<const X*>(a.grad) + sample * space * channels;
    const X* x = static_cast<const X*>(a.x) + sample * space * channels;
    X* dx = a.frozen && !a.mask ? static_cast<X*>(a.dx) + sample * space * channels : nullptr;
    const uint8_t* mask = a.mask ? a.mask + sample * space : nullptr;
    const int64_t last = space * (block + 1) / a.blocks;
    for (int64_t next = space * block / a.blocks; next < last;) {
      const int64_t n = next_rows(mask, channels, last, next, rows);
      piece_grad_sums(g, x, dx, scale, rows, n, k, piece, sums);
      if (!dx || !in_steps) [[likely]] continue;
      for (int64_t r = 0; r < n; ++r)
        row_dx_in_steps<X>(g + rows[r], nullptr, dx + rows[r], k, gain, scale, nullptr, nullptr, false);
    }
  }
}

// Unit: one sample. Its blocks' sums, in order.
inline void last_grad_merge(const ChannelsBackward& a, int64_t begin, int64_t end) {
  const int64_t width = 2 * a.shape.channels;
  for (int64_t sample = begin; sample < end; ++sample) {
    const double* partial = a.partial + sample * a.blocks * width;
    double* sums = a.sums + sample * width;
    memcpy(sums, partial, width * sizeof(double));
    for (int64_t b = 1; b < a.blocks; ++b)
      for (int64_t c = 0; c < width; ++c) sums[c] += partial[b * width + c];
  }
}

// Unit: one row of channels.
template <class X>
void last_dx_from(const ChannelsBackward& a, int64_t begin, int64_t end) {
  using A = compute_t<X>;
  const int64_t channels = a.shape.channels, per_group = channels / a.groups;
  const A* gain = static_cast<const A*>(a.gain);
  ChannelCoefficients<A> k(channels);
  ScratchRow<A> means(2 * channels), products(4 * channels);
  A *s1 = means.get(), *s2 = s1 + channels;
  A *scale = products.get(), *slope = scale + channels, *shift = slope + channels, *safe = shift + channels;
  for_each_sample(a.shape, begin, end, [&](int64_t sample, int64_t from, int64_t to) {
    k.fill(a.mean + sample * a.groups, a.variance + sample * a.groups, a.groups, a.eps);
    const double* sums = a.sums + sample * 2 * channels;
    const double share = a.count == 0 ? 0 : 1 / a.count;
    bool all_safe = true;
    for (int64_t group = 0; group < a.groups; ++group) {
      double total = 0, total_hat = 0;
      if (!a.frozen)
        for (int64_t c = group * per_group; c < (group + 1) * per_group; ++c) {
          total += gain[c] * sums[c];
          total_hat += gain[c] * sums[channels + c];
        }
      for (int64_t c = group * per_group; c < (group + 1) * per_group; ++c) {
        const ScaledGrad<A> s = scaled_grad(k.of(c), gain[c], total * share, total_hat * share);
        s1[c] = s.s1;
        s2[c] = s.s2;
        scale[c] = s.scale;
        slope[c] = s.slope;
        shift[c] = s.shift;
        safe[c] = s.safe;
        all_safe &= s.safe;
      }
    }
    // Given statistics come here with a mask only (`last_grad_sums` writes dx without one), and dx takes no part of x.
    if (a.frozen || !all_safe) [[unlikely]] {
      for (int64_t row = from; row < to; ++row) {
        const int64_t at = row * channels;
        const X* x = a.frozen ? nullptr : static_cast<const X*>(a.x) + at;
        row_dx_in_steps<X>(static_cast<const X*>(a.grad) + at, x, static_cast<X*>(a.dx) + at, k, gain, products.get(), s1,
                        s2, a.mask && !a.mask[row]);
      }
      return;
    }
    each_row_of_channels(a, from, to, static_cast<X*>(a.dx), [&](int64_t row, auto together) NORMKIT_LAMBDA {
      const X* g = static_cast<const X*>(a.grad) + row * channels;
      const X* x = static_cast<const X*>(a.x) + row * channels;
      X* dx = static_cast<X*>(a.dx) + row * channels;
      for_each<A>(channels, [&](int64_t c, auto tag) NORMKIT_LAMBDA {
        fetch_ahead(together, g, channels, c);
        fetch_ahead(together, x, channels, c);
        fetch_ahead(together, dx, channels, c);
        const Vec<A> high = load(k.high + c, tag), by = load(scale + c, tag);
        const Vec<A> of_x = load(slope + c, tag), less = load(shift + c, tag);
        NORMKIT_UNROLL for (int i = 0; i < together.kCount; ++i) {
          const int64_t at = i * channels + c;
          store(dx + at, (load(g + at, tag) * by - (load(x + at, tag) - high) * of_x) - less, tag);
        }
      });
    });
  });
}

inline void last_moments(const ChannelsForward& a, int64_t begin, int64_t end) {
  NORMKIT_BY_DTYPE(a.shape.dtype, last_moments_from<X>(a, begin, end))
}
inline void last_normalize(const ChannelsForward& a, int64_t begin, int64_t end) {
  NORMKIT_BY_DTYPE(a.shape.dtype, last_normalize_from<X>(a, begin, end))
}
inline void last_grad_sums(const ChannelsBackward& a, int64_t begin, int64_t end) {
  NORMKIT_BY_DTYPE(a.shape.dtype, last_grad_sums_from<X>(a, begin, end))
}
inline void last_dx(const ChannelsBackward& a, int64_t begin, int64_t end) {
  NORMKIT_BY_DTYPE(a.shape.dtype, last_dx_from<X>(a, begin, end))
}

}  // namespace normkit::NORMKIT_ISA
