// Operators over rows: RMSNorm and LayerNorm, plain, after a residual sum, and gated.
#include <algorithm>

#include "common.h"

namespace normkit::ops {
namespace {

struct RowOptions {
  double eps;
  double weight_offset;
  bool gain_in_input;  // form weight_offset + weight in the weight's own dtype
  bool round_before_gain;
};

// Everything that one forward needs, whichever operator it came from.
struct Forward {
  const Tensor& x;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  const RowOptions& options;
  bool centered;
  const Tensor* residual = nullptr;
  const Tensor* gate = nullptr;
  bool silu = true;
  bool gate_before = false;
};

// (A default-constructed Tensor allocates; an empty optional does not.)
struct Statistics {
  bool wanted = false;
  OptionalTensor mean = {}, rstd = {};
};

int64_t rows_of(const Tensor& x, int64_t features) { return features ? x.numel() / features : 0; }

std::vector<int64_t> leading_sizes(const Tensor& x) {
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.pop_back();
  return sizes;
}

void check_shape(const Tensor& x, const Tensor& other, const char* name) {
  const auto a = x.sizes(), b = other.sizes();
  NORMKIT_CHECK(a.size() == b.size() && std::equal(a.data(), a.data() + a.size(), b.data()), "normkit: ", name,
                " must have the shape of x");
}

// A weight of [features] or of x's last dims: how many rows pass before its gains repeat.
int64_t period_of(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias) {
  const OptionalTensor& parameter = weight.has_value() ? weight : bias;
  if (!parameter.has_value()) return 1;
  const auto sizes = x.sizes(), wanted = parameter->sizes();
  bool fits = wanted.size() >= 1 && wanted.size() <= sizes.size();
  int64_t period = 1;
  for (size_t d = 1; fits && d <= wanted.size(); ++d) {
    fits = wanted[wanted.size() - d] == sizes[sizes.size() - d];
    if (d > 1) period *= wanted[wanted.size() - d];
  }
  NORMKIT_CHECK(fits, "normkit: weight or bias must have the shape of x's last dims");
  return std::max<int64_t>(period, 1);
}

void run_forward(const Forward& f, Tensor& y, Tensor* sum, Statistics& statistics) {
  const Tensor& x = f.x;
  const int64_t dims = x.dim();
  NORMKIT_CHECK(dims >= 1, "normkit: x must have at least one dim");
  const int64_t n = x.size(dims - 1), rows = rows_of(x, n);
  const DType dtype = dtype_of(x, "x");
  const bool wide = is_wide(dtype);
  RowsForward a;
  OptionalTensor keep_x, keep_residual, keep_gate;
  a.features = n;
  a.period = period_of(x, f.weight, f.bias);
  a.x = input_rows(x, "x", keep_x);
  if (f.residual) {
    check_shape(x, *f.residual, "residual");
    a.residual = input_rows(*f.residual, "residual", keep_residual);
    NORMKIT_CHECK(a.residual.dtype == dtype || (!wide && a.residual.dtype == DType::float32),
                  "normkit: residual must have x's dtype or float32");
    check_shape(x, *sum, "sum");
    a.sum = output_rows(*sum, "sum");
    NORMKIT_CHECK(a.sum.dtype == a.residual.dtype, "normkit: sum must have the residual's dtype");
  }
  if (f.gate) {
    check_shape(x, *f.gate, "gate");
    a.gate = input_rows(*f.gate, "gate", keep_gate);
    NORMKIT_CHECK(a.gate.dtype == dtype && dtype_of(y, "out") == dtype && !f.centered && !f.bias.has_value(),
                  "normkit: a gate needs x, gate and output of one dtype, no mean and no bias");
  }
  check_shape(x, y, "out");
  a.y = output_rows(y, "out");
  NORMKIT_CHECK(is_wide(a.y.dtype) == wide, "normkit: float64 input gives float64 output, and no other does");
  const Parameter gain(f.weight, "weight", a.period * n, wide, f.options.weight_offset, f.options.gain_in_input, true);
  const Parameter bias(f.bias, "bias", a.period * n, wide, 0, false, false);
  a.gain = gain.get();
  a.bias = bias.get();
  if (statistics.wanted) {
    const auto leading = leading_sizes(x);
    statistics.rstd = empty(leading, compute_of(dtype));
    a.rstd = statistics.rstd->mutable_data_ptr();
    if (f.centered) {
      statistics.mean = empty(leading, DType::float64);
      a.mean = static_cast<double*>(statistics.mean->mutable_data_ptr());
    }
  }
  a.eps = f.options.eps;
  a.centered = f.centered;
  a.round_before_gain = f.options.round_before_gain;
  a.silu = f.silu;
  a.gate_before = f.gate_before;
  // Before the gate multiplies it, the product of two halves is a half; with a wider gain it is not.
  a.round_product = f.gate && !f.gate_before && f.options.round_before_gain && f.weight.has_value() &&
                    (f.options.weight_offset == 0 || f.options.gain_in_input) &&
                    dtype_of(*f.weight, "weight") == dtype;
  if (n == 0 || rows == 0) return;
  a.stream = should_stream(rows * n * size_of(a.y.dtype));
  const auto kernel = kernels(a.x.dtype).rows_forward;
  parallel(rows, grain(n), [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
}

Tensor empty_output(const Tensor& x, const std::optional<ScalarType>& dtype) {
  return empty(sizes_of(x), dtype_of(dtype.value_or(x.scalar_type()), "dtype"));
}

struct Backward {
  const Tensor& grad;
  const Tensor& x;
  const OptionalTensor& weight;
  const Tensor* mean;
  const Tensor& rstd;
  double weight_offset;
  bool gain_in_input;
  const OptionalTensor& grad_sum;
  const Tensor* gate = nullptr;
  bool silu = true;
  bool gate_before = false;
  bool want_weight;
  std::optional<ScalarType> bias_dtype = {};
};

struct Gradients {
  OptionalTensor x, gate, weight, bias;
};

Gradients run_backward(const Backward& b) {
  const Tensor& x = b.x;
  const int64_t n = x.size(x.dim() - 1), rows = rows_of(x, n);
  const DType dtype = dtype_of(x, "x");
  const bool wide = is_wide(dtype);
  check_shape(x, b.grad, "grad");
  NORMKIT_CHECK((n == 0 || b.rstd.numel() == rows) && dtype_of(b.rstd, "rstd") == compute_of(dtype) && b.rstd.is_contiguous(),
                "normkit: rstd does not belong to x");
  RowsBackward a;
  OptionalTensor keep_grad, keep_x, keep_sum, keep_gate;
  a.rows = rows;
  a.features = n;
  a.period = period_of(x, b.weight, {});
  a.blocks = blocks_for(rows, n, 32768);  // few, as each has two sums a feature that are cleared and added up
  a.grad = input_rows(b.grad, "grad", keep_grad);
  NORMKIT_CHECK(a.grad.dtype == dtype || (!wide && a.grad.dtype == DType::float32),
                "normkit: grad must have x's dtype or float32");
  a.x = input_rows(x, "x", keep_x);
  Gradients out;
  out.x = empty(sizes_of(x), dtype);
  a.dx = output_rows(*out.x, "dx");
  if (b.grad_sum.has_value()) {
    check_shape(x, *b.grad_sum, "grad_sum");
    a.grad_sum = input_rows(*b.grad_sum, "grad_sum", keep_sum);
    NORMKIT_CHECK(a.grad_sum.dtype == dtype, "normkit: grad_sum must have x's dtype");
  }
  if (b.gate) {
    check_shape(x, *b.gate, "gate");
    a.gate = input_rows(*b.gate, "gate", keep_gate);
    NORMKIT_CHECK(a.gate.dtype == dtype && a.grad.dtype == dtype && !b.mean,
                  "normkit: a gate needs x, gate and grad of one dtype, and no mean");
    out.gate = empty(sizes_of(x), dtype);
    a.dgate = output_rows(*out.gate, "dgate");
  }
  const int64_t width = a.period * n;
  const Parameter gain(b.weight, "weight", width, wide, b.weight_offset, b.gain_in_input, true);
  a.gain = gain.get();
  a.rstd = b.rstd.const_data_ptr();
  if (b.mean) {
    NORMKIT_CHECK((n == 0 || b.mean->numel() == rows) && dtype_of(*b.mean, "mean") == DType::float64 && b.mean->is_contiguous(),
                  "normkit: mean does not belong to x");
    a.mean = static_cast<const double*>(b.mean->const_data_ptr());
    a.centered = true;
  }
  a.silu = b.silu;
  a.gate_before = b.gate_before;

  const bool bias = b.bias_dtype.has_value();
  const bool columns = b.want_weight || bias || b.gate;
  const int64_t element = wide ? 8 : 4;
  const Buffer dgain(columns ? a.blocks * width * element : 0), dbias(bias ? a.blocks * width * element : 0);
  a.dgain = dgain.get();
  a.dbias = dbias.get();
  if (n > 0 && rows > 0) {
    a.stream = should_stream(rows * n * size_of(dtype));
    const auto kernel = kernels(dtype).rows_backward;
    parallel(a.blocks, 1, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
  }
  const auto sum_up = [&](const Buffer& partial, const std::vector<int64_t>& sizes, DType to) {
    Tensor t = empty(sizes, to);
    if (width == 0) return t;
    if (rows == 0) {
      std::fill_n(static_cast<char*>(t.mutable_data_ptr()), width * size_of(to), char(0));
      return t;
    }
    const SumBlocksArgs s{partial.get(), a.blocks, width, width, wide, t.mutable_data_ptr(), to};
    const auto kernel = kernels(dtype).sum_blocks;
    parallel(width, 16384, [&](int64_t begin, int64_t end) { kernel(s, begin, end); });
    return t;
  };
  const std::vector<int64_t> parameter_sizes = b.weight.has_value() ? sizes_of(*b.weight) : std::vector<int64_t>{n};
  out.weight = b.want_weight && b.weight.has_value() ? sum_up(dgain, parameter_sizes, dtype_of(*b.weight, "weight"))
                                                     : empty({0}, DType::float32);
  out.bias = bias ? sum_up(dbias, parameter_sizes, dtype_of(*b.bias_dtype, "bias")) : empty({0}, DType::float32);
  return out;
}

// ---- the operators ----

Tensor rms_norm(const Tensor& x, OptionalTensor weight, OptionalTensor bias, double eps, double weight_offset,
                bool gain_in_input, bool round_before_gain, std::optional<ScalarType> dtype) {
  Tensor y = empty_output(x, dtype);
  Statistics none;
  run_forward({x, weight, bias, {eps, weight_offset, gain_in_input, round_before_gain}, false}, y, nullptr, none);
  return y;
}

std::tuple<Tensor, Tensor> rms_norm_with_statistics(const Tensor& x, OptionalTensor weight, OptionalTensor bias,
                                                    double eps, double weight_offset, bool gain_in_input,
                                                    bool round_before_gain, std::optional<ScalarType> dtype) {
  Tensor y = empty_output(x, dtype);
  Statistics s{true};
  run_forward({x, weight, bias, {eps, weight_offset, gain_in_input, round_before_gain}, false}, y, nullptr, s);
  return {y, *s.rstd};
}

void rms_norm_out(const Tensor& x, OptionalTensor weight, OptionalTensor bias, double eps, double weight_offset,
                  bool gain_in_input, bool round_before_gain, Tensor out) {
  Statistics none;
  run_forward({x, weight, bias, {eps, weight_offset, gain_in_input, round_before_gain}, false}, out, nullptr, none);
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, OptionalTensor weight,
                                                     const Tensor& rstd, double /*eps*/, double weight_offset,
                                                     bool gain_in_input, OptionalTensor grad_sum, bool want_weight,
                                                     std::optional<ScalarType> bias_dtype) {
  Gradients g = run_backward({.grad = grad, .x = x, .weight = weight, .mean = nullptr, .rstd = rstd,
                              .weight_offset = weight_offset, .gain_in_input = gain_in_input, .grad_sum = grad_sum,
                              .want_weight = want_weight, .bias_dtype = bias_dtype});
  return {*g.x, *g.weight, *g.bias};
}

Tensor layer_norm(const Tensor& x, OptionalTensor weight, OptionalTensor bias, double eps, double weight_offset,
                  bool gain_in_input, bool round_before_gain, std::optional<ScalarType> dtype) {
  Tensor y = empty_output(x, dtype);
  Statistics none;
  run_forward({x, weight, bias, {eps, weight_offset, gain_in_input, round_before_gain}, true}, y, nullptr, none);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_with_statistics(const Tensor& x, OptionalTensor weight,
                                                              OptionalTensor bias, double eps, double weight_offset,
                                                              bool gain_in_input, bool round_before_gain,
                                                              std::optional<ScalarType> dtype) {
  Tensor y = empty_output(x, dtype);
  Statistics s{true};
  run_forward({x, weight, bias, {eps, weight_offset, gain_in_input, round_before_gain}, true}, y, nullptr, s);
  return {y, *s.mean, *s.rstd};
}

void layer_norm_out(const Tensor& x, OptionalTensor weight, OptionalTensor bias, double eps, double weight_offset,
                    bool gain_in_input, bool round_before_gain, Tensor out) {
  Statistics none;
  run_forward({x, weight, bias, {eps, weight_offset, gain_in_input, round_before_gain}, true}, out, nullptr, none);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& x, OptionalTensor weight,
                                                       const Tensor& mean, const Tensor& rstd, double /*eps*/,
                                                       double weight_offset,
                                                       bool gain_in_input, OptionalTensor grad_sum, bool want_weight,
                                                       std::optional<ScalarType> bias_dtype) {
  Gradients g = run_backward({.grad = grad, .x = x, .weight = weight, .mean = &mean, .rstd = rstd,
                              .weight_offset = weight_offset, .gain_in_input = gain_in_input, .grad_sum = grad_sum,
                              .want_weight = want_weight, .bias_dtype = bias_dtype});
  return {*g.x, *g.weight, *g.bias};
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, OptionalTensor weight,
                                        OptionalTensor bias, double eps, double weight_offset, bool gain_in_input,
                                        bool round_before_gain, std::optional<ScalarType> dtype) {
  Tensor y = empty_output(x, dtype), sum = empty_output(residual, {});
  Statistics none;
  run_forward({x, weight, bias, {eps, weight_offset, gain_in_input, round_before_gain}, false, &residual}, y, &sum,
              none);
  return {y, sum};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_with_statistics(const Tensor& x, const Tensor& residual,
                                                                OptionalTensor weight, OptionalTensor bias, double eps,
                                                                double weight_offset, bool gain_in_input,
                                                                bool round_before_gain,
                                                                std::optional<ScalarType> dtype) {
  Tensor y = empty_output(x, dtype), sum = empty_output(residual, {});
  Statistics s{true};
  run_forward({x, weight, bias, {eps, weight_offset, gain_in_input, round_before_gain}, false, &residual}, y, &sum, s);
  return {y, sum, *s.rstd};
}

void add_rms_norm_out(const Tensor& x, const Tensor& residual, OptionalTensor weight, OptionalTensor bias, double eps,
                      double weight_offset, bool gain_in_input, bool round_before_gain, Tensor out, Tensor sum) {
  Statistics none;
  run_forward({x, weight, bias, {eps, weight_offset, gain_in_input, round_before_gain}, false, &residual}, out, &sum,
              none);
}

void add_rms_norm_inplace(const Tensor& x, Tensor residual, OptionalTensor weight, OptionalTensor bias, double eps,
                          double weight_offset, bool gain_in_input, bool round_before_gain, Tensor out) {
  add_rms_norm_out(x, residual, weight, bias, eps, weight_offset, gain_in_input, round_before_gain, out, residual);
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, OptionalTensor weight,
                                          OptionalTensor bias, double eps, double weight_offset, bool gain_in_input,
                                          bool round_before_gain, std::optional<ScalarType> dtype) {
  Tensor y = empty_output(x, dtype), sum = empty_output(residual, {});
  Statistics none;
  run_forward({x, weight, bias, {eps, weight_offset, gain_in_input, round_before_gain}, true, &residual}, y, &sum,
              none);
  return {y, sum};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_with_statistics(
    const Tensor& x, const Tensor& residual, OptionalTensor weight, OptionalTensor bias, double eps,
    double weight_offset, bool gain_in_input, bool round_before_gain, std::optional<ScalarType> dtype) {
  Tensor y = empty_output(x, dtype), sum = empty_output(residual, {});
  Statistics s{true};
  run_forward({x, weight, bias, {eps, weight_offset, gain_in_input, round_before_gain}, true, &residual}, y, &sum, s);
  return {y, sum, *s.mean, *s.rstd};
}

void add_layer_norm_out(const Tensor& x, const Tensor& residual, OptionalTensor weight, OptionalTensor bias, double eps,
                        double weight_offset, bool gain_in_input, bool round_before_gain, Tensor out, Tensor sum) {
  Statistics none;
  run_forward({x, weight, bias, {eps, weight_offset, gain_in_input, round_before_gain}, true, &residual}, out, &sum,
              none);
}

void add_layer_norm_inplace(const Tensor& x, Tensor residual, OptionalTensor weight, OptionalTensor bias, double eps,
                            double weight_offset, bool gain_in_input, bool round_before_gain, Tensor out) {
  add_layer_norm_out(x, residual, weight, bias, eps, weight_offset, gain_in_input, round_before_gain, out, residual);
}

void gated_rms_norm_out(const Tensor& x, const Tensor& gate, OptionalTensor weight, double eps, double weight_offset,
                        bool gain_in_input, bool round_before_gain, bool silu, bool gate_before, Tensor out) {
  Statistics none;
  const OptionalTensor bias;
  const RowOptions options{eps, weight_offset, gain_in_input, round_before_gain};
  run_forward({x, weight, bias, options, false, nullptr, &gate, silu, gate_before}, out, nullptr, none);
}

Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, OptionalTensor weight, double eps, double weight_offset,
                      bool gain_in_input, bool round_before_gain, bool silu, bool gate_before) {
  Tensor y = empty_output(x, {});
  gated_rms_norm_out(x, gate, weight, eps, weight_offset, gain_in_input, round_before_gain, silu, gate_before, y);
  return y;
}

std::tuple<Tensor, Tensor> gated_rms_norm_with_statistics(const Tensor& x, const Tensor& gate, OptionalTensor weight,
                                                          double eps, double weight_offset, bool gain_in_input,
                                                          bool round_before_gain, bool silu, bool gate_before) {
  Tensor y = empty_output(x, {});
  Statistics s{true};
  const OptionalTensor bias;
  const RowOptions options{eps, weight_offset, gain_in_input, round_before_gain};
  run_forward({x, weight, bias, options, false, nullptr, &gate, silu, gate_before}, y, nullptr, s);
  return {y, *s.rstd};
}

std::tuple<Tensor, Tensor, Tensor> gated_rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& gate,
                                                           OptionalTensor weight, const Tensor& rstd,
                                                           double /*eps*/, double weight_offset, bool gain_in_input, bool silu,
                                                           bool gate_before, bool want_weight) {
  const OptionalTensor none;
  Gradients g = run_backward({.grad = grad, .x = x, .weight = weight, .mean = nullptr, .rstd = rstd,
                              .weight_offset = weight_offset, .gain_in_input = gain_in_input, .grad_sum = none,
                              .gate = &gate, .silu = silu, .gate_before = gate_before, .want_weight = want_weight});
  return {*g.x, *g.gate, *g.weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(normkit, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_with_statistics", TORCH_BOX(&rms_norm_with_statistics));
  m.impl("rms_norm_out", TORCH_BOX(&rms_norm_out));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("layer_norm_with_statistics", TORCH_BOX(&layer_norm_with_statistics));
  m.impl("layer_norm_out", TORCH_BOX(&layer_norm_out));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("add_rms_norm_with_statistics", TORCH_BOX(&add_rms_norm_with_statistics));
  m.impl("add_rms_norm_out", TORCH_BOX(&add_rms_norm_out));
  m.impl("add_rms_norm_inplace", TORCH_BOX(&add_rms_norm_inplace));
  m.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  m.impl("add_layer_norm_with_statistics", TORCH_BOX(&add_layer_norm_with_statistics));
  m.impl("add_layer_norm_out", TORCH_BOX(&add_layer_norm_out));
  m.impl("add_layer_norm_inplace", TORCH_BOX(&add_layer_norm_inplace));
  m.impl("gated_rms_norm", TORCH_BOX(&gated_rms_norm));
  m.impl("gated_rms_norm_with_statistics", TORCH_BOX(&gated_rms_norm_with_statistics));
  m.impl("gated_rms_norm_out", TORCH_BOX(&gated_rms_norm_out));
  m.impl("gated_rms_norm_backward", TORCH_BOX(&gated_rms_norm_backward));
}

}  // namespace normkit::ops
