"""Training on torchtitan: the only place that imports it, and, with engines/platform.py, torch.distributed."""

import torch
import torchtitan.tools.utils as titan_utils

from forge_rl.engines.platform import device_type

if device_type() == "cpu":
    # torchtitan 0.3 falls back to "cuda"; five of its modules copy these names when they are imported, so this stands
    # here, before every import of them.
    titan_utils.device_type = "cpu"
    titan_utils.device_module = torch.cpu
    titan_utils.get_local_device = lambda: torch.device("cpu")
