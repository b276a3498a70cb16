"""Workspaces: what sessions changed in them, checkouts of repositories, and tests of what was changed."""
