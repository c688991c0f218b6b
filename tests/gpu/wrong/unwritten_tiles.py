"""Unwritten tiles: the last row of tiles is never computed."""

BASE = "matmul_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


def kernel_fn(a, b):
    a, b = a.contiguous(), b.contiguous()
    batches, M, N, K = sizes(a, b)
    out = torch.empty((*a.shape[:-1], N), dtype=a.dtype, device=a.device)
    grid = (max(1, triton.cdiv(M, 16) - 1), triton.cdiv(N, 16), max(1, batches))
    product[grid](a, b, out, M, N, K, BM=16, BN=16, BK=16, PRECISION="ieee")
    return out
