"""Run folder → report.html."""

from vitrail.reporting.page import compare as compare
from vitrail.reporting.page import write as write
