"""Packages of the wheel: all are inside `forge_rl`, recipes and apps too, so that `forge-rl` finds them anywhere."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["forge_rl*"]), "forge_rl.apps", "forge_rl.recipes", "forge_rl.recipes.agents"],
    package_dir={"forge_rl.apps": "apps", "forge_rl.recipes": "recipes", "forge_rl.recipes.agents": "recipes/agents"},
)
