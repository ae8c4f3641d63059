// The paper's rule on a CPU, one document and head after the other: what a chunk meets stays in the cache.
//
// Formulas as in ../memory/parts: passes.py and gates.py. A chunk's tokens lie side by side in a
// vector's lanes: matrices are [features][P], P the chunk's tokens rounded up to 16, features too;
// what is added is zero and stays so, for f(0) = 0. A name that ends in _t is such a matrix transposed,
// [P][features]. A layer's weights and momentum are stacked over its input: [2 D][F], with a base to forget to
// [3 D][F].
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "calls.h"
#include "lanes.h"
#include "norm.h"

namespace {

// Cut from one block of memory, each on a border of 64 bytes.
template <class R> struct Arena {
  std::vector<R*> parts;
  R* block = nullptr;
  int64_t size = 0;
  std::vector<std::pair<R**, int64_t>> wanted;
  void ask(R*& pointer, int64_t n) { wanted.push_back({&pointer, size}), size += padded(n); }
  void give() {
    block = static_cast<R*>(::operator new(size * sizeof(R), std::align_val_t(64)));
    std::fill(block, block + size, R(0));
    for (auto& [pointer, offset] : wanted) *pointer = block + offset;
  }
  ~Arena() { ::operator delete(block, std::align_val_t(64)); }
};

// One layer of the memory in one chunk.
template <class R> struct Layer {
  int D, F;  // padded
  int64_t inputs, outputs;
  R *WS, *grad;                           // the state and its gradient, [parts D][F]
  R *X, *z, *d, *d_t, *E, *scale;         // keys, as `passes.Keys`
  R *x, *u, *scores, *P;                  // reads; scores and P = C scores are [s][t]
  R *dX, *dd, *dz_t, *slope, *second;     // gradients; dz_t of the reads
};

template <class R> struct Chunk {
  const Spec& spec;
  int L, H, parts;
  int64_t most;  // tokens of the longest chunk, padded
  int64_t state_size = 0;
  std::vector<Layer<R>> layers;
  Arena<R> arena;
  // gates; C and N are [t][s], C_s is [s][t]
  R *alpha, *eta, *theta, *C, *C_s, *N, *beta, *m, *h, *rest;  // rest: 1 - beta, what a base has of a read
  R *dC, *dC_s, *dbeta, *dm, *dh, *dc, *dn, *dalpha, *deta, *dtheta, *carry_C, *carry_N;
  Norm<R> norm;
  R *r, *read_r;   // of LN, for keys and reads
  R *y, *dy, *dp;  // what is read, its gradient, and that of the prediction M(k)
  R *pair, *square, *square_t, *dz, *dx, *v, *spare_t;
  int n = 0, P = 0;  // tokens of the chunk at hand, and rounded up
  int old = 0;       // how many of them came before the call

  Chunk(const Spec& spec, bool backward)
      : spec(spec), L(spec.depth), H(spec.heads), parts(spec.parts), most(padded(spec.chunk)) {
    layers.resize(L);
    int64_t widest = 0;
    for (int l = 0; l <= L; l++) widest = std::max(widest, padded(spec.widths[l]));
    for (int l = 0; l < L; l++) {
      Layer<R>& y = layers[l];
      y.inputs = spec.widths[l], y.outputs = spec.widths[l + 1];
      y.D = padded(y.inputs), y.F = padded(y.outputs);
      int64_t in = y.D * most, out = y.F * most;
      state_size += 2 * y.D * y.F;
      arena.ask(y.WS, parts * y.D * y.F);
      for (R** p : {&y.X, &y.x}) arena.ask(*p, in);
      for (R** p : {&y.z, &y.d, &y.d_t, &y.E, &y.u}) arena.ask(*p, out);
      for (R** p : {&y.scores, &y.P}) arena.ask(*p, most * most);
      arena.ask(y.scale, most);
      if (!backward) continue;
      arena.ask(y.grad, parts * y.D * y.F);
      arena.ask(y.dX, in);
      for (R** p : {&y.dd, &y.dz_t, &y.slope, &y.second}) arena.ask(*p, out);
    }
    for (R** p : {&alpha, &eta, &theta, &beta, &m, &h, &rest, &dbeta, &dm, &dh, &dc, &dn, &dalpha, &deta, &dtheta,
                  &carry_C, &carry_N, &r, &read_r})
      arena.ask(*p, most);
    for (R** p : {&C, &C_s, &N, &dC, &dC_s, &square, &square_t}) arena.ask(*p, most * most);
    arena.ask(pair, parts * widest * most);
    for (R** p : {&dz, &dx, &v, &spare_t, &y, &dy, &dp}) arena.ask(*p, widest * most);
    for (R** p : {&norm.dweight, &norm.dbias}) arena.ask(*p, padded(spec.widths[L]) * LANES);
    norm.rows = spec.widths[L];
    arena.give();
  }

  // Tokens at [T, heads, width] from and to [features][P]; what is beyond them is zero.
  APART void load(const R* from, int64_t token, int head, int64_t width, R* to) {
    int rows = padded(width);
    R* rows_t = spare_t;
    for (int t = 0; t < P; t++) {
      const R* x = from + ((token + t) * H + head) * width;
      bool here = t >= old && t < n;
      if (here) std::copy(x, x + width, rows_t + t * rows);
      std::fill(rows_t + t * rows + (here ? width : 0), rows_t + (t + 1) * rows, R(0));
    }
    transpose(P, rows, rows_t, to);
  }
  APART void store(const R* x, int64_t token, int head, int64_t width, R* to, R sign = 1) {
    int rows = padded(width);
    transpose(rows, P, x, spare_t);
    for (int t = old; t < n; t++)
      for (int i = 0; i < width; i++) to[((token + t) * H + head) * width + i] = sign * spare_t[t * rows + i];
  }
  void load_gate(const R* from, int64_t token, int head, R* to) {
    for (int t = 0; t < P; t++) to[t] = t >= old && t < n ? from[(token + t) * H + head] : R(0);
  }
  void store_gate(const R* x, int64_t token, int head, R* to) {
    for (int t = 0; t < n; t++) to[(token + t) * H + head] = x[t];
  }

  // A state of two tensors [D, F] from and to its padded stack.
  static void load_state(const R* W, const R* S, Layer<R>& y, R* to) {
    std::fill(to, to + 2 * y.D * y.F, R(0));
    for (int i = 0; i < y.inputs; i++) {
      if (W) std::copy(W + i * y.outputs, W + (i + 1) * y.outputs, to + i * y.F);
      if (S) std::copy(S + i * y.outputs, S + (i + 1) * y.outputs, to + (y.D + i) * y.F);
    }
  }
  static void store_state(const R* from, const Layer<R>& y, R* W, R* S) {
    for (int i = 0; i < y.inputs; i++) {
      std::copy(from + i * y.F, from + i * y.F + y.outputs, W + i * y.outputs);
      std::copy(from + (y.D + i) * y.F, from + (y.D + i) * y.F + y.outputs, S + i * y.outputs);
    }
  }
  // A base [D, F] to the third part of its layer's stack, or where there is none zeros; and its gradient from it.
  void load_base(const R* B, const Layer<R>& y, R* stack) const {
    if (parts == 2) return;
    R* to = stack + 2 * y.D * y.F;
    std::fill(to, to + y.D * y.F, R(0));
    for (int i = 0; B && i < y.inputs; i++) std::copy(B + i * y.outputs, B + (i + 1) * y.outputs, to + i * y.F);
  }
  void store_base(const R* stack, const Layer<R>& y, R* B) const {
    const R* from = stack + 2 * y.D * y.F;
    for (int i = 0; i < y.inputs; i++) std::copy(from + i * y.F, from + i * y.F + y.outputs, B + i * y.outputs);
  }
  void save(R* to) const {
    for (const Layer<R>& y : layers) std::copy(y.WS, y.WS + 2 * y.D * y.F, to), to += 2 * y.D * y.F;
  }
  void recall(const R* from) {
    for (Layer<R>& y : layers) std::copy(from, from + 2 * y.D * y.F, y.WS), from += 2 * y.D * y.F;
  }

  void read_tokens(const Tokens<R>& tokens, int64_t token, int head, int count) {
    n = count, P = padded(count);
    load(tokens.q, token, head, layers[0].inputs, layers[0].x);
    load(tokens.k, token, head, layers[0].inputs, layers[0].X);
    load(tokens.v, token, head, layers[L - 1].outputs, v);
    load_gate(tokens.alpha, token, head, alpha);
    load_gate(tokens.eta, token, head, eta);
    load_gate(tokens.theta, token, head, theta);
  }

  // LN's weight and bias of a head, from [heads, D]; and their gradients, to [documents, heads, D].
  void load_norm(R** from, int head) {
    norm.weight = from[0] + head * norm.rows, norm.bias = from[1] + head * norm.rows;
    std::fill(norm.dweight, norm.dweight + norm.rows * LANES, R(0));
    std::fill(norm.dbias, norm.dbias + norm.rows * LANES, R(0));
  }
  void store_norm(R** to, int64_t job) const {
    R* sums[] = {norm.dweight, norm.dbias};
    for (int part = 0; part < 2; part++)
      for (int i = 0; i < norm.rows; i++)
        to[part][job * norm.rows + i] = std::accumulate(sums[part] + i * LANES, sums[part] + (i + 1) * LANES, R(0));
  }

  // Tokens of an open chunk, [old][width], to the lanes of a matrix and from them.
  void load_old(const R* from, int64_t job, int64_t width, R* to) {
    for (int t = 0; t < old; t++)
      for (int i = 0; i < width; i++) to[i * P + t] = from[(job * old + t) * width + i];
  }
  void store_open(const R* x, int64_t job, int64_t width, R* to) {
    for (int t = 0; t < n; t++)
      for (int i = 0; i < width; i++) to[(job * n + t) * width + i] = x[i * P + t];
  }

  // Keys, and the gates' last row; `keys` makes the layers above of the keys and takes the errors from here.
  APART void resume(R** held, int64_t job) {
    int last = old - 1;
    load_old(held[0], job, layers[0].inputs, layers[0].X);
    R **gates = held + 2 * L, *row = C + last * P, *moved = N + last * P;
    std::fill(row, row + P, R(0)), std::fill(moved, moved + P, R(0));
    std::copy(gates[0] + job * old, gates[0] + (job + 1) * old, row);
    std::copy(gates[1] + job * old, gates[1] + (job + 1) * old, moved);
    beta[last] = gates[2][job], m[last] = gates[3][job], h[last] = gates[4][job];
  }
  APART void leave(R** left, int64_t job) {
    int last = n - 1;
    for (int l = 0; l < L; l++) {
      store_open(layers[l].X, job, layers[l].inputs, left[l]);
      store_open(layers[l].d, job, layers[l].outputs, left[L + l]);
    }
    R** gates = left + 2 * L;
    std::copy(C + last * P, C + last * P + n, gates[0] + job * n);
    std::copy(N + last * P, N + last * P + n, gates[1] + job * n);
    gates[2][job] = beta[last], gates[3][job] = m[last], gates[4][job] = h[last];
  }

  // Row after row: C_t = (1 - alpha_t) C_{t-1} + N_t, N_t = eta_t N_{t-1} with theta_t at t.
  APART void gates() {
    for (int t = old; t < P; t++) {
      R keep = 1 - alpha[t];
      R *now = C + t * P, *moved = N + t * P;
      if (t) {
        for (int s = 0; s < P; s++) moved[s] = eta[t] * (moved - P)[s];
        moved[t] = theta[t];
        for (int s = 0; s < P; s++) now[s] = keep * (now - P)[s] + moved[s];
        beta[t] = keep * beta[t - 1], h[t] = eta[t] * h[t - 1], m[t] = keep * m[t - 1] + h[t];
      } else {
        std::fill(moved, moved + P, R(0)), moved[0] = theta[0];
        std::copy(moved, moved + P, now);
        beta[0] = keep, h[0] = m[0] = eta[0];
      }
    }
    for (int t = 0; t < P; t++) rest[t] = 1 - beta[t];
    transpose(P, P, C, C_s);
  }

  // From dC, dbeta, dm, dh, and dn of the last row of N.
  APART void gates_backward() {
    R to_beta = 0, to_m = 0, to_h = 0;
    std::fill(carry_C, carry_C + P, R(0)), std::fill(carry_N, carry_N + P, R(0));
    for (int t = n - 1; t >= 0; t--) {
      R keep = 1 - alpha[t], dkeep = 0, moved = 0;
      for (int s = 0; s < P; s++) {
        carry_C[s] += dC[t * P + s];
        carry_N[s] += carry_C[s] + (t == n - 1 ? dn[s] : R(0));
      }
      to_beta += dbeta[t], to_m += dm[t], to_h += dh[t] + to_m;
      dtheta[t] = carry_N[t];
      carry_N[t] = 0;
      if (t) {
        dkeep = inner(P, carry_C, C + (t - 1) * P), moved = inner(P, carry_N, N + (t - 1) * P);
        dkeep += to_m * m[t - 1];
      }
      dalpha[t] = -(dkeep + to_beta * (t ? beta[t - 1] : R(1)));
      deta[t] = moved + to_h * (t ? h[t - 1] : R(1));
      carry_C[t] = 0;  // the next row has none of this token
      for (int s = 0; s < P; s++) carry_C[s] *= keep, carry_N[s] *= eta[t];
      to_beta *= keep, to_m *= keep, to_h *= eta[t];
    }
  }

  APART void bound(Layer<R>& y) {
    if (!spec.bound) return;
    std::fill(y.scale, y.scale + P, R(0));
    add_inner(y.F, P, y.d, y.d, R(1), y.scale);
    constexpr R EDGE = 1 + 32 * std::numeric_limits<R>::epsilon();  // `edge` in ../memory/parts/passes.py
    for (int t = 0; t < P; t++) {
      R over = std::sqrt(y.scale[t]) / R(spec.bound);
      square[t] = 1 / (y.scale[t] = over > EDGE ? over : R(1));
    }
    scaled(y.F, P, y.d, square, y.d);
  }

  // From predictions M(k) the error in their place, the gradient of the inner loss.
  APART void errors(int rows, R* p) {
    for (int i = 0; i < rows * P; i++) p[i] = 2 * (p[i] - v[i]);
  }

  // d from the last layer's output z; E is the error where that is not d. With LN z becomes n, and d of
  // the tokens that pad the chunk is not zero, but their keys and their columns of C and N are.
  APART void surprise(Layer<R>& top) {
    int size = top.F * P;
    if (!spec.norm) {
      std::copy(top.z, top.z + size, top.d);
      errors(top.F, top.d);
      return;
    }
    std::fill(top.d + norm.rows * P, top.d + size, R(0));
    norm.normalise(P, top.z, r);
    norm.output(P, layers[0].X, top.z, top.E);
    errors(norm.rows, top.E);
    norm.surprise(P, top.z, r, top.E, top.d);
  }

  // Forward through the memory, then the errors back; ``errors`` [L] of the tokens that came before the call.
  APART void keys(R** errors, int64_t job) {
    for (int l = 0; l < L; l++) {
      Layer<R>& y = layers[l];
      multiply<R>(y.F, P, y.D, 1, y.WS, 1, y.F, y.X, y.z, false);
      if (l < L - 1) activate(spec.activation, y.F * P, y.z, layers[l + 1].X);
    }
    Layer<R>& top = layers[L - 1];
    surprise(top);
    bound(top);
    for (int l = L - 2; l >= 0; l--) {
      Layer<R>&y = layers[l], &up = layers[l + 1];
      multiply<R>(up.D, P, up.F, 1, up.WS, up.F, 1, up.d, y.E, false);
      slopes<R>(spec.activation, y.F * P, y.z, y.d, nullptr);
      for (int i = 0; i < y.F * P; i++) y.d[i] *= y.E[i];
      bound(y);
    }
    for (int l = 0; l < L; l++) {
      Layer<R>& y = layers[l];
      if (old) load_old(errors[l], job, y.outputs, y.d);
      transpose(y.F, P, y.d, y.d_t);
    }
  }

  // What a read takes of each part of the stack.
  void factored(const Layer<R>& y, R* to) {
    scaled(y.D, P, y.x, beta, to), scaled(y.D, P, y.x, m, to + y.D * P);
    if (parts == 3) scaled(y.D, P, y.x, rest, to + 2 * y.D * P);
  }

  // Queries through the weights after each of their tokens; with LN the last u becomes n.
  APART void reads() {
    for (int l = 0; l < L; l++) {
      Layer<R>& y = layers[l];
      if (l) activate(spec.activation, y.D * P, layers[l - 1].u, y.x);
      multiply<R>(P, P, y.D, 1, y.X, 1, P, y.x, y.scores, false);
      for (int i = 0; i < P * P; i++) y.P[i] = C_s[i] * y.scores[i];
      factored(y, pair);
      multiply<R>(y.F, P, parts * y.D, 1, y.WS, 1, y.F, pair, y.u, false);
      multiply<R>(y.F, P, P, -1, y.d, P, 1, y.P, y.u, true);
    }
    if (spec.norm) norm.normalise(P, layers[L - 1].u, read_r);
  }

  // What is read [features][P], from the last u.
  R* output() {
    R* u = layers[L - 1].u;
    if (!spec.norm) return u;
    norm.output(P, layers[0].x, u, y);
    return y;
  }

  // From dy the gradient of the last u, in dz.
  APART void output_backward() {
    Layer<R>& top = layers[L - 1];
    std::copy(dy, dy + top.F * P, dz);
    if (spec.norm) norm.output_backward(P, top.u, read_r, dz);
  }

  // Of each key's input what goes into the state after the chunk.
  void leaving(const Layer<R>& y, R* to) {
    scaled(y.D, P, y.X, C + (n - 1) * P, to), scaled(y.D, P, y.X, N + (n - 1) * P, to + y.D * P);
  }

  APART void advance() {
    R a = beta[n - 1], from = m[n - 1], kept = h[n - 1];
    for (Layer<R>& y : layers) {
      R *W = y.WS, *S = y.WS + y.D * y.F, *B = S + y.D * y.F;
      for (int i = 0; i < y.D * y.F; i++) W[i] = a * W[i] + from * S[i], S[i] *= kept;
      for (int i = 0; parts == 3 && i < y.D * y.F; i++) W[i] += (1 - a) * B[i];
      leaving(y, pair);
      multiply<R>(2 * y.D, y.F, P, -1, pair, P, 1, y.d_t, y.WS, true);
    }
  }

  APART void reads_backward() {
    output_backward();
    std::fill(dC_s, dC_s + P * P, R(0));
    std::fill(dbeta, dbeta + P, R(0)), std::fill(dm, dm + P, R(0)), std::fill(dh, dh + P, R(0));
    for (int l = L - 1; l >= 0; l--) {  // dz is that of u
      Layer<R>& y = layers[l];
      transpose(y.F, P, dz, y.dz_t);
      transpose(P, P, y.P, square_t);
      multiply<R>(y.F, P, P, -1, dz, P, 1, square_t, y.dd, false);
      multiply<R>(P, P, y.F, -1, y.d, 1, P, dz, square, false);
      for (int i = 0; i < P * P; i++) dC_s[i] += square[i] * y.scores[i], square[i] *= C_s[i];
      transpose(P, P, square, square_t);
      multiply<R>(y.D, P, P, 1, y.x, P, 1, square_t, y.dX, false);
      multiply<R>(parts * y.D, P, y.F, 1, y.WS, y.F, 1, dz, pair, false);
      add_inner(y.D, P, pair, y.x, R(1), dbeta), add_inner(y.D, P, pair + y.D * P, y.x, R(1), dm);
      scaled(y.D, P, pair, beta, dx), add_scaled(y.D, P, pair + y.D * P, m, R(1), dx);
      if (parts == 3) {
        add_inner(y.D, P, pair + 2 * y.D * P, y.x, R(-1), dbeta);
        add_scaled(y.D, P, pair + 2 * y.D * P, rest, R(1), dx);
      }
      multiply<R>(y.D, P, P, 1, y.X, P, 1, square, dx, true);
      if (!l) continue;
      slopes<R>(spec.activation, y.D * P, layers[l - 1].u, dz, nullptr);
      for (int i = 0; i < y.D * P; i++) dz[i] *= dx[i];
    }
    for (int i = 0; spec.norm && i < norm.rows * P; i++) dx[i] += dy[i];
  }

  // Of the step to the next state, and of the reads with respect to this one.
  APART void advance_backward() {
    int last = n - 1;
    R a = beta[last], from = m[last], kept = h[last];
    std::fill(dc, dc + P, R(0)), std::fill(dn, dn + P, R(0));
    for (Layer<R>& y : layers) {
      int size = y.D * y.F;
      multiply<R>(2 * y.D, P, y.F, 1, y.grad, y.F, 1, y.d, pair, false);
      add_inner(y.D, P, pair, y.X, R(-1), dc), add_inner(y.D, P, pair + y.D * P, y.X, R(-1), dn);
      add_scaled(y.D, P, pair, C + last * P, R(-1), y.dX);
      add_scaled(y.D, P, pair + y.D * P, N + last * P, R(-1), y.dX);
      leaving(y, pair);
      multiply<R>(y.F, P, 2 * y.D, -1, y.grad, 1, y.F, pair, y.dd, true);
      R *dW = y.grad, *dS = y.grad + size;
      dbeta[last] += inner(size, dW, y.WS), dm[last] += inner(size, dW, y.WS + size);
      dh[last] += inner(size, dS, y.WS + size);
      if (parts == 3) {
        R* dB = dS + size;
        dbeta[last] -= inner(size, dW, y.WS + 2 * size);
        for (int i = 0; i < size; i++) dB[i] += (1 - a) * dW[i];
      }
      for (int i = 0; i < size; i++) dS[i] = kept * dS[i] + from * dW[i], dW[i] *= a;
      factored(y, pair);
      multiply<R>(parts * y.D, y.F, P, 1, pair, P, 1, y.dz_t, y.grad, true);
    }
    transpose(P, P, dC_s, dC);
    for (int s = 0; s < P; s++) dC[last * P + s] += dc[s];
  }

  // Where the bound held only what is across d passes.
  void bound_backward(Layer<R>& y) {
    if (!spec.bound) return;
    R *along = square, squared = R(spec.bound * spec.bound);
    std::fill(along, along + P, R(0));
    add_inner(y.F, P, y.d, y.dd, R(1), along);
    for (int t = 0; t < P; t++) along[t] = y.scale[t] > 1 ? along[t] / squared : R(0);
    add_scaled(y.F, P, y.d, along, R(-1), y.dd);
    for (int t = 0; t < P; t++) along[t] = 1 / y.scale[t];
    scaled(y.F, P, y.dd, along, y.dd);
  }

  // dd of the last layer becomes the gradient of z; dp is that of the prediction.
  APART void surprise_backward(Layer<R>& top) {
    if (!spec.norm) {
      for (int i = 0; i < top.F * P; i++) dp[i] = top.dd[i] *= 2;
      return;
    }
    norm.surprise_backward(P, top.z, r, top.E, top.dd, dp);
    for (int i = 0; i < norm.rows * P; i++) layers[0].dX[i] += dp[i];
  }

  // Up through the errors' way down, then down through the keys' way up; dd becomes the gradient of z.
  APART void keys_backward() {
    for (int l = 0; l < L - 1; l++) {
      Layer<R>&y = layers[l], &up = layers[l + 1];
      bound_backward(y);
      slopes(spec.activation, y.F * P, y.z, y.slope, y.second);
      for (int i = 0; i < y.F * P; i++) {
        pair[i] = y.dd[i] * y.slope[i];
        y.dd[i] *= y.second[i] * y.E[i];
      }
      multiply<R>(up.F, P, up.D, 1, up.WS, 1, up.F, pair, up.dd, true);
      multiply<R>(up.D, up.F, P, 1, pair, P, 1, up.d_t, up.grad, true);
    }
    Layer<R>& top = layers[L - 1];
    bound_backward(top);
    surprise_backward(top);
    for (int l = L - 1; l >= 0; l--) {
      Layer<R>& y = layers[l];
      transpose(y.F, P, y.dd, spare_t);
      multiply<R>(y.D, y.F, P, 1, y.X, P, 1, spare_t, y.grad, true);
      multiply<R>(y.D, P, y.F, 1, y.WS, y.F, 1, y.dd, y.dX, true);
      if (!l) continue;
      Layer<R>& down = layers[l - 1];
      for (int i = 0; i < y.D * P; i++) down.dd[i] += y.dX[i] * down.slope[i];
    }
  }
};

// Of document and head ``job``: its first token, how many there are, and where its states are kept.
struct Place {
  int64_t document, first, length, chunks, kept;
  int head;
  Place(const Spec& s, int64_t job) : document(job / s.heads), head(job % s.heads) {
    first = s.borders[document], length = s.borders[document + 1] - first;
    chunks = (length + s.chunk - 1) / s.chunk;
    kept = s.kept[document] * s.heads + head * ((chunks + s.every - 1) / s.every);
  }
};

// ``fixed``, shared by all documents: the base [L] of [heads, D, F] if there is one, with LN its weight and bias
// [heads, D]. ``after`` null: the call closes no chunk.
template <class R>
void forward(const Spec& spec, Tokens<R> tokens, R** state, const int64_t* strides, R** fixed, R** after, R* kept,
             const Open<R>& open, int64_t first, int64_t stop) {
  Chunk<R> chunk(spec, false);
  int L = chunk.L;
  R **base = spec.parts == 3 ? fixed : nullptr, **norm = fixed + (base ? L : 0);
  for (int64_t job = first; job < stop; job++) {
    Place at(spec, job);
    for (int l = 0; l < L; l++) {
      Layer<R>& y = chunk.layers[l];
      int64_t size = y.inputs * y.outputs;
      auto here = [&](int i) { return state[i] + at.document * strides[i] + at.head * size; };
      chunk.load_state(here(l), here(L + l), y, y.WS);
      if (base) chunk.load_base(base[l] + at.head * size, y, y.WS);
    }
    if (spec.norm) chunk.load_norm(norm, at.head);
    int64_t length = open.before + at.length;
    for (int64_t done = 0; done < length; done += spec.chunk) {
      int64_t token = at.first + done - open.before;  // where the chunk began, maybe before the call
      int64_t i = done / spec.chunk;
      if (kept && i % spec.every == 0) chunk.save(kept + (at.kept + i / spec.every) * chunk.state_size);
      chunk.old = done ? 0 : open.before;
      chunk.read_tokens(tokens, token, at.head, std::min(spec.chunk, length - done));
      if (chunk.old) chunk.resume(open.held, job);
      chunk.gates(), chunk.keys(open.held + L, job), chunk.reads();
      chunk.store(chunk.output(), token, at.head, spec.widths[L], tokens.y);
      if (open.after && done + spec.chunk > length)
        chunk.leave(open.left, job);
      else
        chunk.advance();
    }
    for (int l = 0; l < L && after; l++) {
      Layer<R>& y = chunk.layers[l];
      int64_t place = job * y.inputs * y.outputs;
      chunk.store_state(y.WS, y, after[l] + place, after[L + l] + place);
    }
  }
}

// ``dafter`` may hold null pointers, for zeros; ``grads.y`` is the gradient of y. ``dbefore`` has those of
// ``fixed`` too, of each document.
template <class R>
void backward(const Spec& spec, Tokens<R> tokens, R** fixed, const R* kept, R** dafter, Tokens<R> grads,
              R** dbefore, int64_t first, int64_t stop) {
  Chunk<R> chunk(spec, true);
  std::vector<R> states((spec.every - 1) * chunk.state_size);
  int L = chunk.L;
  R **base = spec.parts == 3 ? fixed : nullptr, **norm = fixed + (base ? L : 0);
  for (int64_t job = first; job < stop; job++) {
    Place at(spec, job);
    for (int l = 0; l < L; l++) {
      Layer<R>& y = chunk.layers[l];
      int64_t size = y.inputs * y.outputs, place = job * size;
      R *dW = dafter[l], *dS = dafter[L + l];
      chunk.load_state(dW ? dW + place : nullptr, dS ? dS + place : nullptr, y, y.grad);
      chunk.load_base(nullptr, y, y.grad);
      if (base) chunk.load_base(base[l] + at.head * size, y, y.WS);
    }
    if (spec.norm) chunk.load_norm(norm, at.head);
    for (int64_t i = at.chunks - 1; i >= 0; i--) {
      int64_t token = at.first + i * spec.chunk, within = i % spec.every;
      if (i == at.chunks - 1 || within == spec.every - 1) {  // the states after the one that was kept
        chunk.recall(kept + (at.kept + i / spec.every) * chunk.state_size);
        for (int64_t j = 0; j < within; j++) {
          int64_t earlier = token - (within - j) * spec.chunk;
          chunk.save(states.data() + j * chunk.state_size);
          chunk.read_tokens(tokens, earlier, at.head, spec.chunk);
          chunk.gates(), chunk.keys(nullptr, job), chunk.advance();
        }
      } else {
        chunk.recall(states.data() + within * chunk.state_size);
      }
      chunk.read_tokens(tokens, token, at.head, std::min(spec.chunk, at.length - i * spec.chunk));
      chunk.gates(), chunk.keys(nullptr, job), chunk.reads();
      chunk.load(grads.y, token, at.head, spec.widths[L], chunk.dy);
      chunk.reads_backward();
      chunk.store(chunk.dx, token, at.head, spec.widths[0], grads.q);
      chunk.advance_backward(), chunk.keys_backward(), chunk.gates_backward();
      chunk.store(chunk.layers[0].dX, token, at.head, spec.widths[0], grads.k);
      chunk.store(chunk.dp, token, at.head, spec.widths[L], grads.v, R(-1));
      chunk.store_gate(chunk.dalpha, token, at.head, grads.alpha);
      chunk.store_gate(chunk.deta, token, at.head, grads.eta);
      chunk.store_gate(chunk.dtheta, token, at.head, grads.theta);
    }
    for (int l = 0; l < L; l++) {
      Layer<R>& y = chunk.layers[l];
      int64_t place = job * y.inputs * y.outputs;
      chunk.store_state(y.grad, y, dbefore[l] + place, dbefore[L + l] + place);
      if (base) chunk.store_base(y.grad, y, dbefore[2 * L + l] + place);
    }
    if (spec.norm) chunk.store_norm(dbefore + (base ? 3 : 2) * L, job);
  }
}

}  // namespace

extern "C" void memory_forward(const Spec* spec, const Tokens<Real>* tokens, Real** state, const int64_t* strides,
                               Real** fixed, Real** after, Real* kept, const Open<Real>* open, int64_t first,
                               int64_t stop) {
  FlushDenormals flush;
  forward<Real>(*spec, *tokens, state, strides, fixed, after, kept, *open, first, stop);
}

extern "C" void memory_backward(const Spec* spec, const Tokens<Real>* tokens, Real** fixed, const Real* kept,
                                Real** dafter, const Tokens<Real>* grads, Real** dbefore, int64_t first,
                                int64_t stop) {
  FlushDenormals flush;
  backward<Real>(*spec, *tokens, fixed, kept, dafter, *grads, dbefore, first, stop);
}
