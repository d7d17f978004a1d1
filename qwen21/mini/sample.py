"""The sample picture: an apple and a glass marble on a transparent ground, drawn with numpy.

It has what is hard for an RGBA VAE: shading, grain, highlights, a soft shadow, soft edges, and every kind of alpha.
`python -m qwen21.mini.sample` writes `sample.png` beside this file again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SAMPLE = Path(__file__).with_name("sample.png")
SIZE = (192, 160)

_LIGHT = np.array([-0.50, -0.62, 0.60])
_FILL = np.array([0.75, 0.10, 0.65])


def make_sample(width: int = SIZE[0], height: int = SIZE[1], seed: int = 0) -> Image.Image:
    """Draw the picture as RGBA, fully transparent pixels black. `seed` only changes streaks, speckles and grain."""
    rng = np.random.default_rng(seed)
    unit = height / 2  # pixels per unit of length; the scene is 2 units high at any width
    y, x = np.meshgrid((np.arange(height) + 0.5) / unit - 1, (np.arange(width) + 0.5 - width / 2) / unit, indexing="ij")
    soft = 1.4 / unit
    layers = [
        _shadow(x, y),
        _stem(x, y, soft),
        _apple(x, y, soft, rng),
        _leaf(x, y, soft),
        _marble(x, y, soft),
    ]
    color, alpha = np.zeros((height, width, 3)), np.zeros((height, width, 1))
    for layer_color, coverage in layers:
        coverage = np.clip(coverage, 0, 1)[..., None]
        color = layer_color * coverage + color * (1 - coverage)
        alpha = coverage + alpha * (1 - coverage)
    color = color / np.maximum(alpha, 1e-6)
    color += rng.normal(0, 0.011, (height, width, 1))
    pixels = np.concatenate([np.clip(color, 0, 1), alpha], axis=-1)
    pixels = np.round(pixels * 255).astype(np.uint8)
    pixels[pixels[..., 3] == 0] = 0
    return Image.fromarray(pixels)


def _smoothstep(low: float, high: float, value: np.ndarray) -> np.ndarray:
    t = np.clip((value - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def _mix(a, b, amount: np.ndarray) -> np.ndarray:
    return np.asarray(a) * (1 - amount[..., None]) + np.asarray(b) * amount[..., None]


def _noise(rng: np.random.Generator, shape: tuple[int, int], cells: tuple[int, int]) -> np.ndarray:
    """Smooth noise around 0 from a grid of `cells` knots (height, width)."""
    knots = rng.normal(0, 1, cells).astype(np.float32)
    return np.asarray(Image.fromarray(knots).resize(shape[::-1], Image.Resampling.BICUBIC), dtype=np.float64)


def _shine(normal: np.ndarray, light: np.ndarray, power: float) -> np.ndarray:
    """Blinn highlight of a light, seen from straight above the picture."""
    half = light / np.linalg.norm(light) + np.array([0.0, 0.0, 1.0])
    return np.clip(normal @ (half / np.linalg.norm(half)), 0, 1) ** power


def _diffuse(normal: np.ndarray, light: np.ndarray) -> np.ndarray:
    return np.clip(normal @ (light / np.linalg.norm(light)) * 0.8 + 0.2, 0, 1)


def _shadow(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    wide = np.exp(-(((x - 0.14) / 0.62) ** 2) - ((y - 0.74) / 0.13) ** 2)
    contact = np.exp(-(((x + 0.10) / 0.36) ** 2) - ((y - 0.74) / 0.06) ** 2)
    marble = np.exp(-(((x - 0.80) / 0.20) ** 2) - ((y - 0.79) / 0.06) ** 2)
    coverage = 1 - (1 - 0.42 * wide) * (1 - 0.50 * contact) * (1 - 0.34 * marble)
    return np.broadcast_to([0.09, 0.07, 0.12], (*x.shape, 3)), (coverage - 0.012) / 0.988


def _apple(x: np.ndarray, y: np.ndarray, soft: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x, y = x + 0.12, y - 0.10
    angle = np.arctan2(x, -y)  # 0 is up, where the stem's dent is
    above, below = np.exp(-((angle / 0.42) ** 2)), np.exp(-(((np.abs(angle) - np.pi) / 0.35) ** 2))
    radius = 0.66 * (1 - 0.15 * above - 0.04 * below)
    radius *= 1 + 0.045 * np.sin(np.abs(angle)) ** 2 - 0.03 * np.cos(angle - np.pi)
    depth = np.hypot(x, y) / radius
    z = np.sqrt(np.clip(1 - depth**2, 0.0, 1))
    dent = np.exp(-((x / 0.20) ** 2) - ((y + 0.53) / 0.10) ** 2)
    normal = np.stack([x / radius, y / radius + 0.9 * dent, z + 0.05], axis=-1)
    normal /= np.linalg.norm(normal, axis=-1, keepdims=True)

    meridian = x / np.sqrt(np.clip(0.52 - (y - 0.02) ** 2, 0.02, 1))  # from the stem over the front to the base
    streaks = np.interp(meridian, np.linspace(-1.2, 1.2, 81), rng.normal(0, 1, 81))
    blush = np.clip(0.62 + 0.55 * (x + 0.4 * y) / 0.66 + 0.10 * streaks + 0.10 * _noise(rng, x.shape, (7, 8)), 0, 1)
    skin = _mix([0.88, 0.60, 0.16], [0.70, 0.07, 0.09], blush)
    skin = _mix(skin, [0.62, 0.64, 0.20], np.clip(1.3 * dent + 0.25 * np.exp(-(((y - 0.62) / 0.12) ** 2)), 0, 0.8))
    speckles = _smoothstep(1.1, 1.9, _noise(rng, x.shape, (44, 52)))
    skin = _mix(skin, [0.97, 0.80, 0.50], 0.40 * speckles)

    light = 0.20 + 0.86 * _diffuse(normal, _LIGHT) + 0.16 * _diffuse(normal, _FILL)
    color = skin * light[..., None] * (1 - 0.55 * dent)[..., None]
    color += 0.12 * np.array([1.0, 0.55, 0.40]) * ((1 - z) ** 3)[..., None]  # light that leaks around the edge
    window = _shine(normal, _LIGHT, 46)
    color = _mix(color, [1.0, 0.97, 0.92], np.clip(1.15 * window, 0, 0.92))
    color = _mix(color, [0.75, 0.85, 1.0], 0.25 * _shine(normal, _FILL, 22))
    distance = (depth - 1) * radius
    return color, 1 - _smoothstep(-soft, soft, distance)


def _stem(x: np.ndarray, y: np.ndarray, soft: float) -> tuple[np.ndarray, np.ndarray]:
    along = np.clip((y + 0.86) / 0.46, 0, 1)
    middle = -0.12 + 0.13 * (1 - along) ** 1.6
    thick = 0.024 + 0.016 * (1 - along) ** 3
    across = (x - middle) / thick
    end = _smoothstep(-0.88 - soft, -0.88 + soft, y) * (1 - _smoothstep(-0.36, -0.30, y))
    color = _mix([0.46, 0.32, 0.16], [0.16, 0.10, 0.06], np.clip(0.5 + 0.5 * across, 0, 1))
    return color, end * (1 - _smoothstep(-soft, soft, (np.abs(across) - 1) * thick))


def _leaf(x: np.ndarray, y: np.ndarray, soft: float) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = np.cos(-0.42), np.sin(-0.42)
    x, y = x + 0.04, y + 0.66
    along, across = (x * cos + y * sin) / 0.50, -x * sin + y * cos
    bend = across + 0.10 * along * (1 - along)
    width = 0.155 * np.clip(np.sin(np.pi * np.clip(along, 0, 1) ** 0.8), 0, 1)
    upper = np.clip(0.5 - bend / 0.16, 0, 1)
    color = _mix([0.13, 0.33, 0.10], [0.52, 0.70, 0.24], upper * (0.55 + 0.45 * np.clip(along, 0, 1)))
    side = np.mod(along - 1.6 * np.abs(bend), 0.17) - 0.08
    veins = np.exp(-((bend / 0.011) ** 2)) + 0.35 * np.exp(-((side / 0.018) ** 2))
    color = _mix(color, [0.74, 0.84, 0.45], np.clip(0.55 * veins, 0, 0.6))
    edge = 1 - _smoothstep(-2 * soft, 0.6 * soft, np.abs(bend) - width)
    return color, edge * ((along > 0) & (along < 1))


def _marble(x: np.ndarray, y: np.ndarray, soft: float) -> tuple[np.ndarray, np.ndarray]:
    x, y, radius = x - 0.78, y - 0.57, 0.215
    depth = np.hypot(x, y) / radius
    z = np.sqrt(np.clip(1 - depth**2, 0, 1))
    normal = np.stack([x / radius, y / radius, z], axis=-1)
    rim = np.clip(1 - z, 0, 1) ** 1.5
    # light that the lens gathers lies opposite to its source
    glow = np.clip(normal @ np.array([0.48, 0.60, 0.30]), 0, 1) ** 2
    swirl = np.exp(-(((x + 0.09 * np.sin(17 * y + 0.6)) / 0.036) ** 2)) * z
    color = _mix([0.30, 0.58, 0.72], [0.07, 0.20, 0.36], np.clip(1.2 * rim, 0, 1))
    color = _mix(color, [0.80, 0.96, 0.98], 0.75 * glow)
    color = _mix(color, [0.16, 0.42, 0.70], 0.55 * swirl)
    spark = np.clip(1.4 * _shine(normal, _LIGHT, 90), 0, 1)
    color = _mix(color, [1.0, 1.0, 1.0], spark)
    coverage = np.clip(0.34 + 0.55 * rim + 0.25 * glow + 0.35 * swirl + spark, 0, 1)
    return color, coverage * (1 - _smoothstep(-soft, soft, (depth - 1) * radius))


if __name__ == "__main__":
    make_sample().save(SAMPLE, optimize=True)
