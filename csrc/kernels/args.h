// What a kernel is told: plain structs of pointers, sizes and flags. No arithmetic, no instruction set, no framework.
//
// A kernel works on a range [begin, end) of its units (rows, samples, channels, blocks); who calls it decides on threads.
// No result depends on how the units are divided among calls.
#pragma once

#include <cstdint>

namespace normkit {

enum class DType : int32_t { float32, bfloat16, float16, float64 };

// Rows of contiguous features. The leading dims of a tensor, merged where their strides allow: at most three remain.
struct RowView {
  void* data = nullptr;  // null: this operand is absent
  DType dtype = DType::float32;
  int64_t size[3] = {1, 1, 1};
  int64_t stride[3] = {0, 0, 0};  // in elements
};

// A parameter of any dtype on its way to the compute type: float, or double for float64 input.
struct ParameterArgs {
  const void* from;
  DType dtype;
  int64_t n;
  double offset;         // added to each value,
  bool offset_in_dtype;  // in float32, or in the parameter's own dtype
  void* to;
  bool wide;  // to double, else to float
};

// Gradients of parameters: the sum of the blocks' partial sums in a fixed order, rounded to the parameter's dtype.
struct SumBlocksArgs {
  const void* partial;  // [blocks, n], rows `stride` apart, in float, or in double where wide
  int64_t blocks;
  int64_t n;
  int64_t stride;
  bool wide;
  void* to;
  DType dtype;
};

struct RowsForward {
  int64_t features = 0;
  int64_t period = 1;  // row i takes the gain of row (i % period): groups of features, heads with a gain each
  RowView x;
  RowView residual;  // added to x; the sum is rounded to the residual's dtype and written to `sum`
  RowView sum;
  RowView gate;  // same dtype as x and y; never centered, no bias
  RowView y;
  const void* gain = nullptr;  // [period, features]
  const void* bias = nullptr;  // the same, or null
  double* mean = nullptr;      // [rows], or null where nobody asks; centered only
  void* rstd = nullptr;        // [rows] in the compute type, or null
  double eps = 0;
  bool centered = false;
  bool round_before_gain = false;  // to the half type among stream and y
  bool round_product = false;      // also round gain * normalized before the gate multiplies it
  bool silu = true;                // the gate's activation: SiLU, else sigmoid
  bool gate_before = false;        // the gate multiplies the input (else the output)
  bool stream = false;             // write y and sum past the cache
};

struct RowsBackward {
  int64_t rows = 0;
  int64_t features = 0;
  int64_t period = 1;
  int64_t blocks = 1;  // rows are cut into this many blocks for the column sums: a function of the shape alone
  RowView grad;        // of y
  RowView x;           // what was normalized (the sum, where there was a residual)
  RowView grad_sum;    // of the residual sum, added to dx; dtype of x
  RowView gate;        // dtype of x; dgain is asked for then, dbias is not
  RowView dx;
  RowView dgate;
  const void* gain = nullptr;    // [period, features]
  const double* mean = nullptr;  // centered only
  const void* rstd = nullptr;
  void* dgain = nullptr;  // [blocks, period, features] in the compute type, or null
  void* dbias = nullptr;
  bool centered = false;
  bool silu = true;
  bool gate_before = false;
  bool stream = false;
};

// x[n][c][s], or x[n][s][c] where channels_last: samples, channels, space.
struct Volume {
  int64_t samples = 0;
  int64_t channels = 0;
  int64_t space = 0;
  DType dtype = DType::float32;
};

// Batch, instance, group and channel layer normalization share these two. Each statistic is one group of channels in one
// sample; a batch norm over channels-last memory is the case of one sample and as many groups as channels.
struct ChannelsForward {
  Volume shape;
  int64_t groups = 1;
  const void* x = nullptr;
  void* y = nullptr;
  const uint8_t* mask = nullptr;  // [samples, space], batch norm only: 0 does not count and gives zero
  const void* gain = nullptr;     // [channels] in the compute type
  const void* bias = nullptr;     // [channels]
  double* mean = nullptr;         // one per statistic
  double* variance = nullptr;     // divided by n, not n - 1
  double* count = nullptr;        // how many elements the mask left, or null
  int64_t blocks = 1;             // channels-last: each sample's rows are cut into so many, a function of the shape
  double* partial = nullptr;      // [samples, blocks, 2 * channels + 1]: mean, sum of squares, count of one block
  double eps = 0;
};

struct ChannelsBackward {
  Volume shape;
  int64_t groups = 1;
  const void* grad = nullptr;
  const void* x = nullptr;
  void* dx = nullptr;
  const uint8_t* mask = nullptr;
  const void* gain = nullptr;
  const double* mean = nullptr;
  const double* variance = nullptr;
  double* sums = nullptr;     // [samples or blocks, 2, channels]: sums of grad and of grad * x̂, for dbias and dgain
  double* partial = nullptr;  // channels-last: [samples, blocks, 2, channels]
  int64_t blocks = 1;
  double count = 0;     // elements that share one statistic
  bool frozen = false;  // the statistics were given, not computed from x
  double eps = 0;
};

// running = (1 - momentum) * running + momentum * batch, with the variance divided by n - 1.
struct RunningArgs {
  void* running_mean;  // [channels]
  DType mean_dtype;
  void* running_var;
  DType var_dtype;
  const double* mean;
  const double* variance;  // divided by n
  double count;
  double momentum;
  int64_t channels;
};

}  // namespace normkit
