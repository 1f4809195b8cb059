"""Model → numbers."""
