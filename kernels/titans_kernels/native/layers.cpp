// What stands around the memory, each a pass over its tokens: the short convolution with what is before and
// after it, and RMSNorm with its gate. Rows are independent; channels lie side by side.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "calls.h"
#include "exponential.h"
#include "inner.h"

namespace {

APART void silu(int n, In x, Out y) {
  for (int i = 0; i < n; i++) y[i] = x[i] / (1 + exponential(-x[i]));
}

APART void through_silu(int n, In x, In dy, Out dx) {
  for (int i = 0; i < n; i++) {
    Real s = 1 / (1 + exponential(-x[i]));
    dx[i] = dy[i] * (s + x[i] * s * (1 - s));
  }
}

APART void add_product(int n, In x, In y, Out to) {
  for (int i = 0; i < n; i++) to[i] += x[i] * y[i];
}

struct Row {
  int C;
  int64_t first, length;
  std::vector<Real> held, y;  // silu(x) after the row's state, one more than the tokens; the convolution
  Row(const Mix& mix, int64_t row) : C(mix.parts * mix.heads * mix.width) {
    first = mix.borders[row], length = mix.borders[row + 1] - first;
  }
  Real* at(int64_t token, const Mix& mix) { return held.data() + (token + mix.kernel - 1) * C; }

  void convolve(const Mix& mix, const Real* x, const Real* weight, const Real* state) {
    held.resize((mix.kernel - 1 + length) * C), y.assign(length * C, 0);
    std::copy(state, state + (mix.kernel - 1) * C, held.begin());
    silu(length * C, x + first * C, at(0, mix));
    for (int64_t t = 0; t < length; t++)
      for (int j = 0; j < mix.kernel; j++) add_product(C, weight + j * C, at(t - j, mix), y.data() + t * C);
  }
};

}  // namespace

// x [T, C], weight [K, C], state [rows, K - 1, C]; a part of the output is [T, heads, width]
extern "C" void mix_forward(const Mix* mix, const Real* x, const Real* weight, const Real* state, Real** out,
                            int64_t first, int64_t stop) {
  for (int64_t r = first; r < stop; r++) {
    Row row(*mix, r);
    row.convolve(*mix, x, weight, state + r * mix->state_stride);
    int E = mix->width, size = mix->heads * E;
    for (int64_t t = 0; t < row.length; t++)
      for (int p = 0; p < mix->parts; p++)
        for (int h = 0; h < mix->heads; h++) {
          const Real* y = row.y.data() + t * row.C + p * size + h * E;
          Real* to = out[p] + (row.first + t) * size + h * E;
          Real scale = 1;
          if (mix->unit >> p & 1) scale = 1 / std::max(std::sqrt(inner(E, y, y)), Real(mix->least));
          for (int i = 0; i < E; i++) to[i] = scale * y[i];
        }
  }
}

// dout may hold null pointers; dweight [K, C] is added to, dstate [rows, K - 1, C] written
extern "C" void mix_backward(const Mix* mix, const Real* x, const Real* weight, const Real* state, Real** dout,
                             Real* dx, Real* dweight, Real* dstate, int64_t first, int64_t stop) {
  std::vector<Real> dy, dheld;
  for (int64_t r = first; r < stop; r++) {
    Row row(*mix, r);
    row.convolve(*mix, x, weight, state + r * mix->state_stride);
    int E = mix->width, size = mix->heads * E, C = row.C, before = mix->kernel - 1;
    dy.assign(row.length * C, 0), dheld.assign((before + row.length) * C, 0);
    for (int64_t t = 0; t < row.length; t++)
      for (int p = 0; p < mix->parts; p++)
        for (int h = 0; h < mix->heads && dout[p]; h++) {
          const Real* y = row.y.data() + t * C + p * size + h * E;
          const Real* g = dout[p] + (row.first + t) * size + h * E;
          Real* to = dy.data() + t * C + p * size + h * E;
          Real scale = 1, along = 0;
          if (mix->unit >> p & 1) {
            Real norm = std::sqrt(inner(E, y, y));
            scale = 1 / std::max(norm, Real(mix->least));
            if (norm > mix->least) along = inner(E, y, g) * scale * scale * scale;
          }
          for (int i = 0; i < E; i++) to[i] = scale * g[i] - along * y[i];
        }
    for (int64_t t = 0; t < row.length; t++)
      for (int j = 0; j < mix->kernel; j++) {
        add_product(C, weight + j * C, dy.data() + t * C, dheld.data() + (t - j + before) * C);
        add_product(C, row.at(t - j, *mix), dy.data() + t * C, dweight + j * C);
      }
    std::copy(dheld.begin(), dheld.begin() + before * C, dstate + r * before * C);
    through_silu(row.length * C, x + row.first * C, dheld.data() + before * C, dx + row.first * C);
  }
}

// y = x / sqrt(mean x^2 + epsilon) weight silu(gate), rows of ``width``; the gate may be null
extern "C" void norm_forward(int64_t width, double epsilon, const Real* x, const Real* weight, const Real* gate,
                             Real* y, int64_t first, int64_t stop) {
  std::vector<Real> open(width, 1);
  for (int64_t r = first; r < stop; r++) {
    const Real* from = x + r * width;
    Real scale = 1 / std::sqrt(inner(width, from, from) / width + Real(epsilon));
    if (gate) silu(width, gate + r * width, open.data());
    for (int i = 0; i < width; i++) y[r * width + i] = scale * from[i] * weight[i] * open[i];
  }
}

// dweight [width] is added to
extern "C" void norm_backward(int64_t width, double epsilon, const Real* x, const Real* weight, const Real* gate,
                              const Real* dy, Real* dx, Real* dweight, Real* dgate, int64_t first,
                              int64_t stop) {
  std::vector<Real> open(width, 1), g(width);
  for (int64_t r = first; r < stop; r++) {
    const Real *from = x + r * width, *dto = dy + r * width;
    Real scale = 1 / std::sqrt(inner(width, from, from) / width + Real(epsilon));
    if (gate) {
      silu(width, gate + r * width, open.data());
      for (int i = 0; i < width; i++) g[i] = dto[i] * scale * from[i] * weight[i];
      through_silu(width, gate + r * width, g.data(), dgate + r * width);
    }
    for (int i = 0; i < width; i++) {
      Real through = dto[i] * open[i];
      dweight[i] += through * scale * from[i];
      g[i] = through * weight[i];
    }
    Real along = inner(width, g.data(), from) * scale * scale * scale / width;
    for (int i = 0; i < width; i++) dx[r * width + i] = scale * g[i] - along * from[i];
  }
}
