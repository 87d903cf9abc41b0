"""Triton kernels for supervised rows, their launch code, and their registration as operators."""
