"""A plugin of pytest that writes a line of JSON when a test starts and when it has ended, for `gpu.py`.

So what was found until then is there if the process crashes, or is ended because a test hangs, and which test that was.

    python -m pytest -p _pytest_lines --lines FILE ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", type=Path, metavar="FILE", help="write a line of JSON for each start and end of a test")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--lines")
    if path is not None:
        config.pluginmanager.register(Lines(path), "lines of JSON")


class Lines:
    """Writes them, each at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **line: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write(collected=[item.nodeid for item in session.items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(ended=report.nodeid, status="failed", seconds=0.0, text=report.longreprtext)
        elif report.skipped:
            self.write(ended=report.nodeid, status="skipped", seconds=0.0, text=_reason(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(started=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.reports: list[pytest.TestReport] = []
        result = yield
        failed = next((report for report in self.reports if report.failed), None)
        skipped = next((report for report in self.reports if report.skipped), None)
        seconds = sum(report.duration for report in self.reports)
        status, text = "passed", ""
        if failed is not None:
            status, text = "failed", failed.longreprtext
        elif skipped is not None:
            status, text = "skipped", _reason(skipped)
        self.write(ended=item.nodeid, status=status, seconds=round(seconds, 3), text=text)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)


def _reason(report: Any) -> str:
    """Return why a test was skipped, which pytest keeps as (file, line, "Skipped: reason")."""
    reason = report.longrepr
    text = reason[2] if isinstance(reason, tuple) else str(reason)
    return text.removeprefix("Skipped: ")
