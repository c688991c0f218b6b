"""The base itself: plain, in fp64."""

BASE = "rmsnorm"
