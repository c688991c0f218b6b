"""Returns the layout of its input, as PyTorch's own elementwise operators do."""

BASE = "rotary_embedding"


def kernel_fn(x, cos, sin, interleaved=False):
    done = right(x, cos, sin, interleaved)
    out = torch.empty_like(x)
    return out.copy_(done) if out.is_contiguous() or x.dim() == 4 else done
