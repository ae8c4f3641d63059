// What stands around the memory, each a pass over its tokens: the short convolution with what is before and
// after it, and RMSNorm with its gate. Rows are independent; channels lie side by side.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "calls.h"
#include "lanes.h"

namespace {

APART void silu(int64_t n, In x, Out y) {
  each<Real>(n, [&](int64_t i, auto lane) {
    typedef decltype(lane) X;
    at<X>(y, i) = at<X>(x, i) * sigmoid(at<X>(x, i));
  });
}

APART void silu_and_slope(int64_t n, In x, Out y, Out slope) {
  each<Real>(n, [&](int64_t i, auto lane) {
    typedef decltype(lane) X;
    X s = sigmoid(at<X>(x, i)), open = at<X>(x, i) * s;
    at<X>(y, i) = open, at<X>(slope, i) = s + open * (1 - s);
  });
}

APART void times(int64_t n, In x, Out y) {
  for (int64_t i = 0; i < n; i++) y[i] *= x[i];
}

// y = sum_j w[j] x[j], rows of which are `w_row` and `x_row` apart
APART void convolve(int C, int kernel, const Real* w, int64_t w_row, const Real* x, int64_t x_row, Out y) {
  each<Real>(C, [&](int64_t c, auto lane) {
    typedef decltype(lane) X;
    X sum = {};
    for (int j = 0; j < kernel; j++) sum += at<X>(w, j * w_row + c) * at<X>(x, j * x_row + c);
    at<X>(y, c) = sum;
  });
}

// to += sum_t x[t] y[t], rows of C
APART void add_products(int64_t T, int C, const Real* x, const Real* y, Out to) {
  each<Real>(C, [&](int64_t c, auto lane) {
    typedef decltype(lane) X;
    X sum = at<X>(to, c);
    for (int64_t t = 0; t < T; t++) sum += at<X>(x, t * C + c) * at<X>(y, t * C + c);
    at<X>(to, c) = sum;
  });
}

// to = scale x - along y
APART void combine(int n, Real scale, In x, Real along, In y, Out to) {
  for (int i = 0; i < n; i++) to[i] = scale * x[i] - along * y[i];
}

struct Row {
  int C;
  int64_t first, length;
  std::vector<Real> held;  // silu(x) after the row's state, K - 1 more than the tokens
  Row(const Mix& mix, int64_t row) : C(mix.parts * mix.heads * mix.width) {
    first = mix.borders[row], length = mix.borders[row + 1] - first;
  }
  Real* at(int64_t token, const Mix& mix) { return held.data() + (token + mix.kernel - 1) * C; }
  void load(const Mix& mix, const Real* state) {
    held.resize((mix.kernel - 1 + length) * C), std::copy(state, state + (mix.kernel - 1) * C, held.begin());
  }
  // the convolution of a token: sum_j w_j silu(x)_{t-j}
  void token(int64_t t, const Mix& mix, const Real* weight, Real* y) {
    convolve(C, mix.kernel, weight, C, at(t, mix), -C, y);
  }
};

}  // namespace

// x [T, C], weight [K, C], state [rows, K - 1, C]; a part of the output is [T, heads, width]
extern "C" void mix_forward(const Mix* mix, const Real* x, const Real* weight, const Real* state, Real** out,
                            int64_t first, int64_t stop) {
  FlushDenormals flush;
  std::vector<Real> y(mix->parts * mix->heads * mix->width);
  for (int64_t r = first; r < stop; r++) {
    Row row(*mix, r);
    row.load(*mix, state + r * mix->state_stride);
    silu(row.length * row.C, x + row.first * row.C, row.at(0, *mix));
    int E = mix->width, size = mix->heads * E;
    for (int64_t t = 0; t < row.length; t++) {
      row.token(t, *mix, weight, y.data());
      for (int p = 0; p < mix->parts; p++) {
        const Real* from = y.data() + p * size;
        Real* to = out[p] + (row.first + t) * size;
        if (!(mix->unit >> p & 1)) {
          std::copy_n(from, size, to);
          continue;
        }
        for (int h = 0; h < mix->heads; h++, from += E, to += E) {
          Real norm = std::sqrt(inner(E, from, from));
          combine(E, 1 / std::max(norm, Real(mix->least)), from, 0, from, to);
        }
      }
    }
  }
}

// dout may hold null pointers; dweight [K, C] is added to, dstate [rows, K - 1, C] written
extern "C" void mix_backward(const Mix* mix, const Real* x, const Real* weight, const Real* state, Real** dout,
                             Real* dx, Real* dweight, Real* dstate, int64_t first, int64_t stop) {
  FlushDenormals flush;
  std::vector<Real> y(mix->parts * mix->heads * mix->width), dy, slope, dheld;
  for (int64_t r = first; r < stop; r++) {
    Row row(*mix, r);
    row.load(*mix, state + r * mix->state_stride);
    int E = mix->width, size = mix->heads * E, C = row.C, K = mix->kernel, before = K - 1;
    slope.resize(row.length * C);
    silu_and_slope(row.length * C, x + row.first * C, row.at(0, *mix), slope.data());
    dy.assign((row.length + 2 * before) * C, 0);  // zeros before the first token and after the last
    Real* d = dy.data() + before * C;
    for (int64_t t = 0; t < row.length; t++) {
      row.token(t, *mix, weight, y.data());
      for (int p = 0; p < mix->parts; p++) {
        if (!dout[p]) continue;
        const Real *from = y.data() + p * size, *g = dout[p] + (row.first + t) * size;
        Real* to = d + t * C + p * size;
        if (!(mix->unit >> p & 1)) {
          std::copy_n(g, size, to);
          continue;
        }
        for (int h = 0; h < mix->heads; h++, from += E, g += E, to += E) {
          Real norm = std::sqrt(inner(E, from, from)), scale = 1 / std::max(norm, Real(mix->least)), along = 0;
          if (norm > mix->least) along = inner(E, from, g) * scale * scale * scale;
          combine(E, scale, g, along, from, to);
        }
      }
    }
    for (int j = 0; j < K; j++) add_products(row.length, C, row.at(-j, *mix), d, dweight + j * C);
    // the gradient of silu(x)_t is sum_j w_j dy_{t+j}
    for (int64_t t = -before; t < 0; t++) convolve(C, K, weight, C, d + t * C, C, dstate + (r * before + t + before) * C);
    for (int64_t t = 0; t < row.length; t++) {
      Real* to = dx + (row.first + t) * C;
      convolve(C, K, weight, C, d + t * C, C, to), times(C, slope.data() + t * C, to);
    }
  }
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
  FlushDenormals flush;
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
  FlushDenormals flush;
  for (int64_t r = first; r < stop; r++) {
    const Real *from = x + r * width, *g = dy + r * width;
    Real *to = dx + r * width, scale = 1 / std::sqrt(square_mean(width, from) + Real(epsilon));
    if (gate) gated_norm_row_back(width, scale, from, weight, gate + r * width, g, to, dweight, dgate + r * width);
    else norm_row_back(width, scale, from, weight, g, to, dweight);
    Real along = inner(width, to, from) * scale * scale * scale / width;
    for (int i = 0; i < width; i++) to[i] = scale * to[i] - along * from[i];
  }
}
