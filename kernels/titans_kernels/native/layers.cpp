// What stands around the memory, each a pass over its tokens: the short convolution with what is before and
// after it, and RMSNorm with its gate. Rows are independent; channels lie side by side.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "calls.h"
#include "lanes.h"

namespace {

// rows of n values; those of x are ldx apart
APART void silu(int64_t rows, int n, const Real* x, int64_t ldx, Out y) {
  for (int64_t r = 0; r < rows; r++)
    each<Real>(n, [&](int64_t i, auto lane) {
      typedef decltype(lane) X;
      X z = at<X>(x, r * ldx + i);
      at<X>(y, r * n + i) = z * sigmoid(z);
    });
}

APART void silu_and_slope(int64_t rows, int n, const Real* x, int64_t ldx, Out y, Out slope) {
  for (int64_t r = 0; r < rows; r++)
    each<Real>(n, [&](int64_t i, auto lane) {
      typedef decltype(lane) X;
      X z = at<X>(x, r * ldx + i), s = sigmoid(z), open = z * s;
      at<X>(y, r * n + i) = open, at<X>(slope, r * n + i) = s + open * (1 - s);
    });
}

// y = sum_j w[j] x[j], rows of which are ldw and ldx apart
APART void convolve(int n, int kernel, const Real* w, int64_t ldw, const Real* x, int64_t ldx, Out y) {
  each<Real>(n, [&](int64_t i, auto lane) {
    typedef decltype(lane) X;
    X sum = {};
    for (int j = 0; j < kernel; j++) sum += at<X>(w, j * ldw + i) * at<X>(x, j * ldx + i);
    at<X>(y, i) = sum;
  });
}

// to += sum_t x[t] y[t], rows of n
APART void add_products(int64_t T, int n, const Real* x, const Real* y, Out to) {
  each<Real>(n, [&](int64_t i, auto lane) {
    typedef decltype(lane) X;
    X sum = at<X>(to, i);
    for (int64_t t = 0; t < T; t++) sum += at<X>(x, t * n + i) * at<X>(y, t * n + i);
    at<X>(to, i) = sum;
  });
}

APART void times(int n, In x, Out y) {
  for (int i = 0; i < n; i++) y[i] *= x[i];
}

// to = scale x - along y
APART void combine(int n, Real scale, In x, Real along, In y, Out to) {
  for (int i = 0; i < n; i++) to[i] = scale * x[i] - along * y[i];
}

// A head of a part of a row: E channels from `column` on, which fit into the cache.
struct Head {
  int E, K, part, size;
  bool unit;
  int64_t C, row, column, first, length, out;  // out: of the row's first token in the part
  Head(const Mix& mix, int64_t row, int part, int h)
      : E(mix.width), K(mix.kernel), part(part), size(mix.heads * E), unit(mix.unit >> part & 1),
        C(mix.parts * size), row(row), column(part * size + h * E), first(mix.borders[row]),
        length(mix.borders[row + 1] - first), out(first * size + h * E) {}
  int64_t token(int64_t t) const { return (first + t) * C + column; }
  // silu(x) after the state before the row, K - 1 more than the tokens
  void before(const Mix& mix, const Real* state, std::vector<Real>& held) const {
    held.resize((K - 1 + length) * E);
    for (int j = 0; j < K - 1; j++)
      std::copy_n(state + row * mix.state_stride + j * C + column, E, held.data() + j * E);
  }
};

template <class F> void for_heads(const Mix& mix, int64_t first, int64_t stop, F f) {
  for (int64_t r = first; r < stop; r++)
    for (int p = 0; p < mix.parts; p++)
      for (int h = 0; h < mix.heads; h++) f(Head(mix, r, p, h));
}

}  // namespace

// x [T, C], weight [K, C], state [rows, K - 1, C]; a part of the output is [T, heads, width]
extern "C" void mix_forward(const Mix* mix, const Real* x, const Real* weight, const Real* state, Real** out,
                            int64_t first, int64_t stop) {
  std::vector<Real> held;
  for_heads(*mix, first, stop, [&](const Head& h) {
    h.before(*mix, state, held);
    Real* now = held.data() + (h.K - 1) * h.E;
    silu(h.length, h.E, x + h.token(0), h.C, now);
    for (int64_t t = 0; t < h.length; t++) {
      Real* y = out[h.part] + h.out + t * h.size;
      convolve(h.E, h.K, weight + h.column, h.C, now + t * h.E, -h.E, y);
      if (h.unit) scale_by(h.E, 1 / std::max(std::sqrt(inner(h.E, y, y)), Real(mix->least)), y);
    }
  });
}

// dout may hold null pointers; dweight [K, C] is added to, dstate [rows, K - 1, C] written
extern "C" void mix_backward(const Mix* mix, const Real* x, const Real* weight, const Real* state, Real** dout,
                             Real* dx, Real* dweight, Real* dstate, int64_t first, int64_t stop) {
  std::vector<Real> held, slope, y(mix->width), dy;
  for_heads(*mix, first, stop, [&](const Head& h) {
    int E = h.E, K = h.K, before = K - 1;
    int64_t T = h.length;
    h.before(*mix, state, held), slope.resize(T * E);
    Real* now = held.data() + before * E;
    silu_and_slope(T, E, x + h.token(0), h.C, now, slope.data());
    dy.assign((T + 2 * before) * E, 0);  // zeros before the first token and after the last
    Real* d = dy.data() + before * E;
    for (int64_t t = 0; t < T && dout[h.part]; t++) {
      const Real* g = dout[h.part] + h.out + t * h.size;
      Real scale = 1, along = 0;
      if (h.unit) {
        convolve(E, K, weight + h.column, h.C, now + t * E, -E, y.data());
        Real norm = std::sqrt(inner(E, y.data(), y.data()));
        scale = 1 / std::max(norm, Real(mix->least));
        if (norm > mix->least) along = inner(E, y.data(), g) * scale * scale * scale;
      }
      combine(E, scale, g, along, y.data(), d + t * E);
    }
    for (int j = 0; j < K; j++) add_products(T, E, now - j * E, d, dweight + j * h.C + h.column);
    // the gradient of silu(x)_t is sum_j w_j dy_{t+j}
    for (int64_t t = -before; t < T; t++) {
      Real* to = t < 0 ? dstate + (h.row * before + t + before) * h.C + h.column : dx + h.token(t);
      convolve(E, K, weight + h.column, h.C, d + t * E, E, to);
      if (t >= 0) times(E, slope.data() + t * E, to);
    }
  });
}

namespace {

APART Real square_mean(int n, In x) { return inner(n, x, x) / n; }

APART void norm_row(int n, Real scale, In x, In weight, Out y) {
  for (int i = 0; i < n; i++) y[i] = scale * x[i] * weight[i];
}

APART void gated_norm_row(int n, Real scale, In x, In weight, In gate, Out y) {
  each<Real>(n, [&](int64_t i, auto lane) {
    typedef decltype(lane) X;
    X g = at<X>(gate, i);
    at<X>(y, i) = scale * at<X>(x, i) * at<X>(weight, i) * g * sigmoid(g);
  });
}

// dx becomes the gradient of the normalised x times its weight, without what the norm itself gives
APART void norm_row_back(int n, Real scale, In x, In weight, In dy, Out dx, Out dweight) {
  for (int i = 0; i < n; i++) dweight[i] += dy[i] * scale * x[i], dx[i] = dy[i] * weight[i];
}

APART void gated_norm_row_back(int n, Real scale, In x, In weight, In gate, In dy, Out dx, Out dweight, Out dgate) {
  each<Real>(n, [&](int64_t i, auto lane) {
    typedef decltype(lane) X;
    X g = at<X>(gate, i), s = sigmoid(g), open = g * s, d = at<X>(dy, i), y = scale * at<X>(x, i), w = at<X>(weight, i);
    at<X>(dgate, i) = d * y * w * (s + open * (1 - s));
    at<X>(dweight, i) += d * open * y, at<X>(dx, i) = d * open * w;
  });
}

}  // namespace

// y = x / sqrt(mean x^2 + epsilon) weight silu(gate), rows of ``width``; the gate may be null
extern "C" void norm_forward(int64_t width, double epsilon, const Real* x, const Real* weight, const Real* gate,
                             Real* y, int64_t first, int64_t stop) {
  for (int64_t r = first; r < stop; r++) {
    const Real* from = x + r * width;
    Real scale = 1 / std::sqrt(square_mean(width, from) + Real(epsilon));
    if (gate) gated_norm_row(width, scale, from, weight, gate + r * width, y + r * width);
    else norm_row(width, scale, from, weight, y + r * width);
  }
}

// dweight [width] is added to
extern "C" void norm_backward(int64_t width, double epsilon, const Real* x, const Real* weight, const Real* gate,
                              const Real* dy, Real* dx, Real* dweight, Real* dgate, int64_t first,
                              int64_t stop) {
  for (int64_t r = first; r < stop; r++) {
    const Real *from = x + r * width, *g = dy + r * width;
    Real *to = dx + r * width, scale = 1 / std::sqrt(square_mean(width, from) + Real(epsilon));
    if (gate) gated_norm_row_back(width, scale, from, weight, gate + r * width, g, to, dweight, dgate + r * width);
    else norm_row_back(width, scale, from, weight, g, to, dweight);
    Real along = inner(width, to, from) * scale * scale * scale / width;
    for (int i = 0; i < width; i++) to[i] = scale * to[i] - along * from[i];
  }
}
