"""Defaults that modules which must not import torch share with others."""

# Training batches that BatchNorm statistics are computed on: more of them change the accuracy by less than 0.1 points
# (benchmarks/batchnorm.py).
BN_BATCHES = 50
