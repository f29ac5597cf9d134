#include "common.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace normkit::ops {

DType dtype_of(ScalarType type, const char* name) {
  switch (type) {
    case ScalarType::Float:
      return DType::float32;
    case ScalarType::BFloat16:
      return DType::bfloat16;
    case ScalarType::Half:
      return DType::float16;
    case ScalarType::Double:
      return DType::float64;
    default:
      NORMKIT_CHECK(false, "normkit: ", name, " must be float32, bfloat16, float16 or float64; got ",
                    torch::headeronly::toString(type));
  }
  return DType::float32;
}

ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::bfloat16:
      return ScalarType::BFloat16;
    case DType::float16:
      return ScalarType::Half;
    case DType::float64:
      return ScalarType::Double;
    default:
      return ScalarType::Float;
  }
}

int64_t size_of(DType dtype) { return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2; }

namespace {

int32_t shim_dtype(DType dtype) {
  switch (dtype) {
    case DType::bfloat16:
      return aoti_torch_dtype_bfloat16();
    case DType::float16:
      return aoti_torch_dtype_float16();
    case DType::float64:
      return aoti_torch_dtype_float64();
    default:
      return aoti_torch_dtype_float32();
  }
}

constexpr int64_t kHugePage = int64_t(2) << 20;

void ask_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (bytes < 2 * kHugePage) return;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + 4095) & ~uintptr_t(4095);
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~uintptr_t(4095);
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: a refusal changes nothing
#endif
}

// The third cache that one processor reaches. The C library's answer is the sum over a socket's on some processors
// (256 MB where each group of eight cores has 32), so the kernel's is asked first.
int64_t last_level_cache() {
  int64_t bytes = 0;
#if defined(__linux__)
  if (FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
    long long kilobytes = 0;
    if (std::fscanf(file, "%lldK", &kilobytes) == 1) bytes = kilobytes << 10;
    std::fclose(file);
  }
#endif
#if defined(_SC_LEVEL3_CACHE_SIZE)
  if (bytes <= 0) bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  return bytes > 0 ? bytes : int64_t(16) << 20;
}

}  // namespace

Tensor empty(const std::vector<int64_t>& sizes, DType dtype, bool channels_last) {
  const int64_t dims = int64_t(sizes.size());
  std::vector<int64_t> strides(sizes.size());
  int64_t next = 1;
  const auto place = [&](int64_t d) {
    strides[d] = next;
    next *= std::max<int64_t>(sizes[d], 1);
  };
  if (channels_last) {
    place(1);
    for (int64_t d = dims - 1; d > 1; --d) place(d);
    place(0);
  } else {
    for (int64_t d = dims - 1; d >= 0; --d) place(d);
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes.data(), strides.data(), shim_dtype(dtype),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  Tensor t(handle);
  if (next * size_of(dtype) >= 2 * kHugePage) ask_for_huge_pages(t.mutable_data_ptr(), next * size_of(dtype));
  return t;
}

std::vector<int64_t> sizes_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return {sizes.data(), sizes.data() + sizes.size()};
}

bool should_stream(int64_t bytes) {
  static const int64_t threshold = last_level_cache() / 2;
  return bytes >= threshold;
}

bool view_rows(const Tensor& t, DType dtype, RowView& view) {
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  const int64_t dims = int64_t(sizes.size());
  if (sizes[dims - 1] > 1 && strides[dims - 1] != 1) return false;
  int at = 2;
  bool filled = false;
  for (int64_t d = dims - 2; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (!filled) {
      filled = true;
    } else if (strides[d] == view.stride[at] * view.size[at]) {
      view.size[at] *= sizes[d];
      continue;
    } else if (--at < 0) {
      return false;
    }
    view.size[at] = sizes[d];
    view.stride[at] = strides[d];
  }
  view.data = const_cast<void*>(t.const_data_ptr());
  view.dtype = dtype;
  return true;
}

RowView input_rows(const Tensor& t, const char* name, OptionalTensor& keep) {
  RowView view;
  const DType dtype = dtype_of(t, name);
  if (view_rows(t, dtype, view)) return view;
  keep = torch::stable::contiguous(t);
  view = RowView{};
  view_rows(*keep, dtype, view);
  return view;
}

RowView output_rows(const Tensor& t, const char* name) {
  RowView view;
  NORMKIT_CHECK(view_rows(t, dtype_of(t, name), view), "normkit: ", name,
                " must have a last dim of stride 1 and leading dims that merge into at most three");
  return view;
}

Parameter::Parameter(const OptionalTensor& t, const char* name, int64_t n, bool wide, double offset,
                     bool offset_in_dtype, bool ones) {
  const auto make_buffer = [&] { buffer_ = std::make_unique<Buffer>(n * (wide ? 8 : 4)); };
  if (!t.has_value()) {
    if (!ones) return;
    make_buffer();
    if (wide)
      std::fill_n(static_cast<double*>(buffer_->get()), n, 1.0);
    else
      std::fill_n(static_cast<float*>(buffer_->get()), n, 1.0f);
    data_ = buffer_->get();
    return;
  }
  const DType dtype = dtype_of(*t, name);
  NORMKIT_CHECK(t->numel() == n, "normkit: ", name, " must have ", n, " elements; got ", t->numel());
  if (!t->is_contiguous()) keep_ = torch::stable::contiguous(*t);
  const void* from = keep_ ? keep_->const_data_ptr() : t->const_data_ptr();
  if (offset == 0 && dtype == (wide ? DType::float64 : DType::float32)) {
    data_ = from;
    return;
  }
  make_buffer();
  data_ = buffer_->get();
  kernels(dtype).convert_parameter({from, dtype, n, offset, offset_in_dtype, buffer_->get(), wide});
}

int64_t blocks_for(int64_t rows, int64_t features, int64_t elements) {
  const int64_t wanted = rows * features / elements;
  return std::clamp<int64_t>(wanted, 1, std::min<int64_t>(16, std::max<int64_t>(rows, 1)));
}

}  // namespace normkit::ops
