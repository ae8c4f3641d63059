// The write budget on a CPU, one document and head after the other. Formulas as in ../memory/budget.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "calls.h"
#include "inner.h"

namespace {

// Keys of one chunk, padded with zeros, and their products k_t . k_u for u <= t.
struct Keys {
  int64_t D, P;
  int n = 0;
  std::vector<Real> rows, products;

  explicit Keys(const Shape& s) : D(s.width), P((D + LANES - 1) / LANES * LANES) {
    rows.assign(s.chunk * P, 0), products.assign(s.chunk * s.chunk, 0);
  }
  const Real* row(int t) const { return rows.data() + t * P; }
  Real* product(int t) { return products.data() + t * n; }

  // The products of the first ``skipped`` tokens are not looked at.
  void load(const Real* k, int64_t stride, int count, int skipped) {
    n = count;
    for (int t = 0; t < n; t++) std::copy(k + t * stride, k + t * stride + D, rows.data() + t * P);
    for (int t = 0; t < n; t++)
      for (int u = t < skipped ? t : 0; u <= t; u++) product(t)[u] = inner(P, row(t), row(u));
  }
};

// A chunk of one head: the gates of its tokens are at ``first`` + t heads.
struct Place {
  int64_t first;
  int count, given;
};

template <class Work> void each_chunk(const Shape& s, int64_t job, Work work) {
  int64_t document = job / s.heads, head = job % s.heads;
  int64_t begin = s.borders[document], end = s.borders[document + 1];
  for (int64_t token = begin; token < end; token += s.chunk) {
    int count = std::min(s.chunk, end - token);
    int64_t given = std::clamp<int64_t>(begin + s.held - token, 0, count);
    work(Place{token * s.heads + head, count, int(given)});
  }
}

// What x times the product of two rows gives their gradients.
inline void add_pair(int n, Real x, const Real* a, const Real* b, Real* __restrict da, Real* __restrict db) {
  for (int i = 0; i < n; i++) da[i] += x * b[i], db[i] += x * a[i];
}

constexpr Real TINY = std::numeric_limits<Real>::min();
constexpr Real EDGE = 32 * std::numeric_limits<Real>::epsilon();  // `edge` in ../memory/parts/passes.py

}  // namespace

extern "C" void budget_forward(const Shape* shape, const Real* k, const Real* eta, const Real* theta,
                               Real* limited, Real* steps, int64_t from, int64_t stop) {
  FlushDenormals flush;
  const Shape& s = *shape;
  Keys keys(s);
  std::vector<Real> e(s.chunk);
  for (int64_t job = from; job < stop; job++)
    each_chunk(s, job, [&](Place at) {
      keys.load(k + at.first * s.width, s.heads * s.width, at.count, at.given);
      for (int t = 0; t < at.count; t++) {
        int64_t i = at.first + t * s.heads;
        Real size = keys.product(t)[t], moved = 1 - eta[i], room = 1;
        if (t >= at.given)
          for (int u = 0; u < t; u++) room -= e[u] * std::abs(keys.product(t)[u]);
        room = room > EDGE ? room : Real(0);
        bool counted = size >= TINY;
        if (counted && t >= at.given && 2 * theta[i] * size > (room + EDGE) * moved) {
          e[t] = room / size;
          limited[i] = e[t] * moved / 2;
        } else {
          e[t] = counted && moved > 0 ? 2 * theta[i] / moved : Real(0);
          limited[i] = theta[i];
        }
        steps[i] = e[t];
      }
    });
}

extern "C" void budget_backward(const Shape* shape, const Real* dlimited, const Real* dsteps, const Real* k,
                                const Real* eta, const Real* theta, const Real* limited, const Real* steps,
                                Real* dk, Real* deta, Real* dtheta, int64_t from, int64_t stop) {
  FlushDenormals flush;
  const Shape& s = *shape;
  Keys keys(s);
  std::vector<Real> total(s.chunk), dkeys(s.chunk * keys.P);
  for (int64_t job = from; job < stop; job++)
    each_chunk(s, job, [&](Place at) {
      int64_t stride = s.heads * s.width;
      keys.load(k + at.first * s.width, stride, at.count, 0);
      for (int t = 0; t < at.count; t++) total[t] = dsteps[at.first + t * s.heads];
      std::fill(dkeys.begin(), dkeys.end(), Real(0));
      for (int t = at.count - 1; t >= 0; t--) {
        int64_t i = at.first + t * s.heads;
        Real size = keys.product(t)[t], moved = 1 - eta[i], g = dlimited[i], e = steps[i];
        if (limited[i] == theta[i]) {
          Real per_moved = size >= TINY && moved > 0 ? 1 / moved : Real(0);
          dtheta[i] = g + 2 * total[t] * per_moved;
          deta[i] = total[t] * e * per_moved;
          continue;
        }
        dtheta[i] = 0, deta[i] = -g * e / 2;
        if (!(e > 0)) continue;
        Real share = (total[t] + g * moved / 2) / size;
        Real* dt = dkeys.data() + t * keys.P;
        for (int u = 0; u < t; u++) {
          Real product = keys.product(t)[u];
          Real x = -share * steps[at.first + u * s.heads] * Real((product > 0) - (product < 0));
          total[u] -= share * std::abs(product);
          add_pair(keys.P, x, keys.row(t), keys.row(u), dt, dkeys.data() + u * keys.P);
        }
        for (int j = 0; j < keys.P; j++) dt[j] -= 2 * share * e * keys.row(t)[j];
      }
      for (int t = 0; t < at.count; t++)
        std::copy(dkeys.data() + t * keys.P, dkeys.data() + t * keys.P + s.width,
                  dk + at.first * s.width + t * stride);
    });
}
