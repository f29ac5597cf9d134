// Parameters of any dtype: converted once per call on the way in, their gradients summed and rounded on the way out.
#pragma once

#include "convert.h"
#include "args.h"

namespace normkit::NORMKIT_ISA {

template <class T>
inline void convert_parameter_from(const ParameterArgs& c) {
  using A = compute_t<T>;
  const T* from = static_cast<const T*>(c.from);
  const bool late = c.wide && sizeof(A) != 8 && !c.offset_in_dtype;  // the sum is then formed in double, below
  const Vec<A> offset{late ? A(0) : A(c.offset)};
  const double rest = late ? c.offset : 0;
  for_each<A>(c.n, [&](int64_t j, auto tag) NORMKIT_LAMBDA {
    Vec<A> v = load(from + j, tag) + offset;
    if (c.offset_in_dtype) v = round_to(v, T{});
    if (c.wide == (sizeof(A) == 8)) return store(static_cast<A*>(c.to) + j, v, tag);
    A lanes[Vec<A>::kLanes];
    store(lanes, v, Full{});
    for (int k = 0; k < used_lanes<A>(tag); ++k) {
      if (c.wide)
        static_cast<double*>(c.to)[j + k] = double(lanes[k]) + rest;
      else
        static_cast<float*>(c.to)[j + k] = float(lanes[k]);
    }
  });
}

inline void convert_parameter(const ParameterArgs& c) {
  switch (c.dtype) {
    case DType::float32:
      return convert_parameter_from<float>(c);
    case DType::bfloat16:
      return convert_parameter_from<bfloat16>(c);
    case DType::float16:
      return convert_parameter_from<float16>(c);
    case DType::float64:
      return convert_parameter_from<double>(c);
  }
}

template <class A, class T>
inline void sum_blocks_to(const SumBlocksArgs& s, int64_t begin, int64_t end) {
  const A* partial = static_cast<const A*>(s.partial);
  T* to = static_cast<T*>(s.to);
  for_each<A>(end - begin, [&](int64_t k, auto tag) NORMKIT_LAMBDA {
    const int64_t j = begin + k;
    Vec<A> total = load(partial + j, tag);
    for (int64_t b = 1; b < s.blocks; ++b) total += load(partial + b * s.stride + j, tag);
    if constexpr (sizeof(compute_t<T>) == sizeof(A)) {
      store(to + j, total, tag);
    } else {  // a parameter of another width: lane by lane, through float
      A lanes[Vec<A>::kLanes];
      store(lanes, total, Full{});
      for (int i = 0; i < used_lanes<A>(tag); ++i) {
        if constexpr (sizeof(T) == 8) {
          to[j + i] = T(lanes[i]);
        } else {
          store(to + j + i, VecF{float(lanes[i])}, Part{1});
        }
      }
    }
  });
}

template <class A>
inline void sum_blocks_from(const SumBlocksArgs& s, int64_t begin, int64_t end) {
  switch (s.dtype) {
    case DType::float32:
      return sum_blocks_to<A, float>(s, begin, end);
    case DType::bfloat16:
      return sum_blocks_to<A, bfloat16>(s, begin, end);
    case DType::float16:
      return sum_blocks_to<A, float16>(s, begin, end);
    case DType::float64:
      return sum_blocks_to<A, double>(s, begin, end);
  }
}

// Columns [begin, end).
inline void sum_blocks(const SumBlocksArgs& s, int64_t begin, int64_t end) {
  s.wide ? sum_blocks_from<double>(s, begin, end) : sum_blocks_from<float>(s, begin, end);
}

template <class T>
inline void blend(T* running, const double* batch, int64_t n, double momentum, double scale) {
  using A = compute_t<T>;
  for (int64_t c = 0; c < n; ++c) {
    A lanes[Vec<A>::kLanes];
    store(lanes, load(running + c, Part{1}), Full{});
    const double next = (1 - momentum) * lanes[0] + momentum * (batch[c] * scale);
    store(running + c, Vec<A>{A(next)}, Part{1});
  }
}

inline void blend_any(void* running, DType dtype, const double* batch, int64_t n, double momentum, double scale) {
  switch (dtype) {
    case DType::float32:
      return blend(static_cast<float*>(running), batch, n, momentum, scale);
    case DType::bfloat16:
      return blend(static_cast<bfloat16*>(running), batch, n, momentum, scale);
    case DType::float16:
      return blend(static_cast<float16*>(running), batch, n, momentum, scale);
    case DType::float64:
      return blend(static_cast<double*>(running), batch, n, momentum, scale);
  }
}

// A batch without elements changes nothing.
inline void update_running(const RunningArgs& a) {
  if (a.count == 0) return;
  blend_any(a.running_mean, a.mean_dtype, a.mean, a.channels, a.momentum, 1);
  const double unbiased = a.count > 1 ? a.count / (a.count - 1) : 1;
  blend_any(a.running_var, a.var_dtype, a.variance, a.channels, a.momentum, unbiased);
}

}  // namespace normkit::NORMKIT_ISA
