// Sigmoid and SiLU for gates.
#pragma once

#include "convert.h"

namespace normkit::NORMKIT_ISA {

// exp of x <= 0 to about 1 unit in the last place: x = n log(2) + r, a polynomial in r (Cephes' expf), 2^n by its
// exponent bits. Below -87 the result stays at about 1e-38 where the true one shrinks on; NaN stays NaN.
NORMKIT_INLINE VecF exp_of(const VecF& x) {
  VecF r;
  NORMKIT_UNROLL for (int i = 0; i < VecF::kParts; ++i) {
    VecF::Native v = x.part[i];
    v = v < -87.0f ? (VecF::Native{} - 87.0f) : v;
    const VecF::Native shifted = v * 1.44269504088896341f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    const VecF::Native n = shifted - 12582912.0f;
    const VecF::Native f = (v - n * 0.693359375f) - n * -2.12194440e-4f;
    VecF::Native p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = (p * (f * f) + f) + 1.0f;
    r.part[i] = p * float_of((bits_of(shifted) - 0x4b400000u + 127u) << 23);
  }
  return r;
}
NORMKIT_INLINE Vec<double> exp_of(const Vec<double>& x) {
  Vec<double> r;
  NORMKIT_UNROLL for (int i = 0; i < Vec<double>::kParts; ++i)
    for (int k = 0; k < Vec<double>::kPartLanes; ++k) r.part[i][k] = __builtin_exp(x.part[i][k]);
  return r;
}

// 1 / (1 + exp(-z)), from exp(-|z|) so that nothing overflows.
template <class A>
NORMKIT_INLINE Vec<A> sigmoid(const Vec<A>& z) {
  const Vec<A> zero, one(A(1));
  const Vec<A> e = exp_of(where_less(z, zero, z, zero - z));
  return where_less(z, zero, e, one) / (one + e);
}

// The sigmoid of a row of gates, once for all passes over it: long code, and every loop that inlined it would hold it.
template <class X>
__attribute__((noinline)) void sigmoid_row(const X* z, compute_t<X>* to, int64_t n) {
  for_each<compute_t<X>>(n, [&](int64_t j, auto tag) NORMKIT_LAMBDA { store(to + j, sigmoid(load(z + j, tag)), tag); });
}

// The activation of z with the sigmoid s: SiLU, or s itself.
template <class A>
NORMKIT_INLINE Vec<A> activate(const Vec<A>& z, const Vec<A>& s, bool silu) {
  return silu ? z * s : s;
}

// Its derivative.
template <class A>
NORMKIT_INLINE Vec<A> activation_slope(const Vec<A>& z, const Vec<A>& s, bool silu) {
  const Vec<A> slope = s * (Vec<A>(A(1)) - s);
  return silu ? s + z * slope : slope;
}

}  // namespace normkit::NORMKIT_ISA
