"""The page about runs: one file, readable offline, made from run folders alone."""

from fedtail.report.page import page_data, write_page

__all__ = ["page_data", "write_page"]
