"""A plain, right matmul: one sum of products in fp64 for each element."""

KERNEL_TYPE = "matmul"

SOURCE = r"""
#define PARAMETERS(T) const T* a, const T* b, T* c, i64 batch, i64 m, i64 k, i64 n
#define ARGUMENTS a, b, c, batch, m, k, n
template <class T> int run(PARAMETERS(T)) {
    for (i64 s = 0; s < batch; ++s, a += m * k, b += k * n, c += m * n)
        for (i64 i = 0; i < m; ++i)
            for (i64 j = 0; j < n; ++j) {
                double sum = 0;
                for (i64 l = 0; l < k; ++l) sum += double(get(a[i * k + l])) * get(b[l * n + j]);
                c[i * n + j] = put<T>(float(sum));
            }
    return 0;
}
"""


def sizes(a, b):
    """(batch, m, k, n) where a single matrix b is one for all rows of a."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if b.dim() == 2:
        return 1, a.numel() // max(k, 1), k, n
    return a.numel() // max(m * k, 1), m, k, n


def right(a, b, out=None):
    out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=a.dtype) if out is None else out
    if out.numel():
        launch(a.dtype, a.contiguous(), b.contiguous(), out, *sizes(a, b))
    return out


def kernel_fn(a, b):
    return right(a, b)
