"""A plain, right sum, mean or maximum over any dimensions, which are moved to the end first."""

KERNEL_TYPE = "reduce"

SOURCE = r"""
#define PARAMETERS(T) const T* x, T* y, i64 rows, i64 n, i64 op
#define ARGUMENTS x, y, rows, n, op
template <class T> double sum_of(const T* x, i64 n) {
    double sum = 0;
    for (i64 j = 0; j < n; ++j) sum += get(x[j]);
    return sum;
}
template <class T> double max_of(const T* x, i64 n) {
    double top = -INF;
    for (i64 j = 0; j < n; ++j) top = get(x[j]) > top || get(x[j]) != get(x[j]) ? get(x[j]) : top;
    return top;
}
template <class T> int run(PARAMETERS(T)) {
    for (i64 r = 0; r < rows; ++r, x += n) {
        double result = op == 2 ? max_of(x, n) : sum_of(x, n);
        y[r] = put<T>(float(op == 1 ? result / n : result));
    }
    return 0;
}
"""


def laid_out(x, dim):
    """(x with the reduced dimensions last, how many elements they have, shape of the rest)."""
    dims = tuple(range(x.dim())) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    gone = [d % x.dim() for d in dims]
    kept = [d for d in range(x.dim()) if d not in gone]
    count = 1
    for d in gone:
        count *= x.shape[d]
    return x.permute(kept + gone).contiguous(), count, [x.shape[d] for d in kept]


def right(x, dim, op, out=None):
    x, count, shape = laid_out(x, dim)
    out = torch.empty(shape, dtype=x.dtype) if out is None else out
    launch(x.dtype, x, out, out.numel(), count, ("sum", "mean", "max").index(op))
    return out


def kernel_fn(x, dim=-1, op="sum"):
    return right(x, dim, op)
