"""Look: what run folders hold, for a terminal or a browser. It reads folders, which may be anybody's, and nothing else.

    for run in list_runs(Path("outputs")):
        print(run.folder, run.state)

Names are imported on first use.
"""

from forge_rl.system.lazy import lazy_package

__all__, __getattr__ = lazy_package(__name__, __file__)
