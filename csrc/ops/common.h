// What every operator does around its kernel: check, view, allocate, thread. No arithmetic here.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "../kernels/args.h"
#include "../kernels/table.h"

namespace normkit::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

#define NORMKIT_CHECK(condition, ...) STD_TORCH_CHECK(condition, __VA_ARGS__)

DType dtype_of(ScalarType type, const char* name);
inline DType dtype_of(const Tensor& t, const char* name) { return dtype_of(t.scalar_type(), name); }
ScalarType scalar_type_of(DType dtype);
int64_t size_of(DType dtype);
inline bool is_wide(DType dtype) { return dtype == DType::float64; }
inline DType compute_of(DType dtype) { return is_wide(dtype) ? DType::float64 : DType::float32; }

// A new CPU tensor, dense in the order of its dims, or with channels (dim 1) innermost. Large ones ask the system for
// huge pages before they are first touched: most of the time of a large fresh output is page faults otherwise.
Tensor empty(const std::vector<int64_t>& sizes, DType dtype, bool channels_last = false);
std::vector<int64_t> sizes_of(const Tensor& t);

// Outputs that do not fit the caches are written past them.
bool should_stream(int64_t bytes);

// View the leading dims of t as rows of its last dim. False where strides do not allow it.
bool view_rows(const Tensor& t, DType dtype, RowView& view);
// The same, from a copy where needed; `keep` holds on to it.
RowView input_rows(const Tensor& t, const char* name, OptionalTensor& keep);
RowView output_rows(const Tensor& t, const char* name);

// Memory that a call needs for a moment.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : data_(bytes > 0 ? std::malloc(bytes) : nullptr) {
    NORMKIT_CHECK(bytes <= 0 || data_, "normkit: out of memory");
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }
  void* get() const { return data_; }

 private:
  void* data_;
};

// A parameter in the compute type: its own memory where that is what it holds already, else a converted copy.
class Parameter {
 public:
  // Absent parameters give null, or a row of ones where `ones` says so.
  Parameter(const OptionalTensor& t, const char* name, int64_t n, bool wide, double offset, bool offset_in_dtype,
            bool ones);
  const void* get() const { return data_; }

 private:
  const void* data_ = nullptr;
  OptionalTensor keep_;
  std::unique_ptr<Buffer> buffer_;
};

// How many blocks column sums over rows are cut into: a function of the shape alone, about one for so many elements and at
// most 16.
int64_t blocks_for(int64_t rows, int64_t features, int64_t elements = 16384);

// Rows (or other units) that are worth a thread's while.
inline int64_t grain(int64_t elements_per_unit) {
  return elements_per_unit > 0 ? std::max<int64_t>(1, 16384 / elements_per_unit) : 1;
}

// f(begin, end) over [0, units) on as many threads as that is worth; a small job does not ask the pool.
template <class F>
inline void parallel(int64_t units, int64_t grain_size, const F& f) {
  if (units <= grain_size)
    f(int64_t(0), units);
  else
    torch::stable::parallel_for(0, units, grain_size, f);
}

}  // namespace normkit::ops
