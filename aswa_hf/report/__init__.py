"""Reports on runs: one page with the results and decisions of each strategy, and tests of whether ASWA is better."""

from __future__ import annotations

from aswa_hf.report.page import write_report

__all__ = ["write_report"]
