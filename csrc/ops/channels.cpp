// GroupNorm (InstanceNorm: as many groups as channels) and BatchNorm.
#include "channels.h"

namespace normkit::ops {
namespace {

// A batch norm's channels-last rows are one sample.
Volume as_one_sample(Volume v) {
  v.space *= v.samples;
  v.samples = 1;
  return v;
}

// Samples one by one where there are enough for all threads: what the first step read is still near for the last.
bool by_sample(const Volume& v) { return v.samples >= int64_t(torch::stable::get_num_threads()); }

void run_rows(ChannelsForward& a) {
  const Volume& v = a.shape;
  a.blocks = blocks_for(v.space, v.channels);
  const Buffer partial(v.samples * a.blocks * (2 * v.channels + 1) * 8);
  a.partial = static_cast<double*>(partial.get());
  const KernelTable& k = kernels(v.dtype);
  if (by_sample(v)) {
    parallel(v.samples, grain(v.space * v.channels), [&](int64_t b, int64_t e) {
      for (int64_t i = b; i < e; ++i) {
        k.last_moments(a, i * a.blocks, (i + 1) * a.blocks);
        k.last_merge(a, i, i + 1);
        k.last_normalize(a, i * v.space, (i + 1) * v.space);
      }
    });
    return;
  }
  const int64_t per_block = v.space * v.channels / a.blocks;
  parallel(v.samples * a.blocks, grain(per_block), [&](int64_t b, int64_t e) { k.last_moments(a, b, e); });
  k.last_merge(a, 0, v.samples);
  parallel(v.samples * v.space, grain(v.channels), [&](int64_t b, int64_t e) { k.last_normalize(a, b, e); });
}

void backward_rows(ChannelsBackward& a) {
  const Volume& v = a.shape;
  a.blocks = blocks_for(v.space, v.channels);
  const Buffer partial(v.samples * a.blocks * 2 * v.channels * 8);
  a.partial = static_cast<double*>(partial.get());
  const KernelTable& k = kernels(v.dtype);
  const bool done = a.frozen && !a.mask;  // the first step wrote dx
  if (by_sample(v)) {
    parallel(v.samples, grain(v.space * v.channels), [&](int64_t b, int64_t e) {
      for (int64_t i = b; i < e; ++i) {
        k.last_grad_sums(a, i * a.blocks, (i + 1) * a.blocks);
        k.last_grad_merge(a, i, i + 1);
        if (!done) k.last_dx(a, i * v.space, (i + 1) * v.space);
      }
    });
    return;
  }
  const int64_t per_block = v.space * v.channels / a.blocks;
  parallel(v.samples * a.blocks, grain(per_block), [&](int64_t b, int64_t e) { k.last_grad_sums(a, b, e); });
  k.last_grad_merge(a, 0, v.samples);
  if (!done) parallel(v.samples * v.space, grain(v.channels), [&](int64_t b, int64_t e) { k.last_dx(a, b, e); });
}

// ---- group norm ----

void run_group_norm(const Input& in, const OptionalTensor& weight, const OptionalTensor& bias, int64_t groups,
                    double eps, Tensor& y, double* mean, double* variance) {
  const Volume& v = in.shape;
  NORMKIT_CHECK(groups >= 1 && v.channels % groups == 0, "normkit: groups (", groups, ") must divide the ", v.channels,
                " channels");
  const Affine affine(weight, bias, v);
  ChannelsForward a;
  a.shape = v;
  a.groups = groups;
  a.x = in.get().const_data_ptr();
  a.y = y.mutable_data_ptr();
  a.gain = affine.gain.get();
  a.bias = affine.bias();
  a.mean = mean;
  a.variance = variance;
  a.eps = eps;
  if (in.tensor->numel() == 0) return;
  if (!in.channels_last) {
    const auto kernel = kernels(a.shape.dtype).group_norm;
    parallel(v.samples * groups, grain(v.channels / groups * v.space),
                 [&](int64_t b, int64_t e) { kernel(a, b, e); });
    return;
  }
  const Buffer own(mean ? 0 : 2 * v.samples * groups * 8);
  if (!mean) {
    a.mean = static_cast<double*>(own.get());
    a.variance = a.mean + v.samples * groups;
  }
  run_rows(a);
}

Tensor group_norm(const Tensor& x, OptionalTensor weight, OptionalTensor bias, int64_t groups, double eps) {
  const Input in = input_volume(x);
  Tensor y = empty_like(in);
  run_group_norm(in, weight, bias, groups, eps, y, nullptr, nullptr);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> group_norm_with_statistics(const Tensor& x, OptionalTensor weight,
                                                              OptionalTensor bias, int64_t groups, double eps) {
  const Input in = input_volume(x);
  Tensor y = empty_like(in);
  Tensor mean = empty({in.shape.samples, groups}, DType::float64);
  Tensor variance = empty({in.shape.samples, groups}, DType::float64);
  run_group_norm(in, weight, bias, groups, eps, y, static_cast<double*>(mean.mutable_data_ptr()),
                 static_cast<double*>(variance.mutable_data_ptr()));
  return {y, mean, variance};
}

void group_norm_out(const Tensor& x, OptionalTensor weight, OptionalTensor bias, int64_t groups, double eps,
                    Tensor out) {
  const Input in = input_volume(x);
  check_out(in, out);
  run_group_norm(in, weight, bias, groups, eps, out, nullptr, nullptr);
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const Tensor& grad, const Tensor& x, OptionalTensor weight,
                                                       const Tensor& mean, const Tensor& variance, int64_t groups,
                                                       double eps, bool want_weight,
                                                       std::optional<ScalarType> bias_dtype) {
  const Input in = input_volume(x);
  const Volume& v = in.shape;
  NORMKIT_CHECK(groups >= 1 && v.channels % groups == 0, "normkit: groups must divide the channels");
  const Tensor g = grad_like(in, grad);
  Tensor dx = empty_like(in);
  const Affine affine(weight, {}, v);
  const Buffer sums(std::max<int64_t>(1, v.samples) * 2 * v.channels * 8);
  ChannelsBackward a;
  a.shape = v;
  a.groups = groups;
  a.grad = g.const_data_ptr();
  a.x = in.get().const_data_ptr();
  a.dx = dx.mutable_data_ptr();
  a.gain = affine.gain.get();
  a.mean = statistics_of(mean, v.samples * groups, "mean");
  a.variance = statistics_of(variance, v.samples * groups, "variance");
  a.sums = static_cast<double*>(sums.get());
  a.count = double(v.channels / groups * v.space);
  a.eps = eps;
  int64_t parts = v.samples;
  if (x.numel() == 0) {
    std::fill_n(a.sums, 2 * v.channels, 0.0);
    parts = 1;
  } else if (in.channels_last) {
    backward_rows(a);
  } else {
    const auto kernel = kernels(a.shape.dtype).group_norm_backward;
    parallel(v.samples * groups, grain(v.channels / groups * v.space),
                 [&](int64_t b, int64_t e) { kernel(a, b, e); });
  }
  return with_parameter_grads(dx, a.sums, parts, v, weight, want_weight, bias_dtype);
}

// ---- batch norm ----

void batch_norm_train_out(const Tensor& x, OptionalTensor weight, OptionalTensor bias, OptionalTensor mask, double eps,
                          Tensor out, Tensor mean, Tensor variance, Tensor count) {
  const Input in = input_volume(x);
  const Volume& v = in.shape;
  check_out(in, out);
  const Affine affine(weight, bias, v);
  ChannelsForward a;
  a.shape = in.channels_last ? as_one_sample(v) : v;
  a.groups = v.channels;
  a.x = in.get().const_data_ptr();
  a.y = out.mutable_data_ptr();
  a.mask = mask_of(mask, v);
  a.gain = affine.gain.get();
  a.bias = affine.bias();
  a.mean = const_cast<double*>(statistics_of(mean, v.channels, "mean"));
  a.variance = const_cast<double*>(statistics_of(variance, v.channels, "variance"));
  double* counted = const_cast<double*>(statistics_of(count, 1, "count"));
  a.eps = eps;
  if (x.numel() == 0) {
    std::fill_n(a.mean, v.channels, 0.0);
    std::fill_n(a.variance, v.channels, 0.0);
    *counted = 0;
    return;
  }
  if (in.channels_last) {
    a.count = counted;
    run_rows(a);
    return;
  }
  const auto kernel = kernels(a.shape.dtype).batch_norm;
  parallel(v.channels, grain(v.samples * v.space), [&](int64_t b, int64_t e) {
    ChannelsForward mine = a;
    double counted_here = 0;
    mine.count = &counted_here;
    kernel(mine, b, e);
    if (b == 0) *counted = counted_here;  // all channels have the same
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_train(const Tensor& x, OptionalTensor weight, OptionalTensor bias,
                                                            OptionalTensor mask, double eps) {
  const Input in = input_volume(x);
  Tensor y = empty_like(in);
  Tensor mean = empty({in.shape.channels}, DType::float64), variance = empty({in.shape.channels}, DType::float64);
  Tensor count = empty({}, DType::float64);
  batch_norm_train_out(in.get(), weight, bias, mask, eps, y, mean, variance, count);
  return {y, mean, variance, count};
}

void batch_norm_out(const Tensor& x, const Tensor& mean, const Tensor& variance, OptionalTensor weight,
                    OptionalTensor bias, OptionalTensor mask, double eps, Tensor out) {
  const Input in = input_volume(x);
  const Volume& v = in.shape;
  check_out(in, out);
  const Affine affine(weight, bias, v);
  const Parameter means(mean, "mean", v.channels, true, 0, false, false);
  const Parameter variances(variance, "variance", v.channels, true, 0, false, false);
  ChannelsForward a;
  a.shape = in.channels_last ? as_one_sample(v) : v;
  a.groups = v.channels;
  a.x = in.get().const_data_ptr();
  a.y = out.mutable_data_ptr();
  a.mask = mask_of(mask, v);
  a.gain = affine.gain.get();
  a.bias = affine.bias();
  a.mean = static_cast<double*>(const_cast<void*>(means.get()));
  a.variance = static_cast<double*>(const_cast<void*>(variances.get()));
  a.eps = eps;
  if (x.numel() == 0) return;
  if (in.channels_last) {
    const auto kernel = kernels(a.shape.dtype).last_normalize;
    parallel(a.shape.space, grain(v.channels), [&](int64_t b, int64_t e) { kernel(a, b, e); });
    return;
  }
  const auto kernel = kernels(a.shape.dtype).batch_norm_normalize;
  parallel(v.samples * v.channels, grain(v.space), [&](int64_t b, int64_t e) { kernel(a, b, e); });
}

Tensor batch_norm(const Tensor& x, const Tensor& mean, const Tensor& variance, OptionalTensor weight,
                  OptionalTensor bias, OptionalTensor mask, double eps) {
  const Input in = input_volume(x);
  Tensor y = empty_like(in);
  batch_norm_out(in.get(), mean, variance, weight, bias, mask, eps, y);
  return y;
}

// Without a count the statistics were given, and no gradient flows through them.
std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(const Tensor& grad, const Tensor& x, OptionalTensor weight,
                                                       const Tensor& mean, const Tensor& variance, OptionalTensor count,
                                                       OptionalTensor mask, double eps, bool want_weight,
                                                       std::optional<ScalarType> bias_dtype) {
  const Input in = input_volume(x);
  const Volume& v = in.shape;
  const Tensor g = grad_like(in, grad);
  Tensor dx = empty_like(in);
  const Affine affine(weight, {}, v);
  const Parameter means(mean, "mean", v.channels, true, 0, false, false);
  const Parameter variances(variance, "variance", v.channels, true, 0, false, false);
  const Buffer sums(2 * v.channels * 8);
  ChannelsBackward a;
  a.shape = in.channels_last ? as_one_sample(v) : v;
  a.groups = v.channels;
  a.grad = g.const_data_ptr();
  a.x = in.get().const_data_ptr();
  a.dx = dx.mutable_data_ptr();
  a.mask = mask_of(mask, v);
  a.gain = affine.gain.get();
  a.mean = static_cast<const double*>(means.get());
  a.variance = static_cast<const double*>(variances.get());
  a.sums = static_cast<double*>(sums.get());
  a.frozen = !count.has_value();
  if (count.has_value()) a.count = *statistics_of(*count, 1, "count");
  a.eps = eps;
  if (x.numel() == 0) {
    std::fill_n(a.sums, 2 * v.channels, 0.0);
  } else if (in.channels_last) {
    backward_rows(a);
  } else {
    const auto kernel = kernels(a.shape.dtype).batch_norm_backward;
    parallel(v.channels, grain(v.samples * v.space), [&](int64_t b, int64_t e) { kernel(a, b, e); });
  }
  return with_parameter_grads(dx, a.sums, 1, v, weight, want_weight, bias_dtype);
}

void update_running(Tensor running_mean, Tensor running_var, const Tensor& mean, const Tensor& variance,
                    const Tensor& count, double momentum) {
  const int64_t channels = running_mean.numel();
  NORMKIT_CHECK(running_var.numel() == channels && running_mean.is_contiguous() && running_var.is_contiguous(),
                "normkit: running_mean and running_var must be contiguous and of one size");
  const RunningArgs a{running_mean.mutable_data_ptr(), dtype_of(running_mean, "running_mean"),
                      running_var.mutable_data_ptr(), dtype_of(running_var, "running_var"),
                      statistics_of(mean, channels, "mean"), statistics_of(variance, channels, "variance"),
                      *statistics_of(count, 1, "count"), momentum, channels};
  kernels(DType::float64).update_running(a);  // the batch's statistics are
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(normkit, CPU, m) {
  m.impl("group_norm", TORCH_BOX(&group_norm));
  m.impl("group_norm_with_statistics", TORCH_BOX(&group_norm_with_statistics));
  m.impl("group_norm_out", TORCH_BOX(&group_norm_out));
  m.impl("group_norm_backward", TORCH_BOX(&group_norm_backward));
  m.impl("batch_norm_train", TORCH_BOX(&batch_norm_train));
  m.impl("batch_norm_train_out", TORCH_BOX(&batch_norm_train_out));
  m.impl("batch_norm", TORCH_BOX(&batch_norm));
  m.impl("batch_norm_frozen", TORCH_BOX(&batch_norm));
  m.impl("batch_norm_out", TORCH_BOX(&batch_norm_out));
  m.impl("batch_norm_backward", TORCH_BOX(&batch_norm_backward));
  m.impl("update_running", TORCH_BOX(&update_running));
}

}  // namespace normkit::ops
