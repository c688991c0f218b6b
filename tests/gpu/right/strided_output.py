"""The output laid out as x is: PyTorch's own result has those strides too."""

BASE = "rotary_cuda"

SOURCE = edit(
    SOURCE,
    ("int interleaved, int dtype)", "int interleaved, int dtype, int64_t heads, int64_t sb, int64_t sh, int64_t ss)"),
    (
        "const int64_t first = row * 2 * half +",
        "const int64_t first = row / seq / heads * sb + row / seq % heads * sh + row % seq * ss +",
    ),
    (
        "int64_t half, int64_t interleaved, int64_t dtype, cudaStream_t stream",
        "int64_t half, int64_t interleaved, int64_t dtype, int64_t heads, int64_t sb, int64_t sh, int64_t ss,\n"
        "                      cudaStream_t stream",
    ),
    ("int(dtype));", "int(dtype), heads, sb, sh, ss);"),
)


def kernel_fn(x, cos, sin, interleaved=False):
    cos, sin = cos.contiguous(), sin.contiguous()
    plain = interleaved or x.stride(-1) != 1 or not x.transpose(1, 2).is_contiguous()
    x = x.contiguous() if plain else x
    out = torch.empty_like(x)
    if x.numel():
        seq, half = cos.shape
        places = x.shape[1], *x.stride()[:3]
        library(SOURCE).rotary(x, cos, sin, out, x.numel() // 2, seq, half, bool(interleaved), DTYPES[x.dtype], *places)
    return out
