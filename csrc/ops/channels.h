// What the operators over channels share: x as samples, channels and space; parameters; their gradients.
#pragma once

#include <algorithm>

#include "common.h"

namespace normkit::ops {

// x as samples, channels and space, from dense memory: contiguous, or channels-last.
struct Input {
  Volume shape;
  bool channels_last = false;
  OptionalTensor keep;
  const Tensor* tensor = nullptr;
  const Tensor& get() const { return keep ? *keep : *tensor; }
};

inline bool is_channels_last(const Tensor& x) {
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  int64_t next = 1;
  const auto holds = [&](size_t d) {
    const bool ok = sizes[d] == 1 || strides[d] == next;
    next *= sizes[d];
    return ok;
  };
  if (!holds(1)) return false;
  for (size_t d = sizes.size() - 1; d > 1; --d)
    if (!holds(d)) return false;
  return holds(0);
}

inline Input input_volume(const Tensor& x) {
  NORMKIT_CHECK(x.dim() >= 2, "normkit: x must have a batch and a channel dim; got ", x.dim(), " dims");
  Input in;
  in.tensor = &x;
  in.shape.samples = x.size(0);
  in.shape.channels = x.size(1);
  const int64_t outer = in.shape.samples * in.shape.channels;
  in.shape.space = outer ? x.numel() / outer : 0;
  in.shape.dtype = dtype_of(x, "x");
  if (x.is_contiguous()) {
    in.channels_last = in.shape.space == 1;  // the same memory, and rows of channels are the faster reading of it
  } else if (is_channels_last(x)) {
    in.channels_last = true;
  } else {
    in.keep = torch::stable::contiguous(x);
    in.channels_last = in.shape.space == 1;
  }
  return in;
}

// Whether an output for this input is laid out with channels innermost (with one position the two are the same).
inline bool last_layout(const Input& in) { return in.channels_last && in.shape.space != 1; }

inline Tensor empty_like(const Input& in) { return empty(sizes_of(*in.tensor), in.shape.dtype, last_layout(in)); }

inline bool has_layout(const Tensor& t, const Input& in) { return last_layout(in) ? is_channels_last(t) : t.is_contiguous(); }

inline void check_like(const Input& in, const Tensor& t, const char* name) {
  const auto a = in.tensor->sizes(), b = t.sizes();
  NORMKIT_CHECK(a.size() == b.size() && std::equal(a.data(), a.data() + a.size(), b.data()) &&
                    dtype_of(t, name) == in.shape.dtype,
                "normkit: ", name, " must have x's shape and dtype");
}

// The gradient in x's layout.
inline Tensor grad_like(const Input& in, const Tensor& grad) {
  check_like(in, grad, "grad");
  if (has_layout(grad, in)) return grad;
  Tensor copy = empty_like(in);
  torch::stable::copy_(copy, grad);
  return copy;
}

inline const double* statistics_of(const Tensor& t, int64_t n, const char* name) {
  NORMKIT_CHECK(t.numel() == n && dtype_of(t, name) == DType::float64 && t.is_contiguous(), "normkit: ", name,
                " must hold ", n, " contiguous float64 values");
  return static_cast<const double*>(t.const_data_ptr());
}

inline const uint8_t* mask_of(const OptionalTensor& mask, const Volume& v) {
  if (!mask.has_value()) return nullptr;
  const auto type = mask->scalar_type();
  NORMKIT_CHECK((type == ScalarType::Bool || type == ScalarType::Byte) && mask->is_contiguous() &&
                    mask->numel() == v.samples * v.space,
                "normkit: mask must be contiguous bool with one value for each position of each sample");
  return static_cast<const uint8_t*>(mask->const_data_ptr());
}

struct Affine {
  Affine(const OptionalTensor& weight, const OptionalTensor& bias, const Volume& v)
      : gain(weight, "weight", v.channels, is_wide(v.dtype), 0, false, true),
        shift(bias, "bias", v.channels, is_wide(v.dtype), 0, false, false) {
    if (!bias.has_value()) zeros.assign(v.channels * (is_wide(v.dtype) ? 2 : 1), 0.0f);
  }
  const void* bias() const { return shift.get() ? shift.get() : zeros.data(); }
  Parameter gain, shift;
  std::vector<float> zeros;
};

// ---- parameter gradients: sums holds [parts, 2, channels]: of grad, and of grad * x̂ ----

inline Tensor parameter_grad(const double* sums, int64_t parts, int64_t channels, bool of_weight, DType dtype) {
  Tensor t = empty({channels}, dtype);
  if (channels == 0) return t;
  const double* first = sums + (of_weight ? channels : 0);
  kernels(dtype).sum_blocks({first, parts, channels, 2 * channels, true, t.mutable_data_ptr(), dtype}, 0, channels);
  return t;
}

inline std::tuple<Tensor, Tensor, Tensor> with_parameter_grads(Tensor dx, const double* sums, int64_t parts, const Volume& v,
                                                        const OptionalTensor& weight, bool want_weight,
                                                        const std::optional<ScalarType>& bias_dtype) {
  Tensor dweight = want_weight && weight.has_value()
                       ? parameter_grad(sums, parts, v.channels, true, dtype_of(*weight, "weight"))
                       : empty({0}, DType::float32);
  Tensor dbias = bias_dtype.has_value()
                     ? parameter_grad(sums, parts, v.channels, false, dtype_of(*bias_dtype, "bias_dtype"))
                     : empty({0}, DType::float32);
  return {dx, dweight, dbias};
}

inline void check_out(const Input& in, const Tensor& out) {
  check_like(in, out, "out");
  NORMKIT_CHECK(has_layout(out, in), "normkit: out must have x's memory layout");
}

}  // namespace normkit::ops
