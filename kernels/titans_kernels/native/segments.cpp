// The segments of MAC one after the other, one document after the other: what depends on the memory that a document
// carries, which is the read, its keys and values, attention, what is written, and the write. Formulas as in
// titans_core/blocks/mac.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "calls.h"
#include "lanes.h"

namespace {

typedef std::vector<Real> Buffer;

// C of the memory's channels, A of attention's, D of the model; G gates of a token.
struct Chain {
  Spec memory;  // without its borders and kept states, of which there is one a chunk
  int64_t model, width, queries, span, prefix, segment;  // queries heads of width span
  int64_t read_kernel, write_kernel, read_unit, write_unit, forgets, moves;
  double epsilon, least, budget, max_alpha, max_theta;
  const int64_t *borders, *chunks;  // of the documents, in tokens; chunks of all documents before each
  const int64_t* strides;           // from a document's state to the next one's: 2 L tensors, two convolutions
};

// A name in _t is a matrix transposed, [inputs][outputs].
struct Weights {
  const Real *read_norm, *read_out, *read_out_t, *read_in, *read_in_t, *read_conv;
  const Real *out, *out_t, *norm, *in, *in_t, *write_conv, *gates, *bias;
  const Real *prefix_k, *prefix_v, *scale, *cos, *sin;  // [prefix, A]; [queries]; [segment, span / 2], or null
};

// Of all tokens. The first six are given, the others made: the read and its norm, r, its projection, keys and values,
// attention's output before its projection, y, its norm, the projection, q, k, v and gates of the write, the read of it.
struct Streams {
  Real *x, *read_q, *gate, *q, *k, *v;
  Real *raw, *normed, *r, *read_pre, *read_k, *read_v, *a, *y, *z, *pre;
  Real *write_q, *write_k, *write_v, *alpha, *eta, *own, *theta, *steps, *m;
};

// Gradients: given those of y, z and m; of `Streams` what was given, and what the weights' gradients are made of.
struct Grads {
  const Real *dy, *dz, *dm;
  Real *x, *read_q, *gate, *q, *k, *v, *r, *read_pre, *pre, *lin;
  Real *read_norm, *read_conv, *norm, *write_conv, *prefix_k, *prefix_v, *scale;  // of each document, to be summed
};

// y [n][outputs] (+)= x [n][inputs] W_t
void project(int n, int inputs, int outputs, const Real* x, const Real* weight_t, Real* y, bool add) {
  multiply<Real>(n, outputs, inputs, 1, x, inputs, 1, weight_t, outputs, y, outputs, add);
}

void transposed(int rows, int columns, const Real* from, int64_t stride, Real* to, int64_t to_stride) {
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < columns; j++) to[j * to_stride + i] = from[i * stride + j];
}

// One segment: tokens `at` to `at` + n.
struct Segment {
  const Chain& c;
  const Weights& w;
  const Streams& s;
  int L, H, E, C, D, A, G, P;
  Buffer query, dquery, keys, keys_t, values, values_t, scores, dscores, dkeys, dvalues;  // of a head of attention
  Buffer hidden, dhidden, slopes_, weight, weight_t;                       // of a read
  int64_t at = 0, chunks = 0;  // chunks: of the document before
  int n = 0;

  Segment(const Chain& c, const Weights& w, const Streams& s)
      : c(c), w(w), s(s), L(c.memory.depth), H(c.memory.heads), E(c.width), C(H * E), D(c.model),
        A(c.queries * c.span), G((c.forgets + c.moves + 1) * H), P(c.prefix) {
    int64_t S = padded(P + 2 * c.segment), widest = 0;
    for (int l = 0; l <= L; l++) widest = std::max(widest, c.memory.widths[l]);
    for (Buffer* x : {&keys, &keys_t, &values, &values_t, &dkeys, &dvalues}) x->assign(S * c.span, 0);
    query.assign(c.segment * c.span, 0), dquery = query;
    scores.assign(S * c.segment, 0), dscores = scores;
    hidden.assign((L + 1) * 2 * c.segment * widest, 0), dhidden.assign(2 * c.segment * widest, 0);
    slopes_ = dhidden, weight.assign(widest * widest, 0), weight_t = weight;
  }

  Mix mix(bool read, const int64_t* borders) const {
    return read ? Mix{c.read_kernel, 2, c.queries, c.span, c.read_unit, c.least, borders, 0}
                : Mix{c.write_kernel, 3, H, E, c.write_unit, c.least, borders, 0};
  }

  // ---- the read at the weights before the segment, of one layer [D][ld] at `W`
  Real* layer(int l, bool out) { return hidden.data() + (2 * l + out) * (hidden.size() / (2 * L + 2)); }
  // Widths of a layer, and where a head's weights of it are in states [heads, D, F].
  int in(int l) const { return c.memory.widths[l]; }
  int64_t size(int l) const { return c.memory.widths[l] * c.memory.widths[l + 1]; }

  // M(q) of a head; `W` [L] are its layers, with rows of `ld` [L].
  void read(int h, const Real* const* W, const int64_t* ld) {
    for (int t = 0; t < n; t++) std::copy_n(s.read_q + (at + t) * C + h * E, E, layer(0, false) + t * E);
    for (int l = 0; l < L; l++) {
      multiply<Real>(n, in(l + 1), in(l), 1, layer(l, false), in(l), 1, W[l], ld[l], layer(l, true), in(l + 1), false);
      if (l < L - 1) activate<Real>(c.memory.activation, n * in(l + 1), layer(l, true), layer(l + 1, false));
    }
  }
  void reads(Real* const* state) {
    std::vector<const Real*> W(L);
    for (int h = 0; h < H; h++) {
      for (int l = 0; l < L; l++) W[l] = state[l] + h * size(l);
      read(h, W.data(), c.memory.widths + 1);
      for (int t = 0; t < n; t++) std::copy_n(layer(L - 1, true) + t * E, E, s.raw + (at + t) * C + h * E);
    }
  }
  // The chunk's states as memory.cpp keeps them: of each layer weights and momentum, with padded sides.
  void reads_backward(const Real* kept, int64_t steps, Real* const* grads, const Real* draw, Real* dq) {
    std::vector<const Real*> W(L);
    std::vector<int64_t> ld(L);
    for (int h = 0; h < H; h++) {
      int64_t total = 0;
      for (int l = 0; l < L; l++) total += 2 * padded(in(l)) * padded(in(l + 1));
      const Real* from = kept + h * steps * total;
      for (int l = 0; l < L; l++) W[l] = from, ld[l] = padded(in(l + 1)), from += 2 * padded(in(l)) * ld[l];
      read(h, W.data(), ld.data());
      Real *dz = dhidden.data(), *dx = dz + dhidden.size() / 2;
      for (int t = 0; t < n; t++) std::copy_n(draw + t * C + h * E, E, dz + t * E);
      for (int l = L - 1; l >= 0; l--) {
        int from_width = in(l), to_width = in(l + 1);
        multiply<Real>(from_width, to_width, n, 1, layer(l, false), 1, from_width, dz, to_width,
                       grads[l] + h * size(l), to_width, true);
        transposed(from_width, to_width, W[l], ld[l], weight_t.data(), from_width);
        project(n, to_width, from_width, dz, weight_t.data(), dx, false);
        if (!l) break;
        slopes<Real>(c.memory.activation, n * from_width, layer(l - 1, true), slopes_.data(), nullptr);
        for (int i = 0; i < n * from_width; i++) dz[i] = dx[i] * slopes_[i];
      }
      for (int t = 0; t < n; t++) std::copy_n(dx + t * E, E, dq + (at + t) * C + h * E);
    }
  }

  // ---- the short convolutions' states
  // After the segment, of the projections `pre`: K - 1 rows. Only the last segment of a packed document may have
  // fewer tokens, and what is after that is not asked for.
  void inputs_after(int64_t kernel, int64_t channels, const Real* pre, Real* to) const {
    int64_t size = (kernel - 1) * channels;
    if (size && n >= kernel - 1) activate<Real>(SILU, size, pre + (at + n) * channels - size, to);
  }
  void inputs_backward(int64_t kernel, int64_t channels, const Real* pre, const Real* dafter, Real* dpre) {
    int64_t size = n < kernel - 1 ? 0 : (kernel - 1) * channels, first = (at + n) * channels - size;
    Buffer slope(size);
    if (size) slopes<Real>(SILU, size, pre + first, slope.data(), nullptr);
    for (int64_t i = 0; i < size; i++) dpre[first + i] += dafter[i] * slope[i];
  }

  // ---- attention over [p] || r || Z
  // Rows of a head turned by the angles of their places; back with sign -1.
  void rotate(Real* rows, Real sign) const {
    int half = c.span / 2;
    for (int t = 0; t < n && w.cos; t++) {
      Real *left = rows + t * c.span, *right = left + half;
      const Real *cos = w.cos + t * half, *sin = w.sin + t * half;
      for (int i = 0; i < half; i++) {
        Real x = left[i], y = right[i];
        left[i] = x * cos[i] - sign * y * sin[i], right[i] = sign * x * sin[i] + y * cos[i];
      }
    }
  }
  // Query, keys, values and scores of a head, after softmax; rows of scores are `padded` apart.
  void attend(int h) {
    int e = c.span, S = P + 2 * n, ld = padded(S);
    auto gather = [&](const Real* from, int64_t first, int rows, Real* to) {
      for (int t = 0; t < rows; t++) std::copy_n(from + (first + t) * A + h * e, e, to + t * e);
    };
    gather(w.prefix_k, 0, P, keys.data()), gather(w.prefix_v, 0, P, values.data());
    gather(s.read_k, at, n, keys.data() + P * e), gather(s.read_v, at, n, values.data() + P * e);
    gather(s.k, at, n, keys.data() + (P + n) * e), gather(s.v, at, n, values.data() + (P + n) * e);
    gather(s.q, at, n, query.data());
    rotate(query.data(), 1), rotate(keys.data() + P * e, 1), rotate(keys.data() + (P + n) * e, 1);
    transposed(S, e, keys.data(), e, keys_t.data(), ld);
    Real scale = w.scale[h] / std::sqrt(Real(e));
    multiply<Real>(n, ld, e, scale, query.data(), e, 1, keys_t.data(), ld, scores.data(), ld, false);
    for (int t = 0; t < n; t++) {
      Real* row = scores.data() + t * ld;
      auto hide = [&](Real with) {
        std::fill(row + P + t + 1, row + P + n, with), std::fill(row + P + n + t + 1, row + ld, with);
      };
      hide(-INFINITY);
      Real total = exponentials(ld, greatest(ld, row), row);  // what is hidden adds 1e-38 at most
      hide(0);
      scale_by(ld, 1 / total, row);
    }
  }
  void attention() {
    for (int h = 0; h < c.queries; h++) {
      attend(h);
      int S = P + 2 * n;
      multiply<Real>(n, c.span, S, 1, scores.data(), padded(S), 1, values.data(), c.span, s.a + at * A + h * c.span, A, false);
    }
  }
  void attention_backward(const Real* da, const Grads& g, int64_t document, Real* dread_k, Real* dread_v) {
    int e = c.span, S = P + 2 * n, ld = padded(S);
    for (int h = 0; h < c.queries; h++) {
      attend(h);
      const Real* of = da + h * e;
      multiply<Real>(S, e, n, 1, scores.data(), 1, ld, of, A, dvalues.data(), e, false);
      transposed(S, e, values.data(), e, values_t.data(), ld);
      multiply<Real>(n, ld, e, 1, of, A, 1, values_t.data(), ld, dscores.data(), ld, false);
      for (int t = 0; t < n; t++) {
        Real *row = scores.data() + t * ld, *drow = dscores.data() + t * ld, along = inner(S, row, drow);
        for (int j = 0; j < S; j++) drow[j] = row[j] * (drow[j] - along);
      }
      Real root = 1 / std::sqrt(Real(e)), scale = w.scale[h] * root;
      multiply<Real>(n, e, S, 1, dscores.data(), ld, 1, keys.data(), e, dquery.data(), e, false);
      multiply<Real>(S, e, n, scale, dscores.data(), 1, ld, query.data(), e, dkeys.data(), e, false);
      g.scale[document * c.queries + h] += root * inner(n * e, query.data(), dquery.data());
      for (Real& x : dquery) x *= scale;
      rotate(dquery.data(), -1), rotate(dkeys.data() + P * e, -1), rotate(dkeys.data() + (P + n) * e, -1);
      for (int t = 0; t < n; t++) std::copy_n(dquery.data() + t * e, e, g.q + (at + t) * A + h * e);
      auto scatter = [&](const Buffer& from, Real* prefix, Real* read, Real* tokens) {
        Real* to = prefix + document * P * A;
        for (int t = 0; t < P; t++)
          for (int i = 0; i < e; i++) to[t * A + h * e + i] += from[t * e + i];
        for (int t = 0; t < n; t++) {
          std::copy_n(from.data() + (P + t) * e, e, read + t * A + h * e);
          std::copy_n(from.data() + (P + n + t) * e, e, tokens + (at + t) * A + h * e);
        }
      };
      scatter(dkeys, g.prefix_k, dread_k, g.k), scatter(dvalues, g.prefix_v, dread_v, g.v);
    }
  }

  // ---- gates and the write
  Tokens<Real> tokens(const Streams& of, Real* y) const {
    return {of.write_q + at * C, of.write_k + at * C, of.write_v + at * C, of.alpha + at * H,
            of.eta + at * H,     of.theta + at * H,   y};
  }
  void gates() {
    for (int t = 0; t < n; t++)
      for (int i = 0; i < G; i++) {
        const Real* z = s.z + (at + t) * D;
        Real x = 1 / (1 + exponential(-(inner(D, z, w.gates + i * D) + w.bias[i])));
        int64_t kind = i / H, to = (at + t) * H + i % H;
        if (c.forgets && kind == 0) s.alpha[to] = Real(c.max_alpha) * x;
        if (c.moves && kind == c.forgets) s.eta[to] = x;
        if (kind == c.forgets + c.moves) s.own[to] = s.theta[to] = Real(c.max_theta) * x;
      }
  }
  // theta within the budget: see `effective_steps` in ../memory/budget.py
  void limit(const Shape& shape) {
    if (!c.budget) return;
    Buffer share(n * H);
    Real *own = s.own + at * H, *theta = s.theta + at * H;
    for (int i = 0; i < n * H; i++) share[i] = own[i] / Real(c.budget);
    budget_forward(&shape, s.write_k + at * C, s.eta + at * H, share.data(), theta, s.steps + at * H, 0, H);
    for (int i = 0; i < n * H; i++) theta[i] = theta[i] == share[i] ? own[i] : theta[i] * Real(c.budget);
  }
  // dtheta from the gradient of what is written with to that of the gate; adds to the keys' and eta's.
  void limit_backward(const Shape& shape, Real* dtheta, Real* dk, Real* deta) {
    if (!c.budget) return;
    Buffer share(n * H), limited(n * H), given(n * H), none(n * H, 0), dkeys(n * C), deta_(n * H), dshare(n * H);
    for (int i = 0; i < n * H; i++) {
      Real own = s.own[at * H + i], theta = s.theta[at * H + i];
      bool free = theta == own;
      share[i] = own / Real(c.budget), limited[i] = free ? share[i] : theta / Real(c.budget);
      given[i] = free ? Real(0) : dtheta[i] * Real(c.budget), dtheta[i] = free ? dtheta[i] : Real(0);
    }
    budget_backward(&shape, given.data(), none.data(), s.write_k + at * C, s.eta + at * H, share.data(),
                    limited.data(), s.steps + at * H, dkeys.data(), deta_.data(), dshare.data(), 0, H);
    for (int i = 0; i < n * C; i++) dk[i] += dkeys[i];
    for (int i = 0; i < n * H; i++) deta[i] += deta_[i], dtheta[i] += dshare[i] / Real(c.budget);
  }
  // dlin of the gates from theirs; adds to dz.
  void gates_backward(const Real* dalpha, const Real* deta, const Real* dtheta, Real* lin, Real* dz) {
    for (int t = 0; t < n; t++)
      for (int i = 0; i < G; i++) {
        int64_t kind = i / H, to = t * H + i % H, of = (at + t) * H + i % H;
        bool forgets = c.forgets && kind == 0, moves = !forgets && c.moves && kind == c.forgets;
        Real most = forgets ? c.max_alpha : moves ? 1 : c.max_theta;
        Real x = (forgets ? s.alpha : moves ? s.eta : s.own)[of] / most;
        Real d = (forgets ? dalpha : moves ? deta : dtheta)[to] * most * x * (1 - x);
        lin[(at + t) * G + i] = d;
        for (int j = 0; j < D; j++) dz[t * D + j] += d * w.gates[i * D + j];
      }
  }
};

// A document's segments, with its place among the chunks' states.
template <class Work> void each_segment(const Chain& c, int64_t document, bool back, Work work) {
  int64_t begin = c.borders[document], end = c.borders[document + 1], count = (end - begin + c.segment - 1) / c.segment;
  for (int64_t i = 0; i < count; i++) {
    int64_t at = begin + (back ? count - 1 - i : i) * c.segment;
    int64_t n = std::min(c.segment, end - at), chunk = c.memory.chunk;
    work(at, n, c.chunks[document] + (at - begin) / chunk, (n + chunk - 1) / chunk);
  }
}

}  // namespace

// ``state`` [2 L + 2]: weights and momenta [documents, heads, D, F], the convolutions' inputs [documents, K - 1,
// channels] of reads and writes; ``after`` the same, or null. ``base`` [L], or null; with it weights are whole.
extern "C" void segments_forward(const Chain* chain, const Weights* weights, const Streams* streams,
                                 const Real* const* state, Real** base, Real** after, Real* kept, int64_t first,
                                 int64_t stop) {
  FlushDenormals flush;
  const Chain& c = *chain;
  const Weights& w = *weights;
  const Streams& s = *streams;
  Segment x(c, w, s);
  int L = x.L, parts = 2 * L, C = x.C, D = x.D, A = x.A;
  std::vector<Buffer> now(parts), next(parts);
  std::vector<Real*> from(parts), to(parts);
  std::vector<int64_t> none(parts, 0);
  Buffer read_inputs((c.read_kernel - 1) * 2 * A), write_inputs((c.write_kernel - 1) * 3 * C);
  int64_t kept_size = 0;
  for (int l = 0; l < L; l++) kept_size += 2 * padded(x.in(l)) * padded(x.in(l + 1)) * x.H;
  for (int64_t document = first; document < stop; document++) {
    for (int i = 0; i < parts; i++) {
      int64_t size = x.size(i % L) * x.H;
      now[i].assign(state[i] + document * c.strides[i], state[i] + document * c.strides[i] + size);
      next[i].resize(size);
    }
    std::copy_n(state[parts] + document * c.strides[parts], read_inputs.size(), read_inputs.data());
    std::copy_n(state[parts + 1] + document * c.strides[parts + 1], write_inputs.size(), write_inputs.data());
    each_segment(c, document, false, [&](int64_t at, int64_t n, int64_t chunk, int64_t count) {
      x.at = at, x.n = n;
      for (int i = 0; i < parts; i++) from[i] = now[i].data(), to[i] = next[i].data();
      int64_t borders[] = {0, n}, chunks[] = {0, count};
      x.reads(from.data());
      norm_forward(x.E, c.epsilon, s.raw + at * C, w.read_norm, s.gate ? s.gate + at * C : nullptr, s.normed + at * C,
                   0, n * x.H);
      project(n, C, D, s.normed + at * C, w.read_out_t, s.r + at * D, false);
      project(n, D, 2 * A, s.r + at * D, w.read_in_t, s.read_pre + at * 2 * A, false);
      Real* pair[] = {s.read_k + at * A, s.read_v + at * A};
      Mix mix = x.mix(true, borders);
      mix_forward(&mix, s.read_pre + at * 2 * A, w.read_conv, read_inputs.data(), pair, 0, 1);
      x.inputs_after(c.read_kernel, 2 * A, s.read_pre, read_inputs.data());
      x.attention();
      std::copy_n(s.x + at * D, n * D, s.y + at * D);
      project(n, A, D, s.a + at * A, w.out_t, s.y + at * D, true);
      norm_forward(D, c.epsilon, s.y + at * D, w.norm, nullptr, s.z + at * D, 0, n);
      project(n, D, 3 * C, s.z + at * D, w.in_t, s.pre + at * 3 * C, false);
      Real* three[] = {s.write_q + at * C, s.write_k + at * C, s.write_v + at * C};
      mix = x.mix(false, borders);
      mix_forward(&mix, s.pre + at * 3 * C, w.write_conv, write_inputs.data(), three, 0, 1);
      x.inputs_after(c.write_kernel, 3 * C, s.pre, write_inputs.data());
      x.gates();
      x.limit(Shape{x.H, x.E, c.memory.chunk, 0, borders});
      Spec spec = c.memory;
      spec.borders = borders, spec.kept = chunks;
      Tokens<Real> tokens = x.tokens(s, s.m + at * C);
      Open<Real> open{};
      memory_forward(&spec, &tokens, from.data(), none.data(), base, to.data(),
                     kept ? kept + chunk * kept_size : nullptr, &open, 0, x.H);
      std::swap(now, next);
    });
    if (!after) continue;
    for (int i = 0; i < parts; i++) std::copy(now[i].begin(), now[i].end(), after[i] + document * now[i].size());
    std::copy(read_inputs.begin(), read_inputs.end(), after[parts] + document * read_inputs.size());
    std::copy(write_inputs.begin(), write_inputs.end(), after[parts + 1] + document * write_inputs.size());
  }
}

// ``dafter`` as ``after``, with null pointers for zeros; ``dbefore`` [2 L + 2, and L with a base]: of the state, then
// of the base of each document.
extern "C" void segments_backward(const Chain* chain, const Weights* weights, const Streams* streams,
                                  const Real* const* state, Real** base, const Real* kept, const Real* const* dafter,
                                  const Grads* grads, Real** dbefore, int64_t first, int64_t stop) {
  FlushDenormals flush;
  const Chain& c = *chain;
  const Weights& w = *weights;
  const Streams& s = *streams;
  const Grads& g = *grads;
  Segment x(c, w, s);
  int L = x.L, parts = 2 * L, C = x.C, D = x.D, A = x.A, H = x.H;
  int64_t n0 = c.segment, read_size = (c.read_kernel - 1) * 2 * A, write_size = (c.write_kernel - 1) * 3 * C;
  std::vector<Buffer> now(parts), next(parts + L);
  std::vector<Real*> from(parts), to(parts + L);
  Buffer dq(n0 * C), dk(n0 * C), dv(n0 * C), dalpha(n0 * H), deta(n0 * H), dtheta(n0 * H), dz(n0 * D), da(n0 * A),
      dread_k(n0 * A), dread_v(n0 * A), dnormed(n0 * C), draw(n0 * C);
  Buffer read_inputs(read_size), write_inputs(write_size), dread(read_size), dwrite(write_size);
  int64_t kept_size = 0;
  for (int l = 0; l < L; l++) kept_size += 2 * padded(x.in(l)) * padded(x.in(l + 1)) * H;
  for (int64_t document = first; document < stop; document++) {
    auto given = [&](int i, int64_t size, Buffer& to) {
      const Real* from = dafter[i];
      to.assign(size, 0);
      if (from) std::copy_n(from + document * size, size, to.data());
    };
    for (int i = 0; i < parts; i++) given(i, x.size(i % L) * H, now[i]);
    for (int i = 0; i < parts + L; i++) next[i].assign(x.size(i % L) * H, 0);
    given(parts, read_size, dread), given(parts + 1, write_size, dwrite);
    each_segment(c, document, true, [&](int64_t at, int64_t n, int64_t chunk, int64_t count) {
      x.at = at, x.n = n;
      for (int i = 0; i < parts + L; i++) to[i] = next[i].data();
      for (int i = 0; i < parts; i++) from[i] = now[i].data();
      int64_t borders[] = {0, n}, chunks[] = {0, count};
      bool start = at == c.borders[document];
      auto before = [&](const Real* pre, int64_t channels, int part, Buffer& to) {
        if (start) std::copy_n(state[part] + document * c.strides[part], to.size(), to.data());
        else if (!to.empty()) activate<Real>(SILU, to.size(), pre + at * channels - to.size(), to.data());
      };
      before(s.read_pre, 2 * A, parts, read_inputs), before(s.pre, 3 * C, parts + 1, write_inputs);
      // the write
      Spec spec = c.memory;
      spec.borders = borders, spec.kept = chunks;
      const Real* held = kept + chunk * kept_size;
      Tokens<Real> tokens = x.tokens(s, nullptr);
      Tokens<Real> dtokens{dq.data(), dk.data(), dv.data(), dalpha.data(), deta.data(), dtheta.data(),
                           const_cast<Real*>(g.dm) + at * C};
      memory_backward(&spec, &tokens, base, held, from.data(), &dtokens, to.data(), 0, H);
      for (int l = 0; base && l < L; l++)
        for (size_t i = 0; i < next[parts + l].size(); i++)
          dbefore[parts + 2 + l][document * next[parts + l].size() + i] += next[parts + l][i];
      x.limit_backward(Shape{H, x.E, c.memory.chunk, 0, borders}, dtheta.data(), dk.data(), deta.data());
      std::copy_n(g.dz + at * D, n * D, dz.data());
      x.gates_backward(dalpha.data(), deta.data(), dtheta.data(), g.lin, dz.data());
      const Real* three[] = {dq.data(), dk.data(), dv.data()};
      Mix mix = x.mix(false, borders);
      Buffer dinputs(write_size);
      mix_backward(&mix, s.pre + at * 3 * C, w.write_conv, write_inputs.data(), const_cast<Real**>(three),
                   g.pre + at * 3 * C, g.write_conv + document * c.write_kernel * 3 * C, dinputs.data(), 0, 1);
      x.inputs_backward(c.write_kernel, 3 * C, s.pre, dwrite.data(), g.pre);
      std::swap(dwrite, dinputs);
      project(n, 3 * C, D, g.pre + at * 3 * C, w.in, dz.data(), true);
      // attention
      Real* dx = g.x + at * D;
      norm_backward(D, c.epsilon, s.y + at * D, w.norm, nullptr, dz.data(), dx, g.norm + document * D, nullptr, 0, n);
      for (int i = 0; i < n * D; i++) dx[i] += g.dy[at * D + i];
      project(n, D, A, dx, w.out, da.data(), false);
      x.attention_backward(da.data(), g, document, dread_k.data(), dread_v.data());
      // the read
      const Real* pair[] = {dread_k.data(), dread_v.data()};
      mix = x.mix(true, borders);
      dinputs.assign(read_size, 0);
      mix_backward(&mix, s.read_pre + at * 2 * A, w.read_conv, read_inputs.data(), const_cast<Real**>(pair),
                   g.read_pre + at * 2 * A, g.read_conv + document * c.read_kernel * 2 * A, dinputs.data(), 0, 1);
      x.inputs_backward(c.read_kernel, 2 * A, s.read_pre, dread.data(), g.read_pre);
      std::swap(dread, dinputs);
      project(n, 2 * A, D, g.read_pre + at * 2 * A, w.read_in, g.r + at * D, false);
      project(n, D, C, g.r + at * D, w.read_out, dnormed.data(), false);
      norm_backward(x.E, c.epsilon, s.raw + at * C, w.read_norm, s.gate ? s.gate + at * C : nullptr, dnormed.data(),
                    draw.data(), g.read_norm + document * x.E, s.gate ? g.gate + at * C : nullptr, 0, n * H);
      x.reads_backward(held, count, to.data(), draw.data(), g.read_q);
      for (int i = 0; i < parts; i++) std::swap(now[i], next[i]);
    });
    for (int i = 0; i < parts; i++) std::copy(now[i].begin(), now[i].end(), dbefore[i] + document * now[i].size());
    std::copy(dread.begin(), dread.end(), dbefore[parts] + document * read_size);
    std::copy(dwrite.begin(), dwrite.end(), dbefore[parts + 1] + document * write_size);
  }
}
