// Every operator's schema. A mutating operator returns nothing: what returns its own argument fails opcheck and
// torch.compile. Fakes and autograd are in src/normkit/ops.
#include "common.h"

#include <string>

namespace normkit::ops {
namespace {

// How a row is finished. weight: [features], or [period, features] where row i takes the gain of row (i % period).
const std::string kAffine = "Tensor? weight, Tensor? bias, ";
const std::string kOptions = "float eps, float weight_offset, bool gain_in_input, bool round_before_gain";
const std::string kDtype = ", ScalarType? dtype";

std::string instruction_set_name() { return instruction_set(); }

}  // namespace

STABLE_TORCH_LIBRARY(normkit, m) {
  const auto def = [&m](const std::string& schema) { m.def(schema.c_str()); };
  for (const std::string norm : {"rms_norm", "layer_norm"}) {
    const std::string statistics = norm == "rms_norm" ? "Tensor rstd" : "Tensor mean, Tensor rstd";
    def(norm + "(Tensor x, " + kAffine + kOptions + kDtype + ") -> Tensor");
    def(norm + "_with_statistics(Tensor x, " + kAffine + kOptions + kDtype + ") -> (Tensor y, " + statistics + ")");
    def(norm + "_out(Tensor x, " + kAffine + kOptions + ", Tensor(a!) out) -> ()");
    def(norm + "_backward(Tensor grad, Tensor x, Tensor? weight, " + statistics +
        ", float eps, float weight_offset, bool gain_in_input, Tensor? grad_sum, bool want_weight, ScalarType? bias_dtype)"
        " -> (Tensor dx, Tensor dweight, Tensor dbias)");
    def("add_" + norm + "(Tensor x, Tensor residual, " + kAffine + kOptions + kDtype + ") -> (Tensor y, Tensor sum)");
    def("add_" + norm + "_with_statistics(Tensor x, Tensor residual, " + kAffine + kOptions + kDtype +
        ") -> (Tensor y, Tensor sum, " + statistics + ")");
    def("add_" + norm + "_out(Tensor x, Tensor residual, " + kAffine + kOptions +
        ", Tensor(a!) out, Tensor(b!) sum) -> ()");
    def("add_" + norm + "_inplace(Tensor x, Tensor(a!) residual, " + kAffine + kOptions + ", Tensor(b!) out) -> ()");
  }
  const std::string gated = "(Tensor x, Tensor gate, Tensor? weight, " + kOptions + ", bool silu, bool gate_before";
  def("gated_rms_norm" + gated + ") -> Tensor");
  def("gated_rms_norm_with_statistics" + gated + ") -> (Tensor y, Tensor rstd)");
  def("gated_rms_norm_out" + gated + ", Tensor(a!) out) -> ()");
  def("gated_rms_norm_backward(Tensor grad, Tensor x, Tensor gate, Tensor? weight, Tensor rstd, float eps, "
      "float weight_offset, bool gain_in_input, bool silu, bool gate_before, bool want_weight) -> (Tensor dx, Tensor dgate, Tensor dweight)");

  // Channels are dim 1; contiguous and channels-last memory are both native, and the layout is kept.
  def("group_norm(Tensor x, " + kAffine + "int groups, float eps) -> Tensor");
  def("group_norm_with_statistics(Tensor x, " + kAffine +
      "int groups, float eps) -> (Tensor y, Tensor mean, Tensor variance)");
  def("group_norm_out(Tensor x, " + kAffine + "int groups, float eps, Tensor(a!) out) -> ()");
  def("group_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor variance, int groups, float eps, "
      "bool want_weight, ScalarType? bias_dtype) -> (Tensor dx, Tensor dweight, Tensor dbias)");
  // Training: normalize by the batch's own statistics. The mask's 0 positions do not count and give zero.
  def("batch_norm_train(Tensor x, " + kAffine +
      "Tensor? mask, float eps) -> (Tensor y, Tensor mean, Tensor variance, Tensor count)");
  def("batch_norm_train_out(Tensor x, " + kAffine +
      "Tensor? mask, float eps, Tensor(a!) out, Tensor(b!) mean, Tensor(c!) variance, Tensor(d!) count) -> ()");
  def("batch_norm(Tensor x, Tensor mean, Tensor variance, " + kAffine + "Tensor? mask, float eps) -> Tensor");
  // The same, for graphs that need its gradient: registering one slows every call.
  def("batch_norm_frozen(Tensor x, Tensor mean, Tensor variance, " + kAffine + "Tensor? mask, float eps) -> Tensor");
  def("batch_norm_out(Tensor x, Tensor mean, Tensor variance, " + kAffine +
      "Tensor? mask, float eps, Tensor(a!) out) -> ()");
  def("batch_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor variance, Tensor? count, "
      "Tensor? mask, float eps, bool want_weight, ScalarType? bias_dtype)"
      " -> (Tensor dx, Tensor dweight, Tensor dbias)");
  def("update_running(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor mean, Tensor variance, Tensor count, "
      "float momentum) -> ()");
  // LayerNorm over dim 1 of contiguous memory.
  def("channel_layer_norm(Tensor x, " + kAffine + "float eps) -> Tensor");
  def("channel_layer_norm_with_statistics(Tensor x, " + kAffine +
      "float eps) -> (Tensor y, Tensor mean, Tensor rstd)");
  def("channel_layer_norm_out(Tensor x, " + kAffine + "float eps, Tensor(a!) out) -> ()");
  def("channel_layer_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, float eps, "
      "bool want_weight, ScalarType? bias_dtype) -> (Tensor dx, Tensor dweight, Tensor dbias)");
  def("instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(normkit, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&instruction_set_name));
}

}  // namespace normkit::ops
