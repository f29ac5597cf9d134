// Random shapes, strides, dtypes and options through every kernel, against plain double loops. Needs no framework:
// csrc/tests/CMakeLists.txt builds it for each instruction set with sanitizers; fuzz_LEVEL SECONDS SEED.
// Every buffer has exactly the size it needs, so that a sanitizer sees a step outside.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../kernels/table.h"

namespace normkit {
extern const KernelTable NORMKIT_TABLE;
}
using namespace normkit;

namespace {

std::mt19937_64 rng;
int64_t pick(int64_t low, int64_t high) { return low + int64_t(rng() % uint64_t(high - low + 1)); }
double normal() { return std::normal_distribution<double>()(rng); }
const KernelTable& K = NORMKIT_TABLE;

DType any_type() {
  for (;;) {
    const DType t = DType(pick(0, 3));
    if (K.has(t)) return t;
  }
}
int64_t size_of(DType t) { return t == DType::float64 ? 8 : t == DType::float32 ? 4 : 2; }

// A typed array of exactly n elements.
struct Array {
  DType dtype;
  std::vector<char> bytes;
  Array(DType t, int64_t n) : dtype(t), bytes(size_t(n * size_of(t))) {}
  void* data() { return bytes.data(); }
  double get(int64_t i) const {
    if (dtype == DType::float64) return reinterpret_cast<const double*>(bytes.data())[i];
    if (dtype == DType::float32) return reinterpret_cast<const float*>(bytes.data())[i];
    const uint16_t h = reinterpret_cast<const uint16_t*>(bytes.data())[i];
    if (dtype == DType::bfloat16) {
      const uint32_t u = uint32_t(h) << 16;
      float f;
      __builtin_memcpy(&f, &u, 4);
      return f;
    }
    const int exponent = (h >> 10) & 31, mantissa = h & 1023;
    const double m = exponent == 0 ? std::ldexp(mantissa, -24)
                     : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                      : std::ldexp(1024 + mantissa, exponent - 25);
    return h & 0x8000 ? -m : m;
  }
  void set(int64_t i, double v) {
    if (dtype == DType::float64) {
      reinterpret_cast<double*>(bytes.data())[i] = v;
    } else if (dtype == DType::float32) {
      reinterpret_cast<float*>(bytes.data())[i] = float(v);
    } else if (dtype == DType::bfloat16) {
      const float f = float(v);
      uint32_t u;
      __builtin_memcpy(&u, &f, 4);
      reinterpret_cast<uint16_t*>(bytes.data())[i] = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
    } else {  // values of ordinary size, truncated
      int e;
      const double m = std::frexp(std::fabs(v), &e);
      const int exponent = e + 14;
      uint16_t h = exponent <= 0 ? uint16_t(std::ldexp(std::fabs(v), 24))
                                 : uint16_t((exponent << 10) | (int(m * 2048) & 1023));
      reinterpret_cast<uint16_t*>(bytes.data())[i] = uint16_t(h | (v < 0 ? 0x8000 : 0));
    }
  }
  void fill(int64_t n) {
    for (int64_t i = 0; i < n; ++i) set(i, normal());
  }
};

double tolerance(DType t) {
  return t == DType::float64 ? 1e-11 : t == DType::float32 ? 5e-5 : t == DType::float16 ? 4e-3 : 3e-2;
}
void check(double got, double want, DType t, double scale, const char* what) {
  if (std::fabs(got - want) <= tolerance(t) * (scale + std::fabs(want))) return;
  std::printf("FAILED %s: %.9g, should be %.9g\n", what, got, want);
  std::exit(1);
}

// Parameters in the compute type.
Array parameters(DType t, int64_t n) {
  Array a(t == DType::float64 ? DType::float64 : DType::float32, n);
  a.fill(n);
  return a;
}

struct Rows {
  RowView view;
  Array array;
  int64_t offset(int64_t row) const {
    const int64_t i2 = row % view.size[2], i1 = row / view.size[2] % view.size[1], i0 = row / view.size[2] / view.size[1];
    return i0 * view.stride[0] + i1 * view.stride[1] + i2 * view.stride[2];
  }
};

Rows make_rows(DType t, const int64_t* size, int64_t n) {
  int64_t stride[3], next = n;
  for (int d = 2; d >= 0; --d) {
    stride[d] = next + pick(0, 3) * pick(0, 1);
    next = stride[d] * size[d];
  }
  const int64_t total = size[0] * size[1] * size[2] == 0 ? 0
                        : (size[0] - 1) * stride[0] + (size[1] - 1) * stride[1] + (size[2] - 1) * stride[2] + n;
  Rows r{{}, Array(t, total)};
  r.array.fill(total);
  r.view.data = r.array.data();
  r.view.dtype = t;
  for (int d = 0; d < 3; ++d) {
    r.view.size[d] = size[d];
    r.view.stride[d] = stride[d];
  }
  return r;
}

void fuzz_rows() {
  const DType t = any_type();
  const int64_t n = pick(0, 9) == 0 ? pick(4090, 4200) : pick(1, 150);
  int64_t size[3] = {pick(1, 3), pick(1, 3), pick(1, 4)};
  const int64_t rows = size[0] * size[1] * size[2];
  const bool centered = pick(0, 1), residual = pick(0, 1), with_bias = pick(0, 1);
  const int64_t period = pick(0, 1) ? size[2] : 1;
  const DType compute = t == DType::float64 ? DType::float64 : DType::float32;
  Rows x = make_rows(t, size, n), r = make_rows(t, size, n), sum = make_rows(t, size, n), y = make_rows(t, size, n);
  Array gain = parameters(t, period * n), bias = parameters(t, period * n), rstd(compute, rows);
  std::vector<double> mean(size_t(rows), 0.0);
  RowsForward a;
  a.features = n;
  a.period = period;
  a.x = x.view;
  if (residual) {
    a.residual = r.view;
    a.sum = sum.view;
  }
  a.y = y.view;
  a.gain = gain.data();
  a.bias = with_bias ? bias.data() : nullptr;
  a.mean = centered ? mean.data() : nullptr;
  a.rstd = rstd.data();
  a.eps = 1e-3;
  a.centered = centered;
  a.stream = pick(0, 1);
  const int64_t cut = pick(0, rows);
  K.rows_forward(a, 0, cut);
  K.rows_forward(a, cut, rows);

  Rows g = make_rows(t, size, n), dx = make_rows(t, size, n), more = make_rows(t, size, n);
  const bool sum_used = residual && pick(0, 1);
  RowsBackward b;
  b.rows = rows;
  b.features = n;
  b.period = period;
  b.blocks = pick(1, rows);
  b.grad = g.view;
  b.x = residual ? sum.view : x.view;
  if (sum_used) b.grad_sum = more.view;
  b.dx = dx.view;
  b.gain = gain.data();
  b.mean = mean.data();
  b.rstd = rstd.data();
  Array dgain(compute, b.blocks * period * n), dbias(compute, b.blocks * period * n);
  b.dgain = dgain.data();
  b.dbias = dbias.data();
  b.centered = centered;
  b.stream = pick(0, 1);
  K.rows_backward(b, 0, b.blocks);

  std::vector<double> want_gain(size_t(period * n), 0.0), want_bias(size_t(period * n), 0.0);
  for (int64_t i = 0; i < rows; ++i) {
    const Rows& in = residual ? sum : x;
    const auto value = [&](int64_t j) { return in.array.get(in.offset(i) + j); };
    double m = 0, s = 0;
    for (int64_t j = 0; j < n; ++j) m += centered ? value(j) / double(n) : 0;
    for (int64_t j = 0; j < n; ++j) s += (value(j) - m) * (value(j) - m) / double(n);
    const double root = 1 / std::sqrt(s + 1e-3);
    const int64_t p = i % period * n;
    double h = 0, hx = 0;
    for (int64_t j = 0; j < n; ++j) {
      const double hat = (value(j) - m) * root, w = gain.get(p + j), grad = g.array.get(g.offset(i) + j);
      if (residual)
        check(value(j), x.array.get(x.offset(i) + j) + r.array.get(r.offset(i) + j), t, 1e-2, "sum");
      check(y.array.get(y.offset(i) + j), hat * w + (with_bias ? bias.get(p + j) : 0), t, 2, "y");
      h += grad * w / double(n);
      hx += grad * w * hat / double(n);
      want_gain[size_t(p + j)] += grad * hat;
      want_bias[size_t(p + j)] += grad;
    }
    for (int64_t j = 0; j < n; ++j) {
      const double hat = (value(j) - m) * root;
      const double want =
          root * (g.array.get(g.offset(i) + j) * gain.get(p + j) - (centered ? h : 0) - hat * hx) +
          (sum_used ? more.array.get(more.offset(i) + j) : 0);
      check(dx.array.get(dx.offset(i) + j), want, t, root * 10, "dx");
    }
  }
  for (int64_t j = 0; j < period * n; ++j) {
    double got_gain = 0, got_bias = 0;
    for (int64_t k = 0; k < b.blocks; ++k) {
      got_gain += dgain.get(k * period * n + j);
      got_bias += dbias.get(k * period * n + j);
    }
    check(got_gain, want_gain[size_t(j)], compute, 20, "dgain");
    check(got_bias, want_bias[size_t(j)], compute, 20, "dbias");
  }
}

void fuzz_gated() {
  const DType t = any_type();
  const int64_t n = pick(0, 9) == 0 ? pick(4090, 4200) : pick(1, 150);
  int64_t size[3] = {pick(1, 3), pick(1, 3), pick(1, 4)};
  const int64_t rows = size[0] * size[1] * size[2];
  const bool silu = pick(0, 1), before = pick(0, 1);
  const int64_t period = pick(0, 1) ? size[2] : 1;
  const DType compute = t == DType::float64 ? DType::float64 : DType::float32;
  Rows x = make_rows(t, size, n), gate = make_rows(t, size, n), y = make_rows(t, size, n);
  Array gain = parameters(t, period * n), rstd(compute, rows);
  RowsForward a;
  a.features = n;
  a.period = period;
  a.x = x.view;
  a.gate = gate.view;
  a.y = y.view;
  a.gain = gain.data();
  a.rstd = rstd.data();
  a.eps = 1e-3;
  a.silu = silu;
  a.gate_before = before;
  a.stream = pick(0, 1);
  const int64_t cut = pick(0, rows);
  K.rows_forward(a, 0, cut);
  K.rows_forward(a, cut, rows);

  Rows g = make_rows(t, size, n), dx = make_rows(t, size, n), dgate = make_rows(t, size, n);
  RowsBackward b;
  b.rows = rows;
  b.features = n;
  b.period = period;
  b.blocks = pick(1, rows);
  b.grad = g.view;
  b.x = x.view;
  b.gate = gate.view;
  b.dx = dx.view;
  b.dgate = dgate.view;
  b.gain = gain.data();
  b.rstd = rstd.data();
  Array dgain(compute, b.blocks * period * n);
  b.dgain = dgain.data();
  b.silu = silu;
  b.gate_before = before;
  b.stream = pick(0, 1);
  K.rows_backward(b, 0, b.blocks);

  std::vector<double> want_gain(size_t(period * n), 0.0);
  for (int64_t i = 0; i < rows; ++i) {
    const auto value = [&](int64_t j) { return x.array.get(x.offset(i) + j); };
    const auto gate_at = [&](int64_t j) { return gate.array.get(gate.offset(i) + j); };
    const auto grad = [&](int64_t j) { return g.array.get(g.offset(i) + j); };
    const auto sigmoid = [&](int64_t j) { return 1 / (1 + std::exp(-gate_at(j))); };
    const auto act = [&](int64_t j) { return silu ? gate_at(j) * sigmoid(j) : sigmoid(j); };
    const auto slope = [&](int64_t j) {
      const double s = sigmoid(j), d = s * (1 - s);
      return silu ? s + gate_at(j) * d : d;
    };
    const auto normed = [&](int64_t j) { return before ? value(j) * act(j) : value(j); };
    double s = 0;
    for (int64_t j = 0; j < n; ++j) s += normed(j) * normed(j) / double(n);
    const double root = 1 / std::sqrt(s + 1e-3);
    const int64_t p = i % period * n;
    const auto inner = [&](int64_t j) { return grad(j) * gain.get(p + j) * (before ? 1 : act(j)); };  // d hat
    double hx = 0;
    for (int64_t j = 0; j < n; ++j) {
      const double hat = normed(j) * root, after = before ? 1 : act(j);
      check(y.array.get(y.offset(i) + j), hat * gain.get(p + j) * after, t, 2, "gated y");
      hx += inner(j) * hat / double(n);
      want_gain[size_t(p + j)] += grad(j) * hat * after;
    }
    for (int64_t j = 0; j < n; ++j) {
      const double hat = normed(j) * root, d = root * (inner(j) - hat * hx);
      const double want_gate = (before ? d * value(j) : grad(j) * hat * gain.get(p + j)) * slope(j);
      check(dx.array.get(dx.offset(i) + j), before ? d * act(j) : d, t, root * 10, "gated dx");
      check(dgate.array.get(dgate.offset(i) + j), want_gate, t, root * 10, "dgate");
    }
  }
  for (int64_t j = 0; j < period * n; ++j) {
    double got = 0;
    for (int64_t k = 0; k < b.blocks; ++k) got += dgain.get(k * period * n + j);
    check(got, want_gain[size_t(j)], compute, 20, "gated dgain");
  }
}

void fuzz_channels() {
  const DType t = any_type();
  Volume v;
  v.samples = pick(1, 4);
  const int64_t per_group = pick(1, 9);
  int64_t groups = pick(1, 9);
  v.channels = groups * per_group;
  v.space = pick(0, 9) == 0 ? pick(4000, 4300) / v.channels + 1 : pick(1, 90);
  v.dtype = t;
  const bool last = pick(0, 1), batch = pick(0, 1), masked = batch && pick(0, 1);
  const DType compute = t == DType::float64 ? DType::float64 : DType::float32;
  const int64_t total = v.samples * v.channels * v.space;
  Array x(t, total), y(t, total), g(t, total), dx(t, total), gain = parameters(t, v.channels), bias = parameters(t, v.channels);
  x.fill(total);
  g.fill(total);
  std::vector<uint8_t> mask(size_t(v.samples * v.space), 1);
  if (masked)
    for (auto& m : mask) m = pick(0, 2) != 0;
  const auto at = [&](int64_t n, int64_t c, int64_t s) {
    return last ? (n * v.space + s) * v.channels + c : (n * v.channels + c) * v.space + s;
  };
  if (batch) groups = v.channels;
  const int64_t statistics = batch ? v.channels : v.samples * groups;
  std::vector<double> mean(size_t(statistics), 0.0), variance(size_t(statistics), 0.0);
  double count = 0;
  ChannelsForward a;
  a.shape = v;
  if (batch && last) a.shape.space *= a.shape.samples, a.shape.samples = 1;
  a.groups = groups;
  a.x = x.data();
  a.y = y.data();
  a.mask = masked ? mask.data() : nullptr;
  a.gain = gain.data();
  a.bias = bias.data();
  a.mean = mean.data();
  a.variance = variance.data();
  if (batch) a.count = &count;
  a.eps = 1e-3;
  a.blocks = pick(1, a.shape.space);
  std::vector<double> partial(size_t(a.shape.samples * a.blocks * (2 * v.channels + 1)));
  a.partial = partial.data();
  if (last) {
    K.last_moments(a, 0, a.shape.samples * a.blocks);
    K.last_merge(a, 0, a.shape.samples);
    K.last_normalize(a, 0, a.shape.samples * a.shape.space);
  } else if (batch) {
    K.batch_norm(a, 0, v.channels);
  } else {
    K.group_norm(a, 0, v.samples * groups);
  }

  ChannelsBackward b;
  b.shape = a.shape;
  b.groups = groups;
  b.grad = g.data();
  b.x = x.data();
  b.dx = dx.data();
  b.mask = a.mask;
  b.gain = gain.data();
  b.mean = mean.data();
  b.variance = variance.data();
  b.blocks = a.blocks;
  b.eps = a.eps;
  const int64_t parts = batch ? 1 : v.samples;
  std::vector<double> sums(size_t(parts * 2 * v.channels)), partial_sums(size_t(a.shape.samples * a.blocks * 2 * v.channels));
  b.sums = sums.data();
  b.partial = partial_sums.data();
  const int64_t share = batch ? v.samples * v.space : per_group * v.space;
  b.count = batch ? count : double(share);
  b.frozen = batch && pick(0, 3) == 0;
  if (last) {
    K.last_grad_sums(b, 0, b.shape.samples * b.blocks);
    K.last_grad_merge(b, 0, b.shape.samples);
    if (!b.frozen || masked) K.last_dx(b, 0, b.shape.samples * b.shape.space);
  } else if (batch) {
    K.batch_norm_backward(b, 0, v.channels);
  } else {
    K.group_norm_backward(b, 0, v.samples * groups);
  }

  for (int64_t k = 0; k < statistics; ++k) {
    const int64_t n0 = batch ? 0 : k / groups, n1 = batch ? v.samples : n0 + 1;
    const int64_t c0 = batch ? k : k % groups * per_group, c1 = batch ? k + 1 : c0 + per_group;
    double m = 0, s = 0, n = 0, h = 0, hx = 0;
    const auto each = [&](auto&& f) {
      for (int64_t i = n0; i < n1; ++i)
        for (int64_t c = c0; c < c1; ++c)
          for (int64_t p = 0; p < v.space; ++p)
            if (mask[size_t(i * v.space + p)]) f(c, at(i, c, p));
    };
    each([&](int64_t, int64_t e) { m += x.get(e), n += 1; });
    if (n == 0) continue;
    m /= n;
    each([&](int64_t, int64_t e) { s += (x.get(e) - m) * (x.get(e) - m) / n; });
    const double root = 1 / std::sqrt(s + 1e-3);
    check(mean[size_t(k)], m, compute, 1, "mean");
    check(variance[size_t(k)], s, compute, 1, "variance");
    each([&](int64_t c, int64_t e) {
      const double hat = (x.get(e) - m) * root;
      check(y.get(e), hat * gain.get(c) + bias.get(c), t, 2, "channel y");
      h += g.get(e) * gain.get(c) / n;
      hx += g.get(e) * gain.get(c) * hat / n;
    });
    if (b.frozen) h = hx = 0;
    each([&](int64_t c, int64_t e) {
      const double hat = (x.get(e) - m) * root;
      check(dx.get(e), root * (g.get(e) * gain.get(c) - h - hat * hx), t, root * 10, "channel dx");
    });
  }
  if (masked)
    for (int64_t i = 0; i < v.samples; ++i)
      for (int64_t c = 0; c < v.channels; ++c)
        for (int64_t p = 0; p < v.space; ++p)
          if (!mask[size_t(i * v.space + p)]) check(y.get(at(i, c, p)), 0, t, 0, "masked y");
}

void fuzz_channel_layer() {
  const DType t = any_type();
  Volume v{pick(1, 3), pick(1, 80), pick(1, 150), t};
  const int64_t total = v.samples * v.channels * v.space;
  Array x(t, total), y(t, total), g(t, total), dx(t, total), gain = parameters(t, v.channels), bias = parameters(t, v.channels);
  x.fill(total);
  g.fill(total);
  std::vector<double> mean(size_t(v.samples * v.space), 0.0), rstd(size_t(v.samples * v.space), 0.0);
  ChannelsForward a;
  a.shape = v;
  a.x = x.data();
  a.y = y.data();
  a.gain = gain.data();
  a.bias = bias.data();
  a.mean = mean.data();
  a.variance = rstd.data();
  a.eps = 1e-3;
  const int64_t tiles = v.samples * K.channel_layer_norm_tiles(v);
  K.channel_layer_norm(a, 0, tiles);
  ChannelsBackward b;
  b.shape = v;
  b.grad = g.data();
  b.x = x.data();
  b.dx = dx.data();
  b.gain = gain.data();
  b.mean = mean.data();
  b.variance = rstd.data();
  b.blocks = pick(1, tiles);
  std::vector<double> sums(size_t(b.blocks * 2 * v.channels));
  b.sums = sums.data();
  K.channel_layer_norm_backward(b, 0, b.blocks);
  for (int64_t i = 0; i < v.samples; ++i)
    for (int64_t p = 0; p < v.space; ++p) {
      const auto at = [&](int64_t c) { return (i * v.channels + c) * v.space + p; };
      double m = 0, s = 0, h = 0, hx = 0;
      const double n = double(v.channels);
      for (int64_t c = 0; c < v.channels; ++c) m += x.get(at(c)) / n;
      for (int64_t c = 0; c < v.channels; ++c) s += (x.get(at(c)) - m) * (x.get(at(c)) - m) / n;
      const double root = 1 / std::sqrt(s + 1e-3);
      for (int64_t c = 0; c < v.channels; ++c) {
        const double hat = (x.get(at(c)) - m) * root;
        check(y.get(at(c)), hat * gain.get(c) + bias.get(c), t, 2, "channel layer y");
        h += g.get(at(c)) * gain.get(c) / n;
        hx += g.get(at(c)) * gain.get(c) * hat / n;
      }
      for (int64_t c = 0; c < v.channels; ++c) {
        const double hat = (x.get(at(c)) - m) * root;
        check(dx.get(at(c)), root * (g.get(at(c)) * gain.get(c) - h - hat * hx), t, root * 10, "channel layer dx");
      }
    }
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 5;
  rng.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  const auto start = std::chrono::steady_clock::now();
  long rounds = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds) {
    fuzz_rows();
    fuzz_gated();
    fuzz_channels();
    fuzz_channel_layer();
    ++rounds;
  }
  std::printf("%ld cases without a finding\n", 4 * rounds);
}
