"""`vitrail paper`: the paper's tables and figures, run again at a chosen scale."""
