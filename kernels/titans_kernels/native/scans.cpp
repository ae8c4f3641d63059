// Recurrences token by token: linear attention with a decay per key channel (GLA, HGRN2), the selective scan of
// Mamba, and the online rule of a linear memory (DeltaNet). A forward stores the state every `every` tokens; a backward recomputes the others.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "exponential.h"
#include "inner.h"

namespace {

// to = keep to + scale x
APART void write_row(int n, Real keep, Real scale, In x, Out to) {
  for (int i = 0; i < n; i++) to[i] = keep * to[i] + scale * x[i];
}

// S = eta S + x u and W = keep W + S; before and after may be the same row.
APART void mix_row(int n, Real keep, Real eta, Real x, In u, const Real* W, const Real* S, Real* W_to, Real* S_to) {
#pragma GCC ivdep
  for (int i = 0; i < n; i++) {
    Real s = eta * S[i] + x * u[i];
    W_to[i] = keep * W[i] + s, S_to[i] = s;
  }
}

APART void add_row(int n, Real scale, In x, Out to) {
  for (int i = 0; i < n; i++) to[i] += scale * x[i];
}

}  // namespace

extern "C" struct Attend {
  int64_t tokens, heads, keys, values, every;
};

namespace {

struct Head {
  int64_t T, H, E, F, every, chunks, row, head;
  Head(const Attend& shape, int64_t job)
      : T(shape.tokens), H(shape.heads), E(shape.keys), F(shape.values), every(shape.every),
        chunks((T + every - 1) / every), row(job / H), head(job % H) {}
  int64_t key(int64_t t) const { return ((row * T + t) * H + head) * E; }
  int64_t value(int64_t t) const { return ((row * T + t) * H + head) * F; }
  int64_t state() const { return (row * H + head) * E * F; }

  void write(int64_t t, const Real* k, const Real* v, const Real* log_decay, const uint8_t* fresh, Real* S) const {
    bool reset = fresh && fresh[row * T + t];
    for (int64_t e = 0; e < E; e++) {
      Real keep = reset ? 0 : exponential(log_decay[key(t) + e]);
      if (reset) std::fill(S + e * F, S + (e + 1) * F, Real(0));
      write_row(F, keep, k[key(t) + e], v + value(t), S + e * F);
    }
  }
};

}  // namespace

// q, k, log_decay [B, T, H, E], v and y [B, T, H, F], start and end [B, H, E, F]; fresh [B, T] or null: the state
// is reset before the token; saved [B H, chunks, E, F]. Jobs are rows times heads.
extern "C" void attend_forward(const Attend* shape, const Real* q, const Real* k, const Real* v,
                               const Real* log_decay, const Real* start, const uint8_t* fresh, Real* y, Real* end,
                               Real* saved, int64_t first, int64_t stop) {
  FlushDenormals flush;
  for (int64_t job = first; job < stop; job++) {
    Head at(*shape, job);
    int64_t size = at.E * at.F;
    Real* S = end + at.state();
    std::copy(start + at.state(), start + at.state() + size, S);
    for (int64_t t = 0; t < at.T; t++) {
      if (t % at.every == 0) std::copy(S, S + size, saved + (job * at.chunks + t / at.every) * size);
      at.write(t, k, v, log_decay, fresh, S);
      Real* to = y + at.value(t);
      std::fill(to, to + at.F, Real(0));
      for (int64_t e = 0; e < at.E; e++) add_row(at.F, q[at.key(t) + e], S + e * at.F, to);
    }
  }
}

extern "C" void attend_backward(const Attend* shape, const Real* q, const Real* k, const Real* v,
                                const Real* log_decay, const uint8_t* fresh, const Real* saved, const Real* dy,
                                const Real* dend, Real* dq, Real* dk, Real* dv, Real* dlog_decay, Real* dstart,
                                int64_t first, int64_t stop) {
  FlushDenormals flush;
  std::vector<Real> states;
  for (int64_t job = first; job < stop; job++) {
    Head at(*shape, job);
    int64_t size = at.E * at.F;
    Real* dS = dstart + at.state();
    std::copy(dend + at.state(), dend + at.state() + size, dS);
    states.resize((at.every + 1) * size);
    for (int64_t chunk = at.chunks - 1; chunk >= 0; chunk--) {
      int64_t begin = chunk * at.every, length = std::min(at.every, at.T - begin);
      const Real* before = saved + (job * at.chunks + chunk) * size;
      std::copy(before, before + size, states.begin());
      for (int64_t i = 0; i < length; i++) {
        Real* S = states.data() + i * size;
        std::copy(S, S + size, S + size);
        at.write(begin + i, k, v, log_decay, fresh, S + size);
      }
      for (int64_t i = length - 1; i >= 0; i--) {
        int64_t t = begin + i;
        bool reset = fresh && fresh[at.row * at.T + t];
        const Real *S = states.data() + i * size, *next = S + size, *g = dy + at.value(t), *x = v + at.value(t);
        Real* to = dv + at.value(t);
        std::fill(to, to + at.F, Real(0));
        for (int64_t e = 0; e < at.E; e++) {
          int64_t c = at.key(t) + e;
          Real *d = dS + e * at.F, keep = reset ? 0 : exponential(log_decay[c]);
          add_row(at.F, q[c], g, d);
          dq[c] = inner(at.F, next + e * at.F, g);
          dk[c] = inner(at.F, d, x);
          dlog_decay[c] = reset ? 0 : keep * inner(at.F, d, S + e * at.F);
          add_row(at.F, k[c], d, to);
          for (int64_t f = 0; f < at.F; f++) d[f] *= keep;
        }
      }
    }
  }
}

extern "C" struct Select {
  int64_t tokens, channels, states, width, every;  // width: channels of a job
};

namespace {

APART void decays(int n, Real step, In rate, Out keep) {
  for (int i = 0; i < n; i++) keep[i] = exponential(-step * rate[i]);
}

// h = keep h + input b
APART void write_state(int n, In keep, Real input, In b, In before, Out h) {
  for (int i = 0; i < n; i++) h[i] = keep[i] * before[i] + input * b[i];
}

APART void step_back(int n, Real dy, Real input, Real step, In b, In c, In keep, In before, In h, Out d, Out db,
                     Out dc, Out drate, Out through) {
  for (int i = 0; i < n; i++) {
    dc[i] += dy * h[i];
    d[i] += dy * c[i];
    db[i] += input * d[i];
    through[i] = d[i] * keep[i] * before[i];
    drate[i] -= step * through[i];
  }
}

struct Channels {
  int64_t T, C, N, every, chunks, blocks, row, block, begin, count;
  Channels(const Select& shape, int64_t job)
      : T(shape.tokens), C(shape.channels), N(shape.states), every(shape.every), chunks((T + every - 1) / every),
        blocks((C + shape.width - 1) / shape.width), row(job / blocks), block(job % blocks),
        begin(block * shape.width), count(std::min(shape.width, C - begin)) {}
  int64_t at(int64_t t) const { return (row * T + t) * C + begin; }
  int64_t shared(int64_t t) const { return (row * T + t) * N; }
  int64_t state() const { return (row * C + begin) * N; }
  // states are stored [B, chunks, C, N]
  int64_t stored(int64_t chunk) const { return ((row * chunks + chunk) * C + begin) * N; }

  void write(int64_t t, const Real* dt, const Real* x, const Real* b, const Real* rate, const uint8_t* fresh,
             const Real* before, Real* keep, Real* h) const {
    bool reset = fresh && fresh[row * T + t];
    for (int64_t i = 0; i < count; i++) {
      Real step = dt[at(t) + i], *a = keep + i * N;
      if (reset) std::fill(a, a + N, Real(0));
      else decays(N, step, rate + (begin + i) * N, a);
      write_state(N, a, step * x[at(t) + i], b + shared(t), before + i * N, h + i * N);
    }
  }
};

}  // namespace

// dt, x, y [B, T, C], b and c [B, T, N], rate [C, N], start and end [B, C, N], fresh [B, T] or null, saved
// [B, chunks, C, N]. Jobs are rows times blocks of channels.
extern "C" void select_forward(const Select* shape, const Real* dt, const Real* x, const Real* b, const Real* c,
                               const Real* rate, const Real* start, const uint8_t* fresh, Real* y, Real* end,
                               Real* saved, int64_t first, int64_t stop) {
  FlushDenormals flush;
  std::vector<Real> keep, h, next;
  for (int64_t job = first; job < stop; job++) {
    Channels on(*shape, job);
    int64_t size = on.count * on.N;
    keep.resize(size), h.assign(start + on.state(), start + on.state() + size), next.resize(size);
    for (int64_t t = 0; t < on.T; t++) {
      if (t % on.every == 0) std::copy(h.begin(), h.begin() + size, saved + on.stored(t / on.every));
      on.write(t, dt, x, b, rate, fresh, h.data(), keep.data(), next.data());
      std::swap(h, next);
      for (int64_t i = 0; i < on.count; i++) y[on.at(t) + i] = inner(on.N, c + on.shared(t), h.data() + i * on.N);
    }
    std::copy(h.begin(), h.begin() + size, end + on.state());
  }
}

// db and dc [blocks, B, T, N]; drate [C, N] is added to
extern "C" void select_backward(const Select* shape, const Real* dt, const Real* x, const Real* b, const Real* c,
                                const Real* rate, const uint8_t* fresh, const Real* saved, const Real* dy,
                                const Real* dend, Real* ddt, Real* dx, Real* db, Real* dc, Real* dstart,
                                int64_t rows, Real* drate, int64_t first, int64_t stop) {
  FlushDenormals flush;
  std::vector<Real> states, keeps, through;
  for (int64_t job = first; job < stop; job++) {
    Channels on(*shape, job);
    int64_t size = on.count * on.N, N = on.N;
    Real* d = dstart + on.state();
    std::copy(dend + on.state(), dend + on.state() + size, d);
    states.resize((on.every + 1) * size), keeps.resize(on.every * size), through.resize(N);
    for (int64_t chunk = on.chunks - 1; chunk >= 0; chunk--) {
      int64_t begin = chunk * on.every, length = std::min(on.every, on.T - begin);
      std::copy(saved + on.stored(chunk), saved + on.stored(chunk) + size, states.begin());
      for (int64_t j = 0; j < length; j++)
        on.write(begin + j, dt, x, b, rate, fresh, states.data() + j * size, keeps.data() + j * size,
                 states.data() + (j + 1) * size);
      for (int64_t j = length - 1; j >= 0; j--) {
        int64_t t = begin + j, part = on.block * rows * on.T * N + on.shared(t);
        std::fill(db + part, db + part + N, Real(0)), std::fill(dc + part, dc + part + N, Real(0));
        for (int64_t i = 0; i < on.count; i++) {
          int64_t at = on.at(t) + i;
          Real *di = d + i * N, step = dt[at];
          const Real *keep = keeps.data() + j * size + i * N, *before = states.data() + j * size + i * N;
          const Real* rates = rate + (on.begin + i) * N;
          step_back(N, dy[at], step * x[at], step, b + on.shared(t), c + on.shared(t), keep, before, before + size,
                    di, db + part, dc + part, drate + (on.begin + i) * N, through.data());
          Real along = inner(N, di, b + on.shared(t));
          dx[at] = along * step;
          ddt[at] = along * x[at] - inner(N, through.data(), rates);
          for (int64_t n = 0; n < N; n++) di[n] *= keep[n];
        }
      }
    }
  }
}

extern "C" struct Delta {
  int64_t tokens, heads, keys, values, every;
  int64_t gated;  // whether the gradient is taken after forgetting
};

namespace {

// The online rule of a linear memory (../memory/forms/online.py); a state is weights and momentum, [2][E, F].
struct Linear {
  Head at;
  int64_t size;
  bool gated;
  const Real *k, *v, *alpha, *eta, *theta;
  Linear(const Delta& d, int64_t job, const Real* k, const Real* v, const Real* alpha, const Real* eta,
         const Real* theta)
      : at(Attend{d.tokens, d.heads, d.keys, d.values, d.every}, job), size(at.E * at.F), gated(d.gated), k(k), v(v),
        alpha(alpha), eta(eta), theta(theta) {}
  int64_t gate(int64_t t) const { return (at.row * at.T + t) * at.H + at.head; }
  // What the gradient's weights predict, over those before that the token has.
  Real share(int64_t t) const { return gated ? 1 - alpha[gate(t)] : Real(1); }

  void read(int64_t key, const Real* x, const Real* W, Real scale, Real* to) const {
    std::fill(to, to + at.F, Real(0));
    for (int64_t e = 0; e < at.E; e++) add_row(at.F, scale * x[key + e], W + e * at.F, to);
  }
  // The state after the token from that before it; u = 2 theta (v - prediction).
  void write(int64_t t, const Real* before, Real* after, Real* u) const {
    int64_t g = gate(t), key = at.key(t);
    read(key, k, before, share(t), u);
    for (int64_t f = 0; f < at.F; f++) u[f] = 2 * theta[g] * (v[at.value(t) + f] - u[f]);
    for (int64_t e = 0; e < at.E; e++) {
      Real *W = after + e * at.F, *S = W + size, x = k[key + e];
      mix_row(at.F, 1 - alpha[g], eta[g], x, u, before + e * at.F, before + size + e * at.F, W, S);
    }
  }
};

}  // namespace

// start and end [B, H, 2, E, F], saved [B H, chunks, 2, E, F], gates [B, T, H]. Jobs are rows times heads.
extern "C" void delta_forward(const Delta* shape, const Real* q, const Real* k, const Real* v, const Real* alpha,
                              const Real* eta, const Real* theta, const Real* start, Real* y, Real* end, Real* saved,
                              int64_t first, int64_t stop) {
  FlushDenormals flush;
  std::vector<Real> u(shape->values);
  for (int64_t job = first; job < stop; job++) {
    Linear m(*shape, job, k, v, alpha, eta, theta);
    Real* X = end + job * 2 * m.size;
    std::copy(start + job * 2 * m.size, start + (job + 1) * 2 * m.size, X);
    for (int64_t t = 0; t < m.at.T; t++) {
      if (t % m.at.every == 0) std::copy(X, X + 2 * m.size, saved + (job * m.at.chunks + t / m.at.every) * 2 * m.size);
      m.write(t, X, X, u.data());
      m.read(m.at.key(t), q, X, 1, y + m.at.value(t));
    }
  }
}

extern "C" void delta_backward(const Delta* shape, const Real* q, const Real* k, const Real* v, const Real* alpha,
                               const Real* eta, const Real* theta, const Real* saved, const Real* dy,
                               const Real* dend, Real* dq, Real* dk, Real* dv, Real* dalpha, Real* deta,
                               Real* dtheta, Real* dstart, int64_t first, int64_t stop) {
  FlushDenormals flush;
  std::vector<Real> states, us, du(shape->values), seen(shape->values);
  for (int64_t job = first; job < stop; job++) {
    Linear m(*shape, job, k, v, alpha, eta, theta);
    const Head& at = m.at;
    int64_t size = m.size, E = at.E, F = at.F;
    Real *dW = dstart + job * 2 * size, *dS = dW + size;
    std::copy(dend + job * 2 * size, dend + (job + 1) * 2 * size, dW);
    states.resize((at.every + 1) * 2 * size), us.resize(at.every * F);
    for (int64_t chunk = at.chunks - 1; chunk >= 0; chunk--) {
      int64_t begin = chunk * at.every, length = std::min(at.every, at.T - begin);
      std::copy_n(saved + (job * at.chunks + chunk) * 2 * size, 2 * size, states.data());
      for (int64_t i = 0; i < length; i++)
        m.write(begin + i, states.data() + i * 2 * size, states.data() + (i + 1) * 2 * size, us.data() + i * F);
      for (int64_t i = length - 1; i >= 0; i--) {
        int64_t t = begin + i, g = m.gate(t), key = at.key(t), value = at.value(t);
        const Real *W = states.data() + i * 2 * size, *S = W + size, *next = S + size, *u = us.data() + i * F;
        Real keep = 1 - alpha[g], share = m.share(t), to_keep = 0, to_eta = 0, to_theta = 0;
        std::fill(du.begin(), du.end(), Real(0));
        for (int64_t e = 0; e < E; e++) {
          Real *w = dW + e * F, *s = dS + e * F;
          add_row(F, q[key + e], dy + value, w), add_row(F, 1, w, s);
          dq[key + e] = inner(F, next + e * F, dy + value);
          dk[key + e] = inner(F, s, u);
          to_keep += inner(F, w, W + e * F), to_eta += inner(F, s, S + e * F);
          add_row(F, k[key + e], s, du.data());
        }
        m.read(key, k, W, 1, seen.data());
        for (int64_t f = 0; f < F; f++) {
          to_theta += 2 * (v[value + f] - share * seen[f]) * du[f];
          du[f] *= 2 * theta[g], dv[value + f] = du[f];
        }
        if (m.gated) to_keep -= inner(F, seen.data(), du.data());
        for (int64_t e = 0; e < E; e++) {
          Real *w = dW + e * F, *s = dS + e * F;
          dk[key + e] -= share * inner(F, W + e * F, du.data());
          write_row(F, keep, -share * k[key + e], du.data(), w);
          for (int64_t f = 0; f < F; f++) s[f] *= eta[g];
        }
        dalpha[g] = -to_keep, deta[g] = to_eta, dtheta[g] = to_theta;
      }
    }
  }
}
