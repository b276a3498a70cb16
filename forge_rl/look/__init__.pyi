"""Public names of `look`."""

from forge_rl.look.page.report_file import write_page as write_page
from forge_rl.look.page.run_data import RunData as RunData
from forge_rl.look.past_runs import PastRun as PastRun
from forge_rl.look.past_runs import list_runs as list_runs
from forge_rl.look.past_runs import read_run as read_run
