#pragma once
// Products and functions of matrices [features][P], the tokens of a chunk side by side in a vector's lanes.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "exponential.h"
#include "inner.h"

namespace {

// bytes of a vector; vectors of sums that the registers hold beside operands; rows at once of one vector
#if defined(__AVX512F__)
constexpr int BYTES = 64, SUMS = 24, TALL = 16;
#elif defined(__AVX__)
constexpr int BYTES = 32, SUMS = 12, TALL = 8;
#else
constexpr int BYTES = 16, SUMS = 8, TALL = 8;
#endif

inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

template <class R> struct Vector {
  typedef R type __attribute__((vector_size(BYTES), aligned(alignof(R)), may_alias));
  static constexpr int size = BYTES / sizeof(R);
};

using ::exponential;

// as the scalar one, which GCC gives two divisions where it vectorises a sigmoid
inline Vector<float>::type exponential(Vector<float>::type x) {
  typedef Vector<float>::type V;
  typedef int32_t Bits __attribute__((vector_size(BYTES), aligned(4), may_alias));
  V low = V{} - 87.0f, high = V{} + 88.0f;
  x = x < low ? low : x, x = x > high ? high : x;
  V whole = x * 1.44269504f + 12582912.0f;
  Bits bits = (Bits)whole;
  whole -= 12582912.0f;
  V r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  V p = V{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Bits scale = (bits - 0x4B400000 + 127) << 23;
  return p * (V)scale;
}
inline Vector<double>::type exponential(Vector<double>::type x) {
  for (int j = 0; j < Vector<double>::size; j++) x[j] = std::exp(x[j]);
  return x;
}
template <class X> inline X sigmoid(X x) { return 1 / (1 + exponential(-x)); }

// f(i, X()) for n places: X is a vector of R, and R for the last few
template <class R, class F> inline void each(int64_t n, F f) {
  typedef typename Vector<R>::type V;
  int64_t i = 0;
  for (; i + Vector<R>::size <= n; i += Vector<R>::size) f(i, V());
  for (; i < n; i++) f(i, R());
}
template <class X, class R> inline X& at(R* x, int64_t i) { return *(X*)(x + i); }
template <class X, class R> inline const X& at(const R* x, int64_t i) { return *(const X*)(x + i); }

// MR rows and NV vectors of C (+)= sign A B, where A[m][k] is at a[m * row + k * column]
template <class R, int MR, int NV>
inline void tile(int K, R sign, const R* a, int64_t row, int64_t column, const R* b, int64_t ldb, R* c,
                 int64_t ldc, bool add) {
  typedef typename Vector<R>::type V;
  constexpr int size = Vector<R>::size;
  V sum[MR][NV];
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NV; j++) sum[i][j] = V{};
  for (int k = 0; k < K; k++) {
    V right[NV];
    for (int j = 0; j < NV; j++) right[j] = *(const V*)(b + k * ldb + j * size);
    for (int i = 0; i < MR; i++) {
      R left = a[i * row + k * column];
      for (int j = 0; j < NV; j++) sum[i][j] += left * right[j];
    }
  }
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NV; j++) {
      V* to = (V*)(c + i * ldc + j * size);
      *to = add ? *to + sign * sum[i][j] : sign * sum[i][j];
    }
}

// NV vectors of C's columns, and of its rows as many at once as there are registers
template <class R, int NV, int MR = SUMS / NV>
inline void columns(int M, int K, R sign, const R* a, int64_t row, int64_t column, const R* b, int64_t ldb,
                    R* c, int64_t ldc, bool add) {
  int m = 0;
  for (; m + MR <= M; m += MR) tile<R, MR, NV>(K, sign, a + m * row, row, column, b, ldb, c + m * ldc, ldc, add);
  if constexpr (MR > 1)
    if (m < M) columns<R, NV, (MR + 1) / 2>(M - m, K, sign, a + m * row, row, column, b, ldb, c + m * ldc, ldc, add);
}

// C [M][N] (+)= sign A B; rows of B and C are ldb and ldc apart
template <class R>
APART void multiply(int M, int N, int K, R sign, const R* a, int64_t row, int64_t column, const R* b, int64_t ldb,
                    R* c, int64_t ldc, bool add) {
  constexpr int size = Vector<R>::size;
  int n = 0;
  if constexpr (SUMS >= 24)
    for (; n + 4 * size <= N; n += 4 * size)
      columns<R, 4>(M, K, sign, a, row, column, b + n, ldb, c + n, ldc, add);
  for (; n + 2 * size <= N; n += 2 * size)
    columns<R, 2>(M, K, sign, a, row, column, b + n, ldb, c + n, ldc, add);
  for (; n + size <= N; n += size)
    columns<R, 1, TALL>(M, K, sign, a, row, column, b + n, ldb, c + n, ldc, add);
  for (; n < N; n++)
    for (int m = 0; m < M; m++) {
      R sum = 0;
      for (int k = 0; k < K; k++) sum += a[m * row + k * column] * b[k * ldb + n];
      c[m * ldc + n] = (add ? c[m * ldc + n] : R(0)) + sign * sum;
    }
}
template <class R>
inline void multiply(int M, int N, int K, R sign, const R* a, int64_t row, int64_t column, const R* b, R* c,
                     bool add) {
  multiply<R>(M, N, K, sign, a, row, column, b, N, c, N, add);
}

template <class R> APART void transpose(int M, int N, const R* from, R* to) {
  for (int m = 0; m < M; m += LANES)
    for (int n = 0; n < N; n += LANES)
      for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[(n + i) * int64_t(M) + m + j] = from[(m + j) * int64_t(N) + n + i];
}

// of n values, a multiple of LANES
APART Real greatest(int n, In x) {
  Real most[LANES];
  std::fill(most, most + LANES, -INFINITY);
  for (int i = 0; i < n; i += LANES)
    for (int j = 0; j < LANES; j++) most[j] = std::max(most[j], x[i + j]);
  return *std::max_element(most, most + LANES);
}

// x becomes exp(x - most); their sum
APART Real exponentials(int n, Real most, Out x) {
  typedef Vector<Real>::type V;
  V part = {};
  for (int i = 0; i < n; i += Vector<Real>::size) part += at<V>(x, i) = exponential(at<V>(x, i) - most);
  Real total = 0;
  for (int j = 0; j < Vector<Real>::size; j++) total += part[j];
  return total;
}

APART void scale_by(int n, Real scale, Out x) {
  for (int i = 0; i < n; i++) x[i] *= scale;
}

enum Activation { SILU, GELU, IDENTITY };

template <class R> APART void activate(int activation, int n, const R* z, R* f) {
  if (activation == SILU)
    each<R>(n, [&](int64_t i, auto lane) {
      typedef decltype(lane) X;
      at<X>(f, i) = at<X>(z, i) * sigmoid(at<X>(z, i));
    });
  else if (activation == GELU)
    for (int i = 0; i < n; i++) f[i] = R(0.5) * z[i] * (1 + std::erf(z[i] * R(M_SQRT1_2)));
  else
    std::copy(z, z + n, f);
}

// f' and, where there is space for it, f''
template <class R> APART void slopes(int activation, int n, const R* z, R* first, R* second) {
  if (activation == SILU) {
    each<R>(n, [&](int64_t i, auto lane) {
      typedef decltype(lane) X;
      X x = at<X>(z, i), s = sigmoid(x), rest = s * (1 - s);
      at<X>(first, i) = s + x * rest;
      if (second) at<X>(second, i) = rest * (2 + x * (1 - 2 * s));
    });
  } else if (activation == GELU) {
    for (int i = 0; i < n; i++) {
      R density = std::exp(R(-0.5) * z[i] * z[i]) * R(0.398942280401432677939946);
      first[i] = R(0.5) * (1 + std::erf(z[i] * R(M_SQRT1_2))) + z[i] * density;
      if (second) second[i] = density * (2 - z[i] * z[i]);
    }
  } else {
    std::fill(first, first + n, R(1));
    if (second) std::fill(second, second + n, R(0));
  }
}

// y += sign x scale, a factor for each lane
template <class R> APART void add_scaled(int rows, int P, const R* x, const R* scale, R sign, R* y) {
  for (int i = 0; i < rows; i++)
    for (int t = 0; t < P; t++) y[i * P + t] += sign * x[i * P + t] * scale[t];
}

template <class R> APART void scaled(int rows, int P, const R* x, const R* scale, R* y) {
  for (int i = 0; i < rows; i++)
    for (int t = 0; t < P; t++) y[i * P + t] = x[i * P + t] * scale[t];
}

// out[t] += sign sum_i x[i][t] y[i][t]
template <class R> APART void add_inner(int rows, int P, const R* x, const R* y, R sign, R* out) {
  for (int t0 = 0; t0 < P; t0 += LANES) {
    R sum[LANES] = {};
    for (int i = 0; i < rows; i++)
      for (int t = 0; t < LANES; t++) sum[t] += x[i * P + t0 + t] * y[i * P + t0 + t];
    for (int t = 0; t < LANES; t++) out[t0 + t] += sign * sum[t];
  }
}

}  // namespace
