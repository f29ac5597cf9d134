// Loads and stores between storage types and compute lanes, whole or partial, plain or streaming.
#pragma once

#include "simd.h"

namespace normkit::NORMKIT_ISA {

typedef uint32_t U32 __attribute__((vector_size(kNativeBytes)));
typedef uint16_t U16 __attribute__((vector_size(kNativeBytes / 2)));
using VecF = Vec<float>;

NORMKIT_INLINE U32 bits_of(VecF::Native v) { return (U32)v; }
NORMKIT_INLINE VecF::Native float_of(U32 v) { return (VecF::Native)v; }

// Conversions that take many instructions are functions of their own on processors so old that size counts for more.
#if defined(__SSE2__) && !defined(__AVX2__)
#define NORMKIT_LONG inline __attribute__((noinline))
#else
#define NORMKIT_LONG NORMKIT_INLINE
#endif

// ---- bfloat16: the upper half of a float ----

// (GCC 12 takes five instructions for the widening that is one.)
#if defined(__AVX512F__)
NORMKIT_INLINE U32 zero_extended(U16 h) { return (U32)_mm512_cvtepu16_epi32((__m256i)h); }
#elif defined(__AVX2__)
NORMKIT_INLINE U32 zero_extended(U16 h) { return (U32)_mm256_cvtepu16_epi32((__m128i)h); }
#else
NORMKIT_INLINE U32 zero_extended(U16 h) { return __builtin_convertvector(h, U32); }
#endif

NORMKIT_INLINE VecF::Native widen(U16 h, bfloat16) { return float_of(zero_extended(h) << 16); }

// The upper halves hold the value rounded to nearest even: of anything but a NaN, and of any value (a NaN stays one,
// made quiet).
NORMKIT_INLINE U32 rounded_number(VecF::Native v) {
  const U32 u = bits_of(v);
  return u + 0x7fffu + ((u >> 16) & 1u);
}
NORMKIT_INLINE U32 rounded_value(VecF::Native v) { return (v != v) ? (bits_of(v) | 0x400000u) : rounded_number(v); }

NORMKIT_LONG U16 narrow(VecF::Native v, bfloat16) {
#if defined(__AVX512BF16__)
  // Rounds to nearest even like the integer form, but takes subnormal floats (below 1.2e-38) for zero.
  return (U16)_mm512_cvtneps_pbh((__m512)v);
#else
  return __builtin_convertvector(rounded_value(v) >> 16, U16);
#endif
}

// ---- float16 ----

#if defined(__AVX512F__)
NORMKIT_INLINE VecF::Native widen(U16 h, float16) { return (VecF::Native)_mm512_cvtph_ps((__m256i)h); }
NORMKIT_INLINE U16 narrow(VecF::Native v, float16) {
  return (U16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
NORMKIT_INLINE VecF::Native widen(U16 h, float16) { return (VecF::Native)_mm256_cvtph_ps((__m128i)h); }
NORMKIT_INLINE U16 narrow(VecF::Native v, float16) {
  return (U16)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
}
#else
NORMKIT_LONG VecF::Native widen(U16 h, float16) {
  const U32 u = __builtin_convertvector(h, U32);
  const U32 magnitude = u & 0x7fffu;
  // Moving the exponent by a multiplication also makes subnormal halves come out right.
  const VecF::Native scaled = float_of(magnitude << 13) * 0x1p112f;
  const U32 special = (magnitude << 13) | 0x7f800000u;  // inf and NaN
  return float_of((magnitude >= 0x7c00u ? special : bits_of(scaled)) | ((u & 0x8000u) << 16));
}
NORMKIT_LONG U16 narrow(VecF::Native v, float16) {
  const U32 u = bits_of(v);
  const U32 magnitude = u & 0x7fffffffu;
  const U32 normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  const U32 subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;  // the addition rounds to 2^-24
  U32 r = magnitude < 0x38800000u ? subnormal : normal;
  r = magnitude >= 0x477ff000u ? (U32{} + 0x7c00u) : r;
  r = magnitude > 0x7f800000u ? (0x7e00u | ((magnitude >> 13) & 0x3ffu)) : r;
  return __builtin_convertvector(r | ((u >> 16) & 0x8000u), U16);
}
#endif

// ---- whole vectors ----

template <class T>
NORMKIT_INLINE typename Vec<compute_t<T>>::Native load_register(const T* p) {
  if constexpr (sizeof(T) == 2) {
    U16 h;
    memcpy(&h, p, sizeof h);
    return widen(h, T{});
  } else {
    typename Vec<T>::Native v;
    memcpy(&v, p, sizeof v);
    return v;
  }
}
template <class T>
NORMKIT_INLINE Vec<compute_t<T>> load(const T* p, Full) {
  Vec<compute_t<T>> r;
  NORMKIT_UNROLL for (int i = 0; i < Vec<compute_t<T>>::kParts; ++i)
    r.part[i] = load_register(p + i * Vec<compute_t<T>>::kPartLanes);
  return r;
}
template <class A>
NORMKIT_INLINE void store(A* p, const Vec<A>& v, Full) {
  NORMKIT_UNROLL for (int i = 0; i < Vec<A>::kParts; ++i)
    memcpy(p + i * Vec<A>::kPartLanes, &v.part[i], kNativeBytes);
}

#define NORMKIT_HALF(T)                                                      \
  NORMKIT_INLINE void store(T* p, const VecF& v, Full) {                     \
    NORMKIT_UNROLL for (int i = 0; i < VecF::kParts; ++i) {                                 \
      const U16 h = narrow(v.part[i], T{});                                  \
      memcpy(p + i * VecF::kPartLanes, &h, sizeof h);                        \
    }                                                                        \
  }                                                                          \
  NORMKIT_INLINE VecF round_to(const VecF& v, T) {                           \
    VecF r;                                                                  \
    NORMKIT_UNROLL for (int i = 0; i < VecF::kParts; ++i) r.part[i] = widen(narrow(v.part[i], T{}), T{}); \
    return r;                                                                \
  }
NORMKIT_HALF(float16)
#if defined(__AVX2__) && !defined(__AVX512F__)
// Both registers by one packing; a NaN in either (rare) by the long way.
NORMKIT_INLINE void store(bfloat16* p, const VecF& v, Full) {
  U32 low = rounded_number(v.part[0]), high = rounded_number(v.part[1]);
  if (_mm256_movemask_ps(_mm256_cmp_ps((__m256)v.part[0], (__m256)v.part[1], _CMP_UNORD_Q))) [[unlikely]] {
    low = rounded_value(v.part[0]);
    high = rounded_value(v.part[1]);
  }
  const __m256i halves = _mm256_packus_epi32((__m256i)(low >> 16), (__m256i)(high >> 16));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(halves, 0xd8));
}
NORMKIT_INLINE VecF round_to(const VecF& v, bfloat16) {
  VecF r;
  NORMKIT_UNROLL for (int i = 0; i < VecF::kParts; ++i) r.part[i] = float_of(rounded_value(v.part[i]) & 0xffff0000u);
  return r;
}
#else
NORMKIT_HALF(bfloat16)
#endif
#undef NORMKIT_HALF
#undef NORMKIT_LONG

NORMKIT_INLINE VecF round_to(const VecF& v, float) { return v; }
NORMKIT_INLINE Vec<double> round_to(const Vec<double>& v, double) { return v; }

// ---- the first n lanes; the others load as zero ----

// Fewer than 16 elements, without a call: what memcpy of a size known only at run time would be.
template <class T>
NORMKIT_INLINE void copy_few(T* to, const T* from, int n) {
  NORMKIT_UNROLL for (int step = 8; step > 0; step /= 2) {
    if (!(n & step)) continue;
    memcpy(to, from, step * sizeof(T));
    to += step;
    from += step;
  }
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
template <class T>
NORMKIT_INLINE Vec<compute_t<T>> load(const T* p, Part t) {
  const __mmask16 mask = __mmask16((1u << t.n) - 1u);
  if constexpr (sizeof(T) == 2) {
    VecF r;
    r.part[0] = widen((U16)_mm256_maskz_loadu_epi16(mask, p), T{});
    return r;
  } else if constexpr (sizeof(T) == 4) {
    VecF r;
    r.part[0] = (VecF::Native)_mm512_maskz_loadu_ps(mask, p);
    return r;
  } else {
    Vec<double> r;
    r.part[0] = (Vec<double>::Native)_mm512_maskz_loadu_pd(__mmask8(mask), p);
    return r;
  }
}
template <class T>
NORMKIT_INLINE void store(T* p, const Vec<compute_t<T>>& v, Part t) {
  const __mmask16 mask = __mmask16((1u << t.n) - 1u);
  if constexpr (sizeof(T) == 2)
    _mm256_mask_storeu_epi16(p, mask, (__m256i)narrow(v.part[0], T{}));
  else if constexpr (sizeof(T) == 4)
    _mm512_mask_storeu_ps(p, mask, (__m512)v.part[0]);
  else
    _mm512_mask_storeu_pd(p, __mmask8(mask), (__m512d)v.part[0]);
}
#else
#if defined(__AVX2__)
// All ones in the lanes of this part that are among the first n of the vector.
NORMKIT_INLINE __m256i part_mask(int part, int n, float) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n - part * 8), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
NORMKIT_INLINE __m256i part_mask(int part, int n, double) {
  return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n - part * 4), _mm256_setr_epi64x(0, 1, 2, 3));
}
NORMKIT_INLINE __m256 load_part(const float* p, __m256i mask) { return _mm256_maskload_ps(p, mask); }
NORMKIT_INLINE __m256d load_part(const double* p, __m256i mask) { return _mm256_maskload_pd(p, mask); }

// n of sixteen halves (0 < n < 16): pairs as far as there are any, then the last one once more or for the first time.
// By way of memory a load would wait for the small stores before it.
template <class T>
NORMKIT_INLINE VecF load_halves(const T* p, int n) {
  const __m256i pairs = _mm256_maskload_epi32(reinterpret_cast<const int*>(p), part_mask(0, n / 2, 0.0f));
  const __m256i index = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m256i last = _mm256_and_si256(_mm256_cmpeq_epi16(_mm256_set1_epi16(short(n - 1)), index),
                                        _mm256_set1_epi16(short(p[n - 1].bits)));
  const __m256i all = _mm256_or_si256(pairs, last);
  VecF r;
  r.part[0] = widen((U16)_mm256_castsi256_si128(all), T{});
  r.part[1] = widen((U16)_mm256_extracti128_si256(all, 1), T{});
  return r;
}
#endif
template <class T>
NORMKIT_INLINE Vec<compute_t<T>> load(const T* p, Part t) {
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 2) {
    return load_halves(p, t.n);
  } else {
    Vec<T> r;
    NORMKIT_UNROLL for (int i = 0; i < Vec<T>::kParts; ++i)
      r.part[i] = load_part(p + i * Vec<T>::kPartLanes, part_mask(i, t.n, T{}));
    return r;
  }
#else
  T buffer[Vec<compute_t<T>>::kLanes] = {};
  copy_few(buffer, p, t.n);
  return load(buffer, Full{});
#endif
}
// (A masked store of AVX2 takes some processors longer than this.)
template <class T>
NORMKIT_INLINE void store(T* p, const Vec<compute_t<T>>& v, Part t) {
  T buffer[Vec<compute_t<T>>::kLanes];
  store(buffer, v, Full{});
  copy_few(p, buffer, t.n);
}
#endif

// ---- streaming stores: past the cache, for outputs larger than it. The address must be a multiple of 64 bytes (32 for
// half types). Where there are none, an ordinary store.

template <class T>
NORMKIT_INLINE void stream(T* p, const Vec<compute_t<T>>& v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2)
    _mm256_stream_si256((__m256i*)p, (__m256i)narrow(v.part[0], T{}));
  else
    _mm512_stream_si512((__m512i*)p, (__m512i)v.part[0]);
#elif defined(__AVX__)
  if constexpr (sizeof(T) == 2) {
    alignas(32) T halves[Vec<compute_t<T>>::kLanes];
    store(halves, v, Full{});
    _mm256_stream_si256((__m256i*)p, _mm256_load_si256((const __m256i*)halves));
  } else {
    NORMKIT_UNROLL for (int i = 0; i < Vec<T>::kParts; ++i)
      _mm256_stream_si256((__m256i*)p + i, (__m256i)v.part[i]);
  }
#elif defined(__SSE2__)
  alignas(64) T buffer[Vec<compute_t<T>>::kLanes];
  store(buffer, v, Full{});
  for (unsigned i = 0; i < sizeof buffer / 16; ++i)
    _mm_stream_si128((__m128i*)p + i, _mm_load_si128((const __m128i*)buffer + i));
#else
  store(p, v, Full{});
#endif
}

// Order the streaming stores before whatever the thread does next.
NORMKIT_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace normkit::NORMKIT_ISA
