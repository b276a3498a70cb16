"""Public names of the worlds."""

from forge_rl.worlds.game import GuessNumber as GuessNumber
from forge_rl.worlds.gymnasium import GymnasiumEnv as GymnasiumEnv
from forge_rl.worlds.harbor import HarborEnv as HarborEnv
from forge_rl.worlds.mcp import McpEnv as McpEnv
from forge_rl.worlds.openenv import OpenEnvFactory as OpenEnvFactory
from forge_rl.worlds.programs import Programs as Programs
from forge_rl.worlds.python import PythonEnv as PythonEnv
from forge_rl.worlds.repository import RepositoryEnv as RepositoryEnv
from forge_rl.worlds.shell import ShellEnv as ShellEnv
from forge_rl.worlds.swebench import SweBenchEnv as SweBenchEnv
from forge_rl.worlds.textarena import TextArena as TextArena
from forge_rl.worlds.unit_tests import UnitTests as UnitTests
from forge_rl.worlds.user import SimulatedUser as SimulatedUser
from forge_rl.worlds.verifiers import VerifiersEnv as VerifiersEnv
