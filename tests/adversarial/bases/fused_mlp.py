"""A plain, right gated MLP: one row after another, its hidden values in fp64."""

KERNEL_TYPE = "fused_mlp"

SOURCE = r"""
#define PARAMETERS(T) const T* x, const T* gate, const T* up, const T* down, T* y, i64 rows, i64 inner, i64 hidden, \
    i64 width, i64 kind
#define ARGUMENTS x, gate, up, down, y, rows, inner, hidden, width, kind
static double activate(double v, i64 kind) {
    if (kind == 0) return v / (1 + __builtin_exp(-v));
    if (kind == 1) return v / 2 * (1 + __builtin_erf(v * 0.70710678118654752));
    if (kind == 2) return v / 2 * (1 + __builtin_tanh(0.79788456080286536 * (v + 0.044715 * v * v * v)));
    return v > 0 ? v : 0;
}
template <class T> double dot(const T* x, const T* w, i64 n) {
    double sum = 0;
    for (i64 j = 0; j < n; ++j) sum += double(get(x[j])) * get(w[j]);
    return sum;
}
template <class T> int run(PARAMETERS(T)) {
    double* h = new double[hidden + 1];
    for (i64 r = 0; r < rows; ++r, x += inner, y += width) {
        for (i64 j = 0; j < hidden; ++j)
            h[j] = activate(dot(x, gate + j * inner, inner), kind) * dot(x, up + j * inner, inner);
        for (i64 o = 0; o < width; ++o) {
            double sum = 0;
            for (i64 j = 0; j < hidden; ++j) sum += h[j] * get(down[o * hidden + j]);
            y[o] = put<T>(float(sum));
        }
    }
    delete[] h;
    return 0;
}
"""
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def right(x, w_gate, w_up, w_down, activation, out=None):
    (hidden, inner), width = w_gate.shape, w_down.shape[0]
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype) if out is None else out
    if out.numel():
        weights = [weight.contiguous() for weight in (w_gate, w_up, w_down)]
        rows, kind = x.numel() // inner, ACTIVATIONS.index(activation)
        launch(x.dtype, x.contiguous(), *weights, out, rows, inner, hidden, width, kind)
    return out


def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    return right(x, w_gate, w_up, w_down, activation)
