"""Operations of the networks: attention, RoPE, linear layers, pointwise kernels, quantized weights."""
