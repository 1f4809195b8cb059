"""Model → files that run without Vitrail."""
