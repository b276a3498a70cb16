"""The services that a recipe drives: each a frozen Config, an Actor, and a typed handle."""

import forge_rl.runtime  # noqa: F401  secures Monarch's log before Monarch is imported
