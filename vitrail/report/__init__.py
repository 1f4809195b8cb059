"""Run folder → report.html."""

from vitrail.report.page import compare as compare
from vitrail.report.page import write as write
