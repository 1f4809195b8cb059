"""How fast models are, and how much memory they take."""
