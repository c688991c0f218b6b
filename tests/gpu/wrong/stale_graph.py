"""CUDA graph with stale inputs: captured for a shape with the inputs of its first call, and replayed."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "sweep", "FAIL"
NEEDS_GPU = True

GRAPHS = {}


def kernel_fn(x, weight, eps=1e-6):
    key = (x.shape, x.dtype, eps)
    if key not in GRAPHS and x.numel():
        own = x.clone(), weight.clone()
        right(*own, eps)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = right(*own, eps)
        GRAPHS[key] = graph, out, own
    if not x.numel():
        return torch.empty_like(x)
    graph, out, _ = GRAPHS[key]
    graph.replay()
    return out.clone()
