"""Reports: what a plan decided and why, as data, text and JSON."""

from hybridc.report.plan_report import Report, report_plan, report_to_json
from hybridc.report.text import render_text

__all__ = ["Report", "render_text", "report_plan", "report_to_json"]
