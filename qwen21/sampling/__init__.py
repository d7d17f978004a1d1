"""Schedules, the sampling loop, and a step recorded as a CUDA graph."""
