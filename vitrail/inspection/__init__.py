"""Model and pictures → what lies inside: filters, positions, attention, features."""
