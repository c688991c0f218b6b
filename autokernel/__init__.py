"""An autonomous agent that makes a PyTorch model's kernels faster overnight."""

__version__ = "0.1.0"
