"""Run `python -m forge_rl` like `forge-rl`."""

from forge_rl.cli import main

if __name__ == "__main__":
    main()
