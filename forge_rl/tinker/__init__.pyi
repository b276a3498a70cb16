"""Public names of the Tinker API's server."""

from forge_rl.tinker.server import TinkerServer as TinkerServer
from forge_rl.tinker.server import TinkerServices as TinkerServices
from forge_rl.tinker.tenants import read_keys as read_keys
from forge_rl.tinker.tinker_config import TinkerConfig as TinkerConfig
from forge_rl.tinker.training import BaseModel as BaseModel
