// What the elementwise passes of channel norms multiply and add, formed once for many elements: two or three numbers where
// the formulas have five. The mean itself is subtracted first, so that a large one costs no digits.
#pragma once

#include "moments.h"

namespace normkit::NORMKIT_ISA {

// Whether a product formed beforehand keeps its digits: not where it leaves the exponents of A, or comes near to that
// (values of 1e30 with gains of 1e-10), though the same factors one by one do not. `factor` is one of its own factors: a
// product with zero may be zero. A NaN is one either way, and other channels keep their bits.
template <class A>
constexpr A kSmall = sizeof(A) == 4 ? A(1e-34) : A(1e-290);
template <class A>
constexpr A kLarge = sizeof(A) == 4 ? A(1e34) : A(1e290);
template <class A>
NORMKIT_INLINE bool is_safe(A product, A factor) {
  const A size = product < 0 ? -product : product;
  return !(size <= kSmall<A> || size >= kLarge<A>) || factor == 0;
}

// y = (x - high) * scale + shift: the lower part of the mean goes into the shift, where it is smaller than the steps
// between values of x near the mean.
template <class A>
struct Scaled {
  Statistic<A> stat;
  A gain, bias, scale, shift;
  bool safe;
};
template <class A>
NORMKIT_INLINE Scaled<A> scaled(const Statistic<A>& stat, A gain, A bias) {
  const A scale = stat.rstd * gain;
  return {stat, gain, bias, scale, bias - stat.low * scale, is_safe(scale, gain)};
}

// dx = rstd * (gain * grad - s1 - x̂ * s2) = (grad * scale - (x - high) * slope) - shift.
template <class A>
struct ScaledGrad {
  Statistic<A> stat;
  A gain, s1, s2, scale, slope, shift;
  bool safe;
};
template <class A>
NORMKIT_INLINE ScaledGrad<A> scaled_grad(const Statistic<A>& stat, A gain, double s1, double s2) {
  const A scale = stat.rstd * gain;
  const double rstd = stat.rstd, slope = rstd * rstd * s2, shift = rstd * s1 - stat.low * slope;
  return {stat, gain, A(s1), A(s2), scale, A(slope), A(shift),
          is_safe(scale, gain) && is_safe(A(slope), A(s2)) && !(shift >= kLarge<A> || shift <= -kLarge<A>)};
}

}  // namespace normkit::NORMKIT_ISA
