"""Pages about runs, comparisons of runs, and duplicates."""
