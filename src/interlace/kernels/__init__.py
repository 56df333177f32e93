"""Kernels in Triton: each file's function equals its plain reference within the stated tolerance."""
