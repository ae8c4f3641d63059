#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

inline double exponential(double x) { return std::exp(x); }

// 2 units in the last place; written out so that a loop of it is vectorised
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  float whole = x * 1.44269504f + 12582912.0f;
  int32_t bits;
  std::memcpy(&bits, &whole, 4);
  whole -= 12582912.0f;
  float r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t scale = (bits - 0x4B400000 + 127) << 23;
  float power;
  std::memcpy(&power, &scale, 4);
  return p * power;
}
