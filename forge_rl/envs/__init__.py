"""Environments: the Env protocol and the environments that come with forge_rl."""
