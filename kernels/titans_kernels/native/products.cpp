// Products of many tokens with small weights, and what follows each in the same pass: a linear layer, the feed-forward
// layer with its norm and residual connection, the loss over a vocabulary. Weights are [outputs, inputs].
//
// A tile of tokens stays in the cache from the first product to the last, and the backward makes it again: only the
// inputs are kept. PyTorch's products use half of the vector width on processors that are not Intel's.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "calls.h"
#include "lanes.h"

namespace {

constexpr int64_t TILE = 64;  // tokens
typedef std::vector<Real> Buffer;

// W [rows][columns] as columns of W_t [columns][ld]
void transposed(int64_t rows, int64_t columns, const Real* from, Real* to, int64_t ld) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) to[j * ld + i] = from[i * columns + j];
}

// y [n][outputs] (+)= x [n][inputs] B [inputs][outputs]
void product(int n, int inputs, int outputs, const Real* x, int64_t row, const Real* b, Real* y, bool add) {
  multiply<Real>(n, outputs, inputs, 1, x, row, 1, b, outputs, y, outputs, add);
}

// dweight [outputs][inputs] += dy^T x, over n tokens
void add_outer(int n, int outputs, int inputs, const Real* dy, int64_t row, const Real* x, Real* dweight) {
  multiply<Real>(outputs, inputs, n, 1, dy, 1, row, x, inputs, dweight, inputs, true);
}

APART void gated(int n, In gate, In up, Out h) {
  each<Real>(n, [&](int64_t i, auto lane) {
    typedef decltype(lane) X;
    at<X>(h, i) = at<X>(gate, i) * sigmoid(at<X>(gate, i)) * at<X>(up, i);
  });
}

// h, and in place of gate and up their gradients
APART void gated_backward(int n, In dh, Out gate, Out up, Out h) {
  each<Real>(n, [&](int64_t i, auto lane) {
    typedef decltype(lane) X;
    X g = at<X>(gate, i), u = at<X>(up, i), d = at<X>(dh, i), s = sigmoid(g), open = g * s;
    at<X>(h, i) = open * u, at<X>(up, i) = d * open, at<X>(gate, i) = d * u * (s + open * (1 - s));
  });
}

// The logits of a tile of tokens [n][P] under a weight [V][D]; those of V and beyond are zero.
struct Vocabulary {
  int64_t D, V, P;
  Buffer weight_t, logits;
  Vocabulary(int64_t D, int64_t V, const Real* weight)
      : D(D), V(V), P(padded(V)), weight_t(D * P, 0), logits(TILE * P) {
    transposed(V, D, weight, weight_t.data(), P);
  }
  Real* of(int n, const Real* x) {
    product(n, D, P, x, D, weight_t.data(), logits.data(), false);
    return logits.data();
  }
};

APART void add(int n, In x, Out y) {
  for (int i = 0; i < n; i++) y[i] += x[i];
}

}  // namespace

extern "C" {

struct Layer {
  int64_t tokens, inputs, outputs;
};

// x [T, inputs], bias [outputs] or null, y [T, outputs]. Jobs are tiles of tokens, here and below.
void linear_forward(const Layer* l, const Real* x, const Real* weight, const Real* bias, Real* y, int64_t first,
                    int64_t stop) {
  FlushDenormals flush;
  int64_t D = l->inputs, F = l->outputs, P = padded(F);
  Buffer weight_t(D * P, 0), tile(P == F ? 0 : TILE * P);
  transposed(F, D, weight, weight_t.data(), P);
  for (int64_t at = first * TILE; at < std::min(stop * TILE, l->tokens); at += TILE) {
    int n = std::min(TILE, l->tokens - at);
    Real* to = P == F ? y + at * F : tile.data();
    product(n, D, P, x + at * D, D, weight_t.data(), to, false);
    for (int t = 0; t < n && P != F; t++) std::copy_n(to + t * P, F, y + (at + t) * F);
    for (int t = 0; t < n && bias; t++) add(F, bias, y + (at + t) * F);
  }
}

// dx and dbias may be null; dweight and dbias are added to
void linear_backward(const Layer* l, const Real* x, const Real* weight, const Real* dy, Real* dx, Real* dweight,
                     Real* dbias, int64_t first, int64_t stop) {
  FlushDenormals flush;
  int64_t D = l->inputs, F = l->outputs;
  for (int64_t at = first * TILE; at < std::min(stop * TILE, l->tokens); at += TILE) {
    int n = std::min(TILE, l->tokens - at);
    const Real* from = dy + at * F;
    if (dx) product(n, F, D, from, F, weight, dx + at * D, false);
    add_outer(n, F, D, from, F, x + at * D, dweight);
    for (int t = 0; t < n && dbias; t++) add(F, from + t * F, dbias);
  }
}

struct FeedForward {
  int64_t tokens, width, hidden;
  double epsilon;
};

// y = x + down (silu(gate z) * up z), z = x / rms(x) norm; x and y [T, width]
void feed_forward(const FeedForward* f, const Real* x, const Real* norm, const Real* gate, const Real* up,
                  const Real* down, Real* y, int64_t first, int64_t stop) {
  FlushDenormals flush;
  int64_t D = f->width, F = f->hidden;
  Buffer in_t(2 * D * F), down_t(F * D), z(TILE * D), pre(2 * TILE * F), h(TILE * F);
  transposed(F, D, gate, in_t.data(), F), transposed(F, D, up, in_t.data() + D * F, F);
  transposed(D, F, down, down_t.data(), D);
  for (int64_t at = first * TILE; at < std::min(stop * TILE, f->tokens); at += TILE) {
    int n = std::min(TILE, f->tokens - at);
    norm_forward(D, f->epsilon, x + at * D, norm, nullptr, z.data(), 0, n);
    product(n, D, F, z.data(), D, in_t.data(), pre.data(), false);
    product(n, D, F, z.data(), D, in_t.data() + D * F, pre.data() + n * F, false);
    gated(n * F, pre.data(), pre.data() + n * F, h.data());
    std::copy_n(x + at * D, n * D, y + at * D);
    product(n, F, D, h.data(), F, down_t.data(), y + at * D, true);
  }
}

// dnorm, dgate, dup and ddown are added to
void feed_forward_backward(const FeedForward* f, const Real* x, const Real* norm, const Real* gate, const Real* up,
                           const Real* down, const Real* dy, Real* dx, Real* dnorm, Real* dgate, Real* dup,
                           Real* ddown, int64_t first, int64_t stop) {
  FlushDenormals flush;
  int64_t D = f->width, F = f->hidden;
  Buffer in_t(2 * D * F), z(TILE * D), dz(TILE * D), pre(2 * TILE * F), h(TILE * F), dh(TILE * F);
  transposed(F, D, gate, in_t.data(), F), transposed(F, D, up, in_t.data() + D * F, F);
  for (int64_t at = first * TILE; at < std::min(stop * TILE, f->tokens); at += TILE) {
    int n = std::min(TILE, f->tokens - at);
    Real *g = pre.data(), *u = g + n * F;
    norm_forward(D, f->epsilon, x + at * D, norm, nullptr, z.data(), 0, n);
    product(n, D, F, z.data(), D, in_t.data(), g, false);
    product(n, D, F, z.data(), D, in_t.data() + D * F, u, false);
    product(n, D, F, dy + at * D, D, down, dh.data(), false);
    gated_backward(n * F, dh.data(), g, u, h.data());
    add_outer(n, D, F, dy + at * D, D, h.data(), ddown);
    add_outer(n, F, D, g, F, z.data(), dgate), add_outer(n, F, D, u, F, z.data(), dup);
    product(n, F, D, g, F, gate, dz.data(), false), product(n, F, D, u, F, up, dz.data(), true);
    norm_backward(D, f->epsilon, x + at * D, norm, nullptr, dz.data(), dx + at * D, dnorm, nullptr, 0, n);
    add(n * D, dy + at * D, dx + at * D);
  }
}

// The loss log sum_v exp(x . w_v) - x . w_target of each token; total [T] is the first of the two. Outputs are the
// vocabulary.
void loss_forward(const Layer* l, const Real* x, const Real* weight, const int64_t* targets, Real* losses,
                  Real* total, int64_t first, int64_t stop) {
  FlushDenormals flush;
  int64_t D = l->inputs, V = l->outputs, P = padded(V);
  Vocabulary vocabulary(D, V, weight);
  for (int64_t at = first * TILE; at < std::min(stop * TILE, l->tokens); at += TILE) {
    int n = std::min(TILE, l->tokens - at);
    Real* logits = vocabulary.of(n, x + at * D);
    for (int t = 0; t < n; t++) {
      Real *row = logits + t * P, hit = row[targets[at + t]];
      std::fill(row + V, row + P, -INFINITY);
      Real most = greatest(P, row);
      total[at + t] = most + std::log(exponentials(P, most, row));
      losses[at + t] = total[at + t] - hit;
    }
  }
}

// dx may be null; dweight is added to
void loss_backward(const Layer* l, const Real* x, const Real* weight, const int64_t* targets, const Real* total,
                   const Real* dlosses, Real* dx, Real* dweight, int64_t first, int64_t stop) {
  FlushDenormals flush;
  int64_t D = l->inputs, V = l->outputs, P = padded(V);
  Vocabulary vocabulary(D, V, weight);
  for (int64_t at = first * TILE; at < std::min(stop * TILE, l->tokens); at += TILE) {
    int n = std::min(TILE, l->tokens - at);
    Real* logits = vocabulary.of(n, x + at * D);
    for (int t = 0; t < n; t++) {
      Real *row = logits + t * P, d = dlosses[at + t];
      exponentials(P, total[at + t], row), scale_by(P, d, row);
      row[targets[at + t]] -= d;
    }
    if (dx) product(n, V, D, logits, P, weight, dx + at * D, false);
    add_outer(n, V, D, logits, P, x + at * D, dweight);
  }
}
}
