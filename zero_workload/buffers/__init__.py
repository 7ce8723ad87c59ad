"""Below the engine: its settings, its collectives, and where every parameter lies."""
