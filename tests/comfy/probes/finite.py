"""A node that ends a workflow of the sweep over core's nodes."""

import torch


class ProbeFinite:
    """Fails where a tensor in what is wired holds NaN or infinities; takes anything else."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"value": ("*",)}})
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "probes", True

    @classmethod
    def VALIDATE_INPUTS(cls, input_types):
        return True

    def run(self, value):
        for one in value.values() if isinstance(value, dict) else [value]:
            if isinstance(one, torch.Tensor) and one.is_floating_point() and not one.is_nested:
                assert bool(torch.isfinite(one).all()), f"not finite: {list(one.shape)}"
        return {"ui": {"shown": ["{}"]}}
