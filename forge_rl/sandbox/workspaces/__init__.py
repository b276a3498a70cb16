"""Workspaces: changes of sessions, checkouts of repositories, and tests of changes."""
