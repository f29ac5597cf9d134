// Layer normalization over the channels of contiguous x[n][c][s], without a permute: a tile of neighbouring positions is
// walked channel by channel, each position a lane.
#pragma once

#include "contiguous_norms.h"

namespace normkit::NORMKIT_ISA {

constexpr int kTileVectors = 4;
constexpr int64_t kChannelsPerSum = 32;  // short float sums, added up: a lane has no other lanes to share its error with

template <class A>
constexpr int64_t tile_width() {
  return kTileVectors * Vec<A>::kLanes;
}

// Positions of one tile, cut into whole vectors and one unfinished.
template <class A, class F>
NORMKIT_INLINE void for_each_tile(int64_t space, int64_t tile, const F& f) {
  constexpr int L = Vec<A>::kLanes;
  const int64_t first = tile * tile_width<A>();
  const int64_t n = smaller(tile_width<A>(), space - first);
  if (n == tile_width<A>()) return f.template operator()<kTileVectors>(first, Full{});
  int64_t s = 0;
  for (; s + L <= n; s += L) f.template operator()<1>(first + s, Full{});
  if (s < n) f.template operator()<1>(first + s, Part{int(n - s)});
}

template <class A, int V>
struct TileStatistic {
  Vec<A> high[V], low[V], rstd[V];
};

template <class X, int V, class Tag>
NORMKIT_INLINE TileStatistic<compute_t<X>, V> tile_statistic(const X* x, int64_t channels, int64_t space, double eps,
                                                            Tag tag) {
  using A = compute_t<X>;
  constexpr int L = Vec<A>::kLanes;
  TileStatistic<A, V> t;
  const Vec<A> inverse(A(1) / A(channels));
  Vec<A> squares[V];
  for (int64_t c0 = 0; c0 < channels; c0 += kChannelsPerSum) {
    Vec<A> sum[V];
    for (int64_t c = c0; c < smaller(c0 + kChannelsPerSum, channels); ++c)
      NORMKIT_UNROLL for (int v = 0; v < V; ++v) sum[v] += load(x + c * space + v * L, tag);
    NORMKIT_UNROLL for (int v = 0; v < V; ++v) t.high[v] += sum[v];
  }
  NORMKIT_UNROLL for (int v = 0; v < V; ++v) t.high[v] = t.high[v] * inverse;
  for (int64_t c0 = 0; c0 < channels; c0 += kChannelsPerSum) {
    Vec<A> sum[V], square[V];
    for (int64_t c = c0; c < smaller(c0 + kChannelsPerSum, channels); ++c)
      NORMKIT_UNROLL for (int v = 0; v < V; ++v) {
        const Vec<A> d = load(x + c * space + v * L, tag) - t.high[v];
        sum[v] += d;
        square[v] += d * d;
      }
    NORMKIT_UNROLL for (int v = 0; v < V; ++v) {
      t.low[v] += sum[v];
      squares[v] += square[v];
    }
  }
  NORMKIT_UNROLL for (int v = 0; v < V; ++v) {
    const Vec<A> rest = t.low[v];
    t.low[v] = rest * inverse;
    Vec<A> variance = (squares[v] - rest * t.low[v]) * inverse;
    variance = where_less(variance, Vec<A>(), Vec<A>(), variance);
    const Vec<A> spread = variance + Vec<A>(A(eps));
    t.rstd[v] = Vec<A>(A(1)) / sqrt_of(spread);
    A lanes[L];
    store(lanes, spread, Full{});
    bool rare = false;
    for (int k = 0; k < used_lanes<A>(tag); ++k) rare |= out_of_range(lanes[k]);
    if (!rare) continue;
    A high[L], low[L], rstd[L];
    store(high, t.high[v], Full{});
    store(low, t.low[v], Full{});
    store(rstd, t.rstd[v], Full{});
    for (int k = 0; k < used_lanes<A>(tag); ++k) {
      if (!out_of_range(lanes[k])) continue;
      double mean = 0, square = 0;
      for (int64_t c = 0; c < channels; ++c) mean += value_at(x, c * space + v * L + k);
      mean /= channels;
      for (int64_t c = 0; c < channels; ++c) {
        const double d = value_at(x, c * space + v * L + k) - mean;
        square += d * d;
      }
      high[k] = A(mean);
      low[k] = A(mean - high[k]);
      rstd[k] = A(1 / __builtin_sqrt(square / channels + eps));
    }
    t.high[v] = load(high, Full{});
    t.low[v] = load(low, Full{});
    t.rstd[v] = load(rstd, Full{});
  }
  return t;
}

NORMKIT_INLINE int64_t tiles_of(int64_t space, int64_t width) { return (space + width - 1) / width; }

// Unit (sample, tile). a.mean: [samples, space]; a.variance holds rstd here, [samples, space].
template <class X>
void channel_layer_norm_from(const ChannelsForward& a, int64_t begin, int64_t end) {
  using A = compute_t<X>;
  constexpr int L = Vec<A>::kLanes;
  const int64_t channels = a.shape.channels, space = a.shape.space, tiles = tiles_of(space, tile_width<A>());
  const A* gain = static_cast<const A*>(a.gain);
  const A* bias = static_cast<const A*>(a.bias);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t sample = unit / tiles;
    for_each_tile<A>(space, unit % tiles, [&]<int V>(int64_t s, auto tag) NORMKIT_LAMBDA {
      const X* x = static_cast<const X*>(a.x) + sample * channels * space + s;
      X* y = static_cast<X*>(a.y) + sample * channels * space + s;
      const TileStatistic<A, V> t = tile_statistic<X, V>(x, channels, space, a.eps, tag);
      for (int64_t c = 0; c < channels; ++c) {
        const Vec<A> w(gain[c]), b(bias[c]);
        NORMKIT_UNROLL for (int v = 0; v < V; ++v) {
          const Vec<A> d = (load(x + c * space + v * L, tag) - t.high[v]) - t.low[v];
          store(y + c * space + v * L, d * t.rstd[v] * w + b, tag);
        }
      }
      if (!a.mean) return;
      NORMKIT_UNROLL for (int v = 0; v < V; ++v) {
        A high[L], low[L], rstd[L];
        store(high, t.high[v], Full{});
        store(low, t.low[v], Full{});
        store(rstd, t.rstd[v], Full{});
        for (int k = 0; k < used_lanes<A>(tag); ++k) {
          a.mean[sample * space + s + v * L + k] = double(high[k]) + double(low[k]);
          a.variance[sample * space + s + v * L + k] = rstd[k];
        }
      }
    });
  }
}

// Unit: one block of (sample, tile) pairs; a.sums: [blocks, 2, channels].
template <class X>
void channel_layer_norm_backward_from(const ChannelsBackward& a, int64_t begin, int64_t end) {
  using A = compute_t<X>;
  constexpr int L = Vec<A>::kLanes;
  const int64_t channels = a.shape.channels, space = a.shape.space, tiles = tiles_of(space, tile_width<A>());
  const int64_t units = a.shape.samples * tiles;
  const A* gain = static_cast<const A*>(a.gain);
  const Vec<A> inverse(A(1) / A(channels));
  for (int64_t block = begin; block < end; ++block) {
    double* sums = a.sums + block * 2 * channels;
    memset(sums, 0, 2 * channels * sizeof(double));
    for (int64_t unit = units * block / a.blocks; unit < units * (block + 1) / a.blocks; ++unit) {
      const int64_t sample = unit / tiles;
      for_each_tile<A>(space, unit % tiles, [&]<int V>(int64_t s, auto tag) NORMKIT_LAMBDA {
        const int64_t offset = sample * channels * space + s;
        const X* x = static_cast<const X*>(a.x) + offset;
        const X* g = static_cast<const X*>(a.grad) + offset;
        X* dx = static_cast<X*>(a.dx) + offset;
        Vec<A> high[V], low[V], rstd[V], s1[V], s2[V];
        NORMKIT_UNROLL for (int v = 0; v < V; ++v) {
          A h[L] = {}, l[L] = {}, r[L] = {};
          for (int k = 0; k < used_lanes<A>(tag); ++k) {
            const int64_t at = sample * space + s + v * L + k;
            h[k] = A(a.mean[at]);
            l[k] = A(a.mean[at] - h[k]);
            r[k] = A(a.variance[at]);
          }
          high[v] = load(h, Full{});
          low[v] = load(l, Full{});
          rstd[v] = load(r, Full{});
        }
        for (int64_t c0 = 0; c0 < channels; c0 += kChannelsPerSum) {
          Vec<A> part1[V], part2[V];
          for (int64_t c = c0; c < smaller(c0 + kChannelsPerSum, channels); ++c) {
            Vec<A> grad_sum, hat_sum;
            NORMKIT_UNROLL for (int v = 0; v < V; ++v) {
              const Vec<A> grad = load(g + c * space + v * L, tag);
              const Vec<A> hat = ((load(x + c * space + v * L, tag) - high[v]) - low[v]) * rstd[v];
              const Vec<A> grad_hat = keep(grad * hat, tag);
              grad_sum += grad;
              hat_sum += grad_hat;
              part1[v] += grad * Vec<A>(gain[c]);
              part2[v] += grad_hat * Vec<A>(gain[c]);
            }
            sums[c] += reduce(grad_sum);
            sums[channels + c] += reduce(hat_sum);
          }
          NORMKIT_UNROLL for (int v = 0; v < V; ++v) {
            s1[v] += part1[v];
            s2[v] += part2[v];
          }
        }
        NORMKIT_UNROLL for (int v = 0; v < V; ++v) {
          s1[v] = s1[v] * inverse;
          s2[v] = s2[v] * inverse;
        }
        for (int64_t c = 0; c < channels; ++c)
          NORMKIT_UNROLL for (int v = 0; v < V; ++v) {
            const Vec<A> hat = ((load(x + c * space + v * L, tag) - high[v]) - low[v]) * rstd[v];
            const Vec<A> h = load(g + c * space + v * L, tag) * Vec<A>(gain[c]);
            store(dx + c * space + v * L, (h - s1[v] - hat * s2[v]) * rstd[v], tag);
          }
      });
    }
  }
}

inline void channel_layer_norm(const ChannelsForward& a, int64_t begin, int64_t end) {
  NORMKIT_BY_DTYPE(a.shape.dtype, channel_layer_norm_from<X>(a, begin, end))
}
inline void channel_layer_norm_backward(const ChannelsBackward& a, int64_t begin, int64_t end) {
  NORMKIT_BY_DTYPE(a.shape.dtype, channel_layer_norm_backward_from<X>(a, begin, end))
}
// How many tiles one sample has.
inline int64_t channel_layer_norm_tiles(const Volume& v) {
  return tiles_of(v.space, v.dtype == DType::float64 ? tile_width<double>() : tile_width<float>());
}

}  // namespace normkit::NORMKIT_ISA
