"""Training on torchtitan: the only place that imports it, and, with engines/platform.py, torch.distributed.

All patches of torchtitan are here. Tested with torchtitan 0.3.0.
"""

import torch
import torchtitan.tools.utils as titan_utils

from forge_rl.engines.devices import device_type
from forge_rl.errors import ForgeError

if missing_names := {"device_type", "device_module", "get_local_device"} - vars(titan_utils).keys():
    raise ForgeError(f"torchtitan's utils lack {', '.join(sorted(missing_names))}", hint="install torchtitan 0.3.0")
if device_type() == "cpu":
    # torchtitan falls back to "cuda". Five of its modules copy these names on import, so patch them before that.
    titan_utils.device_type = "cpu"
    titan_utils.device_module = torch.cpu
    titan_utils.get_local_device = lambda: torch.device("cpu")
