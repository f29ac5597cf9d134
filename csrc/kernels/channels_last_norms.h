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

// Unit: one row of channels. What a row of channels reads beside x is most of the work.
template <class X>
void last_normalize_from(const ChannelsForward& a, int64_t begin, int64_t end) {
  using A = compute_t<X>;
  const int64_t channels = a.shape.channels;
  const A* gain = static_cast<const A*>(a.gain);
  const A* bias = static_cast<const A*>(a.bias);
  ChannelCoefficients<A> k(channels);
  ScratchRow<A> products(2 * channels);
  A *scale = products.get(), *shift = scale + channels;
  for_each_sample(a.shape, begin, end, [&](int64_t sample, int64_t from, int64_t to) {
    k.fill(a.mean + sample * a.groups, a.variance + sample * a.groups, a.groups, a.eps);
    bool safe = true;
    for (int64_t c = 0; c < channels; ++c) {
      const Scaled<A> s = scaled(k.of(c), gain[c], bias[c]);
      scale[c] = s.scale;
      shift[c] = s.shift;
      safe &= s.safe;
    }
    const auto each_row = [&](const auto& at) NORMKIT_LAMBDA {
      each_row_of_channels(a, from, to, static_cast<X*>(a.y), [&](int64_t row, auto together) NORMKIT_LAMBDA {
        const X* x = static_cast<const X*>(a.x) + row * channels;
        X* y = static_cast<X*>(a.y) + row * channels;
        for_each<A>(channels, [&](int64_t c, auto tag) NORMKIT_LAMBDA {
          fetch_ahead(together, x, channels, c);
          const auto normalized = at(c, tag);
          NORMKIT_UNROLL for (int i = 0; i < together.kCount; ++i)
            store(y + i * channels + c, normalized(load(x + i * channels + c, tag)), tag);
        });
      });
    };
    if (safe) [[likely]] {
      each_row([&](int64_t c, auto tag) NORMKIT_LAMBDA {
        return [high = load(k.high + c, tag), by = load(scale + c, tag), add = load(shift + c, tag)](const Vec<A>& x)
                   NORMKIT_LAMBDA { return (x - high) * by + add; };
      });
    } else {
      each_row([&](int64_t c, auto tag) NORMKIT_LAMBDA {
        return [high = load(k.high + c, tag), low = load(k.low + c, tag), rstd = load(k.rstd + c, tag),
                by = load(gain + c, tag), add = load(bias + c, tag)](const Vec<A>& x) NORMKIT_LAMBDA {
          return ((x - high) - low) * rstd * by + add;
        };
      });
    }
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

// dx of one piece of rows with given statistics, where gain * rstd cannot be formed beforehand.
template <class X>
__attribute__((noinline)) void piece_dx_in_steps(const X* g, X* dx, const compute_t<X>* gain, const compute_t<X>* rstd,
                                                 const int64_t* rows, int64_t n, int64_t channels) {
  using A = compute_t<X>;
  for (int64_t r = 0; r < n; ++r)
    for_each<A>(channels, [&](int64_t c, auto tag) NORMKIT_LAMBDA {
      store(dx + rows[r] + c, load(g + rows[r] + c, tag) * load(gain + c, tag) * load(rstd + c, tag), tag);
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
  ScratchRow<A> scales(channels);
  A* scale = scales.get();
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
        in_steps |= !is_safe(scale[c], gain[c]);
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
      if (dx && in_steps) [[unlikely]] piece_dx_in_steps(g, dx, gain, k.rstd, rows, n, channels);
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
  ScratchRow<A> means(2 * channels), products(3 * channels);
  A *s1 = means.get(), *s2 = s1 + channels;
  A *scale = products.get(), *slope = scale + channels, *shift = slope + channels;
  for_each_sample(a.shape, begin, end, [&](int64_t sample, int64_t from, int64_t to) {
    k.fill(a.mean + sample * a.groups, a.variance + sample * a.groups, a.groups, a.eps);
    const double* sums = a.sums + sample * 2 * channels;
    const double share = a.frozen || a.count == 0 ? 0 : 1 / a.count;
    bool safe = true;
    for (int64_t group = 0; group < a.groups; ++group) {
      double total = 0, total_hat = 0;
      for (int64_t c = group * per_group; c < (group + 1) * per_group; ++c) {
        total += gain[c] * sums[c];
        total_hat += gain[c] * sums[channels + c];
      }
      for (int64_t c = group * per_group; c < (group + 1) * per_group; ++c) {
        s1[c] = A(total * share);
        s2[c] = A(total_hat * share);
        const ScaledGrad<A> s = scaled_grad(k.of(c), gain[c], total * share, total_hat * share);
        scale[c] = s.scale;
        slope[c] = s.slope;
        shift[c] = s.shift;
        safe &= s.safe;
      }
    }
    const auto each_row = [&](const auto& at) NORMKIT_LAMBDA {
      each_row_of_channels(a, from, to, static_cast<X*>(a.dx), [&](int64_t row, auto together) NORMKIT_LAMBDA {
        const X* g = static_cast<const X*>(a.grad) + row * channels;
        const X* x = static_cast<const X*>(a.x) + row * channels;
        X* dx = static_cast<X*>(a.dx) + row * channels;
        for_each<A>(channels, [&](int64_t c, auto tag) NORMKIT_LAMBDA {
          fetch_ahead(together, g, channels, c);
          fetch_ahead(together, x, channels, c);
          fetch_ahead(together, dx, channels, c);
          const auto gradient = at(c, tag);
          NORMKIT_UNROLL for (int i = 0; i < together.kCount; ++i) {
            const int64_t j = i * channels + c;
            store(dx + j, gradient(load(g + j, tag), load(x + j, tag)), tag);
          }
        });
      });
    };
    if (safe) [[likely]] {
      each_row([&](int64_t c, auto tag) NORMKIT_LAMBDA {
        return [high = load(k.high + c, tag), by = load(scale + c, tag), of_x = load(slope + c, tag),
                less = load(shift + c, tag)](const Vec<A>& grad, const Vec<A>& x) NORMKIT_LAMBDA {
          return (grad * by - (x - high) * of_x) - less;
        };
      });
    } else {
      each_row([&](int64_t c, auto tag) NORMKIT_LAMBDA {
        return [high = load(k.high + c, tag), low = load(k.low + c, tag), rstd = load(k.rstd + c, tag),
                by = load(gain + c, tag), first = load(s1 + c, tag), second = load(s2 + c, tag)](
                   const Vec<A>& grad, const Vec<A>& x) NORMKIT_LAMBDA {
          return (grad * by - first - ((x - high) - low) * rstd * second) * rstd;
        };
      });
    }
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
