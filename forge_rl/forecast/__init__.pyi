"""Public names of the forecast."""

from forge_rl.forecast.search import Forecast as Forecast
from forge_rl.forecast.search import Machines as Machines
from forge_rl.forecast.search import read_policy as read_policy
from forge_rl.forecast.search import search as search
from forge_rl.forecast.show import show_forecast as show_forecast
