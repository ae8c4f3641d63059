#pragma once
// x + LN(z) of one head in a chunk, with its gradients: `Norm` of ../memory/residual.py, whose names these are.
//
// Matrices are [features][P] as in lanes.h. Only the first `rows` features exist: the others, which are zero, are
// neither read nor written, and have no part in a mean.
#include <cmath>

#include "lanes.h"

namespace {

template <class R> struct Norm {
  typedef typename Vector<R>::type V;
  static constexpr int size = Vector<R>::size;
  static constexpr R EPS = R(1e-6);

  int rows;
  const R *weight, *bias;  // of the head
  R *dweight, *dbias;      // [rows][LANES]: sums over tokens, lane by lane

  static const V& at(const R* x, int64_t i) { return *(const V*)(x + i); }
  static V& at(R* x, int64_t i) { return *(V*)(x + i); }

  // z becomes n = (z - mean z) r.
  APART void normalise(int P, R* z, R* r) const {
    for (int t = 0; t < P; t += size) {
      V mean = {}, square = {};
      for (int i = 0; i < rows; i++) mean += at(z, i * P + t);
      mean /= R(rows);
      for (int i = 0; i < rows; i++) {
        V centred = at(z, i * P + t) - mean;
        at(z, i * P + t) = centred, square += centred * centred;
      }
      for (int j = 0; j < size; j++) r[t + j] = 1 / std::sqrt(square[j] / rows + EPS);
      for (int i = 0; i < rows; i++) at(z, i * P + t) *= at(r, t);
    }
  }

  // y = x + n w + b
  APART void output(int P, const R* x, const R* n, R* y) const {
    for (int i = 0; i < rows; i++)
      for (int t = 0; t < P; t++) y[i * P + t] = x[i * P + t] + n[i * P + t] * weight[i] + bias[i];
  }

  // g becomes J g = r (g - mean g - n mean(g n)).
  APART void through(int P, const R* n, const R* r, R* g) const {
    for (int t = 0; t < P; t += size) {
      V mean = {}, along = {};
      for (int i = 0; i < rows; i++) mean += at(g, i * P + t), along += at(g, i * P + t) * at(n, i * P + t);
      mean /= R(rows), along /= R(rows);
      for (int i = 0; i < rows; i++)
        at(g, i * P + t) = at(r, t) * (at(g, i * P + t) - mean - at(n, i * P + t) * along);
    }
  }

  // dy becomes the gradient of z.
  APART void output_backward(int P, const R* n, const R* r, R* dy) const {
    for (int i = 0; i < rows; i++)
      for (int t = 0; t < P; t += size) {
        V& g = at(dy, i * P + t);
        add(i, t, g * at(n, i * P + t), g);
        g *= weight[i];
      }
    through(P, n, r, dy);
  }

  // d = J(e w) from the errors e.
  APART void surprise(int P, const R* n, const R* r, const R* e, R* d) const {
    for (int i = 0; i < rows; i++)
      for (int t = 0; t < P; t += size) at(d, i * P + t) = at(e, i * P + t) * weight[i];
    through(P, n, r, d);
  }

  // dd, the gradient of d, becomes that of z; dp is that of the prediction M(k).
  APART void surprise_backward(int P, const R* n, const R* r, const R* e, R* dd, R* dp) const {
    for (int t = 0; t < P; t += size) {
      V dd_mean = {}, dd_n = {}, g_mean = {}, g_n = {}, dd_g = {}, mean = {}, along = {};
      for (int i = 0; i < rows; i++) {
        V x = at(dd, i * P + t), y = at(n, i * P + t), g = at(e, i * P + t) * weight[i];
        dd_mean += x, dd_n += x * y, g_mean += g, g_n += g * y, dd_g += x * g;
      }
      for (V* sum : {&dd_mean, &dd_n, &g_mean, &g_n, &dd_g}) *sum /= R(rows);
      V scale = at(r, t), dr = dd_g - dd_mean * g_mean - dd_n * g_n;
      for (int i = 0; i < rows; i++) {
        V &x = at(dd, i * P + t), y = at(n, i * P + t), error = at(e, i * P + t);
        V dg = scale * (x - dd_mean - y * dd_n), p = R(2) * dg * weight[i];
        add(i, t, error * dg + p * y, p);
        at(dp, i * P + t) = p;
        x = p * weight[i] - scale * (error * weight[i] * dd_n + x * g_n);  // of n
        mean += x, along += x * y;
      }
      mean /= R(rows), along /= R(rows);
      for (int i = 0; i < rows; i++) {
        V &x = at(dd, i * P + t), y = at(n, i * P + t);
        x = scale * (x - mean - y * along) - y * dr * scale * scale;
      }
    }
  }

 private:
  void add(int i, int t, V to_weight, V to_bias) const {
    int64_t place = i * LANES + t % LANES;
    at(dweight, place) += to_weight, at(dbias, place) += to_bias;
  }
};

}  // namespace
