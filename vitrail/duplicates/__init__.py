"""Images that a data set holds twice, or shares with another."""
