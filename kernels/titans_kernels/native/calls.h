#pragma once
// Arguments of the functions of this library that others of its functions call.
#include <cstdint>

// Of a call of the memory.
struct Spec {
  int64_t heads, depth, chunk, activation;
  int64_t norm;  // 1 for x + LN(f(x)) of the layers f, else 0
  double bound;  // 0: none
  int64_t parts;  // of a layer's stack: 3 with a base, else 2
  int64_t every;  // chunks between two states that a forward keeps
  const int64_t* widths;   // depth + 1
  const int64_t* borders;  // of the documents, in tokens
  const int64_t* kept;     // states kept of all documents before each
};

template <class R> struct Tokens {
  R *q, *k, *v, *alpha, *eta, *theta, *y;  // [T, heads, width] and [T, heads]
};

// The chunk that a call begins and ends inside of: its tokens, and as `decode.DecodeState` has them each layer's
// inputs, each layer's errors, c, n, beta, m and h, of all documents and heads.
template <class R> struct Open {
  int64_t before, after;
  R **held, **left;
};

// Of a call of the write budget.
struct Shape {
  int64_t heads, width, chunk;
  int64_t held;            // first tokens of a document whose steps are given
  const int64_t* borders;  // of the documents, in tokens
};

// Of a short convolution.
struct Mix {
  int64_t kernel, parts, heads, width;  // channels: parts * heads * width
  int64_t unit;                         // bit p: part p's heads are scaled to norm 1
  double least;                         // norm a head is divided by
  const int64_t* borders;               // of the rows, in tokens
  int64_t state_stride;                 // from a row's state to the next one's; 0: one for all
};

extern "C" {
void memory_forward(const Spec*, const Tokens<Real>*, Real** state, const int64_t* strides, Real** fixed,
                    Real** after, Real* kept, const Open<Real>*, int64_t first, int64_t stop);
void memory_backward(const Spec*, const Tokens<Real>*, Real** fixed, const Real* kept, Real** dafter,
                     const Tokens<Real>* grads, Real** dbefore, int64_t first, int64_t stop);
void budget_forward(const Shape*, const Real* k, const Real* eta, const Real* theta, Real* limited, Real* steps,
                    int64_t first, int64_t stop);
void budget_backward(const Shape*, const Real* dlimited, const Real* dsteps, const Real* k, const Real* eta,
                     const Real* theta, const Real* limited, const Real* steps, Real* dk, Real* deta, Real* dtheta,
                     int64_t first, int64_t stop);
void mix_forward(const Mix*, const Real* x, const Real* weight, const Real* state, Real** out, int64_t first,
                 int64_t stop);
void mix_backward(const Mix*, const Real* x, const Real* weight, const Real* state, Real** dout, Real* dx,
                  Real* dweight, Real* dstate, int64_t first, int64_t stop);
void norm_forward(int64_t width, double epsilon, const Real* x, const Real* weight, const Real* gate, Real* y,
                  int64_t first, int64_t stop);
void norm_backward(int64_t width, double epsilon, const Real* x, const Real* weight, const Real* gate,
                   const Real* dy, Real* dx, Real* dweight, Real* dgate, int64_t first, int64_t stop);
}
