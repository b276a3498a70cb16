"""Commands for who maintains the project; no part of the package."""
