"""Run folder → report.html."""

from vitrail.reporting.comparison import compare as compare
from vitrail.reporting.page import write as write
