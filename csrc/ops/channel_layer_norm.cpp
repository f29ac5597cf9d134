// LayerNorm over dim 1 of contiguous memory.
#include "channels.h"

namespace normkit::ops {
namespace {

void run_channel_layer_norm(const Input& in, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                            Tensor& y, double* mean, double* rstd) {
  const Volume& v = in.shape;
  NORMKIT_CHECK(!last_layout(in), "normkit: channels-last memory is rows of features: use layer_norm on its view");
  const Affine affine(weight, bias, v);
  ChannelsForward a;
  a.shape = v;
  a.x = in.get().const_data_ptr();
  a.y = y.mutable_data_ptr();
  a.gain = affine.gain.get();
  a.bias = affine.bias();
  a.mean = mean;
  a.variance = rstd;
  a.eps = eps;
  if (in.tensor->numel() == 0) return;
  const KernelTable& k = kernels(v.dtype);
  const int64_t tiles = k.channel_layer_norm_tiles(v);
  parallel(v.samples * tiles, grain(v.channels * v.space / tiles),
               [&](int64_t b, int64_t e) { k.channel_layer_norm(a, b, e); });
}

Tensor channel_layer_norm(const Tensor& x, OptionalTensor weight, OptionalTensor bias, double eps) {
  const Input in = input_volume(x);
  Tensor y = empty_like(in);
  run_channel_layer_norm(in, weight, bias, eps, y, nullptr, nullptr);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> channel_layer_norm_with_statistics(const Tensor& x, OptionalTensor weight,
                                                                      OptionalTensor bias, double eps) {
  const Input in = input_volume(x);
  Tensor y = empty_like(in);
  const std::vector<int64_t> sizes{in.shape.samples, in.shape.space};
  Tensor mean = empty(sizes, DType::float64), rstd = empty(sizes, DType::float64);
  run_channel_layer_norm(in, weight, bias, eps, y, static_cast<double*>(mean.mutable_data_ptr()),
                         static_cast<double*>(rstd.mutable_data_ptr()));
  return {y, mean, rstd};
}

void channel_layer_norm_out(const Tensor& x, OptionalTensor weight, OptionalTensor bias, double eps, Tensor out) {
  const Input in = input_volume(x);
  check_out(in, out);
  run_channel_layer_norm(in, weight, bias, eps, out, nullptr, nullptr);
}

std::tuple<Tensor, Tensor, Tensor> channel_layer_norm_backward(const Tensor& grad, const Tensor& x,
                                                               OptionalTensor weight, const Tensor& mean,
                                                               const Tensor& rstd, double /*eps*/, bool want_weight,
                                                               std::optional<ScalarType> bias_dtype) {
  const Input in = input_volume(x);
  const Volume& v = in.shape;
  NORMKIT_CHECK(!last_layout(in), "normkit: channels-last memory is rows of features: use layer_norm on its view");
  const Tensor g = grad_like(in, grad);
  Tensor dx = empty_like(in);
  const Affine affine(weight, {}, v);
  const KernelTable& k = kernels(v.dtype);
  const int64_t tiles = x.numel() ? v.samples * k.channel_layer_norm_tiles(v) : 0;
  const int64_t blocks = std::min<int64_t>(blocks_for(v.samples * v.space, v.channels), std::max<int64_t>(tiles, 1));
  const Buffer sums(blocks * 2 * v.channels * 8);
  ChannelsBackward a;
  a.shape = v;
  a.grad = g.const_data_ptr();
  a.x = in.get().const_data_ptr();
  a.dx = dx.mutable_data_ptr();
  a.gain = affine.gain.get();
  a.mean = statistics_of(mean, v.samples * v.space, "mean");
  a.variance = statistics_of(rstd, v.samples * v.space, "rstd");
  a.sums = static_cast<double*>(sums.get());
  a.blocks = blocks;
  if (tiles == 0)
    std::fill_n(a.sums, blocks * 2 * v.channels, 0.0);
  else
    parallel(blocks, 1, [&](int64_t b, int64_t e) { k.channel_layer_norm_backward(a, b, e); });
  return with_parameter_grads(dx, a.sums, blocks, v, weight, want_weight, bias_dtype);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(normkit, CPU, m) {
  m.impl("channel_layer_norm", TORCH_BOX(&channel_layer_norm));
  m.impl("channel_layer_norm_with_statistics", TORCH_BOX(&channel_layer_norm_with_statistics));
  m.impl("channel_layer_norm_out", TORCH_BOX(&channel_layer_norm_out));
  m.impl("channel_layer_norm_backward", TORCH_BOX(&channel_layer_norm_backward));
}

}  // namespace normkit::ops
