"""Device functions shared by the kernels: matrix products, activations, tile addresses.

Tokens are flat: row ``t`` of a tensor [tokens, H, width] belongs to head ``h`` at ``(t H + h) width``. A
head's state is flat too: per layer its weights [D, F], then its momentum, row by row. Addresses are 64-bit.
"""
# Triton's language is not Python's: a constexpr is given as a number, a branch is known when compiling
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from titans_kernels.memory.forms.triton.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _operand(x, TYPE: tl.constexpr):
    x = x.to(TYPE)
    if _INTERPRETED:  # its bfloat16 arithmetic is wrong
        x = x.to(tl.float32)
    return x


@triton.jit
def dot(a, b, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply a b with operands in TYPE, summed in float32."""
    return tl.dot(_operand(a, TYPE), _operand(b, TYPE), input_precision=PRECISION)


@triton.jit
def add_dot(total, a, b, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """total + a b, summed in the registers that hold ``total``."""
    return tl.dot(_operand(a, TYPE), _operand(b, TYPE), total, input_precision=PRECISION)


@triton.jit
def value(z, ACTIVATION: tl.constexpr):
    """f(z), z float32."""
    if ACTIVATION == "silu":
        return z * tl.sigmoid(z)
    elif ACTIVATION == "gelu":
        return 0.5 * z * (1 + tl.math.erf(z * 0.7071067811865476))
    else:
        return z


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    """f'(z), z float32."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(z)
        return s * (1 + z * (1 - s))
    elif ACTIVATION == "gelu":
        density = tl.exp(-0.5 * z * z) * 0.3989422804014327
        return 0.5 * (1 + tl.math.erf(z * 0.7071067811865476)) + z * density
    else:
        return tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def second_derivative(z, ACTIVATION: tl.constexpr):
    """f''(z), z float32."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(z)
        return s * (1 - s) * (2 + z * (1 - 2 * s))
    elif ACTIVATION == "gelu":
        return tl.exp(-0.5 * z * z) * 0.3989422804014327 * (2 - z * z)
    else:
        return tl.zeros(z.shape, tl.float32)


@triton.jit
def document_at(documents, n, length, b: tl.constexpr):
    """Return the first token of document n, the token after its last, and its first chunk; see `tables`."""
    if documents is None:
        return n * length, n * length + length, (n * ((length + b - 1) // b)).to(tl.int64)
    else:
        at = documents + 3 * n
        return tl.load(at), tl.load(at + 1), tl.load(at + 2).to(tl.int64)


@triton.jit
def chunk_at(chunks, m, length, b: tl.constexpr):
    """Return the first token of chunk m and its number of tokens; see `tables`."""
    if chunks is None:
        each = (length + b - 1) // b
        before = m % each * b
        return m // each * length + before, tl.minimum(length - before, b)
    else:
        return tl.load(chunks + 2 * m), tl.load(chunks + 2 * m + 1)


@triton.jit
def rows_at(pointer, t, row, h, H, WIDTH: tl.constexpr, column):
    """Pointers [b, columns] to the rows of tokens t + row in a tensor [tokens, H, WIDTH]."""
    first = (tl.cast(t, tl.int64) * H + h) * WIDTH
    return pointer + first + (row[:, None] * (H * WIDTH) + column[None, :])


@triton.jit
def load_rows(pointer, t, row, valid, h, H, WIDTH: tl.constexpr, column):
    """Rows [b, columns] of a tensor [tokens, H, WIDTH], zero where a token is not valid."""
    return tl.load(rows_at(pointer, t, row, h, H, WIDTH, column), mask=valid[:, None], other=0.0)


@triton.jit
def store_rows(pointer, x, t, row, valid, h, H, WIDTH: tl.constexpr, column):
    """Inverse of `load_rows`, in the tensor's dtype."""
    at = rows_at(pointer, t, row, h, H, WIDTH, column)
    tl.store(at, x.to(pointer.dtype.element_ty), mask=valid[:, None])


@triton.jit
def load_tokens(pointer, t, row, valid, h, H):
    """Load one value per token [b] from [tokens, H], float32, zero where a token is not valid."""
    first = tl.cast(t, tl.int64) * H + h
    return tl.load(pointer + first + row * H, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def store_tokens(pointer, x, t, row, valid, h, H):
    """Inverse of `load_tokens`."""
    first = tl.cast(t, tl.int64) * H + h
    tl.store(pointer + first + row * H, x, mask=valid)


@triton.jit
def tile_at(row, column, WIDTH: tl.constexpr):
    """Offsets [rows, columns] in a matrix of WIDTH columns."""
    return row[:, None] * WIDTH + column[None, :]


@triton.jit
def base_of(base, h, at, SIZE: tl.constexpr):
    """Return the base [D, F] of the layer whose state starts at ``at``, or None without a base.

    A head's base has SIZE / 2 numbers.
    """
    if base is None:
        return None
    else:
        return base + h.to(tl.int64) * (SIZE // 2) + at // 2


@triton.jit
def divisor(squares, BOUND: tl.constexpr):
    """Divisor [b] that reduces errors, whose squares sum to ``squares``, to a norm of at most BOUND."""
    over = tl.sqrt(squares) / BOUND
    return tl.where(over > 1 + 32 * 2.0**-23, over, 1.0)  # `parts.passes.edge`


@triton.jit
def through_bound(dd, d, along, scale, BOUND: tl.constexpr):
    """Backward of the bound from dd; where it is active, only the component of dd orthogonal to d passes.

    ``along`` [b] is the sum over all columns of d dd.
    """
    held = tl.where(scale > 1, along / (BOUND * BOUND), 0.0)
    return (dd - d * held[:, None]) / scale[:, None]
