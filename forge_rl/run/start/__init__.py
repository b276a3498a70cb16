"""How a run starts, from its settings to all services, and how it ends."""
