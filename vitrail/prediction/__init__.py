"""Model and pictures → answers."""
