"""Images that a dataset holds twice, or shares with another."""
