"""Reports over runs: one page that shows what each strategy came to, how, and whether ASWA is really better."""

from __future__ import annotations

from aswa_hf.report.page import write_report

__all__ = ["write_report"]
