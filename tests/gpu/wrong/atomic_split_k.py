"""Not repeatable: parts of K are added by atomics, in whatever order they come."""

BASE = "matmul_triton"
CAUGHT_BY, VERDICT = "determinism", "FAIL"
JUDGED_IN = ("fp32",)
SHAPES = {"a": (512, 4096), "b": (4096, 512)}


@triton.jit
def add_part(a, b, c, M, N, K, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    batch = (tl.program_id(2) // PARTS).to(tl.int64)
    part = tl.program_id(2) % PARTS
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(part * BK, K, PARTS * BK):
        k = start + tl.arange(0, BK)
        at_a = a + batch * M * K + m[:, None] * K + k[None, :]
        at_b = b + batch * K * N + k[:, None] * N + n[None, :]
        left = tl.load(at_a, mask=(m[:, None] < M) & (k[None, :] < K), other=0)
        above = tl.load(at_b, mask=(k[:, None] < K) & (n[None, :] < N), other=0)
        acc = tl.dot(left, above, acc, input_precision="ieee")
    at_c = c + batch * M * N + m[:, None] * N + n[None, :]
    tl.atomic_add(at_c, acc, mask=(m[:, None] < M) & (n[None, :] < N))


def kernel_fn(a, b):
    a, b = a.contiguous(), b.contiguous()
    batches, M, N, K = sizes(a, b)
    out = torch.zeros((*a.shape[:-1], N), dtype=torch.float32, device=a.device)
    if out.numel():
        grid = (triton.cdiv(M, 32), triton.cdiv(N, 32), batches * 16)
        add_part[grid](a, b, out, M, N, K, PARTS=16, BM=32, BN=32, BK=32)
    return out
