// Vectors of one fixed logical width, whatever the instruction set.
//
// A Vec<float> always holds 16 lanes and a Vec<double> 8 (64 bytes): one AVX-512 register, two AVX2 registers, or four
// of SSE2 or NEON. So every sum is formed in the same order on every instruction set, and results agree bit for bit.
// The code is the compiler's vector extension, which GCC and clang lower to any target; intrinsics appear only for
// half-precision conversions, partial loads and streaming stores.
//
// This header is compiled once per instruction set, each time in a namespace of its own (NORMKIT_ISA), and it includes
// no part of the C++ library that has code to inline: a std:: function compiled for AVX-512 here could otherwise be
// the copy that the linker keeps for everybody.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef NORMKIT_ISA
#define NORMKIT_ISA baseline
#endif

#define NORMKIT_INLINE inline __attribute__((always_inline))
#define NORMKIT_LAMBDA __attribute__((always_inline))

// Before each loop over the registers of one Vec, which must be copied one by one too: GCC at -O2 unrolls no loop that
// grows by it, and a Vec that is indexed, or copied as 64 bytes, lives in memory. That made AVX2 seven times slower.
#if defined(__clang__)
#define NORMKIT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define NORMKIT_UNROLL _Pragma("GCC unroll 4")
#endif

namespace normkit {

// Storage-only half types: a kernel loads them into float lanes.
struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

namespace NORMKIT_ISA {

// The storage types that this instruction set has kernels of. The largest sets have those which they are for; other types
// take the next lower one, with the same bits, and the library stays small.
template <class X>
constexpr bool kCompiled =
#if defined(__AVX512BF16__)
    std::is_same_v<X, bfloat16>;
#elif defined(__AVX512F__)
    !std::is_same_v<X, double>;
#else
    true;
#endif

#if defined(__AVX512F__)
constexpr int kNativeBytes = 64;
#elif defined(__AVX__)
constexpr int kNativeBytes = 32;
#else
constexpr int kNativeBytes = 16;
#endif

// The type that arithmetic on a storage type runs in.
template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class T>
using compute_t = typename ComputeOf<T>::type;

template <class A>
struct LaneInt;
template <>
struct LaneInt<float> {
  using type = int32_t;
};
template <>
struct LaneInt<double> {
  using type = int64_t;
};

template <class A>
struct Vec {
  static constexpr int kLanes = 64 / sizeof(A);
  static constexpr int kParts = 64 / kNativeBytes;
  static constexpr int kPartLanes = kNativeBytes / sizeof(A);
  using Int = typename LaneInt<A>::type;
  typedef A Native __attribute__((vector_size(kNativeBytes)));
  typedef Int NativeInt __attribute__((vector_size(kNativeBytes)));

  Native part[kParts];

  NORMKIT_INLINE Vec() {
    NORMKIT_UNROLL for (int i = 0; i < kParts; ++i) part[i] = Native{};
  }
  NORMKIT_INLINE Vec(A a) {
    NORMKIT_UNROLL for (int i = 0; i < kParts; ++i) part[i] = a - Native{};
  }
};

#define NORMKIT_VEC_OPERATOR(op)                                             \
  template <class A>                                                         \
  NORMKIT_INLINE Vec<A> operator op(const Vec<A>& a, const Vec<A>& b) {      \
    Vec<A> r;                                                                \
    NORMKIT_UNROLL for (int i = 0; i < Vec<A>::kParts; ++i) r.part[i] = a.part[i] op b.part[i]; \
    return r;                                                                \
  }
NORMKIT_VEC_OPERATOR(+)
NORMKIT_VEC_OPERATOR(-)
NORMKIT_VEC_OPERATOR(*)
NORMKIT_VEC_OPERATOR(/)
#undef NORMKIT_VEC_OPERATOR

template <class A>
NORMKIT_INLINE Vec<A>& operator+=(Vec<A>& a, const Vec<A>& b) {
  return a = a + b;
}

// Lane by lane: a < b ? yes : no. NaN compares false.
template <class A>
NORMKIT_INLINE Vec<A> where_less(const Vec<A>& a, const Vec<A>& b, const Vec<A>& yes, const Vec<A>& no) {
  Vec<A> r;
  NORMKIT_UNROLL for (int i = 0; i < Vec<A>::kParts; ++i) r.part[i] = a.part[i] < b.part[i] ? yes.part[i] : no.part[i];
  return r;
}

// ---- how much of a vector is in use: all of it, or the first n lanes at the end of a row ----

struct Full {};
struct Part {
  int n;
};

template <class A>
NORMKIT_INLINE int used_lanes(Full) {
  return Vec<A>::kLanes;
}
template <class A>
NORMKIT_INLINE int used_lanes(Part t) {
  return t.n;
}

template <class A>
NORMKIT_INLINE Vec<A> lane_index() {
  Vec<A> r;
  NORMKIT_UNROLL for (int i = 0; i < Vec<A>::kParts; ++i)
    for (int k = 0; k < Vec<A>::kPartLanes; ++k) r.part[i][k] = A(i * Vec<A>::kPartLanes + k);
  return r;
}

template <class A>
NORMKIT_INLINE Vec<A> keep(const Vec<A>& v, Full) {
  return v;
}
// Zero in the lanes past the end, which would otherwise hold (0 - mean).
template <class A>
NORMKIT_INLINE Vec<A> keep(const Vec<A>& v, Part t) {
  return where_less(lane_index<A>(), Vec<A>(A(t.n)), v, Vec<A>());
}

// The sum of the lanes in double, as a tree: i + (i + 8), then i + (i + 4), ... What float lanes have gathered is nearly
// exact, and adding sixteen of them in float would spoil it.
NORMKIT_INLINE double reduce(const Vec<double>& v) {
#if defined(__AVX__)
#if defined(__AVX512F__)
  const __m512d all = (__m512d)v.part[0];
  const __m256d four = _mm512_castpd512_pd256(all) + _mm512_extractf64x4_pd(all, 1);
#else
  const __m256d four = (__m256d)v.part[0] + (__m256d)v.part[1];
#endif
  const __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
  return two[0] + two[1];
#else
  double lanes[8];
  memcpy(lanes, v.part, 64);
  const double a = lanes[0] + lanes[4], b = lanes[1] + lanes[5], c = lanes[2] + lanes[6], d = lanes[3] + lanes[7];
  return (a + c) + (b + d);
#endif
}
NORMKIT_INLINE double reduce(const Vec<float>& v) {
  Vec<double> sum;
#if defined(__AVX512F__)
  const __m512 all = (__m512)v.part[0];
  sum.part[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(all)) + _mm512_cvtps_pd(_mm512_extractf32x8_ps(all, 1));
#elif defined(__AVX__)
  const __m256 low = (__m256)v.part[0], high = (__m256)v.part[1];
  sum.part[0] = _mm256_cvtps_pd(_mm256_castps256_ps128(low)) + _mm256_cvtps_pd(_mm256_castps256_ps128(high));
  sum.part[1] = _mm256_cvtps_pd(_mm256_extractf128_ps(low, 1)) + _mm256_cvtps_pd(_mm256_extractf128_ps(high, 1));
#else
  typedef float Half __attribute__((vector_size(kNativeBytes / 2)));
  typedef double Wide __attribute__((vector_size(kNativeBytes)));
  Half half[2 * Vec<float>::kParts];
  memcpy(half, v.part, 64);
  NORMKIT_UNROLL for (int i = 0; i < Vec<double>::kParts; ++i)
    sum.part[i] = __builtin_convertvector(half[i], Wide) + __builtin_convertvector(half[i + Vec<double>::kParts], Wide);
#endif
  return reduce(sum);
}

template <class A>
NORMKIT_INLINE A sqrt_of(A v) {
  if constexpr (sizeof(A) == 4) return __builtin_sqrtf(v);
  return __builtin_sqrt(v);
}
template <class A>
NORMKIT_INLINE Vec<A> sqrt_of(const Vec<A>& v) {
  Vec<A> r;
  NORMKIT_UNROLL for (int i = 0; i < Vec<A>::kParts; ++i)
    for (int k = 0; k < Vec<A>::kPartLanes; ++k) r.part[i][k] = sqrt_of<A>(v.part[i][k]);
  return r;
}

template <class A>
NORMKIT_INLINE bool is_finite(A v) {
  return v - v == 0;
}

// ---- loops over a row ----

// Where one Vec is several registers, unrolled loops would only make the program larger.
constexpr bool kUnroll = kNativeBytes > 16;

// Call f(j, Full{}) for each whole vector of [0, n) and f(j, Part{rest}) for what is left.
template <class A, class F>
NORMKIT_INLINE void for_each(int64_t n, const F& f) {
  constexpr int L = Vec<A>::kLanes;
  int64_t j = 0;
  if constexpr (kNativeBytes == 64) {
    for (; j + 2 * L <= n; j += 2 * L) {
      f(j, Full{});
      f(j + L, Full{});
    }
  }
  for (; j + L <= n; j += L) f(j, Full{});
  if (j < n) f(j, Part{int(n - j)});
}

// The same with an accumulator: f(acc, j, tag). Four accumulators hide the latency of the additions: whole quadruples
// of vectors take them in turn, what is left goes to the first, an unfinished vector to the second.
template <class A, class Acc, class F>
NORMKIT_INLINE Acc accumulate(int64_t n, const F& f) {
  constexpr int L = Vec<A>::kLanes;
  int64_t j = 0;
  if constexpr (kUnroll) {
    Acc a0{}, a1{}, a2{}, a3{};
    for (; j + 4 * L <= n; j += 4 * L) {
      f(a0, j, Full{});
      f(a1, j + L, Full{});
      f(a2, j + 2 * L, Full{});
      f(a3, j + 3 * L, Full{});
    }
    for (; j + L <= n; j += L) f(a0, j, Full{});
    if (j < n) f(a1, j, Part{int(n - j)});
    return (a0 + a1) + (a2 + a3);
  } else {
    Acc acc[4] = {};
    const int64_t quadruples = n / (4 * L) * (4 * L);
    for (; j + L <= n; j += L) f(acc[j < quadruples ? j / L % 4 : 0], j, Full{});
    if (j < n) f(acc[1], j, Part{int(n - j)});
    return (acc[0] + acc[1]) + (acc[2] + acc[3]);
  }
}

// The four accumulators themselves, for sums that run over several rows: what is left after whole quadruples takes them
// in turn too, since many short rows would otherwise all wait for the first.
template <class Acc>
struct Four {
  Acc a0{}, a1{}, a2{}, a3{};
  NORMKIT_INLINE Acc total() const { return (a0 + a1) + (a2 + a3); }
};
template <class A, class Acc, class F>
NORMKIT_INLINE void accumulate_more(Four<Acc>& acc, int64_t n, const F& f) {
  constexpr int L = Vec<A>::kLanes;
  int64_t j = 0;
  for (; j + 4 * L <= n; j += 4 * L) {
    f(acc.a0, j, Full{});
    f(acc.a1, j + L, Full{});
    f(acc.a2, j + 2 * L, Full{});
    f(acc.a3, j + 3 * L, Full{});
  }
  if (j + 2 * L <= n) {
    f(acc.a0, j, Full{});
    f(acc.a1, j + L, Full{});
    j += 2 * L;
  }
  if (j + L <= n) {
    f(acc.a2, j, Full{});
    j += L;
  }
  if (j < n) f(acc.a3, j, Part{int(n - j)});
}

// Two sums carried at once.
template <class A>
struct Pair {
  Vec<A> first, second;
};
template <class A>
NORMKIT_INLINE Pair<A> operator+(const Pair<A>& a, const Pair<A>& b) {
  return {a.first + b.first, a.second + b.second};
}

}  // namespace NORMKIT_ISA
}  // namespace normkit
