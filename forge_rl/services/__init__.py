"""The services that a recipe drives: each a frozen Config, an Actor, and a typed handle."""
