"""Operations of the networks: attention, rotary embedding, linear layers, pointwise kernels, quantized weights."""
