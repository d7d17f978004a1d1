"""Sampling: schedules, the denoising loop, and steps recorded as CUDA graphs."""
