"""Environments: the Env protocol and forge_rl's built-in environments."""
