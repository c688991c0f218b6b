"""Lazy: returns a subclass of Tensor that computes when it is looked at."""

BASE = "rmsnorm_triton"
CAUGHT_BY, VERDICT = "smoke", "FAIL"


class Later(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            for value in args:
                if isinstance(value, Later) and value.__dict__.get("call"):
                    right(*value.__dict__.pop("call"), out=value)
            return function(*args, **(kwargs or {}))


def kernel_fn(x, weight, eps=1e-6):
    out = torch.empty_like(x, memory_format=torch.contiguous_format).as_subclass(Later)
    out.__dict__["call"] = (x, weight, eps)
    return out
