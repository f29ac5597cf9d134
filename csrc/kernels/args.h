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
  const void* partial;  // [blocks, n] in float, or in double where wide
  int64_t blocks;
  int64_t n;
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
  bool channels_last = false;
  DType dtype = DType::float32;
};

// Batch, instance, group and channel layer normalization share these; each kernel's comment says what it reads.
struct ChannelsForward {
  Volume shape;
  const void* x = nullptr;
  void* y = nullptr;
  const uint8_t* mask = nullptr;  // [samples, space]: other positions do not count and give zero; or null
  const void* gain = nullptr;     // [channels]
  const void* bias = nullptr;     // [channels], or null
  double* mean = nullptr;         // per statistic
  double* variance = nullptr;     // biased
  int64_t groups = 1;
  int64_t blocks = 1;         // partition of rows for column moments
  double* partial = nullptr;  // [blocks, 2 * channels + 1] column moments of one block: mean, m2, count
  double eps = 0;
  bool stream = false;
};

struct ChannelsBackward {
  Volume shape;
  const void* grad = nullptr;
  const void* x = nullptr;
  void* dx = nullptr;
  const uint8_t* mask = nullptr;
  const void* gain = nullptr;
  const double* mean = nullptr;
  const double* variance = nullptr;
  double* sums = nullptr;  // per kernel: partial sums of grad and of grad * (x - mean)
  int64_t groups = 1;
  int64_t blocks = 1;
  double count = 0;  // how many elements share one statistic
  double eps = 0;
  bool frozen = false;  // the statistics were given, not computed from x
  bool stream = false;
};

}  // namespace normkit
