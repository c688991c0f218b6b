"""A plain, right rotary embedding in CUDA C++: one thread for each pair. Fragments are appended to it."""

KERNEL_TYPE = "rotary_embedding"
BACKEND = "cuda"

SOURCE = r"""
__global__ void turn(const void* x, const void* cosine, const void* sine, void* y, int64_t pairs, int64_t seq, int half,
                     int interleaved, int dtype) {
  const int64_t pair = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (pair >= pairs) return;
  const int64_t row = pair / half, angle = row % seq * half + pair % half;
  const int64_t first = row * 2 * half + (interleaved ? pair % half * 2 : pair % half);
  const int64_t second = first + (interleaved ? 1 : half);
  const float a = get(x, first, dtype), b = get(x, second, dtype);
  const float c = get(cosine, angle, dtype), s = get(sine, angle, dtype);
  put(y, first, a * c - b * s, dtype);
  put(y, second, b * c + a * s, dtype);
}

extern "C" int rotary(const void* x, const void* cosine, const void* sine, void* y, int64_t pairs, int64_t seq,
                      int64_t half, int64_t interleaved, int64_t dtype, cudaStream_t stream) {
  turn<<<unsigned((pairs + 255) / 256), 256, 0, stream>>>(x, cosine, sine, y, pairs, seq, int(half), int(interleaved),
                                                          int(dtype));
  return cudaGetLastError();
}
"""


def right(x, cos, sin, interleaved=False):
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        seq, half = cos.shape
        library(SOURCE).rotary(x, cos, sin, out, x.numel() // 2, seq, half, bool(interleaved), DTYPES[x.dtype])
    return out


def kernel_fn(x, cos, sin, interleaved=False):
    return right(x, cos, sin, interleaved)
