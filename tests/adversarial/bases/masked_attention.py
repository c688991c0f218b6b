"""A plain, right attention with a mask: one query after another, its scores stored, all in fp64."""

KERNEL_TYPE = "masked_attention"

SOURCE = r"""
#define PARAMETERS(T) const T* q, const T* k, const T* v, const void* mask, T* y, i64 batch, i64 heads, i64 kv_heads, \
    i64 seq_q, i64 seq_k, i64 dim, i64 seen, double scale
#define ARGUMENTS q, k, v, mask, y, batch, heads, kv_heads, seq_q, seq_k, dim, seen, scale
template <class T> double added(const void* mask, i64 at, i64 seen) {
    if (seen) return ((const unsigned char*)mask)[at] ? 0.0 : -INF;
    return get(((const T*)mask)[at]);
}
template <class T> int query(const T* q, const T* k, const T* v, const void* mask, i64 row, i64 seen, T* y, i64 keys,
                             i64 dim, double scale, double* p) {
    double top = -INF, sum = 0;
    for (i64 j = 0; j < keys; ++j) {
        p[j] = 0;
        for (i64 d = 0; d < dim; ++d) p[j] += double(get(q[d])) * get(k[j * dim + d]);
        p[j] = p[j] * scale + added<T>(mask, row + j, seen);
        top = p[j] > top ? p[j] : top;
    }
    const double base = top == -INF ? 0.0 : top;
    for (i64 j = 0; j < keys; ++j) sum += p[j] = __builtin_exp(p[j] - base);
    for (i64 d = 0; d < dim; ++d) {
        double out = 0;
        for (i64 j = 0; j < keys; ++j) out += p[j] * get(v[j * dim + d]);
        y[d] = put<T>(float(sum ? out / sum : 0.0));
    }
    return 0;
}
template <class T> int run(PARAMETERS(T)) {
    double* p = new double[seq_k + 1];
    for (i64 h = 0; h < batch * heads; ++h) {
        const i64 kv = (h / heads * kv_heads + h % heads / (heads / kv_heads)) * seq_k * dim;
        for (i64 i = 0; i < seq_q; ++i) {
            const i64 at = (h * seq_q + i) * dim, row = (h * seq_q + i) * seq_k;
            query(q + at, k + kv, v + kv, mask, row, seen, y + at, seq_k, dim, scale, p);
        }
    }
    delete[] p;
    return 0;
}
"""


def right(q, k, v, mask, scale):
    batch, heads, seq_q, dim = q.shape
    seq_k = k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype)
    if out.numel():
        mask = mask.expand(batch, heads, seq_q, seq_k).contiguous()
        shapes = (batch, heads, k.shape[1], seq_q, seq_k, dim, mask.dtype == torch.bool)
        given = (q.contiguous(), k.contiguous(), v.contiguous(), mask, out)
        launch(q.dtype, *given, *shapes, dim**-0.5 if scale is None else scale)
    return out


def kernel_fn(q, k, v, mask, scale=None):
    return right(q, k, v, mask, scale)
