// Causal attention within a window and to the persistent tokens, of all documents in one call: rotary positions,
// scores, softmax and values, a block of queries at a time. Formulas as in titans_core/attention.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "calls.h"
#include "lanes.h"

// Of a call. A document's keys are those held from before it, then its own; it leaves the last `after` of them.
extern "C" struct Window {
  int64_t heads, width, window, prefix, before, after;
  const int64_t* borders;  // of the documents, in tokens
  const int64_t* held;     // of each document, how many of the last keys before it are seen; null: all
};

namespace {

constexpr int BLOCK = 16;  // queries
typedef std::vector<Real> Buffer;

// Of all tokens [T, heads, width]; prefix [heads, P, width]; scale [heads]; cos and sin [length, width / 2] or null;
// before and after [documents, heads, keys, width], keys turned.
struct Given {
  const Real *q, *k, *v, *prefix_k, *prefix_v, *scale, *cos, *sin, *before_k, *before_v;
};

// dscores from the scores' probabilities p and their gradients dp
APART void through_softmax(int n, Real along, In p, Out dp) {
  for (int i = 0; i < n; i++) dp[i] = p[i] * (dp[i] - along);
}

APART void turn(int half, Real sign, In cos, In sin, Out left, Out right) {
  for (int i = 0; i < half; i++) {
    Real x = left[i], y = right[i];
    left[i] = x * cos[i] - sign * y * sin[i], right[i] = sign * x * sin[i] + y * cos[i];
  }
}

void transposed(int rows, int columns, const Real* from, Real* to, int64_t ld) {
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < columns; j++) to[j * ld + i] = from[i * columns + j];
}

// A document's head.
struct Head {
  const Window& w;
  const Given& g;
  int64_t H, E, P, PP, S;  // PP: P padded; S: keys held from before
  int64_t row, ld;         // ld: columns of a transposed matrix, with room for the last block's padding
  int64_t document = 0, first = 0;
  int64_t h = 0, T = 0, unseen = 0;
  Buffer q, plain, k, k_t, v, v_t, prefix_k_t, prefix_v_t, scores, dscores;
  bool back;

  Head(const Window& w, const Given& g, bool back)
      : w(w), g(g), H(w.heads), E(w.width), P(w.prefix), PP(padded(P)), S(w.before), row(H * E), ld(0), back(back) {}

  const Real* prefix(const Real* of) const { return of + h * P * E; }
  Real scale() const { return g.scale[h]; }

  void rotate(Real* rows, Real sign) const {
    int64_t half = E / 2;
    for (int t = 0; t < T && g.cos; t++)
      turn(half, sign, g.cos + t * half, g.sin + t * half, rows + t * E, rows + t * E + half);
  }
  void gather(const Real* from, Real* to) const {
    for (int t = 0; t < T; t++) std::copy_n(from + (first + t) * row + h * E, E, to + t * E);
  }

  void load(int64_t job) {
    document = job / H, h = job % H, first = w.borders[document], T = w.borders[document + 1] - first;
    unseen = w.held ? std::max<int64_t>(0, S - w.held[document]) : 0;
    int64_t S_T = S + T, held = (document * H + h) * S * E;
    ld = padded(S_T) + LANES;
    q.resize(T * E), plain.resize(T * E), k.resize(S_T * E), v.resize(S_T * E);
    k_t.assign(E * ld, 0), prefix_k_t.assign(E * PP, 0);
    gather(g.q, plain.data()), std::copy(plain.begin(), plain.end(), q.begin()), rotate(q.data(), 1);
    if (S) std::copy_n(g.before_k + held, S * E, k.data()), std::copy_n(g.before_v + held, S * E, v.data());
    gather(g.k, k.data() + S * E), rotate(k.data() + S * E, 1), gather(g.v, v.data() + S * E);
    transposed(S_T, E, k.data(), k_t.data(), ld), transposed(P, E, prefix(g.prefix_k), prefix_k_t.data(), PP);
    if (!back) return;
    v_t.assign(E * ld, 0), prefix_v_t.assign(E * PP, 0);
    transposed(S_T, E, v.data(), v_t.data(), ld), transposed(P, E, prefix(g.prefix_v), prefix_v_t.data(), PP);
  }

  // The block of n queries from `at` on sees keys from `low` to `high`; a row of scores is the prefix, then these.
  int at, n, low, high, columns, width;
  void open(int from) {
    at = from, n = std::min<int64_t>(BLOCK, T - at), high = S + at + n;
    low = std::max<int64_t>(unseen, S + at - w.window + 1), columns = padded(high - low), width = PP + columns;
    scores.resize(BLOCK * width), dscores.resize(BLOCK * width);
  }
  void attend() {
    multiply<Real>(n, PP, E, scale(), plain.data() + at * E, E, 1, prefix_k_t.data(), PP, scores.data(), width, false);
    multiply<Real>(n, columns, E, scale(), q.data() + at * E, E, 1, k_t.data() + low, ld, scores.data() + PP, width, false);
    for (int t = 0; t < n; t++) {
      Real* of = scores.data() + t * width;
      int begin = PP + std::max<int64_t>(low, S + at + t - w.window + 1) - low, end = PP + S + at + t + 1 - low;
      auto hide = [&](Real with) {
        std::fill(of + P, of + begin, with), std::fill(of + end, of + width, with);
      };
      hide(-INFINITY);
      Real total = exponentials(width, greatest(width, of), of);  // what is hidden adds 1e-38 at most
      hide(0);
      scale_by(width, 1 / total, of);
    }
  }
  // (+)= scores (or their gradients) times rows of the prefix and of the keys
  void times(const Buffer& x, const Real* of_prefix, const Real* of_keys, Real* to, int64_t to_row) const {
    if (P) multiply<Real>(n, E, P, 1, x.data(), width, 1, of_prefix, E, to, to_row, false);
    multiply<Real>(n, E, high - low, 1, x.data() + PP, width, 1, of_keys + low * E, E, to, to_row, P > 0);
  }
  // += of the prefix's rows and of the keys': what the queries' rows give them
  void back_to(const Buffer& x, Real sign, const Real* plain_rows, const Real* rows, int64_t rows_row, Real* of_prefix,
               Real* of_keys) const {
    if (P) multiply<Real>(P, E, n, sign, x.data(), 1, width, plain_rows, rows_row, of_prefix, E, true);
    multiply<Real>(high - low, E, n, sign, x.data() + PP, 1, width, rows, rows_row, of_keys + low * E, E, true);
  }
};

}  // namespace

extern "C" void window_forward(const Window* w, const Given* g, Real* y, Real* after_k, Real* after_v, int64_t first,
                               int64_t stop) {
  FlushDenormals flush;
  Head head(*w, *g, false);
  for (int64_t job = first; job < stop; job++) {
    head.load(job);
    for (int at = 0; at < head.T; at += BLOCK) {
      head.open(at), head.attend();
      head.times(head.scores, head.prefix(g->prefix_v), head.v.data(), y + (head.first + at) * head.row + head.h * head.E,
                 head.row);
    }
    int64_t kept = w->after * head.E, from = (head.S + head.T) * head.E - kept;
    if (kept) std::copy_n(head.k.data() + from, kept, after_k + job * kept);
    if (kept) std::copy_n(head.v.data() + from, kept, after_v + job * kept);
  }
}

// Gradients of what was given; dprefix [documents, heads, P, width] and dscale [documents, heads] are each document's.
// dafter may be null.
extern "C" void window_backward(const Window* w, const Given* g, const Real* dy, const Real* dafter_k,
                                const Real* dafter_v, Real* dq, Real* dk, Real* dv, Real* dprefix_k, Real* dprefix_v,
                                Real* dscale, Real* dbefore_k, Real* dbefore_v, int64_t first, int64_t stop) {
  FlushDenormals flush;
  Head head(*w, *g, true);
  Buffer dturned, dplain, dkeys, dvalues, along;
  for (int64_t job = first; job < stop; job++) {
    head.load(job);
    int64_t E = head.E, P = head.P, S = head.S, T = head.T;
    int64_t S_T = S + T, row = head.row, kept = w->after * E, of_prefix = job * P * E;
    std::fill_n(dprefix_k + of_prefix, P * E, Real(0)), std::fill_n(dprefix_v + of_prefix, P * E, Real(0));
    dkeys.assign(S_T * E, 0), dvalues.assign(S_T * E, 0), dturned.resize(T * E), dplain.assign(T * E, 0);
    if (dafter_k) std::copy_n(dafter_k + job * kept, kept, dkeys.end() - kept);
    if (dafter_v) std::copy_n(dafter_v + job * kept, kept, dvalues.end() - kept);
    Real to_scale = 0;
    for (int at = 0; at < T; at += BLOCK) {
      head.open(at), head.attend();
      const Real* of = dy + (head.first + at) * row + head.h * E;
      int n = head.n, width = head.width;
      head.back_to(head.scores, 1, of, of, row, dprefix_v + of_prefix, dvalues.data());
      Real* d = head.dscores.data();
      multiply<Real>(n, head.PP, E, 1, of, row, 1, head.prefix_v_t.data(), head.PP, d, width, false);
      multiply<Real>(n, head.columns, E, 1, of, row, 1, head.v_t.data() + head.low, head.ld, d + head.PP, width, false);
      for (int t = 0; t < n; t++) {
        const Real* p = head.scores.data() + t * width;
        through_softmax(width, inner(width, p, d + t * width), p, d + t * width);
      }
      head.back_to(head.dscores, head.scale(), head.plain.data() + at * E, head.q.data() + at * E, E,
                   dprefix_k + of_prefix, dkeys.data());
      Real *turned = dturned.data() + at * E, *plain = dplain.data() + at * E;
      if (P) multiply<Real>(n, E, P, 1, d, width, 1, head.prefix(g->prefix_k), E, plain, E, false);
      multiply<Real>(n, E, head.high - head.low, 1, d + head.PP, width, 1, head.k.data() + head.low * E, E, turned, E, false);
      to_scale += inner(n * E, turned, head.q.data() + at * E) + inner(n * E, plain, head.plain.data() + at * E);
    }
    dscale[job] = to_scale;
    head.rotate(dturned.data(), -1), head.rotate(dkeys.data() + S * E, -1);
    for (int t = 0; t < T; t++) {
      int64_t to = (head.first + t) * row + head.h * E;
      for (int i = 0; i < E; i++) dq[to + i] = head.scale() * (dturned[t * E + i] + dplain[t * E + i]);
      std::copy_n(dkeys.data() + (S + t) * E, E, dk + to), std::copy_n(dvalues.data() + (S + t) * E, E, dv + to);
    }
    if (S) std::copy_n(dkeys.data(), S * E, dbefore_k + job * S * E);
    if (S) std::copy_n(dvalues.data(), S * E, dbefore_v + job * S * E);
  }
}
