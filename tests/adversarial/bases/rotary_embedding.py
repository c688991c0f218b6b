"""A plain, right rotary embedding."""

KERNEL_TYPE = "rotary_embedding"

SOURCE = r"""
#define PARAMETERS(T) const T* x, const T* cs, const T* sn, T* y, i64 planes, i64 seq, i64 half, i64 interleaved
#define ARGUMENTS x, cs, sn, y, planes, seq, half, interleaved
template <class T> int run(PARAMETERS(T)) {
    for (i64 p = 0; p < planes * seq; ++p, x += 2 * half, y += 2 * half) {
        const i64 at = p % seq * half;
        for (i64 i = 0; i < half; ++i) {
            i64 i0 = interleaved ? 2 * i : i, i1 = interleaved ? 2 * i + 1 : i + half;
            double a = get(x[i0]), b = get(x[i1]), c = get(cs[at + i]), s = get(sn[at + i]);
            y[i0] = put<T>(float(a * c - b * s));
            y[i1] = put<T>(float(b * c + a * s));
        }
    }
    return 0;
}
"""


def right(x, cos, sin, interleaved, out=None):
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    if x.numel():
        seq, dim = x.shape[-2:]
        planes = x.numel() // (seq * dim)
        launch(x.dtype, x, cos.contiguous(), sin.contiguous(), out, planes, seq, dim // 2, interleaved)
    return out


def kernel_fn(x, cos, sin, interleaved=False):
    return right(x, cos, sin, interleaved)
