// Functions of vectors: exponentials, and what activations are made of them.
#pragma once

#include "simd.h"

namespace simd {

// e^x with a relative error below 2e-7 for x from -87.3 to 88
inline Floats bounded_exponential(Floats x) {
    Ints whole = rounded(x * 1.44269504088896341f);
    Floats part = x - floats(whole) * 0.693359375f;  // ln 2 in two pieces (Cody and Waite, 1980)
    part = part + floats(whole) * 2.12194440e-4f;
    Floats series = broadcast(1.9875691500e-4f);  // Cephes expf
    series = series * part + 1.3981999507e-3f;
    series = series * part + 8.3334519073e-3f;
    series = series * part + 4.1665795894e-2f;
    series = series * part + 1.6666665459e-1f;
    series = series * part + 5.0000001201e-1f;
    series = series * part * part + part + 1.0f;
    return series * (Floats)((whole + 127) << 23);
}

// The same for any x: 0 below -87.3, and no more than e^88
inline Floats exponential(Floats x) {
    Floats lowest = broadcast(-87.3f);
    Ints is_zero = x < lowest;
    x = max(x, lowest);
    x = x < broadcast(88.0f) ? x : broadcast(88.0f);
    return (Floats)((Words)bounded_exponential(x) & ~(Words)is_zero);
}

inline Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

inline Floats hyperbolic_tangent(Floats x) {
    Floats twice = exponential(2.0f * x);  // saturates at both ends
    Floats value = 1.0f - 2.0f / (twice + 1.0f);
    Floats cubic = x - x * x * x * (1.0f / 3.0f);  // near 0 the quotient loses digits
    return absolute(x) < broadcast(0.02f) ? cubic : value;
}

inline Floats gelu_tanh(Floats x) {
    return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

}  // namespace simd
