"""Triton kernels. `TRITON_INTERPRET=1` runs them on a CPU for tests."""
